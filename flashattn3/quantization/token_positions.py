"""Where the tokens of a tensor are: in which sequence, and how far from its beginning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenPositions:
    """Of each token of a tensor, int64 (tokens) each.

    sequence: of a varlen batch, else None. A token of none counts to the nearest one.
    position: in the sequence, within its length.
    owned: bool, whether the token is of a sequence at all; None: all are.
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
