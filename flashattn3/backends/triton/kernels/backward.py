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
from triton import knobs

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
    load_tile,
    m_block_range,
    n_block_range,
    round_down,
    round_up,
    sequence,
    stage_range,
    store_tile,
    strides_of,
    tanh_exp2,
    tile_offsets,
    visible,
)
from .score_terms import alibi_on_minus_lse, bias_pointers, gradient_of_sink, load_bias

# minus_lse and minus_delta of a sequence are padded to a multiple of this many rows, so that no
# m_block reads out of bounds.
LSE_DELTA_ROWS = tl.constexpr(128)
# Whether Triton interprets the kernels below, which it decides when it decorates them.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _block_and_head(num_blocks, num_heads):
    """Block, batch index and head of this program of a grid of num_blocks * num_heads * batch; the
    last two in 64 bits."""
    pid = tl.program_id(0)
    head = pid // num_blocks
    return pid % num_blocks, (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)


@triton.jit
def _lse_delta_start(start_q, batch_idx, VARLEN: tl.constexpr):
    """First row of a sequence in minus_lse and minus_delta, which pad every sequence."""
    start = start_q
    if VARLEN:
        start = round_down(start_q + batch_idx * LSE_DELTA_ROWS, LSE_DELTA_ROWS)
    return tl.multiple_of(start, LSE_DELTA_ROWS)


@triton.jit
def _dq_index(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Index of each element of a (BLOCK_M, WIDTH) tile of dq_accum, as two parts to be added.

    The index is register * threads + thread, of the thread and the register that hold the element
    in the accumulator of dS K: mma.sync tiles of 16 x 8 with two columns of rows r and r + 8 per
    lane, warps side by side along the columns. So an addition of a warp hits 32 consecutive floats,
    and the addresses of a thread differ by constants. It is a permutation of the tile: with another
    layout of the accumulator the additions are scattered, not wrong. FlashAttention-2 also keeps
    dq_accum in the order of its accumulator (flash_bwd_kernel.h, atomicAdd of acc_dq).
    """
    # Not min(), of which Triton 3.5 makes no constexpr.
    WARPS: tl.constexpr = NUM_WARPS if NUM_WARPS <= WIDTH // 8 else WIDTH // 8
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    thread = (rows % 8 * 4)[:, None] + (columns // 8 % WARPS * 32 + columns // 2 % 4)[None, :]
    register = (rows // 8 * 2)[:, None] + (
        columns // (8 * WARPS) * (BLOCK_M // 4) + columns % 2
    )[None, :]  # fmt: skip
    return thread, register * (32 * WARPS)


@triton.jit
def _dq_pointers(tile, BLOCK_M: tl.constexpr, columns, NUM_WARPS: tl.constexpr):
    """Pointers to the elements of a tile of dq_accum, one part of its columns after the other."""
    pointers = ()
    for i in tl.static_range(len(columns)):
        thread, register = _dq_index(BLOCK_M, columns[i].shape[0], NUM_WARPS)
        pointers += (tile + i * BLOCK_M * columns[0].shape[0] + thread + register,)
    return pointers


@triton.jit
def _add(pointers, values):
    """Add in float32 in global memory, in any order.

    One RED per register, by assembly: tl.atomic_add first converts the accumulator's layout, which
    takes a round trip through shared memory and four barriers.
    """
    if INTERPRETED:
        tl.atomic_add(pointers, values, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            "{ red.relaxed.gpu.global.add.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f",
            [pointers.to(tl.int64, bitcast=True), values],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
    out_stride_b, out_stride_s, out_stride_h = strides_of(
        out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT
    )
    dout_stride_b, dout_stride_s, dout_stride_h = strides_of(
        dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT
    )
    m_block, batch_idx, head = _block_and_head(num_m_blocks, num_heads)
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
    out_tile = out_ptr + batch_idx * out_stride_b + head * out_stride_h + tensor_row * out_stride_s
    dout_tile = (
        dout_ptr + batch_idx * dout_stride_b + head * dout_stride_h + tensor_row * dout_stride_s
    )
    out_tile += tile_offsets(row_offsets, columns, out_stride_s)
    dout_tile += tile_offsets(row_offsets, columns, dout_stride_s)
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
    lse_delta += _lse_delta_start(start_q, batch_idx, VARLEN) + rows
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


@triton.jit
def _probabilities(
    a, b, minus_lse, scale_log2, cap_log2, SOFTCAP: tl.constexpr, LSE_IN_SCORES: tl.constexpr
):
    """P = exp(scale * a b^T - lse), and the derivative of the cap at the score.

    LSE_IN_SCORES: minus_lse is in units of a raw score and is the accumulator bias of the GEMM.
    Each exponential then needs one multiply, and no register holds lse.
    """
    slope = 1.0
    if LSE_IN_SCORES:
        shape: tl.constexpr = (a[0].shape[0], b[0].shape[0])
        p = tl.math.exp2(dot_rows(a, b, tl.broadcast_to(minus_lse, shape)) * scale_log2)
    elif SOFTCAP:
        capped = tanh_exp2(dot_rows(a, b) * scale_log2, SOFTCAP)
        p = tl.math.exp2(capped * cap_log2 + minus_lse)
        slope = 1.0 - capped * capped
    else:
        p = tl.math.exp2(dot_rows(a, b) * scale_log2 + minus_lse)
    return p, slope


@triton.jit(
    do_not_specialize=[
        "num_n_blocks",
        "num_heads_kv",
        "group",
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
    tiles of BLOCK_M rows (``_dq_pointers``). None: ``bwd_dq_kernel`` computes dQ.

    S and dP are computed transposed, keys by rows, so that P^T and dS^T feed the next GEMM from
    registers. TAIL: the last m_block or the last n_block may be partial. DELTA_IN_DP: minus_delta
    is the accumulator bias of dP. entries_ptr, ...: the lists of keys of a mask, of rows that are
    keys (block_lists.py); num_n_blocks then fills whole lists.
    """
    q_stride_b, q_stride_s, q_stride_h = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    k_stride_b, k_stride_s, k_stride_h = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_stride_b, v_stride_s, v_stride_h = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    dout_stride_b, dout_stride_s, dout_stride_h = strides_of(
        dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT
    )
    dk_stride_b, dk_stride_s, dk_stride_h = strides_of(
        dk_stride_b, dk_stride_s, dk_stride_h, STRIDE_UNIT
    )
    dv_stride_b, dv_stride_s, dv_stride_h = strides_of(
        dv_stride_b, dv_stride_s, dv_stride_h, STRIDE_UNIT
    )
    n_block, batch_idx, head_kv = _block_and_head(num_n_blocks, num_heads_kv)
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
    k_tile = k_ptr + batch_idx * k_stride_b + head_kv * k_stride_h + first_key_row * k_stride_s
    v_tile = v_ptr + batch_idx * v_stride_b + head_kv * v_stride_h + first_key_row * v_stride_s
    k_pointers = tile_pointers(k_tile, key_offsets, columns, k_stride_s)
    v_pointers = tile_pointers(v_tile, key_offsets, columns_v, v_stride_s)
    k = load_parts(k_pointers, 0, keys, length_k, columns, HEAD_DIM, TAIL)
    v = load_parts(v_pointers, 0, keys, length_k, columns_v, HEAD_DIM_V, TAIL)

    q_step = tl.cast(q_stride_s, tl.int64)
    dout_step = tl.cast(dout_stride_s, tl.int64)

    dk = zero_parts(BLOCK_N, columns)
    dv = zero_parts(BLOCK_N, columns_v)
    for qhead in range(qhead_per_kvhead):
        head = head_kv * qhead_per_kvhead + qhead
        q_head = q_ptr + batch_idx * q_stride_b + head * q_stride_h + start_q * q_stride_s
        dout_head = (
            dout_ptr + batch_idx * dout_stride_b + head * dout_stride_h + start_q * dout_stride_s
        )
        q_pointers = tile_pointers(q_head, row_offsets, columns, q_stride_s)
        dout_pointers = tile_pointers(dout_head, row_offsets, columns_v, dout_stride_s)
        lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
        lse_delta += _lse_delta_start(start_q, batch_idx, VARLEN)
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
                p, slope = _probabilities(
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
                    dq_pointers = _dq_pointers(dq_tile, BLOCK_M, columns, NUM_WARPS)
                    for i in tl.static_range(len(columns)):
                        k_part = k[i]
                        if LISTED and stage != FULL:  # 0 * NaN is NaN
                            k_part = tl.where(tl.abs(k_part) < float("inf"), k_part, 0.0)
                        _add(dq_pointers[i], tl.dot(tl.trans(ds), k_part))

    dk_tile = dk_ptr + batch_idx * dk_stride_b + head_kv * dk_stride_h + first_key_row * dk_stride_s
    dv_tile = dv_ptr + batch_idx * dv_stride_b + head_kv * dv_stride_h + first_key_row * dv_stride_s
    dk_pointers = tile_pointers(dk_tile, key_offsets, columns, dk_stride_s)
    dv_pointers = tile_pointers(dv_tile, key_offsets, columns_v, dv_stride_s)
    store_parts(dk_pointers, scale_parts(dk, softmax_scale), keys, length_k, columns, HEAD_DIM)
    store_parts(dv_pointers, dv, keys, length_k, columns_v, HEAD_DIM_V)


@triton.jit(
    do_not_specialize=[
        "num_m_blocks",
        "num_heads",
        "group",
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
    q_stride_b, q_stride_s, q_stride_h = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    k_stride_b, k_stride_s, k_stride_h = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_stride_b, v_stride_s, v_stride_h = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    dout_stride_b, dout_stride_s, dout_stride_h = strides_of(
        dout_stride_b, dout_stride_s, dout_stride_h, STRIDE_UNIT
    )
    dq_stride_b, dq_stride_s, dq_stride_h = strides_of(
        dq_stride_b, dq_stride_s, dq_stride_h, STRIDE_UNIT
    )
    m_block, batch_idx, head = _block_and_head(num_m_blocks, num_heads)
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
    q_tile = q_ptr + batch_idx * q_stride_b + head * q_stride_h + first_q_row * q_stride_s
    dout_tile = (
        dout_ptr + batch_idx * dout_stride_b + head * dout_stride_h + first_q_row * dout_stride_s
    )
    k_tile = k_ptr + batch_idx * k_stride_b + head_kv * k_stride_h + start_k * k_stride_s
    v_tile = v_ptr + batch_idx * v_stride_b + head_kv * v_stride_h + start_k * v_stride_s
    q_pointers = tile_pointers(q_tile, row_offsets, columns, q_stride_s)
    dout_pointers = tile_pointers(dout_tile, row_offsets, columns_v, dout_stride_s)
    k_pointers = tile_pointers(k_tile, keys, columns, k_stride_s)
    v_pointers = tile_pointers(v_tile, keys, columns_v, v_stride_s)
    q = load_parts(q_pointers, 0, rows, length_q, columns, HEAD_DIM, True)
    dout = load_parts(dout_pointers, 0, rows, length_q, columns_v, HEAD_DIM_V, True)
    lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
    lse_delta += _lse_delta_start(start_q, batch_idx, VARLEN)
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
    k_step = tl.cast(k_stride_s, tl.int64)
    v_step = tl.cast(v_stride_s, tl.int64)
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
            p, slope = _probabilities(q, k, term, scale_log2, cap_log2, SOFTCAP, LSE_IN_SCORES)
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

    dq_tile = dq_ptr + batch_idx * dq_stride_b + head * dq_stride_h + first_q_row * dq_stride_s
    dq_pointers = tile_pointers(dq_tile, row_offsets, columns, dq_stride_s)
    store_parts(dq_pointers, scale_parts(dq, softmax_scale), rows, length_q, columns, HEAD_DIM)


@triton.jit(do_not_specialize=["num_m_blocks", "num_heads", "seqlen_q", "total_q"])
def bwd_postprocess_kernel(
    dq_accum_ptr,
    dq_ptr,
    cu_seqlens_q,
    seqused_q,
    lse_delta_stride_b,
    lse_delta_stride_h,
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    num_m_blocks,
    num_heads,
    seqlen_q,
    total_q,
    softmax_scale,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    VARLEN: tl.constexpr,
    USED_Q: tl.constexpr,
):
    """dQ = softmax_scale * dq_accum. Grid: num_m_blocks * num_heads * batch.

    BLOCK_M, NUM_WARPS: of the ``bwd_kernel`` that added to dq_accum.
    """
    dq_stride_b, dq_stride_s, dq_stride_h = strides_of(
        dq_stride_b, dq_stride_s, dq_stride_h, STRIDE_UNIT
    )
    m_block, batch_idx, head = _block_and_head(num_m_blocks, num_heads)
    first_row = m_block * BLOCK_M
    start_q, length_q = sequence(
        cu_seqlens_q, seqused_q, batch_idx, seqlen_q, total_q, VARLEN, USED_Q
    )
    if first_row >= length_q:
        return
    row_offsets = tl.arange(0, BLOCK_M)
    columns = column_parts(BLOCK_D, PART_D)
    lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
    lse_delta += _lse_delta_start(start_q, batch_idx, VARLEN)
    accum_tile = dq_accum_ptr + (lse_delta + first_row) * BLOCK_D
    accum_pointers = _dq_pointers(accum_tile, BLOCK_M, columns, NUM_WARPS)
    dq = ()
    for i in tl.static_range(len(columns)):
        dq += (tl.load(accum_pointers[i]),)
    first_q_row = start_q + first_row
    dq_tile = dq_ptr + batch_idx * dq_stride_b + head * dq_stride_h + first_q_row * dq_stride_s
    dq_pointers = tile_pointers(dq_tile, row_offsets, columns, dq_stride_s)
    rows = first_row + row_offsets
    store_parts(dq_pointers, scale_parts(dq, softmax_scale), rows, length_q, columns, HEAD_DIM)
