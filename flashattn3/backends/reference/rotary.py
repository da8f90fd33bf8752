"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864) in torch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """x (rows, heads, dim), at least float32, its first 2 * cos.shape[1] columns rotated.

    position: (rows,), rows of the tables; NaN where the tables have no such row.
    interleaved: pairs are columns (2i, 2i + 1); else (i, i + cos.shape[1]).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[1]
    exists = ((position >= 0) & (position < cos.shape[0]))[:, None, None]
    if cos.shape[0] == 0:
        return torch.full_like(x, math.nan, dtype=wide)
    position = position.clamp(0, cos.shape[0] - 1)
    cos, sin = (torch.where(exists, t.to(wide)[position, None], math.nan) for t in (cos, sin))
    turned, rest = x.to(wide).split((2 * half, x.shape[-1] - 2 * half), -1)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1)
