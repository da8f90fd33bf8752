"""The lists of a mask, written on the device (flashattn3/masks/block_lists.py has their layout).

``spans_of_lengths_kernel`` or ``spans_of_ids_kernel`` finds the keys that each token
sees. ``kinds_kernel``, or ``bits_kernel`` from a bool tensor and the kinds of larger or smaller
blocks (``block_kinds_kernel`` reads those of a block mask), finds the kinds of all blocks,
``lists_kernel`` sorts them, ``tiles_kernel`` writes the bits of partial ones. Axis 1 of their grids
is the side: 0 lists of queries, 1 lists of keys.
"""

import triton
import triton.language as tl

from .block_lists import COLUMNS, FIELDS, ROWS

DOCUMENTS = tl.constexpr(32)  # that a program compares its tokens with at once
DISTANCE = tl.constexpr(2048)  # tokens in which a program looks for the end of a run at once
CHUNK = tl.constexpr(32)  # column blocks that a program counts at once
LISTS = tl.constexpr(1024)  # whose counts a program reads at once


@triton.jit
def _store_spans(
    starts, ends, bounds_ptr, begin, end, seen, tokens, seqlen, CAUSAL: tl.constexpr
):  # fmt: skip
    """Stores the spans of a program's tokens, and the first key and the last one that they see."""
    seen = seen & (tokens < seqlen)
    begin, end = tl.where(seen, begin, 0), tl.where(seen, end, 0)
    if CAUSAL:
        end = tl.minimum(end, tokens + 1)
    tl.store(starts + tokens, begin, mask=tokens < seqlen)
    tl.store(ends + tokens, end, mask=tokens < seqlen)
    bounds = bounds_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(bounds, tl.min(tl.where(end > begin, begin, seqlen), 0))
    tl.store(bounds + 1, tl.max(tl.where(end > begin, end, 0), 0))


@triton.jit(do_not_specialize=["seqlen", "num_documents"])
def spans_of_lengths_kernel(
    lengths_ptr, starts_ptr, ends_ptr, bounds_ptr, seqlen, num_documents, CAUSAL: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The span of keys of each token. bounds: int32 (batch, blocks, 2). Grid: blocks of TOKENS
    tokens, batch."""
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    begin = tl.zeros((TOKENS,), dtype=tl.int32)
    end = tl.zeros((TOKENS,), dtype=tl.int32) + (seqlen + 1)
    reached = tl.full((), 0, dtype=tl.int64)
    for first in range(0, num_documents, DOCUMENTS):
        places = first + tl.arange(0, DOCUMENTS)
        lengths = tl.load(
            lengths_ptr + row * num_documents + places, mask=places < num_documents, other=0
        )
        edges = reached + tl.cumsum(tl.maximum(lengths.to(tl.int64), 0), 0)
        reached = tl.max(edges, 0)
        edges = tl.minimum(edges, seqlen).to(tl.int32)[None, :]
        behind = edges > tokens[:, None]
        begin = tl.maximum(begin, tl.max(tl.where(behind, 0, edges), 1))
        end = tl.minimum(end, tl.min(tl.where(behind, edges, seqlen + 1), 1))
    starts, ends = starts_ptr + row * seqlen, ends_ptr + row * seqlen
    _store_spans(starts, ends, bounds_ptr, begin, end, end <= seqlen, tokens, seqlen, CAUSAL)


@triton.jit
def _differs(ids, tokens, step: tl.constexpr, seqlen):
    """Whether the neighbour of a token, before it (step -1) or behind, has another number or does
    not exist; False outside the row."""
    others = tokens + step
    inside = (tokens >= 0) & (tokens < seqlen)
    exists = (others >= 0) & (others < seqlen)
    own = tl.load(ids + tokens, mask=inside, other=0)
    return inside & ((own != tl.load(ids + others, mask=exists & inside, other=0)) | (exists == 0))


@triton.jit(do_not_specialize=["seqlen"])
def spans_of_ids_kernel(
    ids_ptr, starts_ptr, ends_ptr, bounds_ptr, seqlen, CAUSAL: tl.constexpr, TOKENS: tl.constexpr
):
    """The run of equal numbers of each token; otherwise as ``spans_of_lengths_kernel``."""
    row = tl.program_id(1).to(tl.int64)
    ids = ids_ptr + row * seqlen
    first = tl.program_id(0) * TOKENS
    tokens = first + tl.arange(0, TOKENS)
    places = tokens[None, :]
    is_first = (_differs(ids, tokens, -1, seqlen) != 0)[None, :] & (places <= tokens[:, None])
    begin = tl.max(tl.where(is_first, places, -1), 1)
    is_last = (_differs(ids, tokens, 1, seqlen) != 0)[None, :] & (places >= tokens[:, None])
    end = tl.min(tl.where(is_last, places, seqlen), 1)
    # A run that reaches over the block ends in other ones.
    found = tl.full((), -1, dtype=tl.int32)
    edge = first
    while (found < 0) & (edge > 0):
        edge -= DISTANCE
        others = edge + tl.arange(0, DISTANCE)
        edges = _differs(ids, others, -1, seqlen) & (others < first)
        found = tl.max(tl.where(edges, others, -1), 0)
    begin = tl.where(begin < 0, found, begin)
    found = tl.full((), 0, dtype=tl.int32) + seqlen
    edge = first + TOKENS
    while (found == seqlen) & (edge < seqlen):
        others = edge + tl.arange(0, DISTANCE)
        edges = _differs(ids, others, 1, seqlen)
        found = tl.min(tl.where(edges, others, seqlen), 0)
        edge += DISTANCE
    end = tl.where(end == seqlen, found, end) + 1
    seen = tl.load(ids + tokens, mask=tokens < seqlen, other=0) >= 0
    starts, ends = starts_ptr + row * seqlen, ends_ptr + row * seqlen
    _store_spans(starts, ends, bounds_ptr, begin, end, seen, tokens, seqlen, CAUSAL)


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
def _span(spans, query):
    """Start and end of one of the spans of each query, 0 past the last query. spans: (starts_ptr,
    ends_ptr, mask_idx, number of the span, queries, n)."""
    place = (spans[2] * spans[4] + query) * spans[5] + spans[3]
    inside = query < spans[4]
    start = tl.load(spans[0] + place, mask=inside, other=0)
    return start, tl.load(spans[1] + place, mask=inside, other=0)


@triton.jit
def _overlap(start, end, first, last):
    return tl.maximum(tl.minimum(end, last) - tl.maximum(start, first), 0)


@triton.jit
def _seen_by_rows(spans, first_row, blocks):
    """The number of scores that 128 queries see in each block of 64 keys."""
    start, end = _span(spans, first_row + tl.arange(0, ROWS)[:, None])
    first = blocks[None, :] * COLUMNS
    return tl.sum(_overlap(start, end, first, first + COLUMNS), 0)


@triton.jit
def _rows_seen(spans, first_row, blocks):
    """The number of scores of 128 keys in each block of 64 queries."""
    start, end = _span(spans, blocks[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    return tl.sum(_overlap(start, end, first_row, first_row + ROWS), 1)


@triton.jit
def _sees_chunk(bounds_ptr, mask_idx, row_block, first, queries):
    """1 if a row of the block may see one of the CHUNK column blocks from the first on, else 0."""
    IN_CHUNK: tl.constexpr = CHUNK * COLUMNS // ROWS
    row_blocks = tl.cdiv(queries, ROWS)
    places = tl.arange(0, IN_CHUNK)
    block = _of_side(row_block + 0 * places, first * COLUMNS // ROWS + places)
    start = _of_side(first * COLUMNS, row_block * ROWS)
    end = start + _of_side(CHUNK * COLUMNS, ROWS)
    bounds = bounds_ptr + (mask_idx * row_blocks + block) * 2
    low = tl.load(bounds, mask=block < row_blocks, other=2**31 - 1)
    high = tl.load(bounds + 1, mask=block < row_blocks, other=0)
    return tl.max(((low < end) & (high > start)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_masks", "queries", "keys", "n"])
def kinds_kernel(
    starts_ptr, ends_ptr, bounds_ptr, kinds_q_ptr, kinds_k_ptr, work_q_ptr, work_k_ptr, num_masks,
    queries, keys, n,
):  # fmt: skip
    """The kinds of all blocks of a list, and the numbers of full and of listed ones.

    starts, ends: int32 (num_masks, queries, n), spans of keys that do not overlap. bounds: int32
    (num_masks, blocks of 128 queries, 2), the first key that one of them sees and the one past the
    last, or None. num_masks: batch * heads. Grid: the larger number of lists, 2.
    """
    rows, row_blocks, column_blocks = _sizes(queries, keys)
    row_list = tl.program_id(0)
    if row_list >= num_masks * row_blocks:
        return
    mask_idx = tl.cast(row_list // row_blocks, tl.int64)
    first_row = row_list % row_blocks * ROWS
    whole = tl.minimum(rows - first_row, ROWS) * COLUMNS
    kinds = _of_side(kinds_q_ptr, kinds_k_ptr) + tl.cast(row_list, tl.int64) * column_blocks
    num_full, num_listed = 0, 0
    for first in range(0, column_blocks, CHUNK):
        blocks = first + tl.arange(0, CHUNK)
        counts = tl.zeros((CHUNK,), dtype=tl.int32)
        spans_of_chunk = n
        if bounds_ptr is not None:
            spans_of_chunk = n * _sees_chunk(
                bounds_ptr, mask_idx, row_list % row_blocks, first, queries
            )
        for i in range(spans_of_chunk):
            spans = (starts_ptr, ends_ptr, mask_idx, i, queries, n)
            if tl.program_id(1) == 0:
                counts += _seen_by_rows(spans, first_row, blocks)
            else:
                counts += _rows_seen(spans, first_row, blocks)
        is_full, is_listed = (counts == whole).to(tl.int32), (counts > 0).to(tl.int32)
        tl.store(kinds + blocks, (is_full + is_listed).to(tl.int8), mask=blocks < column_blocks)
        num_full += tl.sum(is_full, 0)
        num_listed += tl.sum(is_listed, 0)
    work = _of_side(work_q_ptr, work_k_ptr) + row_list * FIELDS
    tl.store(work, num_full)
    tl.store(work + 1, num_listed)


@triton.jit
def _store_pair(
    words_ptr, kinds_ptr, work_ptr, row_list, pair, words, counts, whole, column_blocks
):  # fmt: skip
    """The bits and the kinds of a pair of column blocks; adds these to the numbers of full and of
    listed ones.

    words: int64 (2, 128), of each row. counts: of visible scores (2,).
    """
    blocks = pair * 2 + tl.arange(0, 2)
    exists = blocks < column_blocks
    place = tl.cast(row_list, tl.int64) * column_blocks + blocks
    rows = tl.arange(0, ROWS)[None, :]
    tl.store(words_ptr + place[:, None] * ROWS + rows, words, mask=exists[:, None] & (rows >= 0))
    is_full, is_listed = (counts == whole).to(tl.int32), (counts > 0).to(tl.int32)
    tl.store(kinds_ptr + place, (is_full + is_listed).to(tl.int8), mask=exists)
    tl.atomic_add(work_ptr + row_list * FIELDS, tl.sum(is_full, 0))
    tl.atomic_add(work_ptr + row_list * FIELDS + 1, tl.sum(is_listed, 0))


@triton.jit(do_not_specialize=["num_blocks_k"])
def block_kinds_kernel(
    counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr, kinds_ptr, num_blocks_k,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The kinds of the blocks of a block mask: 1 where it lists a block, 2 where it lists a full
    one. kinds: int32 (lists, num_blocks_k), zeros at first. Grid: lists."""
    row = tl.program_id(0).to(tl.int64)
    kinds, places = kinds_ptr + row * num_blocks_k, tl.arange(0, BLOCKS)
    for first in range(0, num_blocks_k, BLOCKS):
        listed = first + places < tl.load(counts_ptr + row)
        entries = indices_ptr + row * num_blocks_k + first + places
        tl.atomic_max(kinds + tl.load(entries, mask=listed, other=0), 1, mask=listed)
        if full_counts_ptr is not None:
            listed = first + places < tl.load(full_counts_ptr + row)
            entries = full_indices_ptr + row * num_blocks_k + first + places
            tl.atomic_max(kinds + tl.load(entries, mask=listed, other=0), 2, mask=listed)


@triton.jit
def _seen(visible_ptr, kinds_ptr, query, word, stride_q, sizes, blocks, FULL: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """int64 (128, 16): which keys each query sees, a byte for each; see ``bits_kernel``. sizes:
    queries and keys. blocks: their sizes, and the number of blocks of keys."""
    ones: tl.constexpr = 0x0101010101010101
    inside = (query < sizes[0])[:, None] & (word * 8 < sizes[1])[None, :]
    read, seen = inside, tl.zeros((ROWS, ROWS // 8), dtype=tl.int64)
    if kinds_ptr is not None:
        row, column = query // blocks[0] * blocks[2], word * 8 // blocks[1]
        if WHOLE:
            kind = tl.load(kinds_ptr + tl.min(row, 0) + tl.min(column, 0)).to(tl.int32)
            kind = tl.zeros((ROWS, ROWS // 8), dtype=tl.int32) + kind
        else:
            kinds = kinds_ptr + row[:, None] + column[None, :]
            kind = tl.load(kinds, mask=inside, other=0).to(tl.int32)
        whole = _lowest(8 * (sizes[1] - word * 8)) & ones
        seen = tl.where(inside & (kind == FULL), whole[None, :], seen)
        read = inside & (kind == 1)
    if visible_ptr is not None:
        places = query[:, None] * tl.cast(stride_q, tl.int64) + word[None, :]
        seen |= tl.load(visible_ptr + places, mask=read, other=0)
    return seen


@triton.jit(do_not_specialize=["heads", "queries", "keys", "block_q", "block_k"])
def bits_kernel(
    visible_ptr, block_kinds_ptr, words_q_ptr, words_k_ptr, kinds_q_ptr, kinds_k_ptr, work_q_ptr,
    work_k_ptr, stride_b, stride_h, stride_q, heads, queries, keys, block_q, block_k,
    FULL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The bits and the kinds of two blocks of either side from 128 x 128 bools.

    visible: int64 (batch, heads, queries, words of 8 keys), each key a byte of 0 or 1, and 0 past
    the last key. strides: of words.
    block_kinds: of blocks of block_q x block_k scores (batch * heads, blocks of queries, blocks of
    keys): visible counts where they are 1 and not FULL, FULL shows all and 0 none. None: visible
    counts everywhere. block_k: a multiple of 8. WHOLE: both are multiples of 128.
    words: int64 (blocks, 128), of all blocks. work: zeros at first. Grid: blocks of 128 keys, of
    128 queries, batch * heads.
    """
    WORDS: tl.constexpr = ROWS // 8
    k_block, q_block, mask_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = q_block * ROWS + tl.arange(0, ROWS)
    word = k_block * WORDS + tl.arange(0, WORDS)
    visible, kinds = visible_ptr, block_kinds_ptr
    if visible_ptr is not None:
        visible += mask_idx // heads * tl.cast(stride_b, tl.int64)
        visible += mask_idx % heads * tl.cast(stride_h, tl.int64)
    blocks_k = tl.cdiv(keys, block_k)
    if kinds is not None:
        kinds += mask_idx * tl.cast(tl.cdiv(queries, block_q) * blocks_k, tl.int64)
    seen = _seen(visible, kinds, query, word, stride_q, (queries, keys),
                 (block_q, block_k, blocks_k), FULL, WHOLE)  # fmt: skip
    # Products whose highest byte has the sum of the eight bytes, and the bits of the eight.
    counts = ((seen * 0x0101010101010101) >> 56).to(tl.int32) & 0xFF
    bytes_of_keys = ((seen * 0x0102040810204080) >> 56) & 0xFF
    eight = tl.arange(0, 8).to(tl.int64)

    row_list = mask_idx * tl.cdiv(queries, ROWS) + q_block
    words = tl.sum(tl.reshape(bytes_of_keys, (ROWS, 2, 8)) << (8 * eight)[None, None, :], 2)
    of_pair = tl.sum(tl.sum(tl.reshape(counts, (ROWS, 2, 8)), 2), 0)
    whole = tl.minimum(queries - q_block * ROWS, ROWS) * COLUMNS
    _store_pair(words_q_ptr, kinds_q_ptr, work_q_ptr, row_list, k_block, tl.trans(words), of_pair,
                whole, tl.cdiv(keys, COLUMNS))  # fmt: skip

    row_list = mask_idx * tl.cdiv(keys, ROWS) + k_block
    bits = seen << (tl.arange(0, ROWS) % 8).to(tl.int64)[:, None]
    of_queries = tl.sum(tl.reshape(bits, (WORDS, 8, WORDS)), 1)  # eight queries of eight keys
    bytes_of_queries = (of_queries[:, :, None] >> (8 * eight)[None, None, :]) & 0xFF
    bytes_of_queries = tl.reshape(bytes_of_queries, (2, 8, ROWS))
    words = tl.sum(bytes_of_queries << (8 * eight)[None, :, None], 1)
    of_pair = tl.sum(tl.reshape(tl.sum(counts, 1), (2, COLUMNS)), 1)
    whole = tl.minimum(keys - k_block * ROWS, ROWS) * COLUMNS
    _store_pair(words_k_ptr, kinds_k_ptr, work_k_ptr, row_list, q_block, words, of_pair, whole,
                tl.cdiv(queries, COLUMNS))  # fmt: skip


@triton.jit(do_not_specialize=["num_masks", "queries", "keys"])
def lists_kernel(
    kinds_q_ptr, kinds_k_ptr, work_q_ptr, work_k_ptr, entries_q_ptr, entries_k_ptr, num_masks,
    queries, keys,
):  # fmt: skip
    """The entries of a list, its first bit tile, and its place in the order of its mask's lists.
    Grid: the larger number of lists, 2."""
    _, row_blocks, column_blocks = _sizes(queries, keys)
    row_list = tl.program_id(0)
    if row_list >= num_masks * row_blocks:
        return
    work = _of_side(work_q_ptr, work_k_ptr)
    num_full = tl.load(work + row_list * FIELDS)
    num_listed = tl.load(work + row_list * FIELDS + 1)
    places = tl.arange(0, LISTS)
    tiles = 0
    for first in range(0, row_list, LISTS):
        others = work + (first + places) * FIELDS
        before = first + places < row_list
        partial = tl.load(others + 1, mask=before, other=0) - tl.load(others, mask=before, other=0)
        tiles += tl.sum(partial, 0)
    row_block = row_list % row_blocks
    first_list = row_list - row_block
    rank = 0
    for first in range(0, row_blocks, LISTS):
        others = first + places
        listed = tl.load(
            work + (first_list + others) * FIELDS + 1, mask=others < row_blocks, other=-1
        )
        is_before = (listed > num_listed) | ((listed == num_listed) & (others < row_block))
        rank += tl.sum(is_before.to(tl.int32), 0)
    tl.store(work + row_list * FIELDS + 2, tiles)
    tl.store(work + (first_list + rank) * FIELDS + 3, row_block)

    start = tl.cast(row_list, tl.int64) * column_blocks
    kinds, entries = _of_side(kinds_q_ptr, kinds_k_ptr) + start, start
    entries_ptr = _of_side(entries_q_ptr, entries_k_ptr)
    columns = tl.arange(0, 4 * CHUNK)
    next_hidden, next_partial, next_full = num_listed, num_full, 0
    for first in range(0, column_blocks, 4 * CHUNK):
        blocks = first + columns
        kind = tl.load(kinds + blocks, mask=blocks < column_blocks, other=3).to(tl.int32)
        is_full, is_partial = (kind == 2).to(tl.int32), (kind == 1).to(tl.int32)
        is_hidden = (kind == 0).to(tl.int32)
        place = tl.where(kind == 2, next_full + tl.cumsum(is_full, 0), 0)
        place += tl.where(kind == 1, next_partial + tl.cumsum(is_partial, 0), 0)
        place += tl.where(kind == 0, next_hidden + tl.cumsum(is_hidden, 0), 0)
        tl.store(entries_ptr + entries + place - 1, blocks, mask=blocks < column_blocks)
        next_full += tl.sum(is_full, 0)
        next_partial += tl.sum(is_partial, 0)
        next_hidden += tl.sum(is_hidden, 0)


@triton.jit
def _lowest(count):
    """int64 with as many of the lowest bits set as count, clamped to 0 and 64, says."""
    ones = (tl.full((), 1, dtype=tl.int64) << tl.minimum(tl.maximum(count, 0), 63)) - 1
    return tl.where(count >= 64, tl.full((), -1, dtype=tl.int64), ones)


@triton.jit
def _bits_of_rows(spans, first_row, first_column):
    """int64 (128,): which of 64 keys each query sees."""
    start, end = _span(spans, first_row + tl.arange(0, ROWS))
    return _lowest(end - first_column) & ~_lowest(start - first_column)


@triton.jit
def _bits_of_half(spans, first_row, first_column):
    """int64 (128,): which of 32 queries see each key."""
    bits = tl.arange(0, COLUMNS // 2)
    start, end = _span(spans, first_column + bits[None, :])
    rows = (first_row + tl.arange(0, ROWS))[:, None]
    seen = (rows >= start) & (rows < end)
    words = tl.sum(seen.to(tl.int32) << bits[None, :], 1)
    return words.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _bits_of_columns(spans, first_row, first_column):
    """int64 (128,): which of 64 queries see each key."""
    low = _bits_of_half(spans, first_row, first_column)
    high = _bits_of_half(spans, first_row, first_column + COLUMNS // 2)
    return low | high << (COLUMNS // 2)


@triton.jit(do_not_specialize=["num_masks", "queries", "keys", "n", "capacity_q", "capacity_k"])
def tiles_kernel(
    starts_ptr, ends_ptr, words_q_ptr, words_k_ptr, work_q_ptr, work_k_ptr, entries_q_ptr,
    entries_k_ptr, tiles_q_ptr, tiles_k_ptr, num_masks, queries, keys, n, capacity_q, capacity_k,
):  # fmt: skip
    """A bit tile, from spans or from the words of all blocks; 0 behind the last partial block.
    Grid: the larger capacity, 2."""
    tile = tl.program_id(0)
    if tile >= _of_side(capacity_q, capacity_k):
        return
    _, row_blocks, column_blocks = _sizes(queries, keys)
    work = _of_side(work_q_ptr, work_k_ptr)
    # The last list whose first tile is not behind this one.
    row_list, end = 0, num_masks * row_blocks
    while row_list + 1 < end:
        middle = (row_list + end) // 2
        if tl.load(work + middle * FIELDS + 2) <= tile:
            row_list = middle
        else:
            end = middle
    num_full = tl.load(work + row_list * FIELDS)
    num_partial = tl.load(work + row_list * FIELDS + 1) - num_full
    index = tile - tl.load(work + row_list * FIELDS + 2)
    words = tl.zeros((ROWS,), dtype=tl.int64)
    if index < num_partial:
        list_start = tl.cast(row_list, tl.int64) * column_blocks
        entries = _of_side(entries_q_ptr, entries_k_ptr) + list_start
        column = tl.load(entries + num_full + index)
        if words_q_ptr is None:
            mask_idx = tl.cast(row_list // row_blocks, tl.int64)
            first_row, first_column = row_list % row_blocks * ROWS, column * COLUMNS
            for i in range(n):
                spans = (starts_ptr, ends_ptr, mask_idx, i, queries, n)
                if tl.program_id(1) == 0:
                    words |= _bits_of_rows(spans, first_row, first_column)
                else:
                    words |= _bits_of_columns(spans, first_row, first_column)
        else:
            of_block = _of_side(words_q_ptr, words_k_ptr) + (list_start + column) * ROWS
            words = tl.load(of_block + tl.arange(0, ROWS))
    tiles = _of_side(tiles_q_ptr, tiles_k_ptr) + tl.cast(tile, tl.int64) * ROWS
    tl.store(tiles + tl.arange(0, ROWS), words)
