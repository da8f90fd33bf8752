"""Two rules around a call: q, k and v follow autocast, and a GPU call that runs on the reference
backend unasked is reported."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .call.problem import Tensors
    from .dispatch.planner import Plan

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def under_autocast(tensors: Tensors) -> Tensors:
    """Cast q, k and v to autocast's dtype where autocast is enabled for their device, as
    ``F.scaled_dot_product_attention`` does. float64 and 8-bit tensors stay as they are."""
    kind = tensors.q.device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.dtype in _CAST else x for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


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
