"""Smoothing: the mean of K's tokens, estimated from a sample and subtracted before quantization.

The subtraction shifts every score of a row by the same amount, so P does not change (SageAttention,
arXiv 2410.02367).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.quantization_limits import SAMPLE, SIGNIFICANT


def sample_mean(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Estimate the mean of each sequence's tokens, float32 (batch, heads, head_dim); 0 where it is
    not significant. It is always finite, and so is x - mean where x is finite.

    x: (batch, seqlen, heads, head_dim) float16, bfloat16 or float32; with cu_seqlens (total, heads,
        head_dim). Non-finite elements count as 0.

    Each operation is rounded once and sums have a fixed order, so every device gives the same bits.
    """
    if x.numel() == 0:
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        return x.new_zeros((batch, *x.shape[-2:]), dtype=torch.float32)
    sample = sample_of(x, cu_seqlens, max_seqlen)
    return mean_of(rows_of(x, sample), sample)


class Sample(NamedTuple):
    """The tokens of a sample: their places in their sequences and their rows in a tensor, int64
    (batch, SAMPLE), dense (1, SAMPLE). length: of the sequences, (batch, 1) or (1, 1)."""

    position: Tensor
    row: Tensor
    length: Tensor
    varlen: bool


def sample_of(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Sample:
    """Of tensors with x's rows; arguments as those of sample_mean."""
    start, length = _sequences(x, cu_seqlens, max_seqlen)
    slot = torch.arange(SAMPLE, device=x.device)
    position = torch.where(length <= SAMPLE, slot, slot * length // SAMPLE)
    row = (start + position).clamp(max=x.shape[-3] - 1)
    return Sample(position, row, length, cu_seqlens is not None)


def rows_of(x: Tensor, sample: Sample) -> Tensor:
    """(batch, SAMPLE, ·) of x (batch, seqlen, ·) or (total, ·)."""
    return x[sample.row] if sample.varlen else x[:, sample.row[0]]


def mean_of(rows: Tensor, sample: Sample) -> Tensor:
    """sample_mean of the sample's rows."""
    values, length = rows.float(), sample.length
    slot = torch.arange(SAMPLE, device=rows.device)
    values = values.where(values.isfinite() & (slot < length)[..., None, None], 0.0)
    total, squares = _tree_sum(values), _tree_sum(values * values)
    # The divisor is a tensor, not a number: see torch_operations.scales.
    count = length.clamp(max=SAMPLE).float()[..., None]
    square = total * total
    spread, mean = squares - square / count, total / count
    # It is also 0 where squares are infinite, as they are where the mean is 2**71 or more.
    return mean.where(square > SIGNIFICANT * spread, 0.0).contiguous()


def _sequences(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None):
    """Start and length of each sequence, clamped to the tensor: int64 (batch, 1), or (1, 1) without
    cu_seqlens."""
    num_tokens = x.shape[-3]
    if cu_seqlens is None:
        length = torch.full((1, 1), num_tokens, device=x.device)
        return torch.zeros_like(length), length
    edges = cu_seqlens.long()[:, None].clamp(0, num_tokens)
    start, end = edges[:-1], edges[1:]
    return start, (end - start).clamp(0, max_seqlen)


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over axis 1, whose length is a power of two, by repeatedly adding its two halves."""
    while x.shape[1] > 1:
        first, second = x.chunk(2, dim=1)
        x = first + second
    return x[:, 0]
