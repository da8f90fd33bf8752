"""The lists of a mask by Triton kernels: two to four launches, where torch operations take
hundreds.

The kernels write what ``block_lists.assembled`` gives, bit for bit. Importing this module imports
no Triton.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..modes import is_traced
from .block_lists import BLOCK_ROWS, BlockLists, Grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.triton.kernels.variable_launch import VariableLaunch
    from .predicates import Code

MOST_PARTS = 32  # programs that share the bit tiles of a list, each of which counts all tiles
MOST_PROGRAMS = 4096  # that write bit tiles, where lists are fewer
OLDEST = 8, 0  # compute capability


def serve(device: torch.device) -> bool:
    """Whether the kernels make lists on a device. Traced code takes torch operations."""
    return device.type == "cuda" and not is_traced() and _serve_device(device.index)


@cache
def _serve_device(index: int | None) -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(index) >= OLDEST


def _on_device(device: torch.device, build: Callable, *arguments: object) -> object:
    """``build(*arguments)`` with the device as the current one, where Triton launches."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return build(*arguments)
    with torch.cuda.device(device):
        return build(*arguments)


@lru_cache(maxsize=1024)
def _launch_of_code(
    lines: tuple[str, ...], seen: str, types: tuple[torch.dtype, ...], num_numbers: int,
    given: tuple[bool, ...], index: int | None,
) -> VariableLaunch:  # fmt: skip
    """That of a mask_mod. Products and sums of floats are rounded one by one, as torch does."""
    from ..backends.triton.kernels.mask_mods import kernel_of
    from ..backends.triton.kernels.variable_launch import VariableLaunch

    kernel = kernel_of(lines, seen, len(types), num_numbers)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    return VariableLaunch(kernel, len(types) + 5, {}, options)


@cache
def _launch(name: str, types: object, index: int | None, **constants: object) -> VariableLaunch:
    """A kernel on one device. types: those of tensors that are not always the same."""
    from ..backends.triton.kernels import mask_bits, mask_lists, mask_spans, mask_trees
    from ..backends.triton.kernels.variable_launch import VariableLaunch

    num_warps = {"bits_kernel": 8, "tree_kernel": 8, "tiles_kernel": 8, "block_kinds_kernel": 1}
    modules = mask_lists, mask_bits, mask_spans, mask_trees
    kernel = next(vars(x)[name] for x in modules if hasattr(x, name))
    return VariableLaunch(kernel, 16, constants, {"num_warps": num_warps.get(name, 4)})


class Source(NamedTuple):
    """What tells the scores of a mask. kind: SOURCE of ``lists_kernel`` for lengths of documents,
    prefixes and windows, and for intervals, whose ends are a second tensor; or "ids" of documents.
    All are integers.

    n: documents of a row, or intervals of a query. reach: left, right and sinks of a window.
    """

    kind: str
    tensor: Tensor | None = None
    ends: Tensor | None = None
    causal: bool = False
    n: int = 0
    reach: tuple[int, int, int] = (0, 0, 0)


def of_source(
    grid: Grid,
    source: Source,
    device: torch.device,
    most_partial: tuple[int | None, int | None],
) -> tuple[BlockLists, BlockLists]:
    """The lists of queries and of keys.

    grid: its rows are queries. most_partial: of either side, a bound on the number of partial
        blocks.
    """
    kind, tensor, ends, causal, n, reach = source
    sizes, kinds = _sizes_of(grid, most_partial), None
    if tensor is not None:
        tensor, device = tensor.contiguous(), tensor.device
    if kind == "intervals":
        ends = ends.contiguous()
        kinds = torch.empty(sizes.num_blocks, dtype=torch.int8, device=device)
    if kind == "ids":
        kind, tensor = "documents", _documents_of_ids(grid, tensor)
    given = tensor, ends, kinds
    return _on_device(device, _listed, sizes, kind, given, causal, (n, *reach), device)


def _documents_of_ids(grid: Grid, ids: Tensor) -> Tensor:
    documents = torch.empty((grid.batch, grid.rows, 2), dtype=torch.int32, device=ids.device)
    launch = _launch("documents_of_ids_kernel", ids.dtype, ids.device.index)
    programs = grid.shape[2], grid.batch, 1
    _on_device(ids.device, launch, programs, (ids, documents), (), (grid.rows,))
    return documents


class BlockMaskLists(NamedTuple):
    """The lists of blocks of a block mask: the numbers and indices of those that it lists, and of
    full ones or None. They are int32 and contiguous; the first ``counts`` of each list count."""

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None
    block_q: int
    block_k: int

    @property
    def is_whole(self) -> bool:
        """Whether 128 x 128 scores are of one block."""
        return self.block_q % BLOCK_ROWS == 0 and self.block_k % BLOCK_ROWS == 0

    def blocks(self) -> Blocks:
        given, indices = self[:4], self.indices
        kinds = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
        launch = _launch("block_kinds_kernel", given[2] is None, indices.device.index)
        programs, numbers = (self.counts.numel(), 1, 1), (indices.shape[-1],)
        _on_device(indices.device, launch, programs, (*given, kinds), (), numbers)
        return Blocks(kinds, self.block_q, self.block_k, full=2)


class Blocks(NamedTuple):
    """kinds: integers or bools (batch, heads, blocks of queries, blocks of keys), contiguous, of
    blocks of block_q x block_k scores: ``full`` shows all, 0 none, and 1 some unless it is
    ``full``. There may be more blocks than the mask's scores have."""

    kinds: Tensor
    block_q: int
    block_k: int
    full: int


def of_bools(
    grid: Grid,
    visible: Tensor | None,
    most_partial: tuple[int | None, int | None],
    blocks: Blocks | None = None,
) -> tuple[BlockLists, BlockLists]:
    """The same of a bool tensor (batch, heads, queries, keys) with any strides, read once.

    blocks: visible counts in those that show some of their scores; it may be None if none do.
        block_k is a multiple of 8.
    """
    device = (blocks.kinds if visible is None else visible).device
    strides, of_blocks, numbers, full, whole = (0, 0, 0), None, (8, 8, 0, 0), 1, True
    if blocks is not None:
        of_blocks, block_q, block_k, full = blocks
        whole = block_q % BLOCK_ROWS == block_k % BLOCK_ROWS == 0
        numbers = block_q, block_k, *of_blocks.shape[2:]
    if visible is not None:
        visible = _in_words(visible)
        strides = visible.stride()[:3]
    types = visible is None, of_blocks if of_blocks is None else of_blocks.dtype
    launch = _launch("bits_kernel", types, device.index, FULL=full, WHOLE=whole)
    build = _bits_build(launch, grid, numbers, device, most_partial)
    return build((visible, of_blocks), strides)


def of_code(
    grid: Grid,
    code: Code,
    block_mask: BlockMaskLists | None,
    most_partial: tuple[int | None, int | None],
) -> tuple[BlockLists, BlockLists]:
    """The same of a mask_mod, computed in partial blocks of a block mask, or in all."""
    of_blocks = (None,) * 4
    if block_mask is not None:
        of_blocks = block_mask[:4]
        if not block_mask.is_whole:
            of_blocks = None, block_mask.blocks().kinds, None, None
    build = build_of_code(grid, code, block_mask, most_partial)
    return build((*code.tensors, *of_blocks))


def build_of_code(
    grid: Grid,
    code: Code,
    block_mask: BlockMaskLists | None,
    most_partial: tuple[int | None, int | None],
) -> BitsBuild:
    """That of codes and block masks which differ in no more than the values of tensors. It takes
    those of the code and, of a block mask that ``is_whole``, its first four."""
    lines, seen, tensors, numbers = code
    given, about = (True,) * 4, (8, 8, 0, 0)
    if block_mask is not None:
        about = block_mask.block_q, block_mask.block_k, *block_mask.indices.shape[2:]
        given = True, False, True, True
        if block_mask.is_whole:
            given = tuple([x is None for x in block_mask[:4]])
    device = (tensors[0] if block_mask is None else block_mask.indices).device
    types = tuple([x.dtype for x in tensors])
    launch = _launch_of_code(lines, seen, types, len(numbers), given, device.index)
    return _bits_build(launch, grid, (*about, *numbers), device, most_partial)


def of_tree(grid: Grid, parents: Tensor) -> tuple[BlockLists, BlockLists]:
    """The same of a tree. parents: as ``trees.visits`` takes them, with batch 1 also (seqlen,)."""
    parents, device = parents.contiguous(), parents.device
    ancestors = torch.empty((grid.batch, 3, grid.rows), dtype=torch.int64, device=device)
    launch = _launch("ancestors_kernel", parents.dtype, device.index)
    programs = grid.shape[2], grid.batch, 1
    _on_device(device, launch, programs, (parents, ancestors), (), (grid.rows,))
    launch = _launch("tree_kernel", None, device.index)
    return _bits_build(launch, grid, (), device, (None, None))((ancestors,))


class BitsBuild(NamedTuple):
    """The lists of what a kernel like ``bits_kernel`` finds in tensors on a device."""

    launch: VariableLaunch
    sizes: _Sizes
    numbers: tuple[int, ...]
    device: torch.device

    def __call__(
        self, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...] = ()
    ) -> tuple[BlockLists, BlockLists]:
        return _on_device(self.device, self._lists, tensors, strides)

    def _lists(self, tensors, strides):
        launch, sizes, numbers, device = self
        words = torch.empty(sizes.words, dtype=torch.int64, device=device)
        launch(sizes.pairs, (*tensors, words), strides, numbers)
        return _listed(sizes, "bits", (words, None, None), False, (0, 0, 0, 0), device)


def _bits_build(
    launch: VariableLaunch,
    grid: Grid,
    numbers: tuple[int, ...],
    device: torch.device,
    most_partial: tuple[int | None, int | None],
) -> BitsBuild:
    numbers = grid.heads, grid.rows, grid.columns, *numbers
    return BitsBuild(launch, _sizes_of(grid, most_partial), numbers, device)


def _in_words(visible: Tensor) -> Tensor:
    """int64 (batch, heads, queries, words of 8 keys) of bools, a copy where the words of memory are
    others: each row, padded with False."""
    *strides, last = visible.stride()
    units = *strides, visible.storage_offset(), visible.data_ptr(), visible.shape[3]
    if last != 1 or gcd(8, *units) != 8:
        visible = torch.nn.functional.pad(visible, (0, -visible.shape[3] % 8)).contiguous()
    return visible.view(torch.int64)


class _Sizes(NamedTuple):
    """num_blocks: of queries and of keys together. words: the size of one tensor of their words,
    with room for their kinds behind. room: of one of all lists. capacities: bit tiles of queries,
    and of keys, which are first there. views: shape, strides and place of ``BlockLists.entries``,
    ``work`` and ``tiles`` of queries, and of keys, as int32, tiles as int64. of_masks: masks,
    queries, keys. lists: the grid of a kernel of all lists; tiles: of one that shares out their bit
    tiles; pairs: of one with a program for 128 queries and 128 keys."""

    num_blocks: int
    words: int
    room: int
    capacities: tuple[int, int]
    views: tuple[tuple, ...]
    of_masks: tuple[int, int, int]
    lists: tuple[int, int, int]
    tiles: tuple[int, int, int]
    pairs: tuple[int, int, int]


@lru_cache(maxsize=256)
def _sizes_of(grid: Grid, most_partial: tuple[int | None, int | None]) -> _Sizes:
    shapes, num_masks = (grid.shape, grid.transposed.shape), grid.batch * grid.heads
    num_blocks = tuple(map(prod, shapes))
    capacities = tuple(
        of if most is None else min(most, of)
        for of, most in zip(num_blocks, most_partial, strict=True)
    )
    numbers_of_row = 2 * BLOCK_ROWS
    views, end, first_tile = [], sum(capacities) * numbers_of_row, 0
    for of, capacity in zip(shapes, capacities, strict=True):
        for shape in (of, (*of[:3], 4)):
            strides = tuple(prod(shape[i + 1 :]) for i in range(4))
            views.append((shape, strides, end))
            end += -(-prod(shape) // 32) * 32  # 128 bytes
        views.append(((capacity, BLOCK_ROWS), (BLOCK_ROWS, 1), first_tile * BLOCK_ROWS))
        first_tile += capacity
    num_lists = num_masks * max(x[2] for x in shapes)
    programs = max(
        1, *(-(-of // (num_masks * x[2])) for of, x in zip(capacities, shapes, strict=True))
    )
    return _Sizes(
        sum(num_blocks),
        sum(num_blocks) * BLOCK_ROWS + -(-sum(num_blocks) // 8),
        -(-end // 2),
        capacities,
        tuple(views),
        (num_masks, grid.rows, grid.columns),
        (num_lists, 2, 1),
        (num_lists, 2, min(programs, MOST_PARTS, max(1, MOST_PROGRAMS // (2 * num_lists)))),
        (shapes[1][2], shapes[0][2], num_masks),
    )


def _listed(
    sizes: _Sizes,
    kind: str,
    tensors: tuple[Tensor | None, ...],
    causal: bool,
    numbers: tuple[int, ...],
    device: torch.device,
) -> tuple[BlockLists, BlockLists]:
    """kind: SOURCE of the kernels. tensors: its two and the kinds of blocks, as ``lists_kernel``
    takes them. numbers: ``n`` and ``reach`` of the source."""
    room = torch.empty(sizes.room, dtype=torch.int64, device=device)
    of_room, view = room.view(torch.int32), torch.as_strided  # the fastest view
    entries_q, work_q, tiles_q, entries_k, work_k, tiles_k = sizes.views
    lists = view(of_room, *entries_q)  # the address of all lists
    source, ends, kinds = tensors
    types = None if source is None else source.dtype
    of_lists, of_tiles = _list_launches(types, device.index, kind, causal)
    numbers = *sizes.of_masks, *numbers
    of_lists(sizes.lists, (source, ends, kinds, lists), (), numbers)
    of_tiles(sizes.tiles, (source, ends, lists, room), (), (*numbers, *sizes.capacities))
    of_queries = BlockLists(lists, view(of_room, *work_q), view(room, *tiles_q))
    of_keys = view(of_room, *entries_k), view(of_room, *work_k), view(room, *tiles_k)
    return of_queries, BlockLists(*of_keys)


@cache
def _list_launches(
    types: object, index: int | None, kind: str, causal: bool
) -> tuple[VariableLaunch, VariableLaunch]:
    about = {"SOURCE": kind, "CAUSAL": causal}
    return tuple(_launch(name, types, index, **about) for name in ("lists_kernel", "tiles_kernel"))
