"""Combines the splits of a forward by their lse; combine.py combines parts that a user has."""

import triton
import triton.language as tl

from .common import load_tile, store_tile, stride_of, strides_of, tile_offsets


@triton.jit(do_not_specialize=["num_m_blocks", "num_heads", "num_rows", "num_splits"])
def combine_kernel(
    out_parts,
    lse_parts,
    out_ptr,
    lse_ptr,
    out_stride_p,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_p,
    num_m_blocks,
    num_heads,
    num_rows,
    num_splits,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Combine the splits of a forward: out = sum over p of exp(lse_p - lse) * out_p.

    SINKS: lse of the first split, which has the sink, may be +inf.
    out and each part of out_parts share their strides; lse is (batch, heads, rows), contiguous.
    Grid: num_m_blocks * num_heads * batch.
    """
    out_stride_p = stride_of(out_stride_p, STRIDE_UNIT)
    out_strides = strides_of(out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT)
    pid = tl.program_id(0)
    head = (pid // num_m_blocks).to(tl.int64)
    first_row = pid % num_m_blocks * BLOCK_M
    row_offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    rows = first_row + row_offsets
    inside = rows < num_rows
    lse_rows = head * num_rows + rows
    tile = (
        head // num_heads * out_strides.b
        + head % num_heads * out_strides.h
        + first_row.to(tl.int64) * out_strides.s
    )
    tile += tile_offsets(row_offsets, columns, out_strides.s)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for split in range(num_splits):
        lse = tl.load(lse_parts + split * lse_stride_p + lse_rows, mask=inside, other=float("-inf"))
        part = load_tile(
            out_parts + split * out_stride_p + tile,
            rows,
            num_rows,
            columns,
            HEAD_DIM_V,
            True,
            HEAD_DIM_V < BLOCK_DV,
        )
        new_largest = tl.maximum(largest, lse)
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp(lse - reference)
        decay = tl.exp(largest - reference)
        if SINKS:
            weight = tl.where(lse == float("inf"), 1.0, weight)
            decay = tl.where(largest == float("inf"), 1.0, decay)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        largest = new_largest
    empty = total == 0.0
    tl.store(
        lse_ptr + lse_rows, tl.where(empty, float("-inf"), largest + tl.log(total)), mask=inside
    )
    out = acc * tl.where(empty, 1.0, 1.0 / total)[:, None]
    store_tile(out_ptr + tile, out, rows, num_rows, columns, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)
