"""The bits of a mask's blocks from a bool tensor and from the kinds of larger or smaller blocks."""

import triton
import triton.language as tl

from .block_lists import COLUMNS, ROWS, kinds_behind, start_of_keys
from .mask_spans import lowest

LISTED = tl.constexpr(128)  # blocks of a block mask's list that a program reads at once


@triton.jit(do_not_specialize=["num_blocks_k"])
def block_kinds_kernel(
    counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr, kinds_ptr, num_blocks_k
):
    """The kinds of the blocks of a block mask: 1 where it lists a block, 2 where it lists a full
    one, 0 elsewhere. kinds: int32 (lists, num_blocks_k). Grid: lists."""
    row = tl.program_id(0).to(tl.int64)
    kinds, places = kinds_ptr + row * num_blocks_k, tl.arange(0, LISTED)
    for first in range(0, num_blocks_k, LISTED):
        blocks = first + places
        tl.store(kinds + blocks, blocks * 0, mask=blocks < num_blocks_k)
    tl.debug_barrier()
    for first in range(0, num_blocks_k, LISTED):
        listed = first + places < tl.load(counts_ptr + row)
        entries = indices_ptr + row * num_blocks_k + first + places
        tl.atomic_max(kinds + tl.load(entries, mask=listed, other=0), 1, mask=listed)
        if full_counts_ptr is not None:
            listed = first + places < tl.load(full_counts_ptr + row)
            entries = full_indices_ptr + row * num_blocks_k + first + places
            tl.atomic_max(kinds + tl.load(entries, mask=listed, other=0), 2, mask=listed)


@triton.jit
def _store_pair(words_ptr, kinds_ptr, row_list, pair, words, counts, whole, column_blocks):
    """The bits and the kinds of a pair of column blocks.

    words: int64 (2, 128), of each row. counts: of visible scores (2,).
    """
    blocks = pair * 2 + tl.arange(0, 2)
    exists = blocks < column_blocks
    place = tl.cast(row_list, tl.int64) * column_blocks + blocks
    rows = tl.arange(0, ROWS)[None, :]
    tl.store(words_ptr + place[:, None] * ROWS + rows, words, mask=exists[:, None] & (rows >= 0))
    kinds = (counts == whole).to(tl.int32) + (counts > 0).to(tl.int32)
    tl.store(kinds_ptr + place, kinds.to(tl.int8), mask=exists)


@triton.jit
def _seen(visible_ptr, kinds_ptr, kind, query, word, stride_q, sizes, blocks, FULL: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """int64 (128, 16): which keys each query sees, a byte for each; see ``bits_kernel``. kind: with
    WHOLE that of all scores. sizes: queries and keys. blocks: their sizes, and the number of blocks
    of keys."""
    ones: tl.constexpr = 0x0101010101010101
    inside = (query < sizes[0])[:, None] & (word * 8 < sizes[1])[None, :]
    read, seen = inside, tl.zeros((ROWS, ROWS // 8), dtype=tl.int64)
    if kinds_ptr is not None:
        if not WHOLE:
            row, column = query // blocks[0] * blocks[2], word * 8 // blocks[1]
            kinds = kinds_ptr + row[:, None] + column[None, :]
            kind = tl.load(kinds, mask=inside, other=0).to(tl.int32)
        whole = lowest(8 * (sizes[1] - word * 8)) & ones
        seen = tl.where(inside & (kind == FULL), whole[None, :], seen)
        read = inside & (kind == 1)
    if visible_ptr is not None:
        places = query[:, None] * tl.cast(stride_q, tl.int64) + word[None, :]
        seen |= tl.load(visible_ptr + places, mask=read, other=0)
    return seen


@triton.jit(
    do_not_specialize=["heads", "queries", "keys", "block_q", "block_k", "blocks_q", "blocks_k"]
)
def bits_kernel(
    visible_ptr, block_kinds_ptr, words_ptr, stride_b, stride_h, stride_q, heads, queries, keys,
    block_q, block_k, blocks_q, blocks_k, FULL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The bits and the kinds of two blocks of either side from 128 x 128 bools.

    visible: int64 (batch, heads, queries, words of 8 keys), each key a byte of 0 or 1, and 0 past
    the last key. strides: of words.
    block_kinds: of blocks of block_q x block_k scores (batch * heads, blocks_q, blocks_k): visible
    counts where they are 1 and not FULL, FULL shows all and 0 none. None: visible counts
    everywhere. block_k: a multiple of 8. WHOLE: both are multiples of 128.
    words: as ``kinds_behind`` takes them, with the kinds behind.
    Grid: blocks of 128 keys, of 128 queries, batch * heads.
    """
    WORDS: tl.constexpr = ROWS // 8
    k_block, q_block, mask_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = q_block * ROWS + tl.arange(0, ROWS)
    word = k_block * WORDS + tl.arange(0, WORDS)
    visible, kinds = visible_ptr, block_kinds_ptr
    if visible_ptr is not None:
        visible += mask_idx // heads * tl.cast(stride_b, tl.int64)
        visible += mask_idx % heads * tl.cast(stride_h, tl.int64)
    kind = 1
    if kinds is not None:
        kinds += mask_idx * tl.cast(blocks_q * blocks_k, tl.int64)
        if WHOLE:
            kinds += q_block * ROWS // block_q * blocks_k + k_block * ROWS // block_k
            kind = tl.load(kinds).to(tl.int32)
    shown = 2 * (kind == FULL).to(tl.int32) if kinds is not None and WHOLE and FULL == 1 else kind
    if is_plain(shown, queries, keys):
        store_kind(words_ptr, shown, queries, keys)
    else:
        seen = _seen(visible, kinds, kind, query, word, stride_q, (queries, keys),
                     (block_q, block_k, blocks_k), FULL, WHOLE)  # fmt: skip
        store_words(words_ptr, seen, queries, keys)


@triton.jit
def store_words(words_ptr, seen, queries, keys):
    """The bits and the kinds of this program's blocks, as ``bits_kernel`` says.

    seen: int64 (128 queries, 16), which of eight keys are seen, a byte for each.
    """
    WORDS: tl.constexpr = ROWS // 8
    k_block, q_block, mask_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kinds_ptr = kinds_behind(words_ptr, tl.num_programs(2), queries, keys)
    # Products whose highest byte has the sum of the eight bytes, and the bits of the eight.
    counts = ((seen * 0x0101010101010101) >> 56).to(tl.int32) & 0xFF
    bytes_of_keys = ((seen * 0x0102040810204080) >> 56) & 0xFF
    eight = tl.arange(0, 8).to(tl.int64)

    row_list = mask_idx * tl.cdiv(queries, ROWS) + q_block
    words = tl.sum(tl.reshape(bytes_of_keys, (ROWS, 2, 8)) << (8 * eight)[None, None, :], 2)
    of_pair = tl.sum(tl.sum(tl.reshape(counts, (ROWS, 2, 8)), 2), 0)
    whole = tl.minimum(queries - q_block * ROWS, ROWS) * COLUMNS
    _store_pair(words_ptr, kinds_ptr, row_list, k_block, tl.trans(words), of_pair, whole,
                tl.cdiv(keys, COLUMNS))  # fmt: skip

    row_list = mask_idx * tl.cdiv(keys, ROWS) + k_block
    bits = seen << (tl.arange(0, ROWS) % 8).to(tl.int64)[:, None]
    of_queries = tl.sum(tl.reshape(bits, (WORDS, 8, WORDS)), 1)  # eight queries of eight keys
    bytes_of_queries = (of_queries[:, :, None] >> (8 * eight)[None, None, :]) & 0xFF
    bytes_of_queries = tl.reshape(bytes_of_queries, (2, 8, ROWS))
    words = tl.sum(bytes_of_queries << (8 * eight)[None, :, None], 1)
    of_pair = tl.sum(tl.reshape(tl.sum(counts, 1), (2, COLUMNS)), 1)
    whole = tl.minimum(keys - k_block * ROWS, ROWS) * COLUMNS
    of_keys = start_of_keys(tl.num_programs(2), queries, keys)
    _store_pair(words_ptr + of_keys * ROWS, kinds_ptr + of_keys, row_list, q_block, words, of_pair,
                whole, tl.cdiv(queries, COLUMNS))  # fmt: skip


@triton.jit
def store_kind(words_ptr, kind, queries, keys):
    """The kind that all blocks of this program have. Only partial blocks need words."""
    kinds_ptr = kinds_behind(words_ptr, tl.num_programs(2), queries, keys)
    k_block, q_block, mask_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = tl.arange(0, 2)
    kinds = (pair * 0 + kind).to(tl.int8)
    column_blocks, columns = tl.cdiv(keys, COLUMNS), k_block * 2 + pair
    row_list = tl.cast(mask_idx * tl.cdiv(queries, ROWS) + q_block, tl.int64)
    tl.store(kinds_ptr + row_list * column_blocks + columns, kinds, mask=columns < column_blocks)
    column_blocks, columns = tl.cdiv(queries, COLUMNS), q_block * 2 + pair
    row_list = tl.cast(mask_idx * tl.cdiv(keys, ROWS) + k_block, tl.int64)
    place = start_of_keys(tl.num_programs(2), queries, keys) + row_list * column_blocks + columns
    tl.store(kinds_ptr + place, kinds, mask=columns < column_blocks)


@triton.jit
def is_plain(kind, queries, keys):
    """Whether no block of this program is partial. kind: of all its scores, 0, 1 partial or 2."""
    overhangs = ((tl.program_id(1) + 1) * ROWS > queries) | ((tl.program_id(0) + 1) * ROWS > keys)
    return (kind == 0) | ((kind == 2) & (overhangs == 0))


@triton.jit
def _is_listed(counts_ptr, indices_ptr, row_list, column, num_columns):
    """1 if a list of a block mask has the column, else 0."""
    count, entries = tl.load(counts_ptr + row_list), indices_ptr + row_list * num_columns
    found = tl.zeros((LISTED,), dtype=tl.int32)
    for first in range(0, count, LISTED):
        places = first + tl.arange(0, LISTED)
        found |= (tl.load(entries + places, mask=places < count, other=-1) == column).to(tl.int32)
    return tl.max(found, 0)


@triton.jit
def kind_of_program(blocks_ptr, blocks):
    """The kind, of which 2 is full, that all scores of this program have in a block mask; 1 if they
    may have several.

    blocks_ptr: of a block mask the numbers and indices of blocks of each list, and the same of full
        blocks or None, where 128 x 128 scores are of one block; otherwise None and the kinds of
        blocks, or None where all kinds are 1.
    blocks: sizes of a block and the numbers of blocks.
    """
    kind = 1
    if blocks_ptr[0] is not None:
        row_list = tl.program_id(1) * ROWS // blocks[0]
        row_list += tl.program_id(2) * tl.cast(blocks[2], tl.int64)
        column = tl.program_id(0) * ROWS // blocks[1]
        kind = _is_listed(blocks_ptr[0], blocks_ptr[1], row_list, column, blocks[3])
        if blocks_ptr[2] is not None:
            full = _is_listed(blocks_ptr[2], blocks_ptr[3], row_list, column, blocks[3])
            kind = tl.maximum(kind, 2 * full)
    return kind


@triton.jit
def bytes_of_scores(seen, kind, blocks_ptr, blocks, query, key, queries, keys):
    """int64 (128, 16): 1 where a mask_mod and the block mask show a score. kind: of this program.

    query: (128, 1), key: (1, 16), also past the end.
    """
    inside = (query < queries) & (key < keys)
    if blocks_ptr[0] is None and blocks_ptr[1] is not None:
        kinds = blocks_ptr[1] + tl.program_id(2) * tl.cast(blocks[2] * blocks[3], tl.int64)
        kinds = kinds + query // blocks[0] * blocks[3] + key // blocks[1]
        kind = tl.load(kinds, mask=inside, other=0).to(tl.int32)
    return (inside & ((kind == 2) | ((kind == 1) & seen))).to(tl.int64)


@triton.jit
def floor_divided(a, b):
    """a // b of Python, where Triton's quotient of integers is rounded towards 0."""
    return a // b - (((a % b) != 0) & ((a < 0) != (b < 0))).to(a.dtype)


@triton.jit
def remainder(a, b):
    """a % b of Python, where Triton's remainder has the sign of a."""
    found = a % b
    return tl.where((found != 0) & ((found < 0) != (b < 0)), found + b, found)
