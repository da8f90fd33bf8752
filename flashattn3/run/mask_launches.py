"""The launches of eager calls with a mask, which the operators keep with its tensors until neither
the user of the mask nor an autograd node needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import finalize

import torch

from ..call.fields import Options
from .launches import LaunchCache

if TYPE_CHECKING:
    from ..masks.mask import Mask


class MaskLaunches:
    """The launches of calls with one mask.

    life: a tensor without elements, which the nodes of results save. The launches are dropped when
        it ends. A node that held a Python object, such as the mask, would wait for Python's lock
        when autograd's thread drops it.
    """

    def __init__(self, mask: Mask) -> None:
        self._tensors = mask.tensors
        self._caches: dict[tuple[Options, bool], LaunchCache] = {}
        with torch.inference_mode(False):  # autograd saves no tensor of that mode
            self.life = torch.empty(0, device=mask.device)
            # A second owner: torch takes Python's lock where a tensor goes from one owner to two,
            # or back. A node is one more.
            self._view = self.life.view(0)
        finalize(self.life, _forget, self._caches).atexit = False

    def cache(self, options: Options, bhsd: bool, in_python: tuple[Callable, ...]) -> LaunchCache:
        """That of calls with these options. bhsd, in_python: as in ``LaunchCache``."""
        found = self._caches.get((options, bhsd))
        if found is None:
            found = LaunchCache(options, bhsd, in_python, self._tensors)
            self._caches[options, bhsd] = found
        return found


def _forget(caches: dict[tuple, LaunchCache]) -> None:
    for cache in caches.values():
        cache.forget()


def new_launches_of(mask: Mask) -> MaskLaunches:
    """Those of a mask that is not known. Nothing watches its calls: its tensors are of no subclass
    and have data, and are never replaced."""
    found = known_masks[id(mask)] = MaskLaunches(mask)
    finalize(mask, known_masks.pop, id(mask), None).atexit = False
    return found


# By the ids of masks. One is removed before its id is another object's.
known_masks: dict[int, MaskLaunches] = {}
