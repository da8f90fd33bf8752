"""What the kernels of the backward share: their grid, the rows of lse and delta, P from lse."""

import triton
import triton.language as tl

from .column_parts import dot_rows
from .common import round_down, tanh_exp2

# minus_lse and minus_delta of a sequence are padded to a multiple of this many rows, so that no
# m_block reads out of bounds.
LSE_DELTA_ROWS = tl.constexpr(128)


@triton.jit
def block_and_head(num_blocks, num_heads):
    """Block, batch index and head of this program of a grid of num_blocks * num_heads * batch; the
    last two in 64 bits."""
    pid = tl.program_id(0)
    head = pid // num_blocks
    return pid % num_blocks, (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)


@triton.jit
def lse_delta_start(start_q, batch_idx, VARLEN: tl.constexpr):
    """First row of a sequence in minus_lse and minus_delta, which pad every sequence."""
    start = start_q
    if VARLEN:
        start = round_down(start_q + batch_idx * LSE_DELTA_ROWS, LSE_DELTA_ROWS)
    return tl.multiple_of(start, LSE_DELTA_ROWS)


@triton.jit
def probabilities(
    a, b, minus_lse, scale_log2, cap_log2, SOFTCAP: tl.constexpr, LSE_IN_SCORES: tl.constexpr
):
    """P = exp(scale * a b^T - lse), and the derivative of the cap at the score.

    LSE_IN_SCORES: minus_lse is in units of a raw score and is the accumulator bias of the GEMM.
    Each exponential then needs one multiply, and no register holds lse.
    """
    slope = 1.0
    if LSE_IN_SCORES:
        shape: tl.constexpr = (a[0].shape[0], b[0].shape[0])
        p = tl.math.exp2(dot_rows(a, b, tl.broadcast_to(minus_lse, shape)) * scale_log2)
    elif SOFTCAP:
        capped = tanh_exp2(dot_rows(a, b) * scale_log2, SOFTCAP)
        p = tl.math.exp2(capped * cap_log2 + minus_lse)
        slope = 1.0 - capped * capped
    else:
        p = tl.math.exp2(dot_rows(a, b) * scale_log2 + minus_lse)
    return p, slope
