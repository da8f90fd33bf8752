"""The one representation of a mask: for each block of 128 rows a list of blocks of 64 columns.

Rows are queries and columns keys; the lists of the backward have rows and columns exchanged. All
shapes follow from the lengths and from a bound on the number of partial blocks, never from values,
so lists are built on the device, without waiting for it, and inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import lowest, num_ones, packed, transposed, unpacked

BLOCK_ROWS, BLOCK_COLUMNS = 128, 64
WAVE = 8  # lists of the backward: kWave of csrc/backward/waves.h
# Kinds of blocks. The kind of a block in an intersection is the smaller one of the two, in a union
# the larger one, and that of the inverse is 2 minus it.
HIDDEN, PARTIAL, FULL = 0, 1, 2
# Tiles that are computed together: 16 MB of bools, or 32 MB of words.
_CHUNK, _CHUNK_OF_WORDS = 2**11, 2**15


class BlockLists(NamedTuple):
    """entries: int32 (batch | 1, heads | 1, row blocks, column blocks), a permutation of the column
        blocks for each row block: full blocks, then partial ones, each in ascending order, then
        hidden ones.
    work: int32 (batch | 1, heads | 1, row blocks, 4), of each row block: the number of its full
        blocks, that of its full and partial blocks, its first bit tile, and a row block: those of
        line 0, 1, ... are in the order in which they should be computed, most blocks first. The
        bit tiles of a row block follow each other, as its partial blocks do.
    tiles: int64 (capacity, 128), for each row of a partial block its 64 columns, the first in the
        lowest bit. Bits past the end of rows or columns are 0, and a block that goes past the last
        column is never full.
    """

    entries: Tensor
    work: Tensor
    tiles: Tensor


class Places(NamedTuple):
    """Where blocks are, int64 each: batch_idx, head, row block, column block."""

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor


class Grid(NamedTuple):
    """The blocks of a mask of rows x columns scores, for each batch_idx and head."""

    batch: int
    heads: int
    rows: int
    columns: int

    @property
    def transposed(self) -> Grid:
        return Grid(self.batch, self.heads, self.columns, self.rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        row_blocks = (self.rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        column_blocks = (self.columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
        return self.batch, self.heads, row_blocks, column_blocks

    @property
    def num_blocks(self) -> int:
        batch, heads, rows, columns = self.shape
        return batch * heads * rows * columns

    @property
    def num_scores(self) -> int:
        return self.batch * self.heads * self.rows * self.columns

    def places(self, blocks: Tensor) -> Places:
        """blocks: int64 indices into a flattened tensor of ``shape``."""
        _, heads, rows, columns = self.shape
        lists, column = blocks // columns, blocks % columns
        return Places(lists // (rows * heads), lists // rows % heads, lists % rows, column)

    def rows_in_blocks(self, device: torch.device) -> Tensor:
        """The number of rows of each row block, (row blocks, 1)."""
        first = torch.arange(0, self.rows, BLOCK_ROWS, device=device)
        return (self.rows - first).clamp(max=BLOCK_ROWS).unsqueeze(-1)

    def inside(self, at: Places) -> Tensor:
        """The bits of tiles that are scores of the mask: int64 (tiles, 128)."""
        row = at.row.unsqueeze(-1) * BLOCK_ROWS + torch.arange(BLOCK_ROWS, device=at.row.device)
        columns = lowest(self.columns - at.column * BLOCK_COLUMNS).unsqueeze(-1)
        return torch.where(row < self.rows, columns, 0)

    def kinds_of_counts(self, counts: Tensor) -> Tensor:
        """int8 of ``shape``, from the number of visible scores of each block."""
        whole = self.rows_in_blocks(counts.device) * BLOCK_COLUMNS
        return (counts > 0).to(torch.int8) + (counts == whole).to(torch.int8)

    def without_overhang(self, kinds: Tensor) -> Tensor:
        """kinds in which no block that goes past the last column is full."""
        if self.columns % BLOCK_COLUMNS == 0:
            return kinds
        most = torch.full(self.shape[-1:], FULL, dtype=kinds.dtype, device=kinds.device)
        most[-1:] = PARTIAL
        return kinds.minimum(most)


Words = Callable[[Places], Tensor]  # tiles at places, int64 (tiles, 128)


def assembled(
    grid: Grid, kinds: Tensor, words: Words, most_partial: int | None = None, exact: bool = False
) -> BlockLists:
    """Lists of the blocks of these kinds, int8 of the grid's shape.

    words: computes the bits of partial blocks; those past the end do not matter.
    most_partial: a bound on their number; None: all blocks.
    exact: whether all partial blocks have visible and hidden scores. Otherwise those that have none
        or all visible are hidden or full in the lists.
    """
    kinds = grid.without_overhang(kinds)
    capacity = grid.num_blocks if most_partial is None else min(most_partial, grid.num_blocks)
    blocks, used = _partial_blocks(kinds, capacity)
    places = map(grid.places, blocks.split(_CHUNK_OF_WORDS))
    parts = [words(at) & grid.inside(at) for at in places if capacity]
    tiles = torch.cat(parts) if parts else blocks.new_zeros((0, BLOCK_ROWS))
    tiles = torch.where(used.unsqueeze(-1), tiles, 0)
    if not exact:
        places = torch.where(used, blocks, grid.num_blocks)
        counts = blocks.new_zeros(grid.num_blocks + 1)
        counts = counts.scatter(0, places, num_ones(tiles).sum(-1))
        found = grid.kinds_of_counts(counts[:-1].view(grid.shape))
        slots = numbered(kinds).flatten()
        kinds = torch.where(kinds == PARTIAL, found, kinds)
        blocks, used = _partial_blocks(kinds, capacity)
        if capacity:
            tiles = torch.where(used.unsqueeze(-1), tiles[slots[blocks].clamp(min=0)], 0)
    return _listed(kinds, tiles)


def numbered(kinds: Tensor) -> Tensor:
    """Index of the bit tile of each partial block: that of the partial blocks before it."""
    partial = (kinds == PARTIAL).flatten()
    return (partial.cumsum(0) - 1).view(kinds.shape)


def _partial_blocks(kinds: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The block of each bit tile, int64 (capacity,), and whether there is one."""
    slots = torch.where(kinds == PARTIAL, numbered(kinds), capacity).clamp(max=capacity).flatten()
    places = torch.arange(slots.shape[0], device=kinds.device)
    blocks = places.new_zeros(capacity + 1).scatter(0, slots, places)[:capacity]
    return blocks, torch.arange(capacity, device=kinds.device) < (kinds == PARTIAL).sum()


def _listed(kinds: Tensor, tiles: Tensor) -> BlockLists:
    entries = kinds.argsort(dim=-1, descending=True, stable=True)
    full, partial = (kinds == FULL).sum(-1), (kinds == PARTIAL).sum(-1)
    before = partial.flatten().cumsum(0).view(partial.shape) - partial
    order = (full + partial).argsort(dim=-1, descending=True, stable=True)
    work = torch.stack([full, full + partial, before, order], -1)
    entries = entries.to(torch.int32, memory_format=torch.contiguous_format)
    return BlockLists(entries, work.int(), tiles)


def turns_of(lists: BlockLists) -> Tensor:
    """For each block of each list, the number of lists that add to the block before: int32, as
    entries. So they do it in the same order in every run. Lists are in waves of WAVE, the last ones
    of the order of ``work`` first. Those of a wave are computed at a time, a step for each block,
    partial blocks first: they add in the order of their steps, so that few wait."""
    row_blocks, column_blocks = lists.entries.shape[-2:]
    place = torch.arange(column_blocks, device=lists.work.device)
    full, listed, _, order = lists.work.unsqueeze(-1).long().unbind(-2)
    step = torch.where(place < full, place + listed - full, place - full)
    drawn = torch.empty_like(order).scatter_(
        -2,
        order,
        torch.arange(row_blocks, device=place.device).flip(0).unsqueeze(-1).expand_as(order),
    )
    key = (drawn // WAVE * column_blocks + step) * row_blocks + drawn
    last = row_blocks * column_blocks * row_blocks
    key = torch.where(place < listed, key, last)
    blocks = lists.entries.long()
    of_blocks = torch.empty_like(key).scatter_(-1, blocks, key)
    return of_blocks.argsort(-2).argsort(-2).gather(-1, blocks).int()


def kinds_of(lists: BlockLists) -> Tensor:
    """The kind of each block: int8 (batch | 1, heads | 1, row blocks, column blocks)."""
    place = torch.arange(lists.entries.shape[-1], device=lists.work.device)
    full, listed = (place < lists.work[..., i : i + 1] for i in range(2))
    kinds = full.to(torch.int8) + listed.to(torch.int8)
    return torch.zeros_like(kinds).scatter(-1, lists.entries.long(), kinds)


def words_of(lists: BlockLists) -> Words:
    """The bits of any block: those of a full one are ones. Lists of one batch_idx or head serve all
    batches or heads."""
    kinds = kinds_of(lists)
    # The lists may be a part of those that share the tiles, so that their first tile is not 0.
    slots = lists.work[..., 2:3] + (kinds == PARTIAL).cumsum(-1) - 1
    shape = kinds.shape

    def words(at: Places) -> Tensor:
        batch, head = (
            torch.zeros_like(x) if size == 1 else x
            for x, size in zip((at.batch, at.head), shape[:2], strict=True)
        )
        place = batch, head, at.row, at.column
        kind = kinds[place].unsqueeze(-1)
        whole = torch.where(kind == FULL, -1, 0)
        if lists.tiles.shape[0] == 0:
            return whole.expand(-1, BLOCK_ROWS)
        tile = lists.tiles[slots[place].clamp(0, lists.tiles.shape[0] - 1)]
        return torch.where(kind == PARTIAL, tile, whole)

    return words


def words_of_spans(grid: Grid, of_keys: bool, starts: Tensor, ends: Tensor) -> Words:
    """The bits of tiles from the spans of keys that queries see, (batch, heads, queries, n).

    of_keys: whether the rows of the grid are keys.
    """
    queries, n = starts.shape[2:]
    starts, ends = starts.flatten(0, 2), ends.flatten(0, 2)

    def seen(at: Places, query: Tensor, first_key: Tensor) -> Tensor:
        """Of each query 64 keys, from first_key on."""
        lists = (at.batch * grid.heads + at.head).view(-1, *(1,) * (query.ndim - 1))
        rows = lists * queries + query.clamp(max=queries - 1)
        of_starts, of_ends = (lowest(x[rows] - first_key.unsqueeze(-1)) for x in (starts, ends))
        inside = of_ends & ~of_starts
        found = torch.zeros_like(rows)
        for i in range(n):
            found = found | inside[..., i]
        return found

    def words(at: Places) -> Tensor:
        row, column = at.row * BLOCK_ROWS, at.column * BLOCK_COLUMNS
        if not of_keys:
            query = row.unsqueeze(-1) + torch.arange(BLOCK_ROWS, device=row.device)
            return seen(at, query, column.unsqueeze(-1))
        halves = torch.arange(0, BLOCK_ROWS, BLOCK_COLUMNS, device=row.device)
        query = column.view(-1, 1, 1) + torch.arange(BLOCK_COLUMNS, device=row.device)
        first_key = (row.unsqueeze(-1) + halves).unsqueeze(-1)
        query = query.expand(-1, halves.shape[0], -1)
        return transposed(seen(at, query, first_key)).flatten(1)

    return words


def words_of_predicate(grid: Grid, of_keys: bool, visible: Callable) -> Words:
    """The bits of tiles from ``visible(batch, head, query, key)``, which gets int64 tensors that
    broadcast to (tiles, 128, 64), inside the lengths.

    of_keys: whether the rows of the grid are keys.
    """

    def words(at: Places) -> Tensor:
        chunks = (Places(*of) for of in zip(*(x.split(_CHUNK) for x in at), strict=True))
        return torch.cat([words_of_chunk(chunk) for chunk in chunks])

    def words_of_chunk(at: Places) -> Tensor:
        device = at.row.device
        row = at.row.view(-1, 1, 1) * BLOCK_ROWS
        row = row + torch.arange(BLOCK_ROWS, device=device).view(-1, 1)
        column = at.column.view(-1, 1, 1) * BLOCK_COLUMNS
        column = column + torch.arange(BLOCK_COLUMNS, device=device)
        row, column = row.clamp(max=grid.rows - 1), column.clamp(max=grid.columns - 1)
        query, key = (column, row) if of_keys else (row, column)
        seen = visible(at.batch.view(-1, 1, 1), at.head.view(-1, 1, 1), query, key)
        return packed(seen.expand(at.row.shape[0], BLOCK_ROWS, BLOCK_COLUMNS))

    return words


def bools_of(lists: BlockLists, grid: Grid) -> Tensor:
    """bool (batch | 1, heads | 1, rows, columns)."""
    blocks = torch.arange(grid.num_blocks, device=lists.entries.device)
    at = grid.places(blocks)
    tiles = unpacked(words_of(lists)(at) & grid.inside(at))
    tiles = tiles.view(*grid.shape, BLOCK_ROWS, BLOCK_COLUMNS).transpose(-2, -3)
    return tiles.flatten(-2).flatten(2, 3)[..., : grid.rows, : grid.columns]


def num_visible(lists: BlockLists, grid: Grid) -> Tensor:
    """The number of visible scores, int64 ()."""
    rows = grid.rows_in_blocks(lists.work.device).squeeze(-1)
    of_full = rows * lists.work[..., 0] * BLOCK_COLUMNS
    return of_full.sum() + num_ones(lists.tiles).sum()


def summary(lists: BlockLists, grid: Grid) -> str:
    """The numbers of blocks and the share of visible scores. It waits for the device."""
    sizes = f"of {grid.num_blocks} blocks"
    if lists.work.is_meta:
        return f"lists {sizes}"
    full, listed = lists.work[..., :2].sum((0, 1, 2)).tolist()
    share = int(num_visible(lists, grid)) / max(1, grid.batch * grid.heads * grid.rows)
    share = share / max(1, grid.columns)
    return f"{full} full and {listed - full} partial {sizes}, {share:.3f} visible"
