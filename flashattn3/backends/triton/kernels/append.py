"""New keys and values into a cache, dense or paged, with rotary position embedding on the way
(Su et al., RoFormer, arXiv 2104.09864), and the rotated queries beside them."""

import triton
import triton.language as tl

from .append_rows import DIVIDE, append_rows, copy_columns, write_rows
from .common import Strides, strides_of

CHUNK = tl.constexpr(64)  # sequences that the tokens of a program are compared with at once


@triton.jit
def sequence_of(rows, cu_seqlens, seqlen, num_rows, batch):
    """Sequence of each row, the row's index in it, and whether a sequence has the row."""
    exists = rows < num_rows
    if cu_seqlens is None:
        batch_idx = rows // tl.maximum(seqlen, 1)
        token = rows - batch_idx * seqlen
        exists = exists & (batch_idx < batch)
    else:
        # The number of sequences that end at or before a row.
        batch_idx = tl.zeros_like(rows)
        for first in range(0, batch, CHUNK):
            others = first + tl.arange(0, CHUNK)
            ends = tl.load(cu_seqlens + others + 1, mask=others < batch, other=2147483647)
            batch_idx += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
        exists = exists & (batch_idx < batch)
        token = rows - tl.load(cu_seqlens + batch_idx, mask=exists, other=0)
        exists = exists & (token >= 0)
    return batch_idx, token, exists


@triton.jit
def cached_tokens(cache_seqlens, seqlen_k, batch_idx, exists, capacity):
    """Tokens that the cache of each row's sequence holds."""
    cached = tl.zeros_like(batch_idx) + seqlen_k
    if cache_seqlens is not None:
        cached = tl.load(cache_seqlens + batch_idx, mask=exists, other=0)
    return tl.minimum(tl.maximum(cached, 0), capacity)


@triton.jit
def rotate_queries(
    q_head,
    out_head,
    rows,
    columns,
    cache_seqlens,
    cu_seqlens_q,
    rotary_cos,
    rotary_sin,
    rotary_seqlens,
    q_strides,
    q_out_strides,
    rotary_stride,
    batch,
    num_rows_q,
    seqlen_q,
    seqlen_k,
    capacity,
    num_positions,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_Q_POSITION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of one head of q, rotated; rows of no sequence are copied as they are."""
    one = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    batch_idx, token, exists = sequence_of(rows, cu_seqlens_q, seqlen_q, num_rows_q, batch)
    position = cached_tokens(cache_seqlens, seqlen_k, batch_idx, exists, capacity)
    if rotary_seqlens is not None:
        position = tl.load(rotary_seqlens + batch_idx, mask=exists, other=0)
    if not ONE_Q_POSITION:
        position += token
    if cu_seqlens_q is None:
        row = token.to(tl.int64)
        source = q_head + batch_idx.to(tl.int64) * q_strides.b + row * q_strides.s
        target = out_head + batch_idx.to(tl.int64) * q_out_strides.b + row * q_out_strides.s
    else:
        source = q_head + rows.to(tl.int64) * q_strides.s
        target = out_head + rows.to(tl.int64) * q_out_strides.s
    outside = (rows < num_rows_q) & (exists == 0)
    copy_columns(source, target, one, outside, columns, 0, HEAD_DIM, HEAD_DIM, DIVIDE)
    write_rows(source, target, one, exists, position, columns, rotary_cos, rotary_sin,
               rotary_stride, num_positions, HEAD_DIM, HALF, INTERLEAVED, DIVIDE)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_q", "cu_seqlens_k_new",
        "rotary_cos", "rotary_sin", "rotary_seqlens", "k_descale", "v_descale", "table_stride",
        "rotary_stride", "k_descale_stride_b", "k_descale_stride_s", "k_descale_stride_h",
        "v_descale_stride_b", "v_descale_stride_s", "v_descale_stride_h", "batch", "num_rows_q",
        "num_rows_k", "seqlen_q", "seqlen_k", "seqlen_new", "capacity", "num_caches", "num_pages",
        "num_positions", "num_heads_q", "num_heads_kv",
    ]
)  # fmt: skip
def append_kernel(
    k_ptr,
    v_ptr,
    k_cache,
    v_cache,
    q_ptr,
    q_out,
    cache_seqlens,
    page_table,
    cache_batch_idx,
    cu_seqlens_q,
    cu_seqlens_k_new,
    rotary_cos,
    rotary_sin,
    rotary_seqlens,
    k_descale,
    v_descale,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    k_cache_stride_b,
    k_cache_stride_s,
    k_cache_stride_h,
    v_cache_stride_b,
    v_cache_stride_s,
    v_cache_stride_h,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_out_stride_b,
    q_out_stride_s,
    q_out_stride_h,
    table_stride,
    rotary_stride,
    k_descale_stride_b,
    k_descale_stride_s,
    k_descale_stride_h,
    v_descale_stride_b,
    v_descale_stride_s,
    v_descale_stride_h,
    batch,
    num_rows_q,
    num_rows_k,
    seqlen_q,
    seqlen_k,
    seqlen_new,
    capacity,
    num_caches,
    num_pages,
    num_positions,
    num_heads_q,
    num_heads_kv,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_Q_POSITION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_DESCALE: tl.constexpr,
    V_DESCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows of one head: of k, then of v, then of q in the order of the grid's second axis.

    Grid: (blocks of rows, 2 * num_heads_kv + num_heads_q). num_rows_q, num_rows_k: of all
    sequences. HALF: half of the rotated columns, 0 without tables. A token that has no place in the
    cache is not written. seqlen_k: where cache_seqlens is None. K_DESCALE, V_DESCALE: a descale is
    PER_SEQUENCE, of PAGES or, written here, of TOKENS (append_rows.py), whose b strides are those
    of pages or dense caches.
    """
    k_strides = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_strides = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    k_cache_strides = strides_of(k_cache_stride_b, k_cache_stride_s, k_cache_stride_h, STRIDE_UNIT)
    v_cache_strides = strides_of(v_cache_stride_b, v_cache_stride_s, v_cache_stride_h, STRIDE_UNIT)
    q_strides = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    q_out_strides = strides_of(q_out_stride_b, q_out_stride_s, q_out_stride_h, STRIDE_UNIT)
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, 64)
    if head >= 2 * num_heads_kv:
        if q_ptr is not None:
            head_q = (head - 2 * num_heads_kv).to(tl.int64)
            rotate_queries(
                q_ptr + head_q * q_strides.h, q_out + head_q * q_out_strides.h, rows, columns,
                cache_seqlens, cu_seqlens_q, rotary_cos, rotary_sin, rotary_seqlens,
                q_strides, q_out_strides, rotary_stride, batch, num_rows_q, seqlen_q, seqlen_k,
                capacity, num_positions,
                HEAD_DIM, HALF, INTERLEAVED, ONE_Q_POSITION, BLOCK,
            )  # fmt: skip
        return
    of_k = head < num_heads_kv
    head_kv = (head % num_heads_kv).to(tl.int64)
    batch_idx, token, exists = sequence_of(rows, cu_seqlens_k_new, seqlen_new, num_rows_k, batch)
    cached = cached_tokens(cache_seqlens, seqlen_k, batch_idx, exists, capacity)
    place = cached + token
    exists = exists & (place < capacity)
    cache_idx = batch_idx
    if cache_batch_idx is not None:
        cache_idx = tl.load(cache_batch_idx + batch_idx, mask=exists, other=-1)
        exists = exists & (cache_idx >= 0) & (cache_idx < num_caches)
    if PAGE_SIZE > 0:
        entries = page_table + cache_idx.to(tl.int64) * table_stride + place // PAGE_SIZE
        cache_idx = tl.load(entries, mask=exists, other=-1)
        exists = exists & (cache_idx >= 0) & (cache_idx < num_pages)
        place = place % PAGE_SIZE
    batch_64, cache_64, place = batch_idx.to(tl.int64), cache_idx.to(tl.int64), place.to(tl.int64)
    row = (rows if cu_seqlens_k_new is not None else token).to(tl.int64)
    if of_k:
        source = k_ptr + head_kv * k_strides.h + row * k_strides.s
        if cu_seqlens_k_new is None:
            source += batch_64 * k_strides.b
        target = k_cache + head_kv * k_cache_strides.h
        target += cache_64 * k_cache_strides.b + place * k_cache_strides.s
        offset = cached
        if HALF > 0 and rotary_seqlens is not None:
            offset = tl.load(rotary_seqlens + batch_idx, mask=exists, other=0)
        append_rows(
            source, target, k_descale, batch_64, cache_64, place, head_kv,
            Strides(k_descale_stride_b, k_descale_stride_s, k_descale_stride_h), exists,
            offset + token, columns, rotary_cos, rotary_sin, rotary_stride, num_positions,
            HEAD_DIM, HALF, INTERLEAVED, K_DESCALE,
        )  # fmt: skip
    else:
        source = v_ptr + head_kv * v_strides.h + row * v_strides.s
        if cu_seqlens_k_new is None:
            source += batch_64 * v_strides.b
        target = v_cache + head_kv * v_cache_strides.h
        target += cache_64 * v_cache_strides.b + place * v_cache_strides.s
        append_rows(
            source, target, v_descale, batch_64, cache_64, place, head_kv,
            Strides(v_descale_stride_b, v_descale_stride_s, v_descale_stride_h), exists,
            token, columns, None, None, 0, 0, HEAD_DIM_V, 0, INTERLEAVED, V_DESCALE,
        )  # fmt: skip
