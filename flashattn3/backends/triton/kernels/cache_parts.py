"""The parts into which the keys of a batch are cut, found from the lengths on the device, and their
join: what every program of a cached call computes before it reads a key.

The tiles of keys of the whole batch are cut into parts of one length, so that about num_ctas
programs have equal shares, however unequal the sequences (Flash-Decoding with the work partition of
FlashInfer, arXiv 2501.01005). Parts of a tile are joined in the order of their keys.
"""

import triton
import triton.language as tl

from .common import round_down, store_tile
from .forward import LN2

LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(128)  # sequences in one step of the prefix sum
# n_blocks of a part that was not asked for, at least: shorter ones cost more than idle SMs.
MIN_TILES = tl.constexpr(2)


@triton.jit
def key_lengths(cache_seqlens, cu_seqlens_k_new, seqlen_k, seqlen_new, batch_idx, batch, capacity):
    """Given cached tokens, new tokens, and the length of sequences: of one, or of a vector."""
    inside = batch_idx < batch
    given = seqlen_k
    if cache_seqlens is not None:
        given = tl.load(cache_seqlens + batch_idx, mask=inside, other=0)
    new = seqlen_new
    if cu_seqlens_k_new is not None:
        begin = tl.load(cu_seqlens_k_new + batch_idx, mask=inside, other=0)
        new = tl.load(cu_seqlens_k_new + batch_idx + 1, mask=inside, other=0) - begin
    cached = tl.minimum(tl.maximum(given, 0), capacity)
    return given, new, tl.minimum(cached + tl.maximum(new, 0), capacity)


@triton.jit
def query_span(cu_seqlens_q, seqlen_q, total_q, batch_idx, batch):
    """First row and number of queries: of one sequence, or of a vector of them."""
    start = batch_idx * 0
    length = start + seqlen_q
    if cu_seqlens_q is not None:
        inside = batch_idx < batch
        start = tl.load(cu_seqlens_q + batch_idx, mask=inside, other=0)
        end = tl.load(cu_seqlens_q + batch_idx + 1, mask=inside, other=0)
        start = tl.minimum(tl.maximum(start, 0), total_q)
        end = tl.minimum(tl.maximum(end, start), total_q)
        length = tl.minimum(end - start, seqlen_q)
    return start, length


@triton.jit
def tiles_of(
    cache_seqlens,
    cache_leftpad,
    cu_seqlens_q,
    cu_seqlens_k_new,
    batch,
    seqlen_q,
    total_q,
    seqlen_k,
    seqlen_new,
    capacity,
    window_left,
    first_sequence,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
):
    """m_blocks and n_blocks of CHUNK sequences: of an m_block at most, whatever its rows see."""
    batch_idx = first_sequence + tl.arange(0, CHUNK)
    inside = batch_idx < batch
    _, _, length = key_lengths(
        cache_seqlens, cu_seqlens_k_new, seqlen_k, seqlen_new, batch_idx, batch, capacity
    )
    _, queries = query_span(cu_seqlens_q, seqlen_q, total_q, batch_idx, batch)
    begin = tl.zeros_like(batch_idx)
    if LEFT:
        begin = tl.maximum(length - queries - window_left, 0)
    if cache_leftpad is not None:
        begin = tl.maximum(begin, tl.load(cache_leftpad + batch_idx, mask=inside, other=0))
    n_blocks = tl.cdiv(tl.maximum(length - round_down(begin, BLOCK_N), 0), BLOCK_N)
    m_blocks = tl.where(inside, tl.cdiv(queries * GROUP, BLOCK_M), 0)
    return m_blocks, n_blocks


@triton.jit
def tiles_in_part(
    cache_seqlens,
    cache_leftpad,
    cu_seqlens_q,
    cu_seqlens_k_new,
    batch,
    seqlen_q,
    total_q,
    seqlen_k,
    seqlen_new,
    capacity,
    window_left,
    num_heads_kv,
    num_ctas,
    num_splits,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
):
    """n_blocks of one part, with which about num_ctas parts do all work; 0: asked by num_splits."""
    tiles = 0
    if num_splits == 0:
        work = tl.full((), 0, tl.int64)
        for first_sequence in range(0, batch, CHUNK):
            m_blocks, n_blocks = tiles_of(
                cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, batch, seqlen_q,
                total_q, seqlen_k, seqlen_new, capacity, window_left, first_sequence,
                GROUP, BLOCK_M, BLOCK_N, LEFT,
            )  # fmt: skip
            work += tl.sum(m_blocks.to(tl.int64) * n_blocks, 0)
        tiles = tl.maximum(tl.cdiv(work * num_heads_kv, num_ctas), MIN_TILES).to(tl.int32)
    return tiles


@triton.jit
def parts_of(n_blocks, part_tiles, num_splits):
    """n_blocks of a part of each sequence, and its number of parts, at least 1."""
    asked = tl.cdiv(n_blocks, tl.maximum(num_splits, 1))
    tiles = tl.maximum(tl.where(num_splits > 0, asked, part_tiles), 1)
    return tiles, tl.maximum(tl.cdiv(n_blocks, tiles), 1)


@triton.jit
def with_sink(acc_scale, row_max, row_sum, sink):
    """Add a logit (natural log) to a row: the factor of its accumulator, its maximum, its sum."""
    sink_log2 = sink.to(tl.float32) * LOG2E
    new_max = tl.maximum(row_max, sink_log2)
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.math.exp2(row_max - reference)
    row_sum = row_sum * decay + tl.math.exp2(sink_log2 - reference)
    return acc_scale * decay, new_max, row_sum


@triton.jit(
    do_not_specialize=[
        "out_parts", "lse_parts", "out_ptr", "lse_ptr", "cache_seqlens", "cache_leftpad",
        "cu_seqlens_q", "cu_seqlens_k_new", "sinks", "out_stride_b", "out_stride_s",
        "out_stride_h", "lse_stride_b", "lse_stride_h", "batch", "seqlen_q", "total_q", "seqlen_k",
        "seqlen_new", "capacity", "num_heads_kv", "num_ctas", "num_splits", "window_left",
        "max_m_blocks",
    ]
)  # fmt: skip
def combine_parts_kernel(
    out_parts,
    lse_parts,
    out_ptr,
    lse_ptr,
    cache_seqlens,
    cache_leftpad,
    cu_seqlens_q,
    cu_seqlens_k_new,
    sinks,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_b,
    lse_stride_h,
    batch,
    seqlen_q,
    total_q,
    seqlen_k,
    seqlen_new,
    capacity,
    num_heads_kv,
    num_ctas,
    num_splits,
    window_left,
    max_m_blocks,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the parts of ROWS packed rows, PARTS at a time, in the order of their keys.

    Grid: BLOCK_M / ROWS * max_m_blocks * num_heads_kv * batch. A tile in one part has nothing to
    join. The numbers before max_m_blocks are those of ``decode_kernel``.
    """
    pid = tl.program_id(0)
    first_row = pid % (BLOCK_M // ROWS) * ROWS
    pid = pid // (BLOCK_M // ROWS)
    m_block = pid % max_m_blocks
    head_kv = pid // max_m_blocks % num_heads_kv
    batch_idx = pid // max_m_blocks // num_heads_kv
    start_q, length_q = query_span(cu_seqlens_q, seqlen_q, total_q, batch_idx, batch)
    if (m_block * BLOCK_M + first_row) // GROUP >= length_q:
        return
    part_tiles = tiles_in_part(
        cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, batch, seqlen_q, total_q,
        seqlen_k, seqlen_new, capacity, window_left, num_heads_kv, num_ctas, num_splits,
        GROUP, BLOCK_M, BLOCK_N, LEFT,
    )  # fmt: skip
    num_parts = 0
    slot = 0
    for first_sequence in range(0, batch_idx + 1, CHUNK):
        m_blocks, n_blocks = tiles_of(
            cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, batch, seqlen_q,
            total_q, seqlen_k, seqlen_new, capacity, window_left, first_sequence,
            GROUP, BLOCK_M, BLOCK_N, LEFT,
        )  # fmt: skip
        _, parts = parts_of(n_blocks, part_tiles, num_splits)
        slots = tl.where(parts > 1, m_blocks * num_heads_kv * parts, 0)
        indices = first_sequence + tl.arange(0, CHUNK)
        num_parts += tl.sum(tl.where(indices == batch_idx, parts, 0), 0)
        slot += tl.sum(tl.where(indices < batch_idx, slots, 0), 0)
    if num_parts == 1:
        return
    slot += (m_block * num_heads_kv + head_kv) * num_parts

    part_offsets = tl.arange(0, PARTS)
    columns = tl.arange(0, BLOCK_DV)
    rows = first_row + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK_DV), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)  # natural log
    for first_part in range(0, num_parts, PARTS):
        inside = first_part + part_offsets < num_parts
        tile_rows = (slot + first_part + part_offsets).to(tl.int64)[:, None] * BLOCK_M
        tile_rows += rows[None, :]
        lse = tl.load(lse_parts + tile_rows, mask=inside[:, None], other=float("-inf"))
        parts = tl.load(
            out_parts + tile_rows[:, :, None] * HEAD_DIM_V + columns[None, None, :],
            mask=inside[:, None, None] & (columns < HEAD_DIM_V)[None, None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.math.exp2((lse - reference[None, :]) * LOG2E)
        decay = tl.math.exp2((largest - reference) * LOG2E)
        acc = acc * decay[:, None] + tl.sum(parts * weights[:, :, None], 0)
        total = total * decay + tl.sum(weights, 0)
        largest = new_largest
    packed = m_block * BLOCK_M + rows
    tokens = packed // GROUP
    heads = head_kv * GROUP + packed % GROUP
    valid = tokens < length_q
    acc_scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
    row_max = largest * LOG2E
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0)
        acc_scale, row_max, total = with_sink(acc_scale, row_max, total, sink)
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(total))
    out = acc * (acc_scale * tl.where(empty, 1.0, 1.0 / total))[:, None]
    batch_64 = batch_idx.to(tl.int64)
    out_rows = batch_64 * out_stride_b + (start_q + tokens).to(tl.int64) * out_stride_s
    out_tile = out_ptr + (out_rows + heads.to(tl.int64) * out_stride_h)[:, None] + columns[None, :]
    store_tile(out_tile, out, tokens, length_q, columns, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)
    lse_rows = batch_64 * lse_stride_b + heads.to(tl.int64) * lse_stride_h + start_q + tokens
    tl.store(lse_ptr + lse_rows, lse, mask=valid)
