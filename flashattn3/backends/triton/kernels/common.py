"""Device functions that the forward and backward kernels share: sequences, tiles, masks, tanh.

Conventions: scores are in the log2 domain (multiplied by log2(e)), so that the exponential is one
exp2; offsets within a tensor are 64-bit, so that tensors beyond 2**31 elements work; tile bounds
are in rows or keys, not in tile indices.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton import knobs

# Whether Triton interprets the kernels, which it decides when it decorates them.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
FULL = tl.constexpr(1)  # the stage of full blocks, see stage_range
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


class Strides(NamedTuple):
    """Strides in elements of a tensor whose last axis is dense. As suffixes of kernel arguments
    they have the same letters."""

    b: tl.tensor  # batch; of caches: cache or page
    s: tl.tensor  # sequence
    h: tl.tensor  # head


@triton.jit
def sequence(
    cu_seqlens, seqused, batch_idx, seqlen, total, VARLEN: tl.constexpr, USED: tl.constexpr
):
    """First row (64-bit) and length of one sequence.

    Clamped so that wrong values of cu_seqlens and seqused cannot address outside the tensor.
    """
    start = 0
    length = seqlen
    if VARLEN:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch_idx), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch_idx + 1), start), total)
        length = end - start
        if USED:
            length = tl.minimum(tl.maximum(tl.load(seqused + batch_idx), 0), length)
    return tl.cast(start, tl.int64), length


@triton.jit
def stride_of(stride, UNIT: tl.constexpr):
    """A stride, known to the compiler as a multiple of UNIT elements (``launch.stride_unit``)."""
    if UNIT > 1:
        stride = tl.multiple_of(tl.cast(stride, tl.int64), UNIT)
    return stride


@triton.jit
def strides_of(batch, row, head, UNIT: tl.constexpr):
    """``stride_of`` of the three strides of a tensor."""
    return Strides(stride_of(batch, UNIT), stride_of(row, UNIT), stride_of(head, UNIT))


@triton.jit
def row_pointer(pointer, strides, batch_idx, head, row):
    """Pointer to one row of one head, or to rows."""
    return pointer + batch_idx * strides.b + head * strides.h + row * strides.s


@triton.jit
def tile_offsets(rows, columns, stride):
    """64-bit element offsets of a (rows, columns) tile from its first element."""
    return rows.to(tl.int64)[:, None] * stride + columns[None, :]


@triton.jit
def load_tile(
    pointers,
    rows,
    num_rows,
    columns,
    num_columns,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
):
    """Load a tile; elements out of bounds are zero."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(
            pointers, mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :], other=0.0
        )
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(pointers, mask=(columns < num_columns)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(pointers, values, rows, num_rows, columns, num_columns, MASK_COLUMNS: tl.constexpr):
    """Store a tile in the tensor's dtype; elements out of bounds are not written."""
    mask = (rows < num_rows)[:, None]
    if MASK_COLUMNS:
        mask = mask & (columns < num_columns)[None, :]
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def visible(
    rows,
    keys,
    num_keys,
    diagonal,
    window_left,
    window_right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Mask of the keys that each row sees. rows and keys broadcast against each other.

    LEFT, RIGHT: whether that side of the window is bounded.
    diagonal: key aligned with row 0 (bottom-right alignment), seqlen_k - seqlen_q.
    """
    seen = keys < num_keys
    if RIGHT:
        seen = seen & (keys <= rows + diagonal + window_right)
    if LEFT:
        seen = seen & (keys >= rows + diagonal - window_left)
    return seen


@triton.jit
def tanh_exp2(x, SOFTCAP: tl.constexpr):
    """tanh by one exp2; exact at both infinities, absolute error of a few 1e-7.

    SOFTCAP: 1, or 2 for a cap far above 1, which multiplies the error: small x, where the
    difference cancels, then uses the series, with a relative error of 2e-6. (Both together need so
    many registers that some tiles spill.)
    """
    result = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * 2.8853900817779268))
    if SOFTCAP == 2:
        square = x * x
        series = x * (1.0 + square * (square * (2.0 / 15.0) - 1.0 / 3.0))
        result = tl.where(tl.abs(x) < 0.17, series, result)
    return result


@triton.jit
def round_down(x, multiple: tl.constexpr):
    return x // multiple * multiple


@triton.jit
def round_up(x, multiple: tl.constexpr):
    return (x + multiple - 1) // multiple * multiple


@triton.jit
def stage_range(edges, stage: tl.constexpr):
    """Begin and end of one of the three stages of a loop over blocks, whose four edges
    ``n_block_range`` or ``m_block_range`` gives: partial blocks, FULL ones, partial blocks.
    ``alibi_edges`` gives six of five stages, of which the first and the last are partial.

    Only partial blocks need a mask. A kernel unrolls the stages that it can have.
    """
    return edges[stage], tl.minimum(edges[stage + 1], edges[len(edges) - 1])


@triton.jit
def n_block_range(
    first_row,
    last_row,
    seqlen_k,
    diagonal,
    window_left,
    window_right,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Keys that the rows first_row..last_row see, as four block edges: begin, full_begin,
    full_end, end.

    Blocks in [full_begin, full_end) are full and need no mask; the blocks before and after are
    partial. No row sees a key outside [begin, end).
    """
    begin = 0
    full_begin = 0
    end = seqlen_k
    full_end = round_down(seqlen_k, BLOCK_N)
    if RIGHT:
        end = tl.maximum(tl.minimum(end, last_row + diagonal + window_right + 1), 0)
        full_end = round_down(
            tl.maximum(tl.minimum(seqlen_k, first_row + diagonal + window_right + 1), 0), BLOCK_N
        )
    if LEFT:
        begin = round_down(tl.maximum(first_row + diagonal - window_left, 0), BLOCK_N)
        full_begin = round_up(tl.maximum(last_row + diagonal - window_left, 0), BLOCK_N)
    full_begin = tl.minimum(full_begin, round_up(end, BLOCK_N))
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def m_block_range(
    first_key,
    last_key,
    seqlen_q,
    diagonal,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Rows that see the keys first_key..last_key, as four edges like ``n_block_range``."""
    begin = 0
    full_begin = 0
    end = seqlen_q
    full_end = round_down(seqlen_q, BLOCK_M)
    if RIGHT:
        begin = round_down(tl.maximum(first_key - diagonal - window_right, 0), BLOCK_M)
        full_begin = round_up(tl.maximum(last_key - diagonal - window_right, 0), BLOCK_M)
    if LEFT:
        end = tl.maximum(tl.minimum(end, last_key - diagonal + window_left + 1), 0)
        full_end = round_down(
            tl.maximum(tl.minimum(seqlen_q, first_key - diagonal + window_left + 1), 0), BLOCK_M
        )
    full_begin = tl.minimum(full_begin, round_up(end, BLOCK_M))
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end
