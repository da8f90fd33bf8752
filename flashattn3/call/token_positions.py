"""The sequence of each token of a tensor, and the token's position in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenPositions(NamedTuple):
    """One entry per token: int64 (tokens), owned bool.

    sequence: batch_idx, None without cu_seqlens. A token outside all sequences gets the nearest.
    position: position in the sequence, clamped to its length.
    owned: whether the token belongs to a sequence; None: all do.
    """

    sequence: Tensor | None
    position: Tensor
    owned: Tensor | None


def token_positions(
    num_tokens: int, device: torch.device, cu_seqlens: Tensor | None
) -> TokenPositions:
    """num_tokens: seqlen or, with cu_seqlens (batch + 1), total."""
    token = torch.arange(num_tokens, device=device)
    if cu_seqlens is None:
        return TokenPositions(None, token, None)
    if cu_seqlens.numel() == 1:  # no sequence
        nowhere = torch.zeros_like(token)
        return TokenPositions(nowhere, nowhere, nowhere.bool())
    edges = cu_seqlens.long()
    sequence = torch.searchsorted(edges, token, right=True).sub(1).clamp(0, edges.numel() - 2)
    position = token - edges[sequence]
    length = (edges[1:] - edges[:-1])[sequence]
    owned = (position >= 0) & (position < length)
    return TokenPositions(sequence, position.clamp(min=0).minimum((length - 1).clamp(min=0)), owned)


def of_tokens(of_blocks: Tensor, block: int, of: TokenPositions) -> Tensor:
    """(batch, heads, blocks) → (batch, seqlen, heads), varlen (total, heads); 0 without a block."""
    if of.sequence is None:
        return of_blocks[:, :, of.position // block].transpose(1, 2)
    batch, heads, num_blocks = of_blocks.shape
    if batch == 0 or num_blocks == 0:
        return of_blocks.new_zeros(of.position.numel(), heads)
    return of_blocks[of.sequence, :, blocks_of(of, block, num_blocks)]


def blocks_of(of: TokenPositions, block: int, num_blocks: int) -> Tensor:
    """Block index of each token; the last block if max_seqlen is too small."""
    return (of.position // block).clamp(max=num_blocks - 1)


def of_sequences(mean: Tensor, of: TokenPositions) -> Tensor:
    """(batch, heads, head_dim) → (batch, 1, heads, head_dim), varlen (total, heads, head_dim); 0
    without a batch."""
    if of.sequence is None:
        return mean[:, None]
    if mean.shape[0] == 0:
        return mean.new_zeros(of.position.numel(), *mean.shape[1:])
    return mean[of.sequence]
