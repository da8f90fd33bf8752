"""FlashAttention-2 backward. P is recomputed from the stored LSE, so nothing quadratic is kept.

With delta = rowsum(dout * out) - dlse:  P = exp(S - lse),  dV = P^T dout,  dP = dout V^T,
dS = P * (dP - delta),  dQ = scale * dS K,  dK = scale * dS^T Q  (Dao, arXiv 2307.08691, algorithm
2).

``bwd_preprocess_kernel`` computes -delta and -lse; a program of ``bwd_kernel`` holds an n_block and
loops over the m_blocks of all query heads that share it. There are two ways to dQ:

- Five GEMMs: ``bwd_kernel`` adds dS K of its n_block to dq_accum, in float32, in any order;
  ``bwd_postprocess_kernel`` converts dq_accum to dQ.
- Seven GEMMs: a program of ``bwd_dq_kernel`` holds an m_block and loops over the n_blocks. Each
  result is summed by one program, so the gradients are bitwise reproducible.
"""

import triton
import triton.language as tl

from .backward_parts import block_and_head, lse_delta_start, probabilities
from .block_lists import (
    ROWS,
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
    m_block_range,
    row_pointer,
    sequence,
    stage_range,
    strides_of,
    visible,
)
from .dq_accum import add_unordered, dq_accum_pointers
from .score_terms import alibi_on_minus_lse, bias_pointers, load_bias


@triton.jit(
    do_not_specialize=[
        "num_n_blocks",
        "num_heads_kv",
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
def bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    minus_lse_ptr,
    minus_delta_ptr,
    dk_ptr,
    dv_ptr,
    dq_accum_ptr,
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
    dk_stride_b,
    dk_stride_s,
    dk_stride_h,
    dv_stride_b,
    dv_stride_s,
    dv_stride_h,
    num_n_blocks,
    num_heads_kv,
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
    DELTA_IN_DP: tl.constexpr,
    TAIL: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
):
    """dK and dV of one n_block of one KV head. Grid: num_n_blocks * num_heads_kv * batch.

    dq_accum: float32, the rows of minus_lse with BLOCK_D columns; the program adds its dS K to
    tiles of BLOCK_M rows (``dq_accum_pointers``). None: ``bwd_dq_kernel`` computes dQ.

    S and dP are computed transposed, keys by rows, so that P^T and dS^T feed the next GEMM from
    registers. TAIL: the last m_block or the last n_block may be partial. DELTA_IN_DP: minus_delta
    is the accumulator bias of dP. entries_ptr, ...: the lists of keys of a mask, of rows that are
    keys (block_lists.py); num_n_blocks then fills whole lists.
    """
    q_strides = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    k_strides = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_strides = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    dout_strides = strides_of(dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT)
    dk_strides = strides_of(dk_stride_b, dk_stride_s, dk_stride_h, STRIDE_UNIT)
    dv_strides = strides_of(dv_stride_b, dv_stride_s, dv_stride_h, STRIDE_UNIT)
    n_block, batch_idx, head_kv = block_and_head(num_n_blocks, num_heads_kv)
    LISTED: tl.constexpr = entries_ptr is not None
    if LISTED:  # in the order of the first of the heads
        lists = batch_idx * mask_stride_b + head_kv * qhead_per_kvhead * mask_stride_h
        n_block = in_work_order(work_ptr, lists, n_block, BLOCK_N)
    start_q, length_q = sequence(
        cu_seqlens_q, seqused_q, batch_idx, seqlen_q, total_q, VARLEN, USED_Q
    )
    start_k, length_k = sequence(
        cu_seqlens_k, seqused_k, batch_idx, seqlen_k, total_k, VARLEN, USED_K
    )
    first_key = n_block * BLOCK_N
    if first_key >= length_k:
        return
    last_key = tl.minimum(first_key + BLOCK_N, length_k) - 1
    diagonal = length_k - length_q
    edges = (0, 0, 0, 0)
    if not LISTED:
        edges = m_block_range(
            first_key, last_key, length_q, diagonal, window_left, window_right, BLOCK_M, LEFT, RIGHT
        )
    if dq_accum_ptr is not None and TAIL:
        # dQ sums over the keys, so the keys past the end need a mask in every m_block.
        full_end = tl.where(first_key + BLOCK_N > length_k, edges[1], edges[2])
        edges = (edges[0], edges[1], full_end, edges[3])

    key_offsets = tl.arange(0, BLOCK_N)
    row_offsets = tl.arange(0, BLOCK_M)
    columns = column_parts(BLOCK_D, PART_D)
    columns_v = column_parts(BLOCK_DV, PART_DV)
    keys = first_key + key_offsets
    first_key_row = start_k + first_key
    k_tile = row_pointer(k_ptr, k_strides, batch_idx, head_kv, first_key_row)
    v_tile = row_pointer(v_ptr, v_strides, batch_idx, head_kv, first_key_row)
    k_pointers = tile_pointers(k_tile, key_offsets, columns, k_strides.s)
    v_pointers = tile_pointers(v_tile, key_offsets, columns_v, v_strides.s)
    k = load_parts(k_pointers, 0, keys, length_k, columns, HEAD_DIM, TAIL)
    v = load_parts(v_pointers, 0, keys, length_k, columns_v, HEAD_DIM_V, TAIL)

    q_step = tl.cast(q_strides.s, tl.int64)
    dout_step = tl.cast(dout_strides.s, tl.int64)

    dk = zero_parts(BLOCK_N, columns)
    dv = zero_parts(BLOCK_N, columns_v)
    for qhead in range(qhead_per_kvhead):
        head = head_kv * qhead_per_kvhead + qhead
        q_head = row_pointer(q_ptr, q_strides, batch_idx, head, start_q)
        dout_head = row_pointer(dout_ptr, dout_strides, batch_idx, head, start_q)
        q_pointers = tile_pointers(q_head, row_offsets, columns, q_strides.s)
        dout_pointers = tile_pointers(dout_head, row_offsets, columns_v, dout_strides.s)
        lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
        lse_delta += lse_delta_start(start_q, batch_idx, VARLEN)
        if dq_accum_ptr is not None:
            dq_head = dq_accum_ptr + lse_delta * BLOCK_D
        if LISTED:
            row_list = batch_idx * mask_stride_b + head * mask_stride_h + first_key // ROWS
            edges = listed_edges(work_ptr, row_list, BLOCK_M)
        for stage in tl.static_range(0 if RIGHT else FULL, 3 if LEFT or TAIL or LISTED else 2):
            MASKED = stage != FULL
            stage_begin, stage_end = stage_range(edges, stage)
            if LISTED:
                next_row = listed_column(
                    entries_ptr, row_list, num_listed_blocks, stage_begin, stage_end, BLOCK_M
                )
            for step in range(stage_begin, stage_end, 1 if LISTED else BLOCK_M):
                first_row = step
                if LISTED:
                    first_row = next_row
                    next_row = listed_column(
                        entries_ptr, row_list, num_listed_blocks, step + 1, stage_end, BLOCK_M
                    )
                rows = first_row + row_offsets
                q = load_parts(
                    q_pointers, first_row * q_step, rows, length_q, columns, HEAD_DIM,
                    MASKED and TAIL,
                )  # fmt: skip
                minus_lse = tl.load(minus_lse_ptr + lse_delta + rows)[None, :]
                minus_delta = tl.load(minus_delta_ptr + lse_delta + rows)[None, :]
                if ALIBI != 0:
                    minus_lse = alibi_on_minus_lse(
                        minus_lse, minus_lse_unit, slopes_ptr, slopes_stride_b, batch_idx, head,
                        rows[None, :], keys[:, None], diagonal, first_key, ALIBI,
                    )  # fmt: skip
                if bias_ptr is not None:
                    bias_rows = bias_pointers(
                        bias_ptr, bias_stride_b, bias_stride_h, bias_stride_s, batch_idx, head,
                        rows, length_q, BIAS_UNIT,
                    )  # fmt: skip
                    bias = load_bias(bias_rows[None, :], keys[:, None], length_k, TAIL)
                    minus_lse = minus_lse + bias.to(tl.float32) * minus_lse_unit
                p, slope = probabilities(
                    k, q, minus_lse, scale_log2, cap_log2, SOFTCAP, LSE_IN_SCORES
                )
                if LISTED and stage != FULL:
                    words = listed_words(work_ptr, tiles_ptr, row_list, step, keys % ROWS, BLOCK_M)
                    seen = listed_visible(words, row_offsets)
                    p = tl.where(seen, p, 0.0)
                elif MASKED:
                    seen = visible(
                        rows[None, :],
                        keys[:, None],
                        length_k,
                        diagonal,
                        window_left,
                        window_right,
                        LEFT,
                        RIGHT,
                    )
                    p = tl.where(seen, p, 0.0)
                elif LISTED and TAIL and dq_accum_ptr is not None:  # full blocks may have such keys
                    p = tl.where((keys < length_k)[:, None], p, 0.0)
                dout = load_parts(
                    dout_pointers, first_row * dout_step, rows, length_q, columns_v, HEAD_DIM_V,
                    MASKED and TAIL,
                )  # fmt: skip
                dv = dot_columns(p.to(dout[0].dtype), dout, dv)
                if DELTA_IN_DP:
                    dp = dot_rows(v, dout, tl.broadcast_to(minus_delta, (BLOCK_N, BLOCK_M)))
                else:
                    dp = dot_rows(v, dout) - (-minus_delta)  # a sum would become the bias
                ds = p * dp * slope
                if LISTED and stage != FULL:  # dp and slope of a hidden key may be NaN
                    ds = tl.where(seen, ds, 0.0)
                ds = ds.to(q[0].dtype)
                dk = dot_columns(ds, q, dk)
                if dq_accum_ptr is not None:
                    # A conversion of first_row itself would be Q's: Triton gives all GEMMs that
                    # share a value the layout of the last, and P goes through shared memory.
                    m_block = tl.cast(first_row // BLOCK_M, tl.int64)
                    dq_tile = dq_head + m_block * (BLOCK_M * BLOCK_D)
                    dq_pointers = dq_accum_pointers(dq_tile, BLOCK_M, columns, NUM_WARPS)
                    for i in tl.static_range(len(columns)):
                        k_part = k[i]
                        if LISTED and stage != FULL:  # 0 * NaN is NaN
                            k_part = tl.where(tl.abs(k_part) < float("inf"), k_part, 0.0)
                        add_unordered(dq_pointers[i], tl.dot(tl.trans(ds), k_part))

    dk_tile = row_pointer(dk_ptr, dk_strides, batch_idx, head_kv, first_key_row)
    dv_tile = row_pointer(dv_ptr, dv_strides, batch_idx, head_kv, first_key_row)
    dk_pointers = tile_pointers(dk_tile, key_offsets, columns, dk_strides.s)
    dv_pointers = tile_pointers(dv_tile, key_offsets, columns_v, dv_strides.s)
    store_parts(dk_pointers, scale_parts(dk, softmax_scale), keys, length_k, columns, HEAD_DIM)
    store_parts(dv_pointers, dv, keys, length_k, columns_v, HEAD_DIM_V)
