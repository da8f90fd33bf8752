"""Which of its implementations quantizes a tensor: the Hopper library, Triton or torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..backends.base import Backend
from ..backends.hopper import BACKEND as HOPPER
from ..backends.triton import BACKEND as TRITON
from ..device import describe_device
from . import slots, torch_operations
from .hadamard import signs

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # of the kernels


def on_hopper(x: Tensor) -> bool:
    """Whether the operators of the Hopper library run where x is."""
    return x.shape[-1] <= MAX_HEAD_DIM and _runs_on(HOPPER, x.device)


def quantize(
    x: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """data in the layout, and descale."""
    hopper = on_hopper(x)
    if x.stride(-1) != 1:
        x = x.contiguous()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    if hopper and x.dtype in SIXTEEN_BIT:
        return torch.ops.flashattn3_hopper.quantize.default(
            x,
            signs(x.shape[-1], x.device) if hadamard else None,
            cu_seqlens,
            block,
            max_seqlen or 0,
            layout == "slots",
        )
    if x.shape[-1] <= MAX_HEAD_DIM and _runs_on(TRITON, x.device):
        from . import triton_launch  # imports Triton

        data, descale = triton_launch.quantize(x, block, hadamard, cu_seqlens, max_seqlen)
    else:
        data, descale = torch_operations.quantize(x, block, hadamard, cu_seqlens, max_seqlen)
    if layout == "slots" and hopper:
        to_slots = torch.ops.flashattn3_hopper.to_slots.default
        return to_slots(data, cu_seqlens, max_seqlen or 0), descale
    return slots.to_slots(data, cu_seqlens) if layout == "slots" else data, descale


@cache
def _runs_on(backend: Backend, device: torch.device) -> bool:
    return backend.unavailable_reason(describe_device(device)) is None
