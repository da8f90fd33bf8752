"""Permuted V: the key order in which the Hopper kernels read e4m3 V, and its conversion in torch.

Four consecutive positions hold the keys that a thread has of its row of P after the QKᵀ GEMM, and
16 positions of a column are 16 contiguous bytes; csrc/tile/permuted_v.h explains why. In memory:
(batch, heads, keys / 16, columns, 16), varlen (heads, keys / 16, columns, 16); columns is the head
dim, zero-padded to 64, 128 or 256. Sequence i of a varlen batch begins at position
32 * (cu_seqlens[i] // 32 + i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .token_positions import token_positions

KEY_GROUP = 32  # sequences begin at multiples of this many positions
CORE_ROW_KEYS = 16  # contiguous positions of a column
COLUMNS = (64, 128, 256)  # head dims of the Hopper kernels that read e4m3


def permuted_position(position: Tensor) -> Tensor:
    """Permuted position of a key, both counted from the beginning of the sequence."""
    half, key = position // CORE_ROW_KEYS, position % CORE_ROW_KEYS
    return half * CORE_ROW_KEYS + key % 8 // 2 * 4 + key // 8 * 2 + key % 2


def num_permuted_keys(num_tokens: int, cu_seqlens: Tensor | None) -> int:
    """Number of positions per head. num_tokens: as for ``_permuted_positions``."""
    if cu_seqlens is None:
        return -(-num_tokens // KEY_GROUP) * KEY_GROUP
    return (num_tokens // KEY_GROUP + cu_seqlens.shape[0] - 1) * KEY_GROUP


def shape_of(rows: tuple[int, ...], cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """Shape of permuted data. rows: shape of the unpermuted data."""
    *lead, num_tokens, heads, head_dim = rows
    columns = next(width for width in COLUMNS if width >= head_dim)
    return (
        *lead,
        heads,
        num_permuted_keys(num_tokens, cu_seqlens) // CORE_ROW_KEYS,
        columns,
        CORE_ROW_KEYS,
    )


def permute_v(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """rows: float8_e4m3fn (batch, seqlen, heads, head_dim), with cu_seqlens (total, heads,
    head_dim). Positions without a key are 0."""
    num_tokens, _, head_dim = rows.shape[-3:]
    permuted_key = _permuted_positions(num_tokens, rows.device, cu_seqlens)
    *lead, groups, columns, _ = shape_of(rows.shape, cu_seqlens)
    # One extra position for tokens of no sequence.
    shape = (*lead, groups * CORE_ROW_KEYS + 1, columns)
    data = torch.zeros(shape, dtype=torch.uint8, device=rows.device)
    data[..., permuted_key, :head_dim] = rows.view(torch.uint8).transpose(-2, -3)
    data = data[..., :-1, :].unflatten(-2, (-1, CORE_ROW_KEYS)).transpose(-1, -2).contiguous()
    return data.view(rows.dtype)


def unpermute_v(data: Tensor, shape: tuple[int, ...], cu_seqlens: Tensor | None) -> Tensor:
    """Inverse of ``permute_v``. shape: of the result, in which tokens of no sequence are 0."""
    num_tokens, head_dim = shape[-3], shape[-1]
    permuted_key = _permuted_positions(num_tokens, data.device, cu_seqlens)
    permuted_keys = data.view(torch.uint8).transpose(-1, -2).flatten(-3, -2)
    permuted_keys = torch.nn.functional.pad(permuted_keys, (0, 0, 0, 1))
    return (
        permuted_keys[..., permuted_key, :head_dim].transpose(-2, -3).contiguous().view(data.dtype)
    )


def _permuted_positions(num_tokens: int, device: torch.device, cu_seqlens: Tensor | None) -> Tensor:
    """Permuted position of each token; one past the last for tokens of no sequence."""
    of = token_positions(num_tokens, device, cu_seqlens)
    if cu_seqlens is None:
        return permuted_position(of.position)
    first = (cu_seqlens[of.sequence].long() // KEY_GROUP + of.sequence) * KEY_GROUP
    nowhere = num_permuted_keys(num_tokens, cu_seqlens)
    return torch.where(of.owned, first + permuted_position(of.position), nowhere)
