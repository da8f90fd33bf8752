"""What is added to scores (slopes, a bias), and what rides along: sinks and the largest score.

A score is scale * q k^T, then - slope * |row + diagonal - key| (ALiBi), then + bias. With a slope
or a bias the forward computes in natural units, so that a bias is added as it is.

ALIBI: 0: no slopes; LEFT_ALONE: every row sees keys up to its diagonal alone, as with a causal
mask; BOTH_SIDES: others. Left of the diagonal, and right of it, the distance is a number of the row
plus one of the column: a score takes one addition, of the column's, and the row's is added to its
maximum. ``alibi_edges`` cuts a loop so that only blocks on the diagonal need the absolute value.
"""

import triton
import triton.language as tl

from .common import LN2, LOG2E, round_down, round_up, row_pointer, strides_of

LEFT_ALONE, BOTH_SIDES = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_slope(slopes_ptr, slopes_stride_b, batch_idx, head):
    return tl.load(slopes_ptr + batch_idx * slopes_stride_b + head)


@triton.jit
def alibi_edges(edges, first_row, last_row, diagonal, BLOCK_N: tl.constexpr):
    """The four edges of ``n_block_range``, and between those of the full blocks two more: the end
    of the blocks left of every row's diagonal, and the first block right of every row's."""
    begin, full_begin, full_end, end = edges
    left_end = round_down(tl.maximum(first_row + diagonal + 1, 0), BLOCK_N)
    left_end = tl.minimum(tl.maximum(left_end, full_begin), full_end)
    right_begin = round_up(tl.maximum(last_row + diagonal, 0), BLOCK_N)
    right_begin = tl.minimum(tl.maximum(right_begin, left_end), full_end)
    return begin, full_begin, left_end, right_begin, full_end, end


@triton.jit
def add_alibi(
    scores, slope, rows, keys, offset, stage: tl.constexpr, ALIBI: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Scores less slope * distance, but for ``alibi_shift``. keys: counted from the block's first.

    offset: of the key aligned with row 0 from the block's first. stage: of the loop, whose blocks
    have a side of the diagonal in ``alibi_edges``; LISTED: they are a mask's and have none.
    """
    LEFT: tl.constexpr = (ALIBI == LEFT_ALONE or stage == 1) and not LISTED
    SIDE: tl.constexpr = 1 if LEFT else (-1 if stage == 3 else 0)
    if SIDE == 0:
        distance = tl.abs((rows + offset)[:, None] - keys[None, :]).to(tl.float32)
        scores = scores - slope * distance
    else:
        scores = scores + (slope * SIDE * keys.to(tl.float32))[None, :]
    return scores


@triton.jit
def alibi_shift(
    slope, rows, offset, stage: tl.constexpr, ALIBI: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """What ``add_alibi`` leaves out, for each row, times log2(e)."""
    LEFT: tl.constexpr = (ALIBI == LEFT_ALONE or stage == 1) and not LISTED
    SIDE: tl.constexpr = 1 if LEFT else (-1 if stage == 3 else 0)
    if SIDE == 0:
        shift = tl.zeros((rows.shape[0],), dtype=tl.float32)
    else:
        shift = slope * (-SIDE * LOG2E) * (rows + offset).to(tl.float32)
    return shift


@triton.jit
def bias_pointers(
    bias_ptr, stride_b, stride_h, stride_s, batch_idx, head, rows, num_rows, UNIT: tl.constexpr
):
    """Pointers to the first key of each row; rows past the end have the last row's.

    UNIT: elements of which the strides are multiples (``launch.stride_unit``).
    """
    strides = strides_of(stride_b, stride_s, stride_h, UNIT)
    rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    return row_pointer(bias_ptr, strides, batch_idx, head, rows)


@triton.jit
def load_bias(pointers, keys, num_keys, MASK_KEYS: tl.constexpr):
    """A tile of the bias in its dtype, 0 past the last key. keys broadcast against pointers."""
    if MASK_KEYS:
        bias = tl.load(pointers + keys, mask=keys < num_keys, other=0.0)
    else:
        bias = tl.load(pointers + keys)
    return bias


@triton.jit
def alibi_on_minus_lse(
    minus_lse, unit, slopes_ptr, slopes_stride_b, batch_idx, head, rows, keys, diagonal, origin,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """-lse less slope * distance for the backward, whose exponents are a product plus this sum.

    unit: of minus_lse. rows and keys broadcast against each other, minus_lse against rows. origin:
    a key near them, from which distances are counted.
    """
    slope = load_slope(slopes_ptr, slopes_stride_b, batch_idx, head) * unit
    if ALIBI == LEFT_ALONE:
        minus_lse = minus_lse - slope * (rows + diagonal - origin).to(tl.float32)
        minus_lse = minus_lse + slope * (keys - origin).to(tl.float32)
    else:
        minus_lse = minus_lse - slope * tl.abs(rows + diagonal - keys).to(tl.float32)
    return minus_lse


@triton.jit
def with_sink(acc_scale, row_max, row_sum, sink):
    """Add a logit (natural log) to a row: the factor of its accumulator, its maximum, its sum."""
    sink_log2 = sink.to(tl.float32) * LOG2E
    new_max = tl.maximum(row_max, sink_log2)
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.math.exp2(row_max - reference)
    weight = tl.where(sink_log2 == float("inf"), 1.0, tl.math.exp2(sink_log2 - reference))
    return acc_scale * decay, new_max, row_sum * decay + weight


@triton.jit
def store_max_logit(max_logit_ptr, head, row_max, rows, num_rows):
    """Raise the head's largest score, which is at first -inf, to that of a tile of rows. The order
    of programs does not matter. row_max: log2 domain."""
    largest = tl.max(tl.where(rows < num_rows, row_max, float("-inf")), 0)
    tl.atomic_max(max_logit_ptr + head, largest * LN2, sem="relaxed")


@triton.jit
def gradient_of_sink(sinks_ptr, head, lse, minus_delta):
    """The sum over rows of exp(sink - lse) * (dlse - delta); a sink of either infinity has none."""
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    finite = tl.abs(sink) < float("inf")
    weight = tl.math.exp2((sink - lse) * LOG2E)
    return tl.sum(tl.where(finite, weight * minus_delta, 0.0), 0)
