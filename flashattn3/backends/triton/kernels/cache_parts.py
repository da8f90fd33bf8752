"""The parts into which the keys of a batch are cut, found from the lengths on the device, and their
join: what every program of a cached call computes before it reads a key.

The keys of all tiles of the batch are cut into parts of about one length, so that about num_ctas
programs have equal shares, however unequal the sequences (Flash-Decoding with the work partition of
FlashInfer, arXiv 2501.01005). Parts of a tile are joined in the order of their keys.

A batch may mix chunks of a prompt with single tokens: a sequence of at most FEW_M packed rows has a
tile of FEW_M rows, others have tiles of BLOCK_M; FEW_M is 0 where all have BLOCK_M. A key costs a
part as much in either tile: with few rows it is read as long as many rows compute with it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .common import LN2, LOG2E, round_down, store_tile
from .score_terms import with_sink
from .spans import finish_spans, join_span

CHUNK = tl.constexpr(128)  # sequences in one step of the prefix sum
# Layout of the scheduler metadata, as in flashattn3/call/scheduler_metadata.py.
HEADER = tl.constexpr(2)
PER_SEQUENCE = tl.constexpr(4)
MAGIC = tl.constexpr(0x6B763031)
# Units of a part that was not asked for, at least: shorter ones cost more than idle SMs.
MIN_UNITS = tl.constexpr(2)


class Sequences(NamedTuple):
    """The sequences of a cached call, as arguments of its kernels: pointers, which may be None, and
    numbers."""

    cache_seqlens: tl.tensor
    cache_leftpad: tl.tensor
    cu_seqlens_q: tl.tensor
    cu_seqlens_k_new: tl.tensor
    batch: tl.tensor
    seqlen_q: tl.tensor  # of the longest
    total_q: tl.tensor
    seqlen_k: tl.tensor  # where cache_seqlens is None
    seqlen_new: tl.tensor
    capacity: tl.tensor


@triton.jit
def key_lengths(sequences, batch_idx):
    """Given cached tokens, new tokens, and the length of sequences: of one, or of a vector."""
    inside = batch_idx < sequences.batch
    given = sequences.seqlen_k
    if sequences.cache_seqlens is not None:
        given = tl.load(sequences.cache_seqlens + batch_idx, mask=inside, other=0)
    new = sequences.seqlen_new
    edges = sequences.cu_seqlens_k_new
    if edges is not None:
        begin = tl.load(edges + batch_idx, mask=inside, other=0)
        new = tl.load(edges + batch_idx + 1, mask=inside, other=0) - begin
    cached = tl.minimum(tl.maximum(given, 0), sequences.capacity)
    return given, new, tl.minimum(cached + tl.maximum(new, 0), sequences.capacity)


@triton.jit
def query_span(sequences, batch_idx):
    """First row and number of queries: of one sequence, or of a vector of them."""
    start = batch_idx * 0
    length = start + sequences.seqlen_q
    edges = sequences.cu_seqlens_q
    if edges is not None:
        inside = batch_idx < sequences.batch
        start = tl.load(edges + batch_idx, mask=inside, other=0)
        end = tl.load(edges + batch_idx + 1, mask=inside, other=0)
        start = tl.minimum(tl.maximum(start, 0), sequences.total_q)
        end = tl.minimum(tl.maximum(end, start), sequences.total_q)
        length = tl.minimum(end - start, sequences.seqlen_q)
    return start, length


@triton.jit
def metadata_poison(metadata, options_hash, sequences, batch_idx, given, new, queries):
    """NaN if the scheduler metadata was made for another call, else 0."""
    fits = tl.load(metadata) == MAGIC
    fits = fits & (tl.load(metadata + 1) == options_hash)
    own = metadata + HEADER + batch_idx * PER_SEQUENCE
    fits = fits & (tl.load(own) == given) & ((new == 0) | (tl.load(own + 1) == new))
    fits = fits & (tl.load(own + 2) == queries)
    leftpad = 0
    if sequences.cache_leftpad is not None:
        leftpad = tl.load(sequences.cache_leftpad + batch_idx)
    fits = fits & (tl.load(own + 3) == leftpad)
    return tl.where(fits, 0.0, float("nan"))


@triton.jit
def m_blocks_of(queries, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, FEW_M: tl.constexpr):
    """m_blocks of sequences: their packed rows in tiles of BLOCK_M or in one of FEW_M."""
    rows = queries * GROUP
    m_blocks = tl.cdiv(rows, BLOCK_M)
    if FEW_M > 0:
        m_blocks = tl.where((rows > 0) & (rows <= FEW_M), 1, m_blocks)
    return m_blocks


@triton.jit
def tiles_of(
    sequences,
    window_left,
    first_sequence,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW_M: tl.constexpr,
    UNIT: tl.constexpr,
    LEFT: tl.constexpr,
):
    """m_blocks of CHUNK sequences, and units of UNIT keys of each of their tiles at most, whatever
    its rows see."""
    batch_idx = first_sequence + tl.arange(0, CHUNK)
    inside = batch_idx < sequences.batch
    _, _, length = key_lengths(sequences, batch_idx)
    _, queries = query_span(sequences, batch_idx)
    begin = tl.zeros_like(batch_idx)
    if LEFT:
        begin = tl.maximum(length - queries - window_left, 0)
    if sequences.cache_leftpad is not None:
        leftpad = tl.load(sequences.cache_leftpad + batch_idx, mask=inside, other=0)
        begin = tl.maximum(begin, leftpad)
    units = tl.cdiv(tl.maximum(length - round_down(begin, UNIT), 0), UNIT)
    return tl.where(inside, m_blocks_of(queries, GROUP, BLOCK_M, FEW_M), 0), units


@triton.jit
def parts_of(units, share, num_splits):
    """Number of parts of a tile of each sequence, at least 1 and at most its units.

    share: units of a program. A tile of less than two shares is not cut, so tiles that are cut have
    no more parts than there are shares.
    """
    parts = tl.where(num_splits > 0, num_splits, units // share)
    return tl.maximum(tl.minimum(parts, units), 1)


@triton.jit
def keys_of_part(part, num_parts, units, UNIT: tl.constexpr):
    """First and end of the keys of one of num_parts parts, which differ by at most a unit."""
    own = units // num_parts
    longer = units % num_parts
    begin = part * own + tl.minimum(part, longer)
    end = begin + own + (part < longer).to(tl.int32)
    return begin * UNIT, end * UNIT


@triton.jit
def find_work(
    index,
    sequences,
    window_left,
    num_heads_kv,
    num_ctas,
    num_splits,
    JOINED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW_M: tl.constexpr,
    UNIT: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Find a part by its index in the batch or, with JOINED, a tile by its index among the tiles of
    several parts.

    Returns its sequence, -1 if there is none, the index in the sequence, the units and the parts of
    a tile there, and the sequence's first slot of the workspace, which has one for each part of
    tiles that are cut. The order is sequence, m_block, KV head, part.
    """
    share = tl.full((), 1, tl.int32)
    if num_splits == 0:
        work = tl.full((), 0, tl.int64)
        for first_sequence in range(0, sequences.batch, CHUNK):
            m_blocks, units = tiles_of(
                sequences, window_left, first_sequence, GROUP, BLOCK_M, FEW_M, UNIT, LEFT
            )
            work += tl.sum(m_blocks.to(tl.int64) * units, 0)
        share = tl.maximum(tl.cdiv(work * num_heads_kv, num_ctas), MIN_UNITS).to(tl.int32)
    batch_idx = -1
    own_index = 0
    own_units = 0
    num_parts = 0
    slot = 0
    before = 0
    slots_before = 0
    for first_sequence in range(0, sequences.batch, CHUNK):
        m_blocks, units = tiles_of(
            sequences, window_left, first_sequence, GROUP, BLOCK_M, FEW_M, UNIT, LEFT
        )
        parts = parts_of(units, share, num_splits)
        tiles = m_blocks * num_heads_kv
        slots = tl.where(parts > 1, tiles * parts, 0)
        counted = tiles * parts
        if JOINED:
            counted = tl.where(parts > 1, tiles, 0)
        ends = before + tl.cumsum(counted, 0)
        here = (index < ends) & (index >= ends - counted)
        slot_begins = slots_before + tl.cumsum(slots, 0) - slots
        indices = first_sequence + tl.arange(0, CHUNK)
        batch_idx += tl.sum(tl.where(here, indices + 1, 0), 0)
        own_index += tl.sum(tl.where(here, index - (ends - counted), 0), 0)
        own_units += tl.sum(tl.where(here, units, 0), 0)
        num_parts += tl.sum(tl.where(here, parts, 0), 0)
        slot += tl.sum(tl.where(here, slot_begins, 0), 0)
        before += tl.sum(counted, 0)
        slots_before += tl.sum(slots, 0)
    # Triton 3.8 compiles no division by a number that it sees begin at 0.
    return batch_idx, own_index, own_units, tl.maximum(num_parts, 1), slot


@triton.jit
def m_block_at(index, queries, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, RIGHT: tl.constexpr):
    """The index-th m_block of a sequence: with a causal mask the longest first."""
    m_block = index
    if RIGHT:
        m_block = tl.cdiv(queries * GROUP, BLOCK_M) - 1 - index
    return m_block


@triton.jit(
    do_not_specialize=[
        "out_parts", "lse_parts", "out_ptr", "lse_ptr", "cache_seqlens", "cache_leftpad",
        "cu_seqlens_q", "cu_seqlens_k_new", "sinks", "out_stride_b", "out_stride_s",
        "out_stride_h", "lse_stride_b", "lse_stride_h", "batch", "seqlen_q", "total_q", "seqlen_k",
        "seqlen_new", "capacity", "num_heads_kv", "num_ctas", "num_splits", "window_left",
        "workspace_slots",
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
    workspace_slots,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW_M: tl.constexpr,
    SLOT_M: tl.constexpr,
    UNIT: tl.constexpr,
    SPANS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the parts of ROWS packed rows, PARTS at a time, in the order of their keys.

    Grid: SLOT_M / ROWS for each tile of several parts that there can be. The numbers before
    workspace_slots and the constants are those of ``decode_kernel``.
    """
    pid = tl.program_id(0)
    sequences = Sequences(
        cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, batch, seqlen_q, total_q,
        seqlen_k, seqlen_new, capacity,
    )  # fmt: skip
    batch_idx, tile, _, num_parts, slot = find_work(
        pid // (SLOT_M // ROWS), sequences, window_left, num_heads_kv, num_ctas, num_splits, True,
        GROUP, BLOCK_M, FEW_M, UNIT, LEFT,
    )  # fmt: skip
    slot += tile * num_parts
    if (batch_idx < 0) | (slot + num_parts > workspace_slots):  # wrong cu_seqlens_q may overlap
        return
    start_q, length_q = query_span(sequences, batch_idx)
    head_kv = tile % num_heads_kv
    m_block = m_block_at(tile // num_heads_kv, length_q, GROUP, BLOCK_M, RIGHT)
    first_row = pid % (SLOT_M // ROWS) * ROWS
    if (m_block * BLOCK_M + first_row) // GROUP >= length_q:
        return

    part_offsets = tl.arange(0, PARTS)
    columns = tl.arange(0, BLOCK_DV)
    rows = first_row + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK_DV), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)  # natural log
    packed = m_block * BLOCK_M + rows
    tokens = packed // GROUP
    heads = head_kv * GROUP + packed % GROUP
    valid = tokens < length_q
    if SPANS:
        for first_part in range(0, num_parts, PARTS):
            for step in tl.static_range(PARTS):
                part = first_part + step
                tile_rows = (slot + part).to(tl.int64) * SLOT_M + rows
                inside = tokens < tl.where(part < num_parts, length_q, 0)
                lse = tl.load(lse_parts + tile_rows, mask=inside, other=float("-inf"))
                x = tl.load(
                    out_parts + tile_rows[:, None] * HEAD_DIM_V + columns[None, :],
                    mask=inside[:, None] & (columns < HEAD_DIM_V)[None, :],
                    other=0.0,
                )
                acc, total, largest = join_span(acc, total, largest, x, lse)
        out, lse = finish_spans(acc, total, largest, sinks, heads, valid)
    else:
        for first_part in range(0, num_parts, PARTS):
            inside = first_part + part_offsets < num_parts
            tile_rows = (slot + first_part + part_offsets).to(tl.int64)[:, None] * SLOT_M
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
