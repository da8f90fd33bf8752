"""Attention to cached keys: packed query heads, pages, and parts of equal length.

A tile holds BLOCK_M packed rows of one KV head: row r is query token r // GROUP of query head
r % GROUP, so K and V are read once for all query heads that share them.

The grid is fixed by what the host knows, the work by the lengths on the device: every program finds
its part by a prefix sum over the batch (cache_parts.py), and whether its sequence has few rows. A
tile in one part writes out and lse; parts of others go to a workspace, which
``combine_parts_kernel`` joins. Neither depends on the capacity of the cache, so a CUDA graph stays
right for other lengths.
"""

import triton
import triton.language as tl

from .cache_parts import Sequences, find_work, query_span
from .common import Strides, strides_of
from .decode_part import attend_part


@triton.jit(
    do_not_specialize=[
        "out_parts", "lse_parts", "cache_seqlens", "page_table", "cache_batch_idx",
        "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new", "q_descale", "k_descale", "v_descale",
        "sinks", "metadata", "tree_mask", "slopes", "lse_ptr", "lse_stride_b", "lse_stride_h",
        "table_stride", "tree_stride_b", "tree_stride_s", "slopes_stride_b",
        "q_descale_stride_b", "q_descale_stride_h", "k_descale_stride_b", "k_descale_stride_s",
        "k_descale_stride_h", "v_descale_stride_b", "v_descale_stride_s", "v_descale_stride_h",
        "batch", "seqlen_q", "total_q", "seqlen_k",
        "seqlen_new", "capacity", "num_caches", "num_pages", "num_heads_kv", "num_ctas",
        "num_splits", "options_hash", "window_left", "window_right",
    ]
)  # fmt: skip
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    out_parts,
    lse_parts,
    cache_seqlens,
    page_table,
    cache_batch_idx,
    cache_leftpad,
    cu_seqlens_q,
    cu_seqlens_k_new,
    q_descale,
    k_descale,
    v_descale,
    sinks,
    metadata,
    tree_mask,
    slopes,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_b,
    lse_stride_h,
    table_stride,
    tree_stride_b,
    tree_stride_s,
    slopes_stride_b,
    q_descale_stride_b,
    q_descale_stride_h,
    k_descale_stride_b,
    k_descale_stride_s,
    k_descale_stride_h,
    v_descale_stride_b,
    v_descale_stride_s,
    v_descale_stride_h,
    batch,
    seqlen_q,
    total_q,
    seqlen_k,
    seqlen_new,
    capacity,
    num_caches,
    num_pages,
    num_heads_kv,
    num_ctas,
    num_splits,
    options_hash,
    window_left,
    window_right,
    scale_log2,
    cap_log2,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEW_M: tl.constexpr,
    FEW_N: tl.constexpr,
    SLOT_M: tl.constexpr,
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
    """One part of one tile of packed rows. Grid: as many parts as there can be.

    Stride suffixes: b batch (of caches: cache or page), s sequence, h head. seqlen_q: the longest.
    seqlen_k: where cache_seqlens is None. scale_log2: with SOFTCAP the factor inside tanh.
    out_parts (slots, SLOT_M, HEAD_DIM_V), lse_parts (slots, SLOT_M): the workspace.
    Sequences of at most FEW_M packed rows have tiles of FEW_M rows by FEW_N keys; FEW_M 0: none
    has. UNIT: keys in which parts are counted, a multiple of BLOCK_N and FEW_N. SPANS: each UNIT
    keys from key 0 are a span of their own (spans.py), and a part is one span or all of a tile.
    K_OF_KEYS, V_OF_KEYS: whether a descale is of a page or a token, then with the batch stride of
    pages, or of dense caches, and the stride 0 of the tokens of a page; else of the sequence.
    e4m3 is passed as bytes. NATIVE_FP8: whether the GPU converts it. WORDS: caches of 8 bits are
    loaded by two bytes or more; else they, or their rows, begin at any byte.
    """
    sequences = Sequences(
        cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, batch, seqlen_q, total_q,
        seqlen_k, seqlen_new, capacity,
    )  # fmt: skip
    work = find_work(
        tl.program_id(0), sequences, window_left, num_heads_kv, num_ctas, num_splits, False,
        GROUP, BLOCK_M, FEW_M, UNIT, LEFT,
    )  # fmt: skip
    batch_idx = work[0]
    if batch_idx < 0:
        return
    _, length_q = query_span(sequences, batch_idx)
    for kind in tl.static_range(1 + (FEW_M > 0)):
        if (length_q * GROUP <= FEW_M) == (kind == 1):
            attend_part(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, out_parts, lse_parts, page_table,
                cache_batch_idx, q_descale, k_descale, v_descale, sinks, metadata, tree_mask,
                slopes,
                strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT),
                strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT),
                strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT),
                strides_of(out_stride_b, out_stride_s, out_stride_h, STRIDE_UNIT),
                lse_stride_b, lse_stride_h, table_stride, tree_stride_b, tree_stride_s,
                slopes_stride_b, q_descale_stride_b, q_descale_stride_h,
                Strides(k_descale_stride_b, k_descale_stride_s, k_descale_stride_h),
                Strides(v_descale_stride_b, v_descale_stride_s, v_descale_stride_h),
                sequences, work, num_caches, num_pages, num_heads_kv, options_hash, window_left,
                window_right, scale_log2, cap_log2, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV,
                GROUP, SLOT_M, FEW_M if kind == 1 else BLOCK_M, FEW_N if kind == 1 else BLOCK_N,
                UNIT, SPANS, PAGE_SIZE, LEFT, RIGHT, SOFTCAP, TREE_WORDS, K_OF_KEYS, V_OF_KEYS,
                NATIVE_FP8, WORDS,
            )  # fmt: skip
