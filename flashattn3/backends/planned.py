"""Launches of cached calls that are like an earlier one: an operator of the backend finds a call's
launch from its tensors, in less time than Python takes to read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MOST = 64  # launches of calls with the same options; the operator tries one after the other


@contextmanager
def _outliving_the_call() -> Iterator[None]:
    """Without the modes of a call, for tensors that others use later, also with gradients."""
    with _disable_current_modes(), torch.inference_mode(False):
        yield


class Planned(NamedTuple):
    """A launch as the backend's operators know it.

    words: the launch and what of a call its plan depends on; with those of others joined, launches.
    """

    operators: NamedTuple
    words: Tensor

    @staticmethod
    def of(
        operators: NamedTuple, handles: tuple[Tensor, ...], device: torch.device, *numbers: int
    ) -> Planned:
        """handles: prepared launches, for calls on the device and with these numbers."""
        index = -1 if device.index is None else device.index
        with _outliving_the_call():
            words = torch.tensor((index, *numbers), device="cpu")
            return Planned(operators, torch.cat((*handles, words)))


class PlannedCalls:
    """The launches of calls with the same options, the newest first. A call whose launch is not
    among them, or no longer, is checked in Python each time.

    found: the operators and their launches; None before the first.
    """

    def __init__(self) -> None:
        self.found: tuple[NamedTuple, Tensor] | None = None
        self._words: dict[tuple[int, ...], Tensor] = {}  # by their values, the newest last
        self._lock = Lock()

    def add(self, planned: Planned) -> None:
        with self._lock, _outliving_the_call():
            key = _values_of(planned.words)
            self._words.pop(key, None)
            if len(self._words) == MOST:
                del self._words[next(iter(self._words))]
            self._words[key] = planned.words
            self.found = planned.operators, torch.cat(tuple(reversed(self._words.values())))


def _values_of(words: Tensor) -> tuple[int, ...]:
    return tuple(words.tolist())  # of the CPU's memory
