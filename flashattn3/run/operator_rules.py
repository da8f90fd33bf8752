"""Rules around a call: q, k and v follow autocast, a GPU call that runs on the reference backend
unasked is reported, torch's profiler shows function, backend and kernel, and operators have fakes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ..call.dtypes import EIGHT_BIT
from ..call.operands import Tensors, with_values
from ..modes import autocasts

if TYPE_CHECKING:
    from .planner import Plan

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def under_autocast(tensors: Tensors) -> Tensors:
    """Cast q, k, v and a bias to autocast's dtype where autocast is enabled for their device, as
    ``F.scaled_dot_product_attention`` does. float64 and 8-bit tensors stay as they are, and so do
    sinks of float32."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if not isinstance(q, torch.Tensor) or not autocasts(q.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    sinks, bias = tensors.sinks, _cast(tensors.bias, dtype)
    if sinks is not None and sinks.dtype != torch.float32:
        sinks = _cast(sinks, dtype)
    return with_values(tensors, _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), sinks, bias)


def as_cache_under_autocast(
    cache: object, *tensors: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Cast queries, new keys and new values of a cached call to the cache's dtype, or to autocast's
    where the cache has 8 bits, if autocast is enabled for its device. A cache is never cast: it is
    memory of the caller, and large."""
    if not (isinstance(cache, torch.Tensor) and cache.dtype in (*_CAST, *EIGHT_BIT)):
        return tensors
    kind, dtype = cache.device.type, cache.dtype
    if not autocasts(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind) if dtype in EIGHT_BIT else dtype
    return tuple(_cast(x, dtype) for x in tensors)


def register_fake(names: Iterable[str], fake: Callable) -> None:
    """Register what operators return for tensors without data.

    torch notes where a fake is registered, and searches all modules for each file that does so: one
    file, this one, saves 5 ms of the import.
    """
    for name in names:
        torch.library.register_fake(name, fake)


def recorded(plan: Plan, run: Callable, part: str = "", kernel: str = "kernel config") -> Callable:
    """``run`` under a name in torch's profiler: the function, the backend and its kernel.

    part: of the call, of those that are not the whole. kernel: what ``describe`` calls it.
    Ask ``profiler._is_profiler_enabled`` first, which costs less than a call.
    """
    described = plan.launch.describe()
    name = described.get(kernel) or described.get("tile") or described.get("kernel") or ""
    label = f"flashattn3::{plan.problem.function}{part} [{plan.backend.name} {name}".rstrip() + "]"

    def under_its_name(*arguments):
        with torch.profiler.record_function(label):
            return run(*arguments)

    return under_its_name


def _cast(x: object, dtype: torch.dtype) -> object:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x


def warn_of_reference(plan: Plan) -> None:
    """Warn, once in a process, where no kernel takes a GPU call and the reference backend runs it
    although the caller did not name it."""
    problem = plan.problem
    unasked = plan.device.kind == "cuda" and problem.backend is None
    if unasked and plan.backend.name == "reference":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.declined)
        _warn(f"{problem.function}: runs on the reference backend, slowly ({reasons})")


_told: list[str] = []


def _warn(sentence: str) -> None:
    if not _told:
        _told.append(sentence)
        warnings.warn(f"{sentence}; backend='reference' names it and warns no more", stacklevel=2)
