"""Calls that are like an earlier one, as each step of a generating model is like the step before.

An operator of the backend finds their launch from the tensors, in less time than Python takes to
read them: nothing of such a call is checked or planned in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .problem import DecodeOptions

MOST = 16  # launches of calls with the same options; the operator tries one after the other


class Planned(NamedTuple):
    """A launch as the backend's operator knows it.

    operator: a function of (launches, q, k_cache, v_cache, cache_seqlens, page_table, seqlen, lse)
        that runs a call and returns out, or None if none of the launches is planned for such a
        call. RuntimeError for tensors that do not fit each other. seqlen: -1: the capacity. lse:
        where it is written; None: it is not.
    words: the launch and what of a call its plan depends on; with those of others joined, launches.
    """

    operator: Callable[..., Tensor | None]
    words: Tensor


class PlannedCalls:
    """The launches of calls with the same options, the newest first. A call whose launch is not
    among them, or no longer, is checked in Python each time.

    found: the operator and its launches; None before the first.
    """

    def __init__(self) -> None:
        self.found: tuple[Callable[..., Tensor | None], Tensor] | None = None
        self._words: list[Tensor] = []
        self._lock = Lock()

    def add(self, planned: Planned) -> None:
        with self._lock, _disable_current_modes():  # the tensors outlive the call
            others = [x for x in self._words if not torch.equal(x, planned.words)]
            self._words = [planned.words, *others][:MOST]
            self.found = planned.operator, torch.cat(self._words)


@lru_cache(maxsize=4096)
def planned_calls(options: DecodeOptions) -> PlannedCalls:
    """Those of calls with these options."""
    return PlannedCalls()


def run_planned(
    options: DecodeOptions,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    seqlen: int | None,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run a call that nothing watches; None if it must be checked, because no launch was planned
    for such a call or because the tensors are invalid."""
    found = planned_calls(options).found
    if found is None:
        return None
    if seqlen is None:
        seqlen = -1
    elif seqlen < 0:
        return None
    operator, launches = found
    try:
        if torch.is_grad_enabled() and (
            q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
        ):
            return None
        lse = None
        if options.return_lse:
            batch, rows, heads, _ = q.shape
            lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        out = operator(launches, q, k_cache, v_cache, cache_seqlens, page_table, seqlen, lse)
    except (AttributeError, RuntimeError, ValueError):
        return None  # the checks name the argument, or the launch fails again
    return out if lse is None or out is None else (out, lse)
