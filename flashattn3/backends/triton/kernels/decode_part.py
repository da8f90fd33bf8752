"""One part of the keys of one tile of packed rows: what a program of ``decode_kernel`` computes."""

import triton
import triton.language as tl

from .cache_bits import in_float16, scale_of
from .cache_keys import attend_keys, edges_within
from .cache_parts import (
    key_lengths,
    keys_of_part,
    m_block_at,
    metadata_poison,
    query_span,
)
from .common import LN2, LOG2E, n_block_range, round_down, store_tile, tile_offsets
from .fp8 import as_float16
from .score_terms import with_sink
from .spans import finish_spans, join_span, part_of_span

# Replaces a score factor of 0, with which -inf would become NaN.
SMALLEST_FACTOR = tl.constexpr(2.0**-100)


@triton.jit
def attend_part(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    out_parts,
    lse_parts,
    page_table,
    cache_batch_idx,
    q_descale,
    k_descale,
    v_descale,
    sinks,
    metadata,
    tree_mask,
    slopes,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_stride_b,
    lse_stride_h,
    table_stride,
    tree_stride_b,
    tree_stride_s,
    slopes_stride_b,
    q_descale_stride_b,
    q_descale_stride_h,
    k_descale_strides,
    v_descale_strides,
    sequences,
    work,
    num_caches,
    num_pages,
    num_heads_kv,
    options_hash,
    window_left,
    window_right,
    scale_log2,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    SLOT_M: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    SPANS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE_WORDS: tl.constexpr,
    K_OF_KEYS: tl.constexpr,
    V_OF_KEYS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One part of one tile of ROWS packed rows, KEYS keys in a step, of a sequence. work: what
    ``find_work`` returns."""
    batch_idx, part, units, num_parts, slot = work
    cache_leftpad = sequences.cache_leftpad
    slot = (slot + part).to(tl.int64)
    split = part % num_parts
    head_kv = part // num_parts % num_heads_kv
    m_block = part // num_parts // num_heads_kv
    given, new, length_k = key_lengths(sequences, batch_idx)
    start_q, length_q = query_span(sequences, batch_idx)
    poison = 0.0
    if metadata is not None:
        poison += metadata_poison(
            metadata, options_hash, sequences, batch_idx, given, new, length_q
        )
    cache_idx = batch_idx
    if cache_batch_idx is not None:
        cache_idx = tl.load(cache_batch_idx + batch_idx)
        # A cache that does not exist is not read.
        has_cache = (cache_idx >= 0) & (cache_idx < num_caches)
        poison += tl.where(has_cache, 0.0, float("nan"))
        cache_idx = tl.where(has_cache, cache_idx, 0)
        readable = tl.where(has_cache, length_k, 0)
    else:
        readable = length_k
    first_row = m_block_at(m_block, length_q, GROUP, ROWS, RIGHT) * ROWS
    diagonal = length_k - length_q
    first_token = first_row // GROUP
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, length_q - 1)
    begin, full_begin, full_end, end = n_block_range(
        first_token, last_token, readable, diagonal, window_left, window_right, KEYS, LEFT, RIGHT
    )
    leftpad = 0
    if cache_leftpad is not None:
        leftpad = tl.maximum(tl.load(cache_leftpad + batch_idx), 0)
        begin = tl.maximum(begin, round_down(leftpad, KEYS))
        full_begin = tl.maximum(full_begin, tl.cdiv(leftpad, KEYS) * KEYS)
        full_end = tl.maximum(full_end, full_begin)
    if TREE_WORDS > 0:
        full_end = tl.minimum(full_end, round_down(tl.maximum(diagonal, 0), KEYS))
        full_end = tl.maximum(full_end, full_begin)
    # What is before the first visible key may be anything: pages given back, padding.
    lowest = leftpad
    if LEFT:
        lowest = tl.maximum(lowest, first_token + diagonal - window_left)
    part_begin, part_end = keys_of_part(split, num_parts, units, UNIT)
    first_key = begin
    if SPANS:
        # Spans are counted from key 0, and parts from the first span that the sequence needs.
        first_key = leftpad
        if LEFT:
            first_key = tl.maximum(first_key, diagonal - window_left)
        first_key = round_down(first_key, UNIT)
    edges = edges_within(
        (begin, full_begin, full_end, end), first_key + part_begin, first_key + part_end, KEYS
    )

    row_offsets = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    rows = first_row + row_offsets
    tokens = rows // GROUP
    heads = head_kv * GROUP + rows % GROUP
    valid = tokens < length_q
    batch_64 = batch_idx.to(tl.int64)
    q_rows = batch_64 * q_strides.b + (start_q + tokens).to(tl.int64) * q_strides.s
    q = tl.load(
        q_ptr + (q_rows + heads.to(tl.int64) * q_strides.h)[:, None] + columns[None, :],
        mask=valid[:, None] & (columns < HEAD_DIM)[None, :],
        other=0.0,
    )
    tree_low = tokens
    tree_high = tokens
    if TREE_WORDS > 0:
        words = (
            tree_mask + batch_64 * tree_stride_b + (start_q + tokens).to(tl.int64) * tree_stride_s
        )
        tree_low = tl.load(words, mask=valid, other=0)
        if TREE_WORDS == 2:
            tree_high = tl.load(words + 1, mask=valid, other=0)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + batch_64 * slopes_stride_b + heads, mask=valid, other=0.0) * LOG2E
    if q.dtype == tl.uint8:
        q = as_float16(q, NATIVE_FP8)
    if q_descale is not None:
        scale_log2 *= tl.load(
            q_descale + batch_64 * q_descale_stride_b + head_kv * q_descale_stride_h
        )
    if k_descale is not None and not K_OF_KEYS:
        scale_log2 *= tl.load(
            k_descale + batch_64 * k_descale_strides.b + head_kv * k_descale_strides.h
        )
    # A negative factor is that of -q, so that the maximum may be taken of raw scores.
    q = tl.where(scale_log2 < 0, -q, q)
    factor = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        if q.dtype == tl.bfloat16:
            q, factor = in_float16(q)
        factor *= scale_of(k_ptr.dtype.element_ty, NATIVE_FP8)
    factor *= tl.abs(scale_log2)
    factor = tl.where(factor == 0, SMALLEST_FACTOR, factor)
    k_head = k_ptr + head_kv.to(tl.int64) * k_strides.h
    v_head = v_ptr + head_kv.to(tl.int64) * v_strides.h
    table_row = page_table
    of_v = 1.0
    if K_OF_KEYS:
        k_descale += head_kv * k_descale_strides.h
    if V_OF_KEYS:
        v_descale += head_kv * v_descale_strides.h
    elif v_descale is not None:
        of_v = tl.load(v_descale + batch_64 * v_descale_strides.b + head_kv * v_descale_strides.h)
    if PAGE_SIZE == 0:
        k_head += cache_idx.to(tl.int64) * k_strides.b
        v_head += cache_idx.to(tl.int64) * v_strides.b
        if K_OF_KEYS:
            k_descale += cache_idx.to(tl.int64) * k_descale_strides.b
        if V_OF_KEYS:
            v_descale += cache_idx.to(tl.int64) * v_descale_strides.b
    else:
        table_row += cache_idx.to(tl.int64) * table_stride
    whole = num_parts == 1
    if SPANS:
        out = tl.zeros((ROWS, BLOCK_DV), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        lse = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        for span in range(round_down(edges[0], UNIT), edges[3], UNIT):
            acc, row_sum, row_max, lost = attend_keys(
                q, k_head, v_head, k_strides, v_strides, k_descale, v_descale, k_descale_strides,
                v_descale_strides, table_row, num_pages,
                edges_within(edges, span, span + UNIT, KEYS), lowest, readable, cache_leftpad,
                leftpad, tree_low, tree_high, slope, tokens, length_k, diagonal, window_left,
                window_right, factor, cap_log2,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, ROWS, KEYS, PAGE_SIZE, LEFT, RIGHT,
                SOFTCAP, TREE_WORDS, K_OF_KEYS, V_OF_KEYS, NATIVE_FP8, WORDS,
            )  # fmt: skip
            part_out, part_lse = part_of_span(acc, row_sum, row_max, of_v)
            out, total, lse = join_span(out, total, lse, part_out, part_lse + (poison + lost))
        if whole:
            out, lse = finish_spans(out, total, lse, sinks, heads, valid)
            out, lse = out + poison, lse + poison
    else:
        acc, row_sum, row_max, lost = attend_keys(
            q, k_head, v_head, k_strides, v_strides, k_descale, v_descale, k_descale_strides,
            v_descale_strides, table_row, num_pages, edges, lowest, readable, cache_leftpad,
            leftpad, tree_low, tree_high, slope, tokens, length_k, diagonal, window_left,
            window_right, factor, cap_log2,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, ROWS, KEYS, PAGE_SIZE, LEFT, RIGHT, SOFTCAP,
            TREE_WORDS, K_OF_KEYS, V_OF_KEYS, NATIVE_FP8, WORDS,
        )  # fmt: skip
        poison += lost
        acc_scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
        if sinks is not None:
            # A tile of several parts gets its sink when they are joined.
            sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32)
            sink = tl.where(whole, sink, float("-inf"))
            acc_scale, row_max, row_sum = with_sink(acc_scale, row_max, row_sum, sink)
        empty = row_sum == 0.0
        lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(row_sum)) + poison
        out = acc * (acc_scale * tl.where(empty, 1.0, 1.0 / row_sum) * of_v)[:, None] + poison
    if whole:
        out_rows = batch_64 * out_strides.b + (start_q + tokens).to(tl.int64) * out_strides.s
        out_tile = (
            out_ptr + (out_rows + heads.to(tl.int64) * out_strides.h)[:, None] + columns_v[None, :]
        )
        store_tile(out_tile, out, tokens, length_q, columns_v, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)
        lse_rows = batch_64 * lse_stride_b + heads.to(tl.int64) * lse_stride_h + start_q + tokens
        tl.store(lse_ptr + lse_rows, lse, mask=valid)
    else:
        tile = out_parts + slot * SLOT_M * HEAD_DIM_V
        tile += tile_offsets(row_offsets, columns_v, HEAD_DIM_V)
        num_rows = tl.minimum(ROWS, SLOT_M)
        store_tile(tile, out, row_offsets, num_rows, columns_v, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)
        tl.store(lse_parts + slot * SLOT_M + row_offsets, lse, mask=row_offsets < num_rows)
