"""Two rules around a call: q, k and v follow autocast, and a GPU call that runs on the reference
backend unasked is reported."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from .call.inputs import Tensors, indices_of

if TYPE_CHECKING:
    from .dispatch.planner import Plan

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def under_autocast(tensors: Tensors) -> Tensors:
    """Cast q, k and v to autocast's dtype where autocast is enabled for their device, as
    ``F.scaled_dot_product_attention`` does. float64 and 8-bit tensors stay as they are."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(q.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    return Tensors(_cast(q, dtype), _cast(k, dtype), _cast(v, dtype), *indices_of(tensors))


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
