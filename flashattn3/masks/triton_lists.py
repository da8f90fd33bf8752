"""The lists of a mask by Triton kernels: a few launches, where torch operations take hundreds.

The kernels write what ``block_lists.assembled`` gives, bit for bit. Importing this module imports
no Triton.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..modes import is_traced
from .block_lists import BLOCK_ROWS, BlockLists, Grid

if TYPE_CHECKING:
    from ..backends.triton.kernels.variable_launch import VariableLaunch

TOKENS = 128  # of a program that looks for the documents of tokens
OLDEST = 8, 0  # compute capability


def serve(x: Tensor) -> bool:
    """Whether the kernels make lists of x, which is not empty. Traced code takes torch
    operations."""
    return x.is_cuda and not is_traced() and x.numel() > 0 and _serve_device(x.device.index)


@cache
def _serve_device(index: int) -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(index) >= OLDEST


def on_device(x: Tensor) -> torch.cuda.device | nullcontext:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def _launch(name: str, source: str, index: int | None, **constants: object) -> VariableLaunch:
    """A kernel on one device. source: what the lists are made of, on whose types it depends."""
    from ..backends.triton.kernels import mask_lists
    from ..backends.triton.kernels.variable_launch import VariableLaunch

    num_warps = {"bits_kernel": 8}.get(name, 4)
    return VariableLaunch(getattr(mask_lists, name), 16, constants, {"num_warps": num_warps})


def spans_of_documents(
    lengths: Tensor | None, ids: Tensor | None, seqlen: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The keys of each token, spans [start, end): int32 (batch, 1, seqlen, 1).

    lengths: (batch, documents) or None; ids: (batch, seqlen).
    """
    given = (ids if lengths is None else lengths).contiguous()
    batch, device = given.shape[0], given.device
    shape = batch, 1, seqlen, 1
    starts, ends = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    name, numbers = "spans_of_ids_kernel", (seqlen,)
    if lengths is not None:
        name, numbers = "spans_of_lengths_kernel", (seqlen, given.shape[1])
    launch = _launch(name, str(given.dtype), device.index, CAUSAL=causal, TOKENS=TOKENS)
    with on_device(given):
        launch((-(-seqlen // TOKENS), batch, 1), (given, starts, ends), (), numbers)
    return starts, ends


def of_spans(
    grid: Grid, starts: Tensor, ends: Tensor, most_partial: tuple[int | None, int | None]
) -> tuple[BlockLists, BlockLists]:
    """The lists of queries and of keys of spans of keys.

    grid: its rows are queries. starts, ends: integers (batch, heads, queries, n), spans that do not
        overlap. most_partial: of either side, a bound on the number of partial blocks.
    """
    starts, ends = starts.int().contiguous(), ends.int().contiguous()
    sides, n, device = _Sides.of(grid), starts.shape[-1], starts.device
    kinds, work = sides.kinds_and_work(device, torch.empty)
    with on_device(starts):
        launch = _launch("kinds_kernel", "spans", device.index)
        launch(sides.lists, (starts, ends, *kinds, *work), (), (*sides.sizes, n))
        return _listed(sides, kinds, work, (starts, ends, None, None), n, most_partial)


def of_bools(
    grid: Grid, visible: Tensor, most_partial: tuple[int | None, int | None]
) -> tuple[BlockLists, BlockLists]:
    """The same of a bool tensor (batch, heads, queries, keys) with any strides, read once."""
    device, sides = visible.device, _Sides.of(grid)
    kinds, work = sides.kinds_and_work(device, torch.zeros)
    words = [
        torch.empty((prod(shape), BLOCK_ROWS), dtype=torch.int64, device=device)
        for shape in sides.shapes
    ]
    num_masks, queries, keys = sides.sizes
    tiles = -(-keys // BLOCK_ROWS), -(-queries // BLOCK_ROWS), num_masks
    with on_device(visible):
        launch = _launch("bits_kernel", "bools", device.index)
        of_words = (x.view(torch.int32) for x in words)
        tensors = visible.view(torch.uint8), *of_words, *kinds, *work
        launch(tiles, tensors, (), (grid.heads, queries, keys, *visible.stride()))
        return _listed(sides, kinds, work, (None, None, *words), 0, most_partial)


class _Sides(NamedTuple):
    """shapes: of the blocks of queries and of the blocks of keys. sizes: masks, queries, keys.
    lists: the grid of a kernel of all lists."""

    shapes: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
    sizes: tuple[int, int, int]
    lists: tuple[int, int, int]

    @staticmethod
    def of(grid: Grid) -> _Sides:
        of_queries, of_keys = grid.shape, grid.transposed.shape
        num_masks = grid.batch * grid.heads
        lists = num_masks * max(of_queries[2], of_keys[2]), 2, 1
        return _Sides((of_queries, of_keys), (num_masks, grid.rows, grid.columns), lists)

    def kinds_and_work(self, device: torch.device, empty) -> tuple[list[Tensor], list[Tensor]]:
        """Of either side: room for the kinds, int8, and for ``BlockLists.work``."""
        kinds = [torch.empty(x, dtype=torch.int8, device=device) for x in self.shapes]
        work = [empty((*x[:3], 4), dtype=torch.int32, device=device) for x in self.shapes]
        return kinds, work


def _listed(
    sides: _Sides,
    kinds: list[Tensor],
    work: list[Tensor],
    source: tuple[Tensor | None, ...],
    n: int,
    most_partial: tuple[int | None, int | None],
) -> tuple[BlockLists, BlockLists]:
    device, sizes = kinds[0].device, sides.sizes
    entries = [torch.empty(x, dtype=torch.int32, device=device) for x in sides.shapes]
    blocks = [prod(x) for x in sides.shapes]
    capacities = [
        of if most is None else min(most, of) for of, most in zip(blocks, most_partial, strict=True)
    ]
    tiles = [
        torch.empty((most, BLOCK_ROWS), dtype=torch.int64, device=device) for most in capacities
    ]
    launch = _launch("lists_kernel", "kinds", device.index)
    launch(sides.lists, (*kinds, *work, *entries), (), sizes)
    launch = _launch("tiles_kernel", "bools" if source[0] is None else "spans", device.index)
    tensors = *source, *work, *entries, *tiles
    launch((max(capacities), 2, 1), tensors, (), (*sizes, n, *capacities))
    return BlockLists(entries[0], work[0], tiles[0]), BlockLists(entries[1], work[1], tiles[1])
