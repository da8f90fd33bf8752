"""The sequence of each token of a tensor, and the token's position in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenPositions:
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
