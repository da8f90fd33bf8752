"""FlashAttention-2 forward: one program holds an m_block and loops over the n_blocks.

The online softmax (Milakov & Gimelshein 2018) keeps, for each row, the running maximum m and the
running sum l of exp2(score - m); the accumulator is rescaled when m grows (Dao, arXiv 2307.08691,
algorithm 1). With num_splits > 1 several programs share a work tile, each with a split of the keys,
and ``combine_kernel`` combines them by their lse.

slices.py has the slices of an n_block, fp8.py what 8-bit inputs change.
"""

import triton
import triton.language as tl

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
    LN2,
    LOG2E,
    n_block_range,
    row_pointer,
    sequence,
    stage_range,
    stride_of,
    strides_of,
    tanh_exp2,
    visible,
)
from .fp8 import as_float16, as_operand, descale_of, with_unit
from .score_terms import (
    BOTH_SIDES,
    add_alibi,
    alibi_edges,
    alibi_shift,
    bias_pointers,
    load_bias,
    load_slope,
    store_max_logit,
)
from .slices import block_pointers, slice_pointers
from .softmax import finish_softmax, largest_of, softmax_of_block

DESCALE_SCALARS = [
    *(f"{x}_scale_{of}" for x in "qkv" for of in ("stride_b", "stride_h", "stride_n", "group")),
    *(name for x in "qkv" for name in (f"{x}_block", f"num_{x}_blocks")),
]


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
        "num_splits",
        *DESCALE_SCALARS,
        "mask_stride_b",
        "mask_stride_h",
        "num_listed_blocks",
    ]
)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    max_logit_ptr,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    sinks_ptr,
    slopes_ptr,
    bias_ptr,
    entries_ptr,
    work_ptr,
    tiles_ptr,
    q_descale,
    k_descale,
    v_descale,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    out_stride_p,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_p,
    lse_stride_b,
    lse_stride_h,
    num_m_blocks,
    num_heads,
    qhead_per_kvhead,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    window_left,
    window_right,
    num_splits,
    scale_log2,
    cap_log2,
    q_scale_stride_b,
    q_scale_stride_h,
    q_scale_stride_n,
    q_scale_group,
    q_block,
    num_q_blocks,
    k_scale_stride_b,
    k_scale_stride_h,
    k_scale_stride_n,
    k_scale_group,
    k_block,
    num_k_blocks,
    v_scale_stride_b,
    v_scale_stride_h,
    v_scale_stride_n,
    v_scale_group,
    v_block,
    num_v_blocks,
    slopes_stride_b,
    bias_stride_b,
    bias_stride_h,
    bias_stride_s,
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
    SLICE_N: tl.constexpr,
    K_STRIDE_S: tl.constexpr,
    V_STRIDE_S: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
    SPLIT: tl.constexpr,
    TAIL: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
):
    """out and lse of one work tile of one head. Grid: num_m_blocks * num_splits * num_heads *
    batch.

    Stride suffixes: p split, b batch, s sequence, h head. TAIL: the last n_block may be partial.
    BLOCK_D, BLOCK_DV: columns that are multiplied, in parts of PART_D, PART_DV (column_parts.py).
    SLICE_N divides BLOCK_N; it and BLOCK_M are powers of two. K_STRIDE_S, V_STRIDE_S: the strides
    k_stride_s and v_stride_s if the kernel is compiled for them, else 0.
    scale_log2 >= 0 (for a negative scale q is negated): with SOFTCAP it is the factor inside tanh.
    FP8: v is e4m3 as bytes, q and k are e4m3 bytes or int8, with descales as in ``descale_of``; an
    n_block lies within one descale block. scale_log2 may be negative.
    ALIBI, BIAS_UNIT: as in score_terms.py. entries_ptr, ...: the lists of a mask, block_lists.py,
    whose strides count lists; num_m_blocks then fills whole lists.
    max_logit_ptr: a float32 for each head, -inf at first.
    """
    pid = tl.program_id(0)
    m_block = pid % num_m_blocks
    head = pid // num_m_blocks
    split = 0
    if SPLIT:
        split = head % num_splits
        head = head // num_splits
    batch_idx = (head // num_heads).to(tl.int64)
    head = head % num_heads
    if RIGHT:  # later m_blocks have more keys: longest first shortens the last wave
        m_block = num_m_blocks - 1 - m_block
    LISTED: tl.constexpr = entries_ptr is not None
    if LISTED:
        lists = batch_idx * mask_stride_b + head * mask_stride_h
        m_block = in_work_order(work_ptr, lists, m_block, BLOCK_M)

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
        begin, full_begin, full_end, end = listed_edges(work_ptr, row_list, BLOCK_N)
    else:
        begin, full_begin, full_end, end = n_block_range(
            first_row, last_row, length_k, diagonal, window_left, window_right, BLOCK_N, LEFT, RIGHT
        )
    if SPLIT:
        part = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
        begin = begin + split * part
        end = tl.minimum(begin + part, end)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(begin, end))
        full_end = tl.maximum(tl.minimum(full_end, begin + part), full_begin)

    q_strides = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    k_strides = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_strides = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    out_stride_p = stride_of(out_stride_p, STRIDE_UNIT)
    out_strides = strides_of(out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT)
    SLICED: tl.constexpr = SLICE_N < BLOCK_N
    head_kv = (head // qhead_per_kvhead).to(tl.int64)
    head = head.to(tl.int64)
    row_offsets = tl.arange(0, BLOCK_M)
    columns = column_parts(BLOCK_D, PART_D)
    columns_v = column_parts(BLOCK_DV, PART_DV)
    keys = tl.arange(0, SLICE_N)
    rows = first_row + row_offsets
    q_tile = row_pointer(q_ptr, q_strides, batch_idx, head, start_q + first_row)
    k_tile = row_pointer(k_ptr, k_strides, batch_idx, head_kv, start_k)
    v_tile = row_pointer(v_ptr, v_strides, batch_idx, head_kv, start_k)
    k_pointers = block_pointers(k_tile, keys, columns, k_strides.s, K_STRIDE_S)
    v_pointers = block_pointers(v_tile, keys, columns_v, v_strides.s, V_STRIDE_S)
    k_step = tl.cast(k_strides.s, tl.int64)
    v_step = tl.cast(v_strides.s, tl.int64)

    q_pointers = tile_pointers(q_tile, row_offsets, columns, q_strides.s)
    q = load_parts(q_pointers, 0, rows, length_q, columns, HEAD_DIM, True)
    if NEGATIVE_SCALE:
        q = scale_parts(q, -1.0)
    if FP8:
        q = (as_operand(q[0], NATIVE_FP8),)
        row_factor = scale_log2 * descale_of(
            rows, head, batch_idx, q_descale, q_scale_stride_b, q_scale_stride_h, q_scale_stride_n,
            q_scale_group, q_block, num_q_blocks,
        )  # fmt: skip
        v_unit = 0.0
        largest_unit = 0.0

    # With SOFTCAP the scores are in the log2 domain before the maximum; else the scale is folded
    # into the argument of exp2. FP8 multiplies each n_block by its own factor.
    factor = 1.0 if SOFTCAP or FP8 else scale_log2
    NATURAL: tl.constexpr = ALIBI != 0 or bias_ptr is not None
    if NATURAL:
        factor = LOG2E
        if SOFTCAP:
            cap_log2 *= LN2
        elif FP8:
            row_factor *= LN2
        else:
            scale_log2 *= LN2
    if ALIBI != 0:
        slope = load_slope(slopes_ptr, slopes_stride_b, batch_idx, head)
    if bias_ptr is not None:
        bias_rows = bias_pointers(
            bias_ptr, bias_stride_b, bias_stride_h, bias_stride_s, batch_idx, head, rows, length_q,
            BIAS_UNIT,
        )[:, None]  # fmt: skip
    acc = zero_parts(BLOCK_M, columns_v)
    row_sum = tl.zeros((BLOCK_M, 8) if SLICED else (BLOCK_M,), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    edges = (begin, full_begin, full_end, end)
    CUT: tl.constexpr = ALIBI == BOTH_SIDES and not LISTED
    if CUT:
        edges = alibi_edges(edges, first_row, last_row, diagonal, BLOCK_N)
    LAST: tl.constexpr = 4 if CUT else 2
    for stage in tl.static_range(0 if LEFT else 1, LAST + 1 if RIGHT or TAIL or LISTED else LAST):
        MASKED = stage == 0 or stage == LAST
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
            if LISTED and stage == LAST:
                words = listed_words(work_ptr, tiles_ptr, row_list, step, rows % ROWS, BLOCK_N)
            scores = ()
            for slice_key in tl.static_range(0, BLOCK_N, SLICE_N):
                num_keys = length_k - first_key - slice_key
                k_slice = slice_pointers(
                    k_pointers, first_key, slice_key, k_step, keys, columns, K_STRIDE_S
                )
                k = load_parts(k_slice, 0, keys, num_keys, columns, HEAD_DIM, MASKED and TAIL)
                if FP8:
                    k = (as_operand(k[0], NATIVE_FP8),)
                s = dot_rows(q, k)
                if FP8:
                    if slice_key == 0:
                        k_scale = descale_of(
                            first_key, head, batch_idx, k_descale,
                            k_scale_stride_b, k_scale_stride_h, k_scale_stride_n,
                            k_scale_group, k_block, num_k_blocks,
                        )  # fmt: skip
                        row_scale = tl.broadcast_to(row_factor * k_scale, (BLOCK_M,))
                    s = s.to(tl.float32) * row_scale[:, None]  # int8: int32
                if SOFTCAP:
                    s = cap_log2 * tanh_exp2(s if FP8 else s * scale_log2, SOFTCAP)
                elif NATURAL and not FP8:
                    s = s * scale_log2
                if ALIBI != 0:
                    offset = diagonal - first_key
                    s = add_alibi(s, slope, rows, keys + slice_key, offset, stage, ALIBI, LISTED)
                if bias_ptr is not None:
                    bias_tile = bias_rows + (first_key + slice_key)
                    bias = load_bias(bias_tile, keys[None, :], num_keys, MASKED and TAIL)
                    s += bias.to(tl.float32)
                if LISTED:
                    if stage == LAST:
                        s = tl.where(listed_visible(words, keys + slice_key), s, float("-inf"))
                elif MASKED:
                    reach = diagonal - first_key - slice_key
                    seen = visible(
                        rows[:, None], keys[None, :], num_keys, reach, window_left, window_right,
                        LEFT, RIGHT,
                    )  # fmt: skip
                    s = tl.where(seen, s, float("-inf"))
                scores += (s,)
            largest = largest_of(scores) * factor
            shift = None
            if ALIBI != 0:
                shift = alibi_shift(slope, rows, diagonal - first_key, stage, ALIBI, LISTED)
                largest += shift
            probabilities, row_max, row_sum, decay = softmax_of_block(
                scores, largest, row_max, row_sum, factor, shift, MASKED or bias_ptr is not None
            )
            if FP8:
                new_unit = descale_of(
                    first_key, head, batch_idx, v_descale,
                    v_scale_stride_b, v_scale_stride_h, v_scale_stride_n,
                    v_scale_group, v_block, num_v_blocks,
                )  # fmt: skip
                v_unit, largest_unit, decay = with_unit(new_unit, v_unit, largest_unit, decay)
            acc = scale_parts(acc, decay[:, None])
            for slice_key in tl.static_range(0, BLOCK_N, SLICE_N):
                num_keys = length_k - first_key - slice_key
                v_slice = slice_pointers(
                    v_pointers, first_key, slice_key, v_step, keys, columns_v, V_STRIDE_S
                )
                if LISTED and stage == LAST:
                    hidden = hidden_columns(words, keys + slice_key)
                    v = load_parts(v_slice, 0, hidden, 1, columns_v, HEAD_DIM_V, True)
                else:
                    v = load_parts(
                        v_slice, 0, keys, num_keys, columns_v, HEAD_DIM_V, MASKED and TAIL
                    )
                if FP8:
                    v = (as_float16(v[0], NATIVE_FP8),)
                acc = dot_columns(probabilities[slice_key // SLICE_N].to(v[0].dtype), v, acc)

    if SLICED:
        row_sum = tl.sum(row_sum, 1)
    if max_logit_ptr is not None:
        store_max_logit(max_logit_ptr, head, row_max, rows, length_q)
    lse, acc_scale = finish_softmax(row_max, row_sum, sinks_ptr, head, split, SPLIT)
    acc = scale_parts(acc, acc_scale[:, None])
    if FP8:
        acc = scale_parts(acc, v_unit)
    lse_head = lse_ptr + split * lse_stride_p + batch_idx * lse_stride_b + head * lse_stride_h
    tl.store(lse_head + start_q + rows, lse, mask=rows < length_q)
    out_split = out_ptr + split * out_stride_p
    out_tile = row_pointer(out_split, out_strides, batch_idx, head, start_q + first_row)
    out_pointers = tile_pointers(out_tile, row_offsets, columns_v, out_strides.s)
    store_parts(out_pointers, acc, rows, length_q, columns_v, HEAD_DIM_V)
