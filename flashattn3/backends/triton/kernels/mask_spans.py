"""The keys that each query of a mask sees, as spans, and the queries that see each key.

Axis 1 of the grid is the side, 0 lists of queries and 1 lists of keys. Where the structure of a
mask is known, the queries that see a key are a span too, so both sides read their own rows alone.
"""

import triton
import triton.language as tl

from .block_lists import COLUMNS, ROWS

DOCUMENTS = tl.constexpr(32)  # that a program compares its tokens with at once
DISTANCE = tl.constexpr(2048)  # tokens in which a program looks for the end of a run at once


@triton.jit
def _documents_of_lengths(lengths_ptr, mask_idx, num_documents, seqlen, tokens):
    """Begin and end of the document of each token, and whether it has one."""
    begin = tl.zeros((ROWS,), dtype=tl.int32)
    end = tl.zeros((ROWS,), dtype=tl.int32) + (seqlen + 1)
    reached = tl.full((), 0, dtype=tl.int64)
    for first in range(0, num_documents, DOCUMENTS):
        places = first + tl.arange(0, DOCUMENTS)
        lengths = tl.load(
            lengths_ptr + mask_idx * num_documents + places, mask=places < num_documents, other=0
        )
        edges = reached + tl.cumsum(tl.maximum(lengths.to(tl.int64), 0), 0)
        reached = tl.max(edges, 0)
        edges = tl.minimum(edges, seqlen).to(tl.int32)[None, :]
        behind = edges > tokens[:, None]
        begin = tl.maximum(begin, tl.max(tl.where(behind, 0, edges), 1))
        end = tl.minimum(end, tl.min(tl.where(behind, edges, seqlen + 1), 1))
    return begin, end, end <= seqlen


@triton.jit
def _differs(ids, tokens, step: tl.constexpr, seqlen):
    """Whether the neighbour of a token, before it (step -1) or behind, has another number or does
    not exist; False outside the row."""
    others = tokens + step
    inside = (tokens >= 0) & (tokens < seqlen)
    exists = (others >= 0) & (others < seqlen)
    own = tl.load(ids + tokens, mask=inside, other=0)
    return inside & ((own != tl.load(ids + others, mask=exists & inside, other=0)) | (exists == 0))


@triton.jit
def _documents_of_ids(ids_ptr, mask_idx, seqlen, tokens):
    """The same of the run of equal numbers of each token."""
    ids = ids_ptr + mask_idx * seqlen
    first = tl.min(tokens, 0)
    places = tokens[None, :]
    is_first = (_differs(ids, tokens, -1, seqlen) != 0)[None, :] & (places <= tokens[:, None])
    begin = tl.max(tl.where(is_first, places, -1), 1)
    is_last = (_differs(ids, tokens, 1, seqlen) != 0)[None, :] & (places >= tokens[:, None])
    end = tl.min(tl.where(is_last, places, seqlen), 1)
    # A run that reaches over the block ends in other ones.
    found = tl.full((), -1, dtype=tl.int32)
    edge = first
    while (found < 0) & (edge > 0):
        edge -= DISTANCE
        others = edge + tl.arange(0, DISTANCE)
        edges = _differs(ids, others, -1, seqlen) & (others < first)
        found = tl.max(tl.where(edges, others, -1), 0)
    begin = tl.where(begin < 0, found, begin)
    found = tl.full((), 0, dtype=tl.int32) + seqlen
    edge = first + ROWS
    while (found == seqlen) & (edge < seqlen):
        others = edge + tl.arange(0, DISTANCE)
        edges = _differs(ids, others, 1, seqlen)
        found = tl.min(tl.where(edges, others, seqlen), 0)
        edge += DISTANCE
    end = tl.where(end == seqlen, found, end) + 1
    return begin, end, tl.load(ids + tokens, mask=tokens < seqlen, other=0) >= 0


@triton.jit(do_not_specialize=["seqlen"])
def documents_of_ids_kernel(ids_ptr, documents_ptr, seqlen):
    """int32 (batch, seqlen, 2): begin and end of the document of each token, 0 and 0 of padding.
    Grid: blocks of 128 tokens, batch."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1).to(tl.int64)
    begin, end, seen = _documents_of_ids(ids_ptr, row, seqlen, tokens)
    documents = documents_ptr + (row * seqlen + tokens) * 2
    tl.store(documents, tl.where(seen, begin, 0), mask=tokens < seqlen)
    tl.store(documents + 1, tl.where(seen, end, 0), mask=tokens < seqlen)


@triton.jit
def _spans_of_documents(begin, end, seen, tokens, CAUSAL: tl.constexpr):
    begin, end = tl.where(seen, begin, 0), tl.where(seen, end, 0)
    if CAUSAL:
        of_queries = tl.program_id(1) == 0
        last, first = tl.minimum(end, tokens + 1), tl.maximum(begin, tokens)
        begin, end = tl.where(of_queries, begin, first), tl.where(of_queries, last, end)
    return begin, end


@triton.jit
def _spans_of_prefix(prefixes_ptr, mask_idx, seqlen, tokens):
    prefix = tl.load(prefixes_ptr + mask_idx).to(tl.int64)
    prefix = tl.minimum(tl.maximum(prefix, 0), seqlen).to(tl.int32)
    of_queries = tl.program_id(1) == 0
    begin = tl.where(of_queries | (tokens < prefix), 0, tokens)
    return begin, tl.where(of_queries, tl.maximum(prefix, tokens + 1), seqlen)


@triton.jit
def _within(x, last):
    return tl.minimum(tl.maximum(x, 0), last)


@triton.jit
def _spans_of_window(reach, sizes, rows):
    """Begin and end of the window, and the end of the first tokens that stay visible.

    reach: left, right, sinks.
    """
    left, right, sinks = reach[0], reach[1], reach[2]
    queries, keys = sizes[0], sizes[1]
    if tl.program_id(1) == 0:
        own = rows + (keys - queries)
        end = _within(own + right + 1, keys)
        last_sink = tl.minimum(end, sinks)
        begin = tl.maximum(tl.minimum(tl.maximum(own - left, 0), end), last_sink)
    else:
        own = rows - (keys - queries)
        begin = _within(own - right, queries)
        end = tl.where(rows < sinks, queries, _within(own + left + 1, queries))
        last_sink = rows * 0
    return begin, end, last_sink


@triton.jit
def spans_of_rows(
    source_ptr, mask_idx, n, reach, sizes, rows, SOURCE: tl.constexpr, CAUSAL: tl.constexpr
):
    """Two spans for each row: begin and end of one, and the end of one that begins at 0; 0 past the
    last row.

    SOURCE: what is at source_ptr. "lengths": of n documents; "documents": those of tokens, as
        ``documents_of_ids_kernel`` writes them; "prefix": lengths of prefixes; "window": nothing.
    reach: left, right and sinks of a window.
    sizes: queries and keys.
    """
    other = rows * 0
    if SOURCE == "window":
        begin, end, other = _spans_of_window(reach, sizes, rows)
    elif SOURCE == "prefix":
        begin, end = _spans_of_prefix(source_ptr, mask_idx, sizes[0], rows)
    elif SOURCE == "lengths":
        begin, end, seen = _documents_of_lengths(source_ptr, mask_idx, n, sizes[0], rows)
        begin, end = _spans_of_documents(begin, end, seen, rows, CAUSAL)
    else:
        tl.static_assert(SOURCE == "documents")
        documents, inside = source_ptr + (mask_idx * sizes[0] + rows) * 2, rows < sizes[0]
        begin = tl.load(documents, mask=inside, other=0)
        end = tl.load(documents + 1, mask=inside, other=0)
        begin, end = _spans_of_documents(begin, end, end > 0, rows, CAUSAL)
    inside = rows < tl.where(tl.program_id(1) == 0, sizes[0], sizes[1])
    return tl.where(inside, begin, 0), tl.where(inside, end, 0), tl.where(inside, other, 0)


@triton.jit
def _overlap(start, end, first, last):
    return tl.maximum(tl.minimum(end, last) - tl.maximum(start, first), 0)


@triton.jit
def seen_in_blocks(spans, blocks):
    """The number of scores of ``spans_of_rows`` in each block of columns."""
    first, last = blocks[None, :] * COLUMNS, blocks[None, :] * COLUMNS + COLUMNS
    counts = _overlap(spans[0][:, None], spans[1][:, None], first, last)
    return tl.sum(counts + _overlap(0, spans[2][:, None], first, last), 0)


@triton.jit
def see_columns(spans, first, last):
    """Whether a row sees one of the columns [first, last)."""
    seen = (tl.maximum(spans[0], first) < tl.minimum(spans[1], last)) | (spans[2] > first)
    return tl.max(seen.to(tl.int32), 0) != 0


@triton.jit
def lowest(count):
    """int64 with as many of the lowest bits set as count, clamped to 0 and 64, says."""
    ones = (tl.full((), 1, dtype=tl.int64) << tl.minimum(tl.maximum(count, 0), 63)) - 1
    return tl.where(count >= 64, tl.full((), -1, dtype=tl.int64), ones)


@triton.jit
def words_of_rows(spans, column):
    """int64 (128,): which of 64 columns from column on each row sees."""
    words = lowest(spans[1] - column) & ~lowest(spans[0] - column)
    return words | lowest(spans[2] - column)


@triton.jit
def _interval(intervals, query):
    """Start and end of an interval of each query, 0 past the last query. intervals: (starts_ptr,
    ends_ptr, mask_idx, number of the interval, queries, n)."""
    place = (intervals[2] * intervals[4] + query) * intervals[5] + intervals[3]
    inside = query < intervals[4]
    start = tl.load(intervals[0] + place, mask=inside, other=0).to(tl.int32)
    return start, tl.load(intervals[1] + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def _of_queries(intervals, first_row, blocks):
    start, end = _interval(intervals, first_row + tl.arange(0, ROWS)[:, None])
    first = blocks[None, :] * COLUMNS
    return tl.sum(_overlap(start, end, first, first + COLUMNS), 0)


@triton.jit
def _of_keys(intervals, first_row, blocks):
    start, end = _interval(intervals, blocks[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    return tl.sum(_overlap(start, end, first_row, first_row + ROWS), 1)


@triton.jit
def intervals_in_blocks(intervals, first_row, blocks):
    """The number of scores of 128 rows of this program's side in each block of 64 columns."""
    if tl.program_id(1) == 0:
        counts = _of_queries(intervals, first_row, blocks)
    else:
        counts = _of_keys(intervals, first_row, blocks)
    return counts


@triton.jit
def _half_word_of_keys(intervals, first_row, first_column):
    """int64 (128,): which of 32 queries see each key."""
    bits = tl.arange(0, COLUMNS // 2)
    start, end = _interval(intervals, first_column + bits[None, :])
    rows = (first_row + tl.arange(0, ROWS))[:, None]
    seen = (rows >= start) & (rows < end)
    words = tl.sum(seen.to(tl.int32) << bits[None, :], 1)
    return words.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def words_of_intervals(intervals, first_row, first_column):
    """int64 (128,): which of 64 columns each row of this program's side sees."""
    if tl.program_id(1) == 0:
        start, end = _interval(intervals, first_row + tl.arange(0, ROWS))
        words = lowest(end - first_column) & ~lowest(start - first_column)
    else:
        low = _half_word_of_keys(intervals, first_row, first_column)
        high = _half_word_of_keys(intervals, first_row, first_column + COLUMNS // 2)
        words = low | high << (COLUMNS // 2)
    return words
