"""64 bools in an int64, the first in the lowest bit, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..modes import is_transformed

# (x * GATHER) >> 56 has the lowest bits of x's eight bytes in the lowest byte, the first in bit 0:
# the product of byte k's bit and bit 56 - 7 k is bit 56 + k, and no two products meet.
_GATHER = 0x0102040810204080


def packed(visible: Tensor) -> Tensor:
    """bool (..., 64) → int64 (...)."""
    if is_transformed():
        return (visible.long() << _places(visible)).sum(-1)
    bytes_of_bools = visible.contiguous().view(torch.uint8).view(torch.int64)
    bytes_of_bits = ((bytes_of_bools * _GATHER) >> 56).to(torch.uint8)
    return bytes_of_bits.view(torch.int64).squeeze(-1)


def unpacked(words: Tensor) -> Tensor:
    """int64 (...) → bool (..., 64)."""
    if is_transformed():
        return (words.unsqueeze(-1) >> _places(words) & 1).bool()
    of_bytes = words.contiguous().unsqueeze(-1).view(torch.uint8).unsqueeze(-1)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((of_bytes >> places) & 1).bool().flatten(-2)


def _places(of: Tensor) -> Tensor:
    """Of 64 bits; for torch.vmap, which in torch 2.11 maps no view in a dtype of another size."""
    return torch.arange(64, device=of.device)


def lowest(count: Tensor) -> Tensor:
    """int64 with as many of the lowest bits set as count, clamped to 0 and 64, says."""
    ones = ~torch.bitwise_left_shift(torch.full_like(count, -1), count.clamp(0, 63))
    return torch.where(count >= 64, -1, ones)


def num_ones(words: Tensor) -> Tensor:
    """The number of set bits of each int64, from sums of neighbours in 2, 4 and 8 bits."""
    x = words - ((words >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101 >> 56) & 0x7F


def transposed(words: Tensor) -> Tensor:
    """int64 (..., 64) of which each is a row of 64 bits → its columns: six exchanges of squares
    beside the diagonal, of 32 bits, 16, ... (Warren, Hacker's Delight, 7-3)."""
    size, mask = 32, 0x00000000FFFFFFFF
    while size:
        upper, lower = words.unflatten(-1, (-1, 2, size)).unbind(-2)
        moved = ((upper >> size) ^ lower) & mask
        upper, lower = upper ^ (moved << size), lower ^ moved
        words = torch.stack([upper, lower], -2).flatten(-3)
        size //= 2
        mask ^= (mask << size) & 0xFFFFFFFFFFFFFFFF
    return words
