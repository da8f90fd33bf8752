"""The lists of a mask by Triton kernels: a few launches, where torch operations take hundreds.

The kernels write what ``block_lists.assembled`` gives, bit for bit. Importing this module imports
no Triton.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..modes import is_traced
from .block_lists import BLOCK_ROWS, BlockLists, Grid

if TYPE_CHECKING:
    from ..backends.triton.kernels.variable_launch import VariableLaunch

TOKENS = BLOCK_ROWS  # of a program that looks for the documents of tokens
BLOCKS = 64  # entries of a block mask that a program reads at once
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

    num_warps = {"bits_kernel": 8, "tiles_kernel": 8, "block_kinds_kernel": 1}.get(name, 4)
    return VariableLaunch(getattr(mask_lists, name), 16, constants, {"num_warps": num_warps})


def spans_of_documents(
    lengths: Tensor | None, ids: Tensor | None, seqlen: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of each token, spans [start, end): int32 (batch, 1, seqlen, 1); and the bounds of
    ``of_spans``.

    lengths: (batch, documents) or None; ids: (batch, seqlen).
    """
    given = (ids if lengths is None else lengths).contiguous()
    batch, device = given.shape[0], given.device
    shape = batch, 1, seqlen, 1
    starts = torch.empty(shape, dtype=torch.int32, device=device)
    ends = torch.empty(shape, dtype=torch.int32, device=device)
    blocks = -(-seqlen // TOKENS)
    bounds = torch.empty((batch, blocks, 2), dtype=torch.int32, device=device)
    name, numbers = "spans_of_ids_kernel", (seqlen,)
    if lengths is not None:
        name, numbers = "spans_of_lengths_kernel", (seqlen, given.shape[1])
    launch = _launch(name, str(given.dtype), device.index, CAUSAL=causal, TOKENS=TOKENS)
    with on_device(given):
        launch((blocks, batch, 1), (given, starts, ends, bounds), (), numbers)
    return starts, ends, bounds


def of_spans(
    grid: Grid,
    starts: Tensor,
    ends: Tensor,
    most_partial: tuple[int | None, int | None],
    bounds: Tensor | None = None,
) -> tuple[BlockLists, BlockLists]:
    """The lists of queries and of keys of spans of keys.

    grid: its rows are queries. starts, ends: integers (batch, heads, queries, n), spans that do not
        overlap. most_partial: of either side, a bound on the number of partial blocks.
    bounds: int32 (batch * heads, blocks of 128 queries, 2), the first key that one of them sees and
        the one past the last; without them each list looks at all spans.
    """
    starts, ends = starts.int().contiguous(), ends.int().contiguous()
    sizes, n, device = _sizes_of(grid, most_partial), starts.shape[-1], starts.device
    with on_device(starts):
        kinds, work = sizes.kinds_and_work(device, torch.empty)
        launch = _launch("kinds_kernel", str(bounds is None), device.index)
        launch(sizes.lists, (starts, ends, bounds, *kinds, *work), (), (*sizes.of_masks, n))
        return _listed(sizes, kinds, work, (starts, ends, None, None), n)


class Blocks(NamedTuple):
    """kinds: integers (batch, heads, blocks of queries, blocks of keys), contiguous, of blocks of
    block_q x block_k scores, block_k a multiple of 8: ``full`` shows all, 0 none, and 1 some unless
    it is ``full``."""

    kinds: Tensor
    block_q: int
    block_k: int
    full: int


def kinds_of_block_mask(
    counts: Tensor, indices: Tensor, full_counts: Tensor | None, full_indices: Tensor | None
) -> Tensor:
    """``Blocks.kinds`` of the blocks that a block mask lists, where 2 is full: int32, of the shape
    of indices, of which the first ``counts`` of each list count. All are int32."""
    given = (
        x if x is None else x.contiguous() for x in (counts, indices, full_counts, full_indices)
    )
    kinds, columns = torch.zeros_like(indices), indices.shape[-1]
    with on_device(indices):
        launch = _launch(
            "block_kinds_kernel", str(full_counts is None), indices.device.index, BLOCKS=BLOCKS
        )
        launch((counts.numel(), 1, 1), (*given, kinds), (), (columns,))
    return kinds


def of_bools(
    grid: Grid,
    visible: Tensor | None,
    most_partial: tuple[int | None, int | None],
    blocks: Blocks | None = None,
) -> tuple[BlockLists, BlockLists]:
    """The same of a bool tensor (batch, heads, queries, keys) with any strides, read once.

    blocks: visible counts in those that show some of their scores; it may be None if none do.
    """
    source = blocks.kinds if visible is None else visible
    device, sizes = source.device, _sizes_of(grid, most_partial)
    strides, of_blocks, kind, numbers, full, whole = (0, 0, 0), None, "", (8, 8), 1, True
    if blocks is not None:
        of_blocks, *numbers, full = blocks
        kind, whole = str(of_blocks.dtype), all(x % BLOCK_ROWS == 0 for x in numbers)
    with on_device(source):
        if visible is not None:
            visible = _in_words(visible)
            strides = visible.stride()[:3]
        kinds, work = sizes.kinds_and_work(device, torch.zeros)
        words = [
            torch.empty((count, BLOCK_ROWS), dtype=torch.int64, device=device)
            for count in sizes.num_blocks
        ]
        types = f"{visible is None} {kind}"
        launch = _launch("bits_kernel", types, device.index, FULL=full, WHOLE=whole)
        tensors = visible, of_blocks, *words, *kinds, *work
        launch(sizes.pairs, tensors, strides, (grid.heads, grid.rows, grid.columns, *numbers))
        return _listed(sizes, kinds, work, (None, None, *words), 0)


def _in_words(visible: Tensor) -> Tensor:
    """int64 (batch, heads, queries, words of 8 keys) of bools, a copy where the words of memory are
    others: each row, padded with False."""
    *strides, last = visible.stride()
    units = *strides, visible.storage_offset(), visible.data_ptr(), visible.shape[3]
    if last != 1 or any(x % 8 for x in units):
        visible = torch.nn.functional.pad(visible, (0, -visible.shape[3] % 8)).contiguous()
    return visible.view(torch.int64)


class _Sizes(NamedTuple):
    """Of the lists of queries and of keys. shapes: of their entries. num_blocks, capacities: their
    blocks and bit tiles. of_masks: masks, queries, keys. lists: the grid of a kernel of all lists;
    pairs: of one with a program for 128 queries and 128 keys; tiles: for each bit tile."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    of_work: tuple[tuple[int, ...], tuple[int, ...]]
    num_blocks: tuple[int, int]
    capacities: tuple[int, int]
    of_masks: tuple[int, int, int]
    lists: tuple[int, int, int]
    pairs: tuple[int, int, int]
    tiles: tuple[int, int, int]

    def kinds_and_work(self, device: torch.device, empty) -> tuple[list[Tensor], list[Tensor]]:
        """Of either side: room for the kinds, int8, and for ``BlockLists.work``."""
        kinds = [torch.empty(x, dtype=torch.int8, device=device) for x in self.shapes]
        return kinds, [empty(x, dtype=torch.int32, device=device) for x in self.of_work]


@lru_cache(maxsize=256)
def _sizes_of(grid: Grid, most_partial: tuple[int | None, int | None]) -> _Sizes:
    shapes, num_masks = (grid.shape, grid.transposed.shape), grid.batch * grid.heads
    num_blocks = tuple(map(prod, shapes))
    capacities = tuple(
        of if most is None else min(most, of)
        for of, most in zip(num_blocks, most_partial, strict=True)
    )
    return _Sizes(
        shapes,
        tuple((*x[:3], 4) for x in shapes),
        num_blocks,
        capacities,
        (num_masks, grid.rows, grid.columns),
        (num_masks * max(x[2] for x in shapes), 2, 1),
        (shapes[1][2], shapes[0][2], num_masks),
        (max(capacities), 2, 1),
    )


def _listed(
    sizes: _Sizes,
    kinds: list[Tensor],
    work: list[Tensor],
    source: tuple[Tensor | None, ...],
    n: int,
) -> tuple[BlockLists, BlockLists]:
    device = kinds[0].device
    entries = [torch.empty(x, dtype=torch.int32, device=device) for x in sizes.shapes]
    tiles = [
        torch.empty((most, BLOCK_ROWS), dtype=torch.int64, device=device)
        for most in sizes.capacities
    ]
    launch = _launch("lists_kernel", "kinds", device.index)
    launch(sizes.lists, (*kinds, *work, *entries), (), sizes.of_masks)
    launch = _launch("tiles_kernel", "bools" if source[0] is None else "spans", device.index)
    numbers = *sizes.of_masks, n, *sizes.capacities
    launch(sizes.tiles, (*source, *work, *entries, *tiles), (), numbers)
    return BlockLists(entries[0], work[0], tiles[0]), BlockLists(entries[1], work[1], tiles[1])
