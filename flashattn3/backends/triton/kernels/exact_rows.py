"""lse and dlse for a backward of rows whose out and lse are computed again more exactly."""

import triton
import triton.language as tl

from .common import load_tile, row_pointer, strides_of, tile_offsets


@triton.jit(
    do_not_specialize=[
        "lse_ptr", "exact_lse_ptr", "dlse_ptr", "lse_out", "dlse_out", "num_blocks", "num_heads",
        "seqlen", "count",
    ]
)  # fmt: skip
def take_exact_rows(
    out_ptr,
    exact_ptr,
    dout_ptr,
    lse_ptr,
    exact_lse_ptr,
    dlse_ptr,
    lse_out,
    dlse_out,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    exact_stride_b,
    exact_stride_s,
    exact_stride_h,
    dout_stride_b,
    dout_stride_s,
    dout_stride_h,
    lse_stride_b,
    lse_stride_h,
    exact_lse_stride_b,
    exact_lse_stride_h,
    dlse_stride_b,
    dlse_stride_h,
    dlse_stride_s,
    num_blocks,
    num_heads,
    seqlen,
    count,
    STRIDE_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """lse_out and dlse_out (b, h, s), dense: of the first count rows exact_lse and dlse +
    rowsum((out - exact) * dout), of the others lse and dlse. dlse None: 0. exact and exact_lse have
    count rows. Grid: heads * blocks of BLOCK_M rows * b.
    """
    pid = tl.program_id(0)
    head = pid % num_heads
    first = pid // num_heads % num_blocks * BLOCK_M
    batch = (pid // num_heads // num_blocks).to(tl.int64)
    rows = first + tl.arange(0, BLOCK_M)
    inside, is_exact = rows < seqlen, rows < count
    dlse = tl.zeros([BLOCK_M], tl.float32)
    if dlse_ptr is not None:
        of_dlse = dlse_ptr + batch * dlse_stride_b + head * dlse_stride_h
        dlse = tl.load(of_dlse + rows.to(tl.int64) * dlse_stride_s, mask=inside, other=0.0)
    of_lse = lse_ptr + batch * lse_stride_b + head * lse_stride_h + rows
    lse = tl.load(of_lse, mask=inside & (rows >= count), other=0.0)
    if first < count:
        of_exact = exact_lse_ptr + batch * exact_lse_stride_b + head * exact_lse_stride_h + rows
        lse = tl.where(is_exact, tl.load(of_exact, mask=is_exact, other=0.0), lse)
        columns = tl.arange(0, BLOCK_DV)
        out_strides = strides_of(out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT)
        exact_strides = strides_of(exact_stride_b, exact_stride_s, exact_stride_h, STRIDE_UNIT)
        dout_strides = strides_of(dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT)
        out = row_pointer(out_ptr, out_strides, batch, head, 0)
        exact = row_pointer(exact_ptr, exact_strides, batch, head, 0)
        dout = row_pointer(dout_ptr, dout_strides, batch, head, 0)
        out += tile_offsets(rows, columns, out_strides.s)
        exact += tile_offsets(rows, columns, exact_strides.s)
        dout += tile_offsets(rows, columns, dout_strides.s)
        few: tl.constexpr = HEAD_DIM_V < BLOCK_DV
        moved = load_tile(out, rows, count, columns, HEAD_DIM_V, True, few).to(tl.float32)
        moved -= load_tile(exact, rows, count, columns, HEAD_DIM_V, True, few).to(tl.float32)
        moved *= load_tile(dout, rows, count, columns, HEAD_DIM_V, True, few).to(tl.float32)
        dlse += tl.sum(moved, 1)
    target = (batch * num_heads + head) * seqlen + rows
    tl.store(lse_out + target, lse, mask=inside)
    tl.store(dlse_out + target, dlse, mask=inside)
