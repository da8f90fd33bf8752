"""Joins the results of separate calls over parts of the same keys: ``flash_attn_combine``."""

import triton
import triton.language as tl

from .common import stride_of, strides_of


@triton.jit(do_not_specialize=["num_rows", "num_parts", "seqlen_q", "num_heads"])
def combine_rows_kernel(
    out_parts,
    lse_parts,
    out_ptr,
    lse_ptr,
    out_stride_p,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    result_stride_b,
    result_stride_s,
    result_stride_h,
    lse_stride_p,
    lse_stride_b,
    lse_stride_s,
    lse_stride_h,
    result_lse_stride_b,
    result_lse_stride_s,
    result_lse_stride_h,
    num_rows,
    num_parts,
    seqlen_q,
    num_heads,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out = sum over p of exp(lse_p - lse) * out_p, lse = log(sum over p of exp(lse_p)).

    Grid: (blocks of ROWS rows, all (batch, seqlen_q, heads) flattened, heads innermost; blocks of
    BLOCK_D columns). A part without keys (lse -inf) has weight 0, whatever its rows hold.
    """
    out_stride_p = stride_of(out_stride_p, STRIDE_UNIT)
    out_stride_b, out_stride_s, out_stride_h = strides_of(
        out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT
    )
    result_stride_b, result_stride_s, result_stride_h = strides_of(
        result_stride_b, result_stride_s, result_stride_h, STRIDE_UNIT
    )
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = rows < num_rows
    head = (rows % num_heads).to(tl.int64)
    token = (rows // num_heads % seqlen_q).to(tl.int64)
    batch_idx = (rows // num_heads // seqlen_q).to(tl.int64)
    out_rows = batch_idx * out_stride_b + token * out_stride_s + head * out_stride_h
    lse_rows = batch_idx * lse_stride_b + token * lse_stride_s + head * lse_stride_h
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    for part in range(num_parts):
        part_64 = tl.cast(part, tl.int64)
        lse = tl.load(lse_parts + part_64 * lse_stride_p + lse_rows, mask=inside, other=0.0)
        some = inside & (lse != float("-inf"))
        x = tl.load(
            out_parts + (part_64 * out_stride_p + out_rows)[:, None] + columns[None, :],
            mask=some[:, None] & (columns < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        new_largest = tl.maximum(largest, lse)
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp(lse - reference)
        decay = tl.exp(largest - reference)
        acc = acc * decay[:, None] + x * weight[:, None]
        total = total * decay + weight
        largest = new_largest
    empty = total == 0.0
    out = acc * tl.where(empty, 1.0, 1.0 / total)[:, None]
    target = batch_idx * result_stride_b + token * result_stride_s + head * result_stride_h
    tl.store(
        out_ptr + target[:, None] + columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (columns < HEAD_DIM)[None, :],
    )
    target = batch_idx * result_lse_stride_b + token * result_lse_stride_s
    target += head * result_lse_stride_h
    lse = tl.where(empty, float("-inf"), largest + tl.log(total))
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + target, lse, mask=inside)
