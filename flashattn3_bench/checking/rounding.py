"""What a score is off by where its products are rounded, from the arithmetic alone."""

from __future__ import annotations

from torch import Tensor

from flashattn3.call.operands import Tensors

from .fp64_reference import heads_of

# e4m3 WGMMA truncates each product at the accumulator's exponent, so a sum of n products of one
# sign loses up to n times this of itself (docs/hopper-fp8.md).
E4M3_TRUNCATION = 2.0**-16


def score_rounding(tensors: Tensors, *, softmax_scale: float, unit: float, **_: float) -> Tensor:
    """Of lse, in its shape: what a score of the row can be off by, unit times the sum of |q k|.

    unit: FLOAT32_EPS, of products that float32 adds; E4M3_TRUNCATION * head_dim of e4m3 on tensor
        cores. The other options are ``attention``'s. The log-sum-exp is off by no more than its
        scores.
    """
    q, k = (x.detach().double().abs() for x in tensors[:2])
    moved = q.new_zeros(q.shape[:-1])
    for rows, keys in heads_of(tensors):
        sums = q[rows] @ k[keys].T
        moved[rows] = sums.amax(1) if sums.shape[1] else 0.0
    return unit * abs(softmax_scale) * moved.transpose(-1, -2)
