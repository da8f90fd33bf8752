"""What q and k go through between a projection and their quantization: RMSNorm (Zhang and Sennrich,
arXiv 1910.07467) and rotary position embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.reference.rotary import rotated
from ..call.token_positions import token_positions
from . import smoothing


class Embedding(NamedTuple):
    """What happens to q and k before they are quantized.

    q_norm, k_norm: weights of RMSNorm (head_dim,); None: no norm. eps: of the norm.
    cos, sin: (positions, rotary_dim / 2); None: no rotation. positions: int32 (batch, seqlen),
        varlen (total,); None: those in the sequence. interleaved: pairs are neighbouring columns.
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    interleaved: bool
    eps: float


class Lengths(NamedTuple):
    """Of a varlen batch; all None: dense."""

    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


DENSE = Lengths()


class RotaryCall(NamedTuple):
    """What one launch rotates and quantizes. k, v: None where q is alone. mean: of k, float32
    (batch, heads, head_dim), or None. The others are those of rotate_and_quantize."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    embedding: Embedding
    lengths: Lengths
    block: int
    hadamard: bool
    qk_dtype: torch.dtype
    mean: Tensor | None


def embedded(
    x: Tensor,
    weight: Tensor | None,
    embedding: Embedding,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """q or k, normalized and rotated in torch operations in the dtype."""
    x = x.to(dtype)
    if weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + embedding.eps) * weight.to(dtype)
    if embedding.cos is None:
        return x
    position = embedding.positions
    if position is None:
        position = token_positions(x.shape[-3], x.device, cu_seqlens).position
        position = position.expand(x.shape[:-2])
    rows, tables = x.flatten(0, -3), (embedding.cos, embedding.sin)
    return rotated(rows, *tables, position.flatten().long(), embedding.interleaved).view(x.shape)


def mean_of_embedded(
    k: Tensor, embedding: Embedding, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    """smoothing.sample_mean of the normalized and rotated k, of which the sample alone is made."""
    if k.numel() == 0:
        return smoothing.sample_mean(k, cu_seqlens, max_seqlen)
    sample = smoothing.sample_of(k, cu_seqlens, max_seqlen)
    positions, rows = sample.position, smoothing.rows_of(k, sample)
    if embedding.positions is not None:
        positions = smoothing.rows_of(embedding.positions, sample)
    embedding = embedding._replace(positions=positions.expand(rows.shape[:2]))
    return smoothing.mean_of(embedded(rows, embedding.k_norm, embedding, None), sample)
