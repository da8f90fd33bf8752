"""New keys and values into a cache, dense or paged, with rotary position embedding on the way
(Su et al., RoFormer, arXiv 2104.09864), and the rotated queries beside them."""

import triton
import triton.language as tl

from .common import strides_of
from .quantize import scales_of, to_e4m3, to_int8

PER_SEQUENCE, PAGES, TOKENS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MEASURE, DIVIDE, MULTIPLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LARGEST_E4M3, LARGEST_INT8 = tl.constexpr(448.0), tl.constexpr(127.0)
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
def put(target, x, scale, mask, MODE: tl.constexpr):
    """Store x, float32, divided by or times the scales of its rows, in the dtype of the target; or
    measure it. Returns the largest magnitude of each row, of MEASURE alone.

    Numbers of 8 bits, bytes for e4m3, saturate; what is not finite is as in call/eight_bits.py.
    """
    kind: tl.constexpr = target.dtype.element_ty
    largest = scale * 0.0
    if MODE == MEASURE:
        magnitude = tl.abs(x)
        of_others: tl.constexpr = float("inf") if kind == tl.int8 else 0.0
        magnitude = tl.where(magnitude < float("inf"), magnitude, of_others)
        largest = tl.max(tl.where(mask, magnitude, 0.0), 1)
    elif kind != tl.int8 and kind != tl.uint8:
        tl.store(target, (x / scale[:, None]).to(kind), mask=mask)
    else:
        if MODE == DIVIDE:
            scaled = tl.math.div_rn(x, scale[:, None] + tl.zeros_like(x))
        else:
            scaled = tl.where(tl.abs(x) < float("inf"), x * scale[:, None], float("nan"))
        bound: tl.constexpr = LARGEST_INT8 if kind == tl.int8 else LARGEST_E4M3
        held = tl.minimum(tl.maximum(scaled, -bound), bound)
        if kind == tl.int8:
            codes = to_int8(tl.where(scaled == scaled, held, 0.0))
        else:
            codes = to_e4m3(tl.where(scaled == scaled, held, float("nan")))
        tl.store(target, codes.to(kind, bitcast=True), mask=mask)
    return largest


@triton.jit
def copy_columns(
    source,
    target,
    scale,
    exists,
    columns,
    first_column,
    num_columns,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
):
    """Columns first_column .. num_columns of rows; source and target: pointers to the rows."""
    largest = scale * 0.0
    for begin in tl.static_range(0, WIDTH, 64):
        places = first_column + begin + columns
        mask = exists[:, None] & (places < num_columns)[None, :]
        x = tl.load(source[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, put(target[:, None] + places[None, :], x, scale, mask, MODE))
    return largest


@triton.jit
def rotate_columns(
    source,
    target,
    scale,
    exists,
    position,
    columns,
    rotary_cos,
    rotary_sin,
    rotary_stride,
    num_positions,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
):
    """The first 2 * HALF columns of rows, rotated; NaN where the tables have no such position."""
    known = (position >= 0) & (position < num_positions)
    table_rows = position.to(tl.int64) * rotary_stride
    largest = scale * 0.0
    for begin in tl.static_range(0, HALF, 64):
        pairs = begin + columns
        inside = (pairs < HALF)[None, :]
        first, second = pairs, pairs + HALF
        if INTERLEAVED:
            first, second = 2 * pairs, 2 * pairs + 1
        mask = exists[:, None] & inside
        x = tl.load(source[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
        angles = table_rows[:, None] + pairs[None, :]
        table_mask = mask & known[:, None]
        cos = tl.load(rotary_cos + angles, mask=table_mask, other=float("nan")).to(tl.float32)
        sin = tl.load(rotary_sin + angles, mask=table_mask, other=float("nan")).to(tl.float32)
        turned = put(target[:, None] + first[None, :], x * cos - y * sin, scale, mask, MODE)
        largest = tl.maximum(largest, turned)
        turned = put(target[:, None] + second[None, :], x * sin + y * cos, scale, mask, MODE)
        largest = tl.maximum(largest, turned)
    return largest


@triton.jit
def write_rows(
    source,
    target,
    scale,
    exists,
    position,
    columns,
    rotary_cos,
    rotary_sin,
    rotary_stride,
    num_positions,
    NUM_COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
):
    """Rows of one head, their first 2 * HALF columns rotated. Returns what ``put`` does."""
    largest = scale * 0.0
    if HALF > 0:
        largest = rotate_columns(
            source, target, scale, exists, position, columns, rotary_cos, rotary_sin,
            rotary_stride, num_positions, HALF, INTERLEAVED, MODE,
        )  # fmt: skip
    rest = copy_columns(source, target, scale, exists, columns, 2 * HALF, NUM_COLUMNS,
                        NUM_COLUMNS - 2 * HALF, MODE)  # fmt: skip
    return tl.maximum(largest, rest)


@triton.jit
def append_rows(
    source,
    target,
    descale,
    batch_idx,
    cache_idx,
    place,
    head,
    descale_stride_b,
    descale_stride_s,
    descale_stride_h,
    exists,
    position,
    columns,
    rotary_cos,
    rotary_sin,
    rotary_stride,
    num_positions,
    NUM_COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OF: tl.constexpr,
):
    """Rows of one head of K or V, divided by the descales of their sequences or pages; or those of
    tokens are written, which fit the largest magnitudes of the rows. OF: of ``append_kernel``."""
    one = tl.zeros_like(position).to(tl.float32) + 1.0
    if OF == TOKENS:
        largest = write_rows(
            source, target, one, exists, position, columns, rotary_cos, rotary_sin, rotary_stride,
            num_positions, NUM_COLUMNS, HALF, INTERLEAVED, MEASURE,
        )  # fmt: skip
        own, factor = scales_of(
            largest, LARGEST_INT8 if target.dtype.element_ty == tl.int8 else LARGEST_E4M3
        )
        descale += cache_idx * descale_stride_b + place * descale_stride_s
        tl.store(descale + head * descale_stride_h, own, mask=exists)
        write_rows(
            source, target, factor, exists, position, columns, rotary_cos, rotary_sin,
            rotary_stride, num_positions, NUM_COLUMNS, HALF, INTERLEAVED, MULTIPLY,
        )  # fmt: skip
    else:
        scale = one
        if descale is not None:
            row = cache_idx if OF == PAGES else batch_idx
            descale += row * descale_stride_b + head * descale_stride_h
            scale = tl.load(descale, mask=exists, other=1.0)
        write_rows(
            source, target, scale, exists, position, columns, rotary_cos, rotary_sin,
            rotary_stride, num_positions, NUM_COLUMNS, HALF, INTERLEAVED, DIVIDE,
        )  # fmt: skip


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
    q_stride_b,
    q_stride_s,
    q_out_stride_b,
    q_out_stride_s,
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
        source = q_head + batch_idx.to(tl.int64) * q_stride_b + row * q_stride_s
        target = out_head + batch_idx.to(tl.int64) * q_out_stride_b + row * q_out_stride_s
    else:
        source = q_head + rows.to(tl.int64) * q_stride_s
        target = out_head + rows.to(tl.int64) * q_out_stride_s
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
    PER_SEQUENCE, of PAGES or, written here, of TOKENS; b strides are those of pages then.
    """
    k_stride_b, k_stride_s, k_stride_h = strides_of(k_stride_b, k_stride_s, k_stride_h, STRIDE_UNIT)
    v_stride_b, v_stride_s, v_stride_h = strides_of(v_stride_b, v_stride_s, v_stride_h, STRIDE_UNIT)
    k_cache_stride_b, k_cache_stride_s, k_cache_stride_h = strides_of(
        k_cache_stride_b, k_cache_stride_s, k_cache_stride_h, STRIDE_UNIT
    )
    v_cache_stride_b, v_cache_stride_s, v_cache_stride_h = strides_of(
        v_cache_stride_b, v_cache_stride_s, v_cache_stride_h, STRIDE_UNIT
    )
    q_stride_b, q_stride_s, q_stride_h = strides_of(q_stride_b, q_stride_s, q_stride_h, STRIDE_UNIT)
    q_out_stride_b, q_out_stride_s, q_out_stride_h = strides_of(
        q_out_stride_b, q_out_stride_s, q_out_stride_h, STRIDE_UNIT
    )
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, 64)
    if head >= 2 * num_heads_kv:
        if q_ptr is not None:
            head_q = (head - 2 * num_heads_kv).to(tl.int64)
            rotate_queries(
                q_ptr + head_q * q_stride_h, q_out + head_q * q_out_stride_h, rows, columns,
                cache_seqlens, cu_seqlens_q, rotary_cos, rotary_sin, rotary_seqlens,
                q_stride_b, q_stride_s, q_out_stride_b, q_out_stride_s, rotary_stride,
                batch, num_rows_q, seqlen_q, seqlen_k, capacity, num_positions,
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
        source = k_ptr + head_kv * k_stride_h + row * k_stride_s
        if cu_seqlens_k_new is None:
            source += batch_64 * k_stride_b
        target = k_cache + head_kv * k_cache_stride_h
        target += cache_64 * k_cache_stride_b + place * k_cache_stride_s
        offset = cached
        if HALF > 0 and rotary_seqlens is not None:
            offset = tl.load(rotary_seqlens + batch_idx, mask=exists, other=0)
        append_rows(
            source, target, k_descale, batch_64, cache_64, place, head_kv, k_descale_stride_b,
            k_descale_stride_s, k_descale_stride_h, exists, offset + token, columns, rotary_cos,
            rotary_sin, rotary_stride, num_positions, HEAD_DIM, HALF, INTERLEAVED, K_DESCALE,
        )  # fmt: skip
    else:
        source = v_ptr + head_kv * v_stride_h + row * v_stride_s
        if cu_seqlens_k_new is None:
            source += batch_64 * v_stride_b
        target = v_cache + head_kv * v_cache_stride_h
        target += cache_64 * v_cache_stride_b + place * v_cache_stride_s
        append_rows(
            source, target, v_descale, batch_64, cache_64, place, head_kv, v_descale_stride_b,
            v_descale_stride_s, v_descale_stride_h, exists, token, columns, None, None, 0, 0,
            HEAD_DIM_V, 0, INTERLEAVED, V_DESCALE,
        )  # fmt: skip
