"""Which keys of a cache the queries of a sequence do not see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...call.cached import DecodeProblem


def hidden_keys(
    problem: DecodeProblem, leftpad: Tensor | None, queries: Tensor, keys: Tensor
) -> Tensor:
    """(queries, keys): causal mask, window and left padding. queries, keys: positions."""
    distance = keys - queries.unsqueeze(1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if problem.window_left >= 0:
        hidden |= distance < -problem.window_left
    if problem.window_right >= 0:
        hidden |= distance > problem.window_right
    if leftpad is not None:
        hidden |= keys < leftpad
    return hidden


def hidden_by_tree(tree: Tensor, tokens: Tensor) -> Tensor:
    """(queries, keys): new tokens that the bits of a query do not show. tree: (queries, words).
    tokens: of each key its number among the new tokens, negative for an older key."""
    words = tree.shape[1]
    word = tree[:, tokens.clamp(0, 32 * words - 1) // 32]
    shown = (word >> (tokens % 32)) & 1 == 1
    return (tokens >= 0) & ~(shown & (tokens < 32 * words))
