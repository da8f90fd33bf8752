"""The kinds of blocks from the structure of a mask, without a look at single scores."""

from __future__ import annotations

import torch
from torch import Tensor

from .block_lists import BLOCK_COLUMNS, BLOCK_ROWS, FULL, Grid


def of_spans(grid: Grid, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The kinds of blocks of 128 queries x 64 keys, and of 128 keys x 64 queries.

    grid: its rows are queries. starts, ends: int64 (batch, heads, queries, n), the keys of a query:
        n spans [start, end) that do not overlap, 0 <= start <= end <= keys.
    """
    counts = _counts(grid, starts, ends, BLOCK_ROWS, BLOCK_COLUMNS)
    of_keys = _counts(grid, starts, ends, BLOCK_COLUMNS, BLOCK_ROWS).mT
    return grid.kinds_of_counts(counts), grid.transposed.kinds_of_counts(of_keys)


def _counts(grid: Grid, starts: Tensor, ends: Tensor, rows: int, columns: int) -> Tensor:
    """The number of visible scores of each block of rows x columns.

    A row that sees all keys from x on sees 0 in the blocks before that of x, a part of that block,
    and all of the later ones: their differences are two numbers at x's block and behind it.
    """
    queries, device = grid.rows, starts.device
    row_blocks, column_blocks = -(-queries // rows), -(-grid.columns // columns)
    shape = grid.batch, grid.heads, row_blocks, column_blocks + 2
    differences = torch.zeros(shape, dtype=torch.int64, device=device).flatten()
    lists = torch.arange(grid.batch * grid.heads, device=device).view(grid.batch, grid.heads, 1, 1)
    row_block = torch.arange(queries, device=device).div(rows, rounding_mode="floor").view(-1, 1)
    for x, sign in ((starts, 1), (ends, -1)):
        block = x.div(columns, rounding_mode="floor")
        place = ((lists * row_blocks + row_block) * shape[-1] + block).flatten()
        behind = (x - block * columns).flatten()
        differences = differences.scatter_add(0, place, sign * (columns - behind))
        differences = differences.scatter_add(0, place + 1, sign * behind)
    return differences.view(shape).cumsum(-1)[..., :column_blocks]


def of_blocks(
    grid: Grid, seen: Tensor, full: Tensor, block_q: int, block_k: int, transposed: bool
) -> Tensor:
    """The kinds of blocks from larger or smaller ones of block_q queries x block_k keys.

    grid: that of the wanted kinds, its rows keys if transposed. seen, full: bool (batch, heads,
        query blocks, key blocks), which blocks have a visible score, and which no hidden one.
    """
    if transposed:
        seen, full, block_q, block_k = seen.mT, full.mT, block_k, block_q
    sizes = (grid.rows, BLOCK_ROWS, block_q), (grid.columns, BLOCK_COLUMNS, block_k)
    (top, bottom), (left, right) = (_covered(*size, seen.device) for size in sizes)

    def total(x: Tensor) -> Tensor:
        sums = torch.nn.functional.pad(x.long().cumsum(-2).cumsum(-1), (1, 0, 1, 0))
        above, below = sums[..., top, :], sums[..., bottom, :]
        return below[..., right] - below[..., left] - above[..., right] + above[..., left]

    whole = (bottom - top).unsqueeze(-1) * (right - left)
    return (total(seen) > 0).to(torch.int8) + (total(full) == whole).to(torch.int8) * (FULL - 1)


def _covered(length: int, size: int, given: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The given blocks that a block of size tokens overlaps: the first, the one past the last."""
    begin = torch.arange(0, length, size, device=device)
    end = (begin + size).clamp(max=length)
    return begin // given, (end + given - 1) // given
