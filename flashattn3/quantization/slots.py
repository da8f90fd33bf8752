"""The order in which the Hopper kernels want e4m3 V, and the way there and back in torch.

Four neighbouring slots hold the keys that a thread has of its row of P after the first matrix
product, and 16 slots of a column are 16 neighbouring bytes; csrc/blocks/slot_order.h says why. In
memory: (batch, heads, slots / 16, columns, 16), ragged (heads, slots / 16, columns, 16); columns is
the head dim, rounded up to 64, 128 or 256 with zeros. Sequence i of a ragged batch begins at slot
32 * (cu_seqlens[i] // 32 + i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tokens import places

GROUP = 32  # slots; sequences begin at multiples
ROW = 16  # slots of a column that lie together
COLUMNS = (64, 128, 256)


def slot_of(position: Tensor) -> Tensor:
    """The slot of a key, both counted from the beginning of the sequence."""
    half, key = position // ROW, position % ROW
    return half * ROW + key % 8 // 2 * 4 + key // 8 * 2 + key % 2


def num_slots(num_tokens: int, cu_seqlens: Tensor | None) -> int:
    """Of a head; num_tokens as for places."""
    if cu_seqlens is None:
        return -(-num_tokens // GROUP) * GROUP
    return (num_tokens // GROUP + cu_seqlens.numel() - 1) * GROUP


def shape_of(rows: tuple[int, ...], cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """Of data in slots, from that in rows."""
    *lead, num_tokens, heads, head_dim = rows
    columns = next(width for width in COLUMNS if width >= head_dim)
    return (*lead, heads, num_slots(num_tokens, cu_seqlens) // ROW, columns, ROW)


def to_slots(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """rows: float8_e4m3fn (batch, seqlen, heads, head_dim), with cu_seqlens (total, heads,
    head_dim). Slots of no key are 0."""
    num_tokens, _, head_dim = rows.shape[-3:]
    slot = _slots_of_tokens(num_tokens, rows.device, cu_seqlens)
    *lead, groups, columns, _ = shape_of(rows.shape, cu_seqlens)
    # One more, for tokens of no sequence.
    shape = (*lead, groups * ROW + 1, columns)
    data = torch.zeros(shape, dtype=torch.uint8, device=rows.device)
    data[..., slot, :head_dim] = rows.view(torch.uint8).transpose(-2, -3)
    data = data[..., :-1, :].unflatten(-2, (-1, ROW)).transpose(-1, -2).contiguous()
    return data.view(rows.dtype)


def to_rows(data: Tensor, shape: tuple[int, ...], cu_seqlens: Tensor | None) -> Tensor:
    """The inverse. shape: of the rows; those of no sequence are 0."""
    num_tokens, head_dim = shape[-3], shape[-1]
    slot = _slots_of_tokens(num_tokens, data.device, cu_seqlens)
    slots = data.view(torch.uint8).transpose(-1, -2).flatten(-3, -2)
    slots = torch.nn.functional.pad(slots, (0, 0, 0, 1))
    return slots[..., slot, :head_dim].transpose(-2, -3).contiguous().view(data.dtype)


def _slots_of_tokens(num_tokens: int, device: torch.device, cu_seqlens: Tensor | None) -> Tensor:
    """One past the last slot for tokens of no sequence."""
    of = places(num_tokens, device, cu_seqlens)
    if cu_seqlens is None:
        return slot_of(of.position)
    first = (cu_seqlens[of.sequence].long() // GROUP + of.sequence) * GROUP
    nowhere = num_slots(num_tokens, cu_seqlens)
    return torch.where(of.owned, first + slot_of(of.position), nowhere)
