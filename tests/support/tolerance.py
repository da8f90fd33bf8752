"""The rules of tests alone: of the log-sum-exp, and of sums of few keys in codes of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn3_bench.checking.tolerance import (
    FLOOR,
    comparable,
    largest,
    report,
    root_mean_square,
)

LSE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}


FP8_LSE_TOLERANCE = 5e-3


# Errors of sums of such codes: of one row, which may have one key that counts, and of all of them;
# int8 rows whose keys are alike are off together.
FP8_EXP2_ERROR, FP8_EXP2_RMS_ERROR, INT8_EXP2_RMS_ERROR = 1 / 12, 0.02, 0.05


# Codes end at 2^-7, and when a row's reference is set, its largest P becomes 2^5 at least.
FP8_DROPPED_WEIGHT = 2.0**-12


def check_rounded_p(
    name: str,
    got: Tensor,
    reference: Tensor,
    weights: Tensor,
    dropped: Tensor,
    case: object,
    plan: object = "",
    moved: Tensor | None = None,
) -> None:
    """Hold a result of few keys, where the errors of P do not average out, to what they can do.

    weights: attention of the magnitudes of v: the sum of P |v|. An element may be off by twice the
    error of a code of it, once in the numerator and once in the row sum; all by that error in the
    root mean square.
    dropped: ``dropped_values`` of FP8_DROPPED_WEIGHT. Light keys are lost beside a heavy one, which
    shows in a column where the heavy key's value is near 0.
    moved: what each row's scores can be off by, in out's shape but for the last axis; None: 0.
    """
    moved = weights.new_zeros(()) if moved is None else torch.expm1(moved).unsqueeze(-1)
    moved = moved * (weights + reference.abs())
    got, reference, weights, dropped, moved = comparable(
        name, got, reference, weights, dropped, moved, case=case, plan=plan
    )
    error, rounding = (got - reference).abs(), torch.finfo(torch.bfloat16).eps * reference.abs()
    allowed = 2 * FP8_EXP2_ERROR * weights + dropped + moved + rounding + FLOOR[torch.float32]
    if (error > allowed).any():
        found = f"error over {2 * FP8_EXP2_ERROR:.3g} of the sum of P |v|"
        raise AssertionError(report(name, found, error - allowed, got, reference, case, plan))
    bound = FP8_EXP2_ERROR * root_mean_square(weights)
    bound += root_mean_square(dropped) + root_mean_square(moved)
    bound += FLOOR[torch.float32]
    if root_mean_square(error) > bound:
        found = f"root mean square error {root_mean_square(error):.3e}, bound {bound:.3e}"
        raise AssertionError(report(name, found, error, got, reference, case, plan))


def check_lse(
    got: Tensor,
    reference: Tensor,
    case: object,
    plan: object = "",
    tolerance: float | None = None,
    moved: Tensor | None = None,
) -> None:
    """Hold a log-sum-exp to |error| <= tolerance * max(1, |lse|), and to the fp64 reference's -inf.

    tolerance: None for that of the dtype.
    moved: ``score_rounding``, an error allowed besides; None: 0. It matters where the products of q
        and k are large and their sum is not.
    """
    tolerance = tolerance or LSE_TOLERANCE[got.dtype]
    moved = torch.zeros_like(reference) if moved is None else moved
    got, reference, moved = comparable("lse", got, reference, moved, case=case, plan=plan)
    error = ((got - reference).abs() - moved).clamp(min=0.0)
    excess = torch.where(reference.isfinite(), error / reference.abs().clamp(min=1.0), 0.0)
    if largest(excess) > tolerance:
        found = f"largest error / max(1, |lse|) {largest(excess):.3e} > {tolerance:g}"
        raise AssertionError(report("lse", found, excess, got, reference, case, plan))


def check_exp2_lse(
    got: Tensor, reference: Tensor, case: object, plan: object = "", int8: bool = False
) -> None:
    """Hold a log-sum-exp of P in codes of e4m3 to their error, each row's and that of all rows.

    int8: q and k are.
    """
    allowed = INT8_EXP2_RMS_ERROR if int8 else FP8_EXP2_RMS_ERROR
    check_lse(got, reference, case, plan, FP8_EXP2_ERROR)
    got, reference = comparable("lse", got, reference, case=case, plan=plan)
    error = torch.where(reference.isfinite(), (got - reference).abs(), 0.0)
    if root_mean_square(error) > allowed:
        found = f"root mean square error {root_mean_square(error):.3e} > {allowed:g}"
        raise AssertionError(report("lse", found, error, got, reference, case, plan))


def score_floor(lse: Tensor) -> float:
    """The floor of what is made from P = exp(S - lse): its exponent is rounded at lse's size.

    Scores of 1e4 so cost P a relative 1e-3 in float32. An autograd that keeps P pays it once, a
    backward that stores lse and computes P again pays it twice.
    """
    size = torch.where(lse.isfinite(), lse, 0.0).abs()
    return max(FLOOR[lse.dtype], torch.finfo(lse.dtype).eps * largest(size))
