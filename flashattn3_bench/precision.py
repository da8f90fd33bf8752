"""Attention in the precisions that a caller chooses between: 16 bits, and 8 with coarse or fine
scales. Of 8 bits q and k are e4m3 where the name does not say int8; v is e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashattn3.call.dtypes import FP8, INT8
from flashattn3.quantization import quantize_block_fp8

Arguments = dict[str, Any]  # of flash_attn_func
LARGEST = torch.finfo(FP8).max


def arguments_in(precision: str, q: Tensor, k: Tensor, v: Tensor) -> Arguments:
    """What to call flash_attn_func with: q, k and v in one of PRECISIONS, descales with them.

    q, k, v: (batch, seqlen, heads, head_dim), of 16 bits.
    """
    return PRECISIONS[precision](q, k, v)


def _converted(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Arguments]:
    return lambda q, k, v: {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def _one_scale(over: tuple[int, ...]) -> Callable[[Tensor, Tensor, Tensor], Arguments]:
    """FlashAttention-3's calling form: e4m3 and descales (batch, heads). over: axes of a scale."""

    def quantize(q: Tensor, k: Tensor, v: Tensor) -> Arguments:
        arguments: Arguments = {}
        for side, x in (("q", q), ("k", k), ("v", v)):
            descale = x.abs().amax(over, keepdim=True).float() / LARGEST
            arguments[side] = (x / descale).to(FP8)
            whole = descale.expand(x.shape[0], 1, x.shape[2], 1)
            arguments[f"{side}_descale"] = whole[:, 0, :, 0].contiguous()
        return arguments

    return quantize


def _blocks(
    hadamard: bool, dtype: torch.dtype, smooth_k: bool = False
) -> Callable[[Tensor, Tensor, Tensor], Arguments]:
    return lambda q, k, v: {
        "q": quantize_block_fp8(q, hadamard=hadamard, kind="q", dtype=dtype),
        "k": quantize_block_fp8(k, hadamard=hadamard, kind="k", dtype=dtype, smooth=smooth_k),
        "v": quantize_block_fp8(v, kind="v"),
    }


PRECISIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Arguments]] = {
    "bf16": _converted(torch.bfloat16),
    "fp16": _converted(torch.float16),
    "fp8 per tensor": _one_scale((0, 1, 2, 3)),
    "fp8 per head": _one_scale((1, 3)),
    "fp8 block": _blocks(hadamard=False, dtype=FP8),
    "fp8 block+hadamard, e4m3": _blocks(hadamard=True, dtype=FP8),
    "fp8 block+hadamard, int8": _blocks(hadamard=True, dtype=INT8),
    "fp8 block+hadamard+smooth_k, int8": _blocks(hadamard=True, dtype=INT8, smooth_k=True),
}


def errors(found: Tensor, reference: Tensor) -> dict[str, float]:
    """Of a result against float64: root mean square, relative to the fp64 reference's, and the
    largest.
    """
    error = found.double() - reference
    rmse, size = (float(x.square().mean().sqrt()) for x in (error, reference))
    return {
        "rmse": rmse,
        "relative_error": rmse / size,
        "largest_error": float(error.abs().max()),
        "reference_rms": size,
    }
