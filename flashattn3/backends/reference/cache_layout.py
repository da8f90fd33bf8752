"""Where the tokens of a cache are, and how many, for the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.cache_descales import is_one_number
from ...call.dtypes import FP8

if TYPE_CHECKING:
    from ...call.cached import Lengths


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def movable(x: Tensor) -> Tensor:
    """Torch moves bytes, not e4m3, by index."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def capacity_of(cache: Tensor, page_table: Tensor | None) -> int:
    return cache.shape[1] if page_table is None else page_table.shape[1] * cache.shape[1]


def of_sequence(descale: Tensor, sequence: Tensor | int) -> Tensor:
    """The descales of the heads of sequences, (..., heads), or the one number of all, (1,)."""
    return descale.view(1) if is_one_number(descale) else descale[sequence]


def cached_tokens(tensors, lengths: Lengths, batch: int, capacity: int) -> Tensor:
    """Cached tokens of each sequence, cut to what the cache holds."""
    seqlen = capacity if lengths.seqlen is None else lengths.seqlen
    given = tensors.cache_seqlens
    if given is None:
        given = torch.full((batch,), min(seqlen, 2**31 - 1), device=tensors.k_cache.device)
    return given.long().clamp(0, capacity)
