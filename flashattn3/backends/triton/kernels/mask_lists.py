"""The lists of a mask, written on the device (flashattn3/masks/block_lists.py has their layout).

``lists_kernel`` finds the kinds of all blocks and sorts them, ``tiles_kernel`` writes the bits of
partial ones and what depends on the counts of other lists. Axis 1 of their grids is the side: 0
lists of queries, 1 lists of keys. SOURCE is where the scores come from: one of ``spans_of_rows``,
"intervals" of each query, or "bits", the words and the kinds that ``bits_kernel`` has written.
"""

import triton
import triton.language as tl

from .block_lists import COLUMNS, FIELDS, ROWS, kinds_behind, start_of_keys
from .mask_spans import (
    intervals_in_blocks,
    see_columns,
    seen_in_blocks,
    spans_of_rows,
    words_of_intervals,
    words_of_rows,
)

CHUNK = tl.constexpr(32)  # column blocks whose scores a program counts at once
ALIGNED = tl.constexpr(32)  # numbers in 128 bytes
ENTRIES = tl.constexpr(128)  # blocks that a program sorts at once
LISTS = tl.constexpr(1024)  # whose counts a program reads at once


@triton.jit
def _of_side(of_queries, of_keys):
    """That of this program's side."""
    chosen = of_queries
    if tl.program_id(1) == 1:
        chosen = of_keys
    return chosen


@triton.jit
def _sizes(queries, keys):
    """Rows, row blocks and column blocks of this program's side."""
    rows, columns = _of_side(queries, keys), _of_side(keys, queries)
    return rows, tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)


@triton.jit
def _first_block(row_list, num_masks, queries, keys):
    """The place of a list's first block among the blocks of both sides."""
    of_keys = tl.program_id(1) * start_of_keys(num_masks, queries, keys)
    _, _, column_blocks = _sizes(queries, keys)
    return of_keys + tl.cast(row_list, tl.int64) * column_blocks


@triton.jit
def _aligned(n):
    return tl.cdiv(n, ALIGNED) * ALIGNED


@triton.jit
def _entries_and_work(lists, num_masks, queries, keys):
    """Those of this program's side. lists: int32, entries and work of queries and then of keys,
    each from a multiple of 128 bytes on."""
    entries, blocks = lists, start_of_keys(num_masks, queries, keys)
    if tl.program_id(1) == 1:
        entries += _aligned(blocks) + _aligned(num_masks * tl.cdiv(queries, ROWS) * FIELDS)
        blocks = start_of_keys(num_masks, keys, queries)
    return entries, entries + _aligned(blocks)


@triton.jit
def _kinds(kinds, first, column_blocks, whole, OF_SPANS: tl.constexpr):
    """int32: the kinds of some blocks of a list, 0 past its end. kinds: the spans of its rows, or a
    pointer to int8."""
    if OF_SPANS:
        counts = tl.zeros((CHUNK,), dtype=tl.int32)
        if see_columns(kinds, first * COLUMNS, (first + CHUNK) * COLUMNS):
            counts += seen_in_blocks(kinds, first + tl.arange(0, CHUNK))
        found = (counts == whole).to(tl.int32) + (counts > 0).to(tl.int32)
    else:
        blocks = first + tl.arange(0, ENTRIES)
        found = tl.load(kinds + blocks, mask=blocks < column_blocks, other=0).to(tl.int32)
    return found


NUMBERS = ["num_masks", "queries", "keys", "n", "left", "right", "sinks"]


@triton.jit(do_not_specialize=NUMBERS)
def lists_kernel(
    source_ptr, ends_ptr, kinds_ptr, lists_ptr, num_masks, queries, keys, n, left, right, sinks,
    SOURCE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The entries of a list, and its numbers of full and of listed blocks.

    source, ends: starts and ends of intervals, (num_masks, queries, n), which do not overlap;
        otherwise as ``spans_of_rows`` takes them.
    kinds: int8 (blocks,), written, of all blocks of queries and then of keys, if the source are
        intervals; otherwise None. lists: as ``_entries_and_work`` takes them. num_masks: batch *
        heads.
    Grid: the larger number of lists, 2.
    """
    rows, row_blocks, column_blocks = _sizes(queries, keys)
    row_list = tl.program_id(0)
    if row_list >= num_masks * row_blocks:
        return
    OF_SPANS: tl.constexpr = SOURCE != "bits" and SOURCE != "intervals"
    STEP: tl.constexpr = CHUNK if OF_SPANS else ENTRIES
    mask_idx = tl.cast(row_list // row_blocks, tl.int64)
    first_row = row_list % row_blocks * ROWS
    whole = tl.minimum(rows - first_row, ROWS) * COLUMNS
    if OF_SPANS:
        kinds = spans_of_rows(
            source_ptr, mask_idx, n, (left, right, sinks), (queries, keys),
            first_row + tl.arange(0, ROWS), SOURCE, CAUSAL,
        )  # fmt: skip
    elif SOURCE == "bits":
        kinds = kinds_behind(source_ptr, num_masks, queries, keys)
        kinds += _first_block(row_list, num_masks, queries, keys)
    else:
        kinds = kinds_ptr + _first_block(row_list, num_masks, queries, keys)
    if SOURCE == "intervals":
        for first in range(0, column_blocks, CHUNK):
            blocks = first + tl.arange(0, CHUNK)
            counts = tl.zeros((CHUNK,), dtype=tl.int32)
            for i in range(n):
                intervals = (source_ptr, ends_ptr, mask_idx, i, queries, n)
                counts += intervals_in_blocks(intervals, first_row, blocks)
            kind = (counts == whole).to(tl.int32) + (counts > 0).to(tl.int32)
            tl.store(kinds + blocks, kind.to(tl.int8), mask=blocks < column_blocks)
        tl.debug_barrier()

    # Numbers of full blocks, of listed ones << 32.
    total = tl.full((), 0, dtype=tl.int64)
    for first in range(0, column_blocks, STEP):
        kind = _kinds(kinds, first, column_blocks, whole, OF_SPANS)
        total += tl.sum((kind == 2).to(tl.int64) + ((kind > 0).to(tl.int64) << 32), 0)
    num_full, num_listed = total.to(tl.int32), (total >> 32).to(tl.int32)
    entries, work = _entries_and_work(lists_ptr, num_masks, queries, keys)
    entries += tl.cast(row_list, tl.int64) * column_blocks
    work += row_list * FIELDS
    tl.store(work, num_full)
    tl.store(work + 1, num_listed)

    next_full, next_partial, next_hidden = 0, num_full, num_listed
    for first in range(0, column_blocks, STEP):
        blocks = first + tl.arange(0, STEP)
        kind = _kinds(kinds, first, column_blocks, whole, OF_SPANS)
        # 10 bits for each kind: one scan counts the blocks of all.
        before = tl.cumsum(tl.where(blocks < column_blocks, 1 << (10 * kind), 0), 0)
        own = (before >> (10 * kind)) & 1023
        next = tl.where(kind == 2, next_full, tl.where(kind == 1, next_partial, next_hidden))
        tl.store(entries + next + own - 1, blocks, mask=blocks < column_blocks)
        counts = tl.max(before, 0)
        next_hidden += counts & 1023
        next_partial += (counts >> 10) & 1023
        next_full += counts >> 20


@triton.jit
def _store_order(work, row_list, row_blocks, num_listed, tiles):
    """A list's first bit tile, and its place in the order of its mask's lists."""
    row_block = row_list % row_blocks
    first_list = row_list - row_block
    rank = 0
    for first in range(0, row_blocks, LISTS):
        others = first + tl.arange(0, LISTS)
        listed = tl.load(
            work + (first_list + others) * FIELDS + 1, mask=others < row_blocks, other=-1
        )
        is_before = (listed > num_listed) | ((listed == num_listed) & (others < row_block))
        rank += tl.sum(is_before.to(tl.int32), 0)
    tl.store(work + row_list * FIELDS + 2, tiles)
    tl.store(work + (first_list + rank) * FIELDS + 3, row_block)


@triton.jit(do_not_specialize=[*NUMBERS, "capacity_q", "capacity_k"])
def tiles_kernel(
    source_ptr, ends_ptr, lists_ptr, tiles_ptr, num_masks, queries, keys, n, left, right, sinks,
    capacity_q, capacity_k, SOURCE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The bit tiles of a list, of which axis 2 shares out the work; 0 behind the last partial block
    of all lists.

    source: of "bits" the words, int64 (blocks, 128), of all blocks of queries and then of keys;
        otherwise as in ``lists_kernel``.
    tiles: int64 (capacity_q + capacity_k, 128), of queries and then of keys.
    Grid: the larger number of lists, 2, programs of a list.
    """
    _, row_blocks, column_blocks = _sizes(queries, keys)
    row_list, part, num_parts = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    num_lists = num_masks * row_blocks
    if row_list >= num_lists:
        return
    entries, work = _entries_and_work(lists_ptr, num_masks, queries, keys)
    # Numbers of partial blocks of all lists, of the lists before this one << 32.
    total = tl.full((), 0, dtype=tl.int64)
    for first in range(0, num_lists, LISTS):
        others = first + tl.arange(0, LISTS)
        of_list, inside = work + others * FIELDS, others < num_lists
        partial = tl.load(of_list + 1, mask=inside, other=0)
        partial = (partial - tl.load(of_list, mask=inside, other=0)).to(tl.int64)
        total += tl.sum(partial + tl.where(others < row_list, partial << 32, 0), 0)
    num_tiles, first_tile = total.to(tl.int32), (total >> 32).to(tl.int32)
    num_full = tl.load(work + row_list * FIELDS)
    num_listed = tl.load(work + row_list * FIELDS + 1)
    if part == 0:
        _store_order(work, row_list, row_blocks, num_listed, first_tile)

    tiles = tiles_ptr + tl.program_id(1) * tl.cast(capacity_q, tl.int64) * ROWS
    capacity = _of_side(capacity_q, capacity_k)
    in_tile = tl.arange(0, ROWS)
    num_partial = tl.minimum(num_listed - num_full, capacity - first_tile)
    if part < num_partial:
        mask_idx = tl.cast(row_list // row_blocks, tl.int64)
        first_row = row_list % row_blocks * ROWS
        entries += tl.cast(row_list, tl.int64) * column_blocks + num_full
        if SOURCE == "bits":
            words_of_list = source_ptr + _first_block(row_list, num_masks, queries, keys) * ROWS
        elif SOURCE != "intervals":
            spans = spans_of_rows(
                source_ptr, mask_idx, n, (left, right, sinks), (queries, keys),
                first_row + in_tile, SOURCE, CAUSAL,
            )  # fmt: skip
        for i in range(part, num_partial, num_parts):
            column = tl.load(entries + i)
            if SOURCE == "bits":
                words = tl.load(words_of_list + tl.cast(column, tl.int64) * ROWS + in_tile)
            elif SOURCE == "intervals":
                words = tl.zeros((ROWS,), dtype=tl.int64)
                for j in range(n):
                    intervals = (source_ptr, ends_ptr, mask_idx, j, queries, n)
                    words |= words_of_intervals(intervals, first_row, column * COLUMNS)
            else:
                words = words_of_rows(spans, column * COLUMNS)
            tl.store(tiles + tl.cast(first_tile + i, tl.int64) * ROWS + in_tile, words)
    for tile in range(num_tiles + row_list * num_parts + part, capacity, num_lists * num_parts):
        unused = tiles + tl.cast(tile, tl.int64) * ROWS + in_tile
        tl.store(unused, tl.zeros((ROWS,), dtype=tl.int64))
