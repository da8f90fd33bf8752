"""Device functions for the lists of a mask: for each block of 128 rows its blocks of 64 columns.

flashattn3/masks/block_lists.py has the layout. Rows are queries and columns keys, or the other way
round. A loop takes *steps*, an n_block or m_block each: a listed block holds 64 / BLOCK of them.
``row_list`` is the number of a list: that of the batch_idx, head and block of 128 rows.
"""

import triton
import triton.language as tl

ROWS, COLUMNS = tl.constexpr(128), tl.constexpr(64)
FIELDS = tl.constexpr(4)  # of a work tile: full blocks, full and partial ones, bit tile, order


@triton.jit
def start_of_keys(num_masks, queries, keys):
    """The number of blocks of 128 queries and 64 keys, behind which those of lists of keys are."""
    return tl.cast(num_masks, tl.int64) * tl.cdiv(queries, ROWS) * tl.cdiv(keys, COLUMNS)


@triton.jit
def kinds_behind(words, num_masks, queries, keys):
    """The int8 kinds of all blocks, behind their words, int64 (blocks, 128). Blocks of queries come
    first, then those of keys."""
    blocks = start_of_keys(num_masks, queries, keys) + start_of_keys(num_masks, keys, queries)
    return (words + blocks * ROWS).to(tl.pointer_type(tl.int8))


@triton.jit
def in_work_order(work_ptr, lists, block, BLOCK: tl.constexpr):
    """The block of BLOCK rows that a program computes: those with most work come first.

    lists: the first list of the batch_idx and head.
    """
    PER_LIST: tl.constexpr = ROWS // BLOCK
    rank = block // PER_LIST
    first = tl.load(work_ptr + (lists + rank) * FIELDS + 3) * PER_LIST
    return first + block - rank * PER_LIST


@triton.jit
def listed_edges(work_ptr, row_list, BLOCK: tl.constexpr):
    """Four edges like ``n_block_range``, in steps: full blocks, then partial ones."""
    full = tl.load(work_ptr + row_list * FIELDS)
    listed = tl.load(work_ptr + row_list * FIELDS + 1)
    return 0, 0, full * (COLUMNS // BLOCK), listed * (COLUMNS // BLOCK)


@triton.jit
def listed_column(
    entries_ptr, row_list, num_column_blocks, step, end, BLOCK: tl.constexpr
):  # fmt: skip
    """The first column of a step, 0 past the end. A loop asks for it a step ahead: a load whose
    address another load of the same step gives has one buffer less."""
    PER_ENTRY: tl.constexpr = COLUMNS // BLOCK
    place = step // PER_ENTRY
    entries = entries_ptr + row_list * num_column_blocks
    entry = tl.load(entries + place, mask=step < end, other=0)
    return entry * COLUMNS + (step - place * PER_ENTRY) * BLOCK


@triton.jit
def listed_words(work_ptr, tiles_ptr, row_list, step, rows, BLOCK: tl.constexpr):
    """int64 of the shape of rows: the bits of a step of a partial block, from its bit tile. The
    lowest bit is that of the step's first column.

    rows: those of the list's 128.
    """
    PER_ENTRY: tl.constexpr = COLUMNS // BLOCK
    place = step // PER_ENTRY
    full = tl.load(work_ptr + row_list * FIELDS)
    tile = tl.load(work_ptr + row_list * FIELDS + 2) + place - full
    words = tl.load(tiles_ptr + tile.to(tl.int64) * ROWS + rows)
    return words >> ((step - place * PER_ENTRY) * BLOCK).to(tl.int64)


@triton.jit
def listed_visible(words, columns):
    """bool (rows, columns) of ``listed_words``. columns: counted from the first one of the step."""
    return ((words[:, None] >> columns.to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def hidden_columns(words, columns):
    """1 for columns that no row of ``listed_words`` sees, 0 for the others. As the rows of
    ``load_parts`` with num_rows 1 they keep what a hidden key holds out of a GEMM: 0 * NaN is
    NaN."""
    word = tl.reduce(words, 0, _either)
    return 1 - ((word >> columns.to(tl.int64)) & 1).to(tl.int32)
