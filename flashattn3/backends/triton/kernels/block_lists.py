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
def listed_visible(
    work_ptr, tiles_ptr, row_list, step, rows, columns, BLOCK: tl.constexpr
):  # fmt: skip
    """(rows, columns) of a step of a partial block, from its bit tile.

    rows: those of the list's 128. columns: counted from the first one of the step.
    """
    PER_ENTRY: tl.constexpr = COLUMNS // BLOCK
    place = step // PER_ENTRY
    full = tl.load(work_ptr + row_list * FIELDS)
    tile = tl.load(work_ptr + row_list * FIELDS + 2) + place - full
    words = tl.load(tiles_ptr + tile.to(tl.int64) * ROWS + rows)
    places = ((step - place * PER_ENTRY) * BLOCK + columns).to(tl.int64)
    return ((words[:, None] >> places[None, :]) & 1) != 0
