"""The join of fixed spans of keys (split_tokens), one after the other, in the order of their keys.

A row's bits are to be those of any call: so the sums of a row have one order, whether one program
computes all spans of a tile or each has a program of its own, and no product of two is left to the
compiler to fuse or not. A span of which a row sees no key changes nothing.
"""

import triton
import triton.language as tl

from .common import LN2, LOG2E
from .score_terms import with_sink


@triton.jit
def part_of_span(acc, row_sum, row_max, factor):
    """The result of a span by itself, times a factor, and its lse (natural log)."""
    empty = row_sum == 0.0
    lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(row_sum))
    return acc * (factor * tl.where(empty, 1.0, 1.0 / row_sum))[:, None], lse


@triton.jit
def join_span(joined, total, largest, part, lse):
    """Rows of the spans before, their sum and largest lse, with one span more."""
    new_largest = tl.maximum(largest, lse)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.math.exp2((lse - reference) * LOG2E)
    decay = tl.math.exp2((largest - reference) * LOG2E)
    joined = tl.fma(joined, decay[:, None], part * weight[:, None])
    return joined, tl.fma(total, decay, weight), new_largest


@triton.jit
def finish_spans(joined, total, largest, sinks, heads, valid):
    """out and lse of rows, all spans of which are joined."""
    out_scale = tl.full(total.shape, 1.0, dtype=tl.float32)
    row_max = largest * LOG2E
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0)
        out_scale, row_max, total = with_sink(out_scale, row_max, total, sink)
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(total))
    out = joined * (out_scale * tl.where(empty, 1.0, 1.0 / total))[:, None]
    return tl.where(out == 0.0, 0.0, out), lse  # -0 depends on spans of weight 0
