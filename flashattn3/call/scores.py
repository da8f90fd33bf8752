"""The tensors that change scores: sinks, slopes (ALiBi) and a bias, checked and described without
their data.

A score is softmax_scale * q kᵀ, capped, then minus slope * |i + seqlen_k - seqlen_q - j|
for query i and key j, then plus the bias, then masked. A sink is one more score of every row, which
has no value: it takes weight and adds nothing to out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import UnsupportedError, complaint, expect
from .dtypes import EIGHT_BIT, SIXTEEN_BIT
from .metadata import Metadata
from .tensor_checks import check_device


class Bias(NamedTuple):
    """The bias of a problem. A backend that reads it takes the tensor itself.

    dtype: q's; with 8-bit q one of 16 bits or float32.
    batch, heads: its own, each 1 where the bias is the same for all.
    stride: (batch, head, query) in elements, 0 along an axis that is the same for all; the keys of
        a query lie side by side.
    aligned: whether every row begins at a multiple of 16 bytes.
    """

    dtype: torch.dtype
    batch: int
    heads: int
    stride: tuple[int, int, int]
    aligned: bool


def check_scores(
    function: str,
    q: Metadata,
    seqlen_k: int,
    batch: int,
    sinks: Metadata | None,
    slopes: Metadata | None,
    bias: Metadata | None,
    varlen: bool,
) -> None:
    """Raise for a tensor whose shape, dtype or device does not fit."""
    heads = q.shape[-2]
    check_sinks(function, q, sinks)
    check_slopes(function, q, batch, slopes)
    if bias is not None:
        expect(
            not varlen, function, "bias", "None with cu_seqlens: it is of dense calls", "a tensor"
        )
        axes = "(batch or 1, num_heads_q or 1, seqlen_q, seqlen_k)"
        expect(len(bias.shape) == 4, function, "bias.shape", axes, tuple(bias.shape))
        sizes = (batch, heads, q.shape[1], seqlen_k)
        shared = tuple(zip(bias.shape, sizes, (True, True, False, False), strict=True))
        fits = all(found == size or (may and found == 1) for found, size, may in shared)
        wanted = "{}, where the first two may be 1"
        expect(fits, function, "bias.shape", wanted, tuple(bias.shape), sizes)
        _expect_dtype(function, "bias", bias, _dtypes_beside(q.dtype))
        check_device(function, "bias", bias, q.device, "q")


def check_sinks(function: str, q: Metadata, sinks: Metadata | None) -> None:
    """Raise for sinks that do not fit q."""
    if sinks is None:
        return
    wanted, found = (q.shape[-2],), tuple(sinks.shape)
    expect(found == wanted, function, "sinks.shape", "{} (num_heads_q)", found, wanted)
    _expect_dtype(function, "sinks", sinks, (torch.float32, *_dtypes_beside(q.dtype)))
    check_device(function, "sinks", sinks, q.device, "q")


def check_slopes(function: str, q: Metadata, batch: int, slopes: Metadata | None) -> None:
    """Raise for slopes that do not fit q."""
    if slopes is None:
        return
    heads, shape = q.shape[-2], tuple(slopes.shape)
    legal = {1: (heads,), 2: (batch, heads)}
    fits = shape == legal.get(len(shape))  # torch.compile guards what is compared
    wanted = "{} (num_heads_q,) or {} (batch, num_heads_q)"
    expect(fits, function, "alibi_slopes.shape", wanted, shape, *legal.values())
    _expect_dtype(function, "alibi_slopes", slopes, (torch.float32,))
    check_device(function, "alibi_slopes", slopes, q.device, "q")


def _dtypes_beside(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of a bias beside q of this dtype."""
    return (*SIXTEEN_BIT, torch.float32) if dtype in EIGHT_BIT else (dtype,)


def _expect_dtype(function: str, name: str, x: Metadata, dtypes: tuple[torch.dtype, ...]) -> None:
    wanted = " or ".join(map(str, dict.fromkeys(dtypes)))
    expect(x.dtype in dtypes, function, f"{name}.dtype", wanted, x.dtype)


def bias_of(bias: Metadata | None) -> Bias | None:
    """The bias of a problem, or of its copy where the keys of a query do not lie side by side."""
    if bias is None:
        return None
    batch, heads, seqlen_q, seqlen_k = bias.shape
    stride, aligned = bias.stride, bias.rows_are_aligned
    if not bias.rows_are_dense:
        stride = (heads * seqlen_q * seqlen_k, seqlen_q * seqlen_k, seqlen_k, 1)
        aligned = bias._replace(stride=stride, aligned=True).rows_are_aligned
    stride = (0 if batch == 1 else stride[0], 0 if heads == 1 else stride[1], stride[2])
    return Bias(bias.dtype, batch, heads, stride, aligned)


def refuse_gradient_of_slopes(function: str, slopes: object) -> None:
    """Raise where slopes would need a gradient, which no backend computes."""
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad and torch.is_grad_enabled():
        sentence = complaint(function, "alibi_slopes.requires_grad", False, True)
        raise UnsupportedError(
            f"{sentence}: slopes are constants; pass alibi_slopes.detach(), or learn a bias"
        )
