"""The gradient of a bias that several heads or sequences share: dbias = sum of dS over those.

A program owns a tile of the bias and loops over the heads and sequences that share it, for each of
which it computes S and dP anew: two GEMMs more than the backward has, in exchange for a sum in
float32 registers, always in the same order, that writes each element once. A gradient that is not
shared is stored by ``backward.bwd_dq_kernel``.
"""

import triton
import triton.language as tl

from .backward_parts import probabilities
from .column_parts import column_parts, dot_rows, load_parts, tile_pointers
from .common import store_tile, strides_of, visible
from .score_terms import alibi_on_minus_lse, bias_pointers, load_bias


@triton.jit(
    do_not_specialize=[
        "num_m_blocks",
        "num_n_blocks",
        "bias_heads",
        "bias_batch",
        "shared_heads",
        "num_shared",
        "num_splits",
        "seqlen_q",
        "seqlen_k",
        "window_left",
        "window_right",
    ]
)
def bwd_dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    minus_lse_ptr,
    minus_delta_ptr,
    dbias_ptr,
    slopes_ptr,
    bias_ptr,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    dout_stride_b,
    dout_stride_s,
    dout_stride_h,
    lse_delta_stride_b,
    lse_delta_stride_h,
    num_m_blocks,
    num_n_blocks,
    bias_heads,
    bias_batch,
    shared_heads,
    num_shared,
    num_splits,
    qhead_per_kvhead,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale_log2,
    cap_log2,
    slopes_stride_b,
    bias_stride_b,
    bias_stride_h,
    bias_stride_s,
    minus_lse_unit,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PART_D: tl.constexpr,
    PART_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LSE_IN_SCORES: tl.constexpr,
    TAIL_M: tl.constexpr,
    TAIL_N: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
):
    """One tile of a split of dbias, (num_splits, bias_batch, bias_heads, seqlen_q, seqlen_k). Grid:
    num_m_blocks * num_n_blocks * bias_heads * bias_batch * num_splits.

    num_shared: sequences and heads that share the tile, shared_heads heads of each sequence; a
    split has some of them.
    """
    q_strides = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    k_strides = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_strides = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    dout_strides = strides_of(dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT)
    pid = tl.program_id(0)
    first_row = pid % num_m_blocks * BLOCK_M
    first_key = pid // num_m_blocks % num_n_blocks * BLOCK_N
    place = (pid // num_m_blocks // num_n_blocks).to(tl.int64)
    first_head, first_batch = place % bias_heads, place // bias_heads % bias_batch
    split = (place // bias_heads // bias_batch).to(tl.int32)
    part = tl.cdiv(num_shared, num_splits)
    row_offsets = tl.arange(0, BLOCK_M)
    key_offsets = tl.arange(0, BLOCK_N)
    rows, keys = first_row + row_offsets, first_key + key_offsets
    diagonal = seqlen_k - seqlen_q
    dbias = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = split * part
    end = tl.minimum(begin + part, num_shared)
    if RIGHT:
        end = tl.where(first_key > first_row + BLOCK_M - 1 + diagonal + window_right, begin, end)
    if LEFT:
        end = tl.where(first_key + BLOCK_N - 1 < first_row + diagonal - window_left, begin, end)

    bias_rows = bias_pointers(
        bias_ptr, bias_stride_b, bias_stride_h, bias_stride_s, first_batch, first_head, rows,
        seqlen_q, BIAS_UNIT,
    )  # fmt: skip
    bias = load_bias(bias_rows[:, None], keys[None, :], seqlen_k, TAIL_N).to(tl.float32)
    bias *= minus_lse_unit
    if LEFT or RIGHT or TAIL_N:
        seen = visible(
            rows[:, None], keys[None, :], seqlen_k, diagonal, window_left, window_right, LEFT, RIGHT
        )
        # With a negative scale the exponent is that of +inf.
        hidden = tl.where(minus_lse_unit < 0, float("inf"), float("-inf"))
        bias = tl.where(seen, bias, hidden)
    columns = column_parts(BLOCK_D, PART_D)
    columns_v = column_parts(BLOCK_DV, PART_DV)
    q_pointers = tile_pointers(
        q_ptr + first_row.to(tl.int64) * q_strides.s, row_offsets, columns, q_strides.s
    )
    k_pointers = tile_pointers(
        k_ptr + first_key.to(tl.int64) * k_strides.s, key_offsets, columns, k_strides.s
    )
    v_pointers = tile_pointers(
        v_ptr + first_key.to(tl.int64) * v_strides.s, key_offsets, columns_v, v_strides.s
    )
    dout_pointers = tile_pointers(
        dout_ptr + first_row.to(tl.int64) * dout_strides.s, row_offsets, columns_v, dout_strides.s
    )
    for shared in range(begin, end):
        batch_idx = first_batch + shared // shared_heads
        head = first_head + shared % shared_heads
        head_kv = head // qhead_per_kvhead
        q = load_parts(
            q_pointers, batch_idx * q_strides.b + head * q_strides.h, rows, seqlen_q, columns,
            HEAD_DIM, TAIL_M,
        )  # fmt: skip
        k = load_parts(
            k_pointers, batch_idx * k_strides.b + head_kv * k_strides.h, keys, seqlen_k, columns,
            HEAD_DIM, TAIL_N,
        )  # fmt: skip
        lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h + rows
        minus_lse = tl.load(minus_lse_ptr + lse_delta)[:, None]
        minus_delta = tl.load(minus_delta_ptr + lse_delta)[:, None]
        if ALIBI != 0:
            minus_lse = alibi_on_minus_lse(
                minus_lse, minus_lse_unit, slopes_ptr, slopes_stride_b, batch_idx, head,
                rows[:, None], keys[None, :], diagonal, first_key, ALIBI,
            )  # fmt: skip
        p, _ = probabilities(q, k, minus_lse + bias, scale_log2, cap_log2, SOFTCAP, LSE_IN_SCORES)
        dout = load_parts(
            dout_pointers, batch_idx * dout_strides.b + head * dout_strides.h, rows, seqlen_q,
            columns_v, HEAD_DIM_V, TAIL_M,
        )  # fmt: skip
        v = load_parts(
            v_pointers, batch_idx * v_strides.b + head_kv * v_strides.h, keys, seqlen_k, columns_v,
            HEAD_DIM_V, TAIL_N,
        )  # fmt: skip
        dp = dot_rows(dout, v, tl.broadcast_to(minus_delta, (BLOCK_M, BLOCK_N)))
        dbias += p * dp

    dbias_tile = dbias_ptr + place * seqlen_q * seqlen_k
    dbias_tile += (rows.to(tl.int64) * seqlen_k)[:, None] + keys[None, :]
    store_tile(dbias_tile, dbias, rows, seqlen_q, keys, seqlen_k, TAIL_N)
