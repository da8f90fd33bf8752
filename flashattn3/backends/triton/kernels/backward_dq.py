"""dQ by a program for each m_block, which loops over the n_blocks: the sums have one order."""

import triton
import triton.language as tl

from .backward_parts import block_and_head, lse_delta_start, probabilities
from .block_lists import (
    ROWS,
    hidden_columns,
    in_work_order,
    listed_column,
    listed_edges,
    listed_visible,
    listed_words,
)
from .column_parts import (
    column_parts,
    dot_columns,
    dot_rows,
    load_parts,
    scale_parts,
    store_parts,
    tile_pointers,
    zero_parts,
)
from .common import (
    FULL,
    n_block_range,
    row_pointer,
    sequence,
    stage_range,
    store_tile,
    strides_of,
    visible,
)
from .score_terms import alibi_on_minus_lse, bias_pointers, load_bias


@triton.jit(
    do_not_specialize=[
        "num_m_blocks",
        "num_heads",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
        "window_left",
        "window_right",
        "mask_stride_b",
        "mask_stride_h",
        "num_listed_blocks",
    ]
)
def bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    minus_lse_ptr,
    minus_delta_ptr,
    dq_ptr,
    dbias_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    slopes_ptr,
    bias_ptr,
    entries_ptr,
    work_ptr,
    tiles_ptr,
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
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    num_m_blocks,
    num_heads,
    qhead_per_kvhead,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    window_left,
    window_right,
    softmax_scale,
    scale_log2,
    cap_log2,
    slopes_stride_b,
    bias_stride_b,
    bias_stride_h,
    bias_stride_s,
    minus_lse_unit,
    dbias_stride_b,
    dbias_stride_h,
    mask_stride_b,
    mask_stride_h,
    num_listed_blocks,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PART_D: tl.constexpr,
    PART_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VARLEN: tl.constexpr,
    USED_Q: tl.constexpr,
    USED_K: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LSE_IN_SCORES: tl.constexpr,
    TAIL: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
):
    """dQ of one m_block of one head. Grid: num_m_blocks * num_heads * batch.

    dbias: (batch, heads, seqlen_q, seqlen_k), 0 at first where a mask hides whole blocks; None: it
    is no tensor, or one that bias_gradient.py sums. entries_ptr, ...: the lists of a mask, as in
    the forward.
    """
    q_strides = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    k_strides = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_strides = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    dout_strides = strides_of(dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT)
    dq_strides = strides_of(dq_stride_b, dq_stride_s, dq_stride_h, STRIDE_UNIT)
    m_block, batch_idx, head = block_and_head(num_m_blocks, num_heads)
    if RIGHT:
        m_block = num_m_blocks - 1 - m_block
    LISTED: tl.constexpr = entries_ptr is not None
    if LISTED:
        lists = batch_idx * mask_stride_b + head * mask_stride_h
        m_block = in_work_order(work_ptr, lists, m_block, BLOCK_M)
    head_kv = head // qhead_per_kvhead
    start_q, length_q = sequence(
        cu_seqlens_q, seqused_q, batch_idx, seqlen_q, total_q, VARLEN, USED_Q
    )
    start_k, length_k = sequence(
        cu_seqlens_k, seqused_k, batch_idx, seqlen_k, total_k, VARLEN, USED_K
    )
    first_row = m_block * BLOCK_M
    if first_row >= length_q:
        return
    last_row = tl.minimum(first_row + BLOCK_M, length_q) - 1
    diagonal = length_k - length_q
    if LISTED:
        row_list = lists + first_row // ROWS
        edges = listed_edges(work_ptr, row_list, BLOCK_N)
    else:
        edges = n_block_range(
            first_row, last_row, length_k, diagonal, window_left, window_right, BLOCK_N, LEFT, RIGHT
        )

    row_offsets = tl.arange(0, BLOCK_M)
    columns = column_parts(BLOCK_D, PART_D)
    columns_v = column_parts(BLOCK_DV, PART_DV)
    keys = tl.arange(0, BLOCK_N)
    rows = first_row + row_offsets
    first_q_row = start_q + first_row
    q_tile = row_pointer(q_ptr, q_strides, batch_idx, head, first_q_row)
    dout_tile = row_pointer(dout_ptr, dout_strides, batch_idx, head, first_q_row)
    k_tile = row_pointer(k_ptr, k_strides, batch_idx, head_kv, start_k)
    v_tile = row_pointer(v_ptr, v_strides, batch_idx, head_kv, start_k)
    q_pointers = tile_pointers(q_tile, row_offsets, columns, q_strides.s)
    dout_pointers = tile_pointers(dout_tile, row_offsets, columns_v, dout_strides.s)
    k_pointers = tile_pointers(k_tile, keys, columns, k_strides.s)
    v_pointers = tile_pointers(v_tile, keys, columns_v, v_strides.s)
    q = load_parts(q_pointers, 0, rows, length_q, columns, HEAD_DIM, True)
    dout = load_parts(dout_pointers, 0, rows, length_q, columns_v, HEAD_DIM_V, True)
    lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
    lse_delta += lse_delta_start(start_q, batch_idx, VARLEN)
    minus_lse = tl.load(minus_lse_ptr + lse_delta + rows)[:, None]
    minus_delta = tl.load(minus_delta_ptr + lse_delta + rows)[:, None]

    if bias_ptr is not None:
        bias_rows = bias_pointers(
            bias_ptr, bias_stride_b, bias_stride_h, bias_stride_s, batch_idx, head, rows, length_q,
            BIAS_UNIT,
        )[:, None]  # fmt: skip
    if dbias_ptr is not None:
        dbias_head = dbias_ptr + batch_idx * dbias_stride_b + head * dbias_stride_h
        dbias_tile = dbias_head + (rows.to(tl.int64) * seqlen_k)[:, None]
    k_step = tl.cast(k_strides.s, tl.int64)
    v_step = tl.cast(v_strides.s, tl.int64)
    dq = zero_parts(BLOCK_M, columns)
    for stage in tl.static_range(0 if LEFT else FULL, 3 if RIGHT or TAIL or LISTED else 2):
        MASKED = stage != FULL
        stage_begin, stage_end = stage_range(edges, stage)
        if LISTED:
            next_key = listed_column(
                entries_ptr, row_list, num_listed_blocks, stage_begin, stage_end, BLOCK_N
            )
        for step in range(stage_begin, stage_end, 1 if LISTED else BLOCK_N):
            first_key = step
            if LISTED:
                first_key = next_key
                next_key = listed_column(
                    entries_ptr, row_list, num_listed_blocks, step + 1, stage_end, BLOCK_N
                )
            num_keys = length_k - first_key
            if LISTED and stage != FULL:
                words = listed_words(work_ptr, tiles_ptr, row_list, step, rows % ROWS, BLOCK_N)
                hidden = hidden_columns(words, keys)
                k = load_parts(k_pointers, first_key * k_step, hidden, 1, columns, HEAD_DIM, True)
            else:
                k = load_parts(
                    k_pointers, first_key * k_step, keys, num_keys, columns, HEAD_DIM,
                    MASKED and TAIL,
                )  # fmt: skip
            v = load_parts(
                v_pointers, first_key * v_step, keys, num_keys, columns_v, HEAD_DIM_V,
                MASKED and TAIL,
            )  # fmt: skip
            term = minus_lse
            if ALIBI != 0:
                term = alibi_on_minus_lse(
                    minus_lse, minus_lse_unit, slopes_ptr, slopes_stride_b, batch_idx, head,
                    rows[:, None], first_key + keys[None, :], diagonal, first_key, ALIBI,
                )  # fmt: skip
            if bias_ptr is not None:
                bias = load_bias(bias_rows + first_key, keys[None, :], num_keys, MASKED and TAIL)
                term = term + bias.to(tl.float32) * minus_lse_unit
            p, slope = probabilities(q, k, term, scale_log2, cap_log2, SOFTCAP, LSE_IN_SCORES)
            if MASKED and not LISTED:
                reach = diagonal - first_key
                seen = visible(
                    rows[:, None],
                    keys[None, :],
                    num_keys,
                    reach,
                    window_left,
                    window_right,
                    LEFT,
                    RIGHT,
                )
                p = tl.where(seen, p, 0.0)
            dp = dot_rows(dout, v, tl.broadcast_to(minus_delta, (BLOCK_M, BLOCK_N)))
            ds = p * dp * slope
            if LISTED and stage != FULL:  # p, dp and slope of a hidden key may be NaN
                ds = tl.where(listed_visible(words, keys), ds, 0.0)
            dq = dot_columns(ds.to(k[0].dtype), k, dq)
            if dbias_ptr is not None:
                # TAIL alone: the mask of a stage that is no constexpr has one shape.
                store_tile(
                    dbias_tile + (first_key + keys)[None, :], p * dp, rows, length_q, keys,
                    num_keys, TAIL,
                )  # fmt: skip

    dq_tile = row_pointer(dq_ptr, dq_strides, batch_idx, head, first_q_row)
    dq_pointers = tile_pointers(dq_tile, row_offsets, columns, dq_strides.s)
    store_parts(dq_pointers, scale_parts(dq, softmax_scale), rows, length_q, columns, HEAD_DIM)
