"""The online softmax (Milakov & Gimelshein 2018): one update for all slices of an n_block."""

import triton
import triton.language as tl

from .common import LN2
from .score_terms import with_sink


@triton.jit
def largest_of(scores):
    """The largest score of each row of an n_block; scores: a tile for each slice."""
    block_max = scores[0]
    for i in tl.static_range(1, len(scores)):
        block_max = tl.maximum(block_max, scores[i])
    return tl.max(block_max, 1)


@triton.jit
def softmax_of_block(scores, largest, row_max, row_sum, factor, shift, MAY_BE_EMPTY: tl.constexpr):
    """Probabilities of an n_block, for each of its slices, and row_max, row_sum and the factor that
    the sums so far decay by.

    scores: a tile for each slice; ``factor`` converts them to log2 units, in which the others are.
    largest: of each row. shift: what all scores of a row lack; None: nothing. MAY_BE_EMPTY: a row
    may have seen no key yet.
    """
    new_max = tl.maximum(row_max, largest)
    reference = new_max
    if MAY_BE_EMPTY:  # such a row has maximum -inf, and -inf - -inf is NaN
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    subtracted = reference
    if shift is not None:
        subtracted = reference - shift
    probabilities = ()
    for i in tl.static_range(len(scores)):
        probabilities += (tl.math.exp2(scores[i] * factor - subtracted[:, None]),)
    decay = tl.math.exp2(row_max - reference)
    # With slices each column of row_sum is the sum of every eighth key: each thread sums its own
    # probabilities, and the threads of a row are reduced once, after the loop.
    if len(row_sum.shape) == 2:
        NUM_ROWS: tl.constexpr = scores[0].shape[0]
        NUM_EIGHTHS: tl.constexpr = scores[0].shape[1] // 8
        row_sum = row_sum * decay[:, None]
        for i in tl.static_range(len(scores)):
            eighths = tl.reshape(probabilities[i], (NUM_ROWS, NUM_EIGHTHS, 8))
            row_sum += tl.sum(eighths, 1)
    else:
        row_sum = row_sum * decay + tl.sum(probabilities[0], 1)
    return probabilities, new_max, row_sum, decay


@triton.jit
def finish_softmax(row_max, row_sum, sinks_ptr, head, split, SPLIT: tl.constexpr):
    """lse of each row, with the sink if there is one, and the factor of its accumulator."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        if SPLIT:  # the first split has it
            sink = tl.where(split == 0, sink, float("-inf"))
        ones = tl.full(row_max.shape, 1.0, dtype=tl.float32)
        sink_decay, row_max, row_sum = with_sink(ones, row_max, row_sum, sink)
    empty = row_sum == 0.0
    lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(row_sum))
    acc_scale = tl.where(empty, 1.0, 1.0 / row_sum)
    if sinks_ptr is not None:
        acc_scale *= sink_decay
    return lse, acc_scale
