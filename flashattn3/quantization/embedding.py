"""What q and k go through between a projection and their quantization: RMSNorm (Zhang and Sennrich,
arXiv 1910.07467) and rotary position embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.reference.rotary import rotated
from ..call.token_positions import token_positions


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


def embedded(
    x: Tensor, weight: Tensor | None, embedding: Embedding, cu_seqlens: Tensor | None
) -> Tensor:
    """q or k in float32, normalized and rotated, in torch operations."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + embedding.eps) * weight.float()
    if embedding.cos is None:
        return x
    position = embedding.positions
    if position is None:
        position = token_positions(x.shape[-3], x.device, cu_seqlens).position
        position = position.expand(x.shape[:-2])
    rows, tables = x.flatten(0, -3), (embedding.cos, embedding.sin)
    return rotated(rows, *tables, position.flatten().long(), embedding.interleaved).view(x.shape)
