"""The first kernel of a backward: -lse and -delta of each row, in float32."""

import triton
import triton.language as tl

from .backward_parts import LSE_DELTA_ROWS, block_and_head, lse_delta_start
from .column_parts import column_parts, tile_pointers, zero_parts
from .common import load_tile, round_up, row_pointer, sequence, strides_of, tile_offsets
from .score_terms import gradient_of_sink


@triton.jit(do_not_specialize=["num_m_blocks", "num_heads", "seqlen_q", "total_q"])
def bwd_preprocess_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    minus_lse_ptr,
    minus_delta_ptr,
    dq_accum_ptr,
    cu_seqlens_q,
    seqused_q,
    sinks_ptr,
    dsinks_ptr,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    dout_stride_b,
    dout_stride_s,
    dout_stride_h,
    lse_stride_b,
    lse_stride_h,
    dlse_stride_b,
    dlse_stride_h,
    dlse_stride_s,
    lse_delta_stride_b,
    lse_delta_stride_h,
    num_m_blocks,
    num_heads,
    seqlen_q,
    total_q,
    lse_factor,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART_D: tl.constexpr,
    VARLEN: tl.constexpr,
    USED_Q: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """Per row, float32: minus_lse = lse_factor * lse, and minus_delta = dlse - rowsum(dout * out).
    dq_accum, BLOCK_D columns, is set to 0; None: there is none. dsinks (heads, batch *
    num_m_blocks): the gradient of the head's sink from the program's rows.

    lse_factor is -1 in the unit of the score that minus_lse is added to: raw or log2 domain. A row
    without keys, or outside its sequence, gets lse = +inf, so that its recomputed P is 0.
    Grid: num_m_blocks * num_heads * batch, covering the padded rows.
    """
    out_strides = strides_of(out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT)
    dout_strides = strides_of(dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT)
    m_block, batch_idx, head = block_and_head(num_m_blocks, num_heads)
    first_row = m_block * BLOCK_M
    start_q, length_q = sequence(
        cu_seqlens_q, seqused_q, batch_idx, seqlen_q, total_q, VARLEN, USED_Q
    )
    if first_row >= length_q + LSE_DELTA_ROWS:
        return
    row_offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    rows = first_row + row_offsets
    inside = rows < length_q
    tensor_row = start_q + first_row
    out_tile = row_pointer(out_ptr, out_strides, batch_idx, head, tensor_row)
    dout_tile = row_pointer(dout_ptr, dout_strides, batch_idx, head, tensor_row)
    out_tile += tile_offsets(row_offsets, columns, out_strides.s)
    dout_tile += tile_offsets(row_offsets, columns, dout_strides.s)
    out = load_tile(out_tile, rows, length_q, columns, HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV)
    dout = load_tile(dout_tile, rows, length_q, columns, HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV)
    minus_delta = -tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        dlse_rows = dlse_ptr + batch_idx * dlse_stride_b + head * dlse_stride_h
        minus_delta += tl.load(dlse_rows + (start_q + rows) * dlse_stride_s, mask=inside, other=0.0)
    lse_rows = lse_ptr + batch_idx * lse_stride_b + head * lse_stride_h + start_q + rows
    lse = tl.load(lse_rows, mask=inside, other=float("inf"))
    empty = lse == float("-inf")
    lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
    lse_delta += lse_delta_start(start_q, batch_idx, VARLEN) + rows
    padded = rows < round_up(length_q, LSE_DELTA_ROWS)
    lse = tl.where(empty, float("inf"), lse)
    tl.store(minus_lse_ptr + lse_delta, lse * lse_factor, mask=padded)
    # The gradient of an empty row is 0 even where dlse is not finite.
    tl.store(minus_delta_ptr + lse_delta, tl.where(empty, 0.0, minus_delta), mask=padded)
    if sinks_ptr is not None:
        programs = tl.num_programs(0) // num_heads
        place = head * programs + batch_idx * num_m_blocks + m_block
        tl.store(dsinks_ptr + place, gradient_of_sink(sinks_ptr, head, lse, minus_delta))
    if dq_accum_ptr is not None:
        accum_columns = column_parts(BLOCK_D, PART_D)
        dq_accum = tile_pointers(dq_accum_ptr, lse_delta, accum_columns, BLOCK_D)
        zeros = zero_parts(BLOCK_M, accum_columns)
        for i in tl.static_range(len(zeros)):
            tl.store(dq_accum[i], zeros[i], mask=padded[:, None])
