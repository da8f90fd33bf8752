"""The one rule that says whether a result is right.

The error against a float64 truth may be ``factor`` times the error of plain PyTorch in the kernel's
own precision (``reference.attention`` in the inputs' dtype), plus a floor for the rounding that
PyTorch happens not to do. It is held for the largest error and for the root mean square error: the
first finds one wrong element, the second a result that is slightly wrong everywhere. inf and NaN
must stand where they stand in the fp64 reference. The log-sum-exp has an absolute gate instead
(tests/support/tolerance.py), because the baseline's is not kept in 16 bits.

PyTorch's error is a sample. Of few rows and keys it may be 0 by luck, where a kernel that is as
right is off by a unit in the last place. So a result that has more error passes if each of its
elements is within what the roundings of the algorithm can do to it, a bound that follows from the
arithmetic alone (tests/support/rounding.py) and from no measurement. With many keys the bound
admits hardly more than PyTorch's error: with 65 to 2000 keys a planted scale is found if it is 1.0
to 1.3 times as wrong as without the bound, and planted noise as before.

Where tensor cores multiply e4m3 there is no such baseline: P may be rounded to e4m3, and sums be
kept in fewer bits than float32's. Against the exact attention of the quantized inputs the result
then has bounds on its root mean square error and on its cosine; against the attention of the 16-bit
inputs wider ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# By what a kernel accumulates in, for values of order one: eighty roundings of float32, since sums
# over a head dim that cancel (delta and dP of a row with one key) round as often as it is long. In
# float64 the fp64 reference is its own baseline, with no error to multiply, so there the floor has
# to hold the rounding of scores up to 1e4 as well.
FLOOR = {torch.float32: 1e-5, torch.float64: 1e-10}


class Fp8Bounds(NamedTuple):
    """rmse: relative to the fp64 reference's root mean square."""

    rmse: float
    cosine: float


# q, k and v rounded to e4m3 are off by up to 1/16, by 1/40 in the root mean square: on normal data,
# in blocks, exact attention of what they are rounded to is off by 0.039 to 0.047; by 0.029 with q
# and k rotated and in int8, which is held to the same bounds. P as codes of e4m3
# (csrc/attention/softmax_e4m3.cuh) is off by up to 1/12, by 1/31 in the root mean square.
FP8_OF_QUANTIZED = Fp8Bounds(0.04, 0.999)
# With scores of int8 the code of a row's largest P is rounded as well: all rows together are off as
# before (0.031), the four of a case with one query by 0.051.
INT8_OF_QUANTIZED = Fp8Bounds(0.055, 0.998)
FP8_OF_16_BIT = Fp8Bounds(0.07, 0.997)


def check(
    name: str,
    got: Tensor,
    reference: Tensor,
    baseline: Tensor,
    factor: float,
    case: object,
    plan: object = "",
    floor: float | None = None,
    rounding: Callable[[], Tensor] | None = None,
) -> None:
    """Hold a result to the rule.

    Args:
        name: what it is: "out", "dq", ...
        got, reference, baseline: of one shape; truth is float64, got in the kernel's dtype.
        factor: FORWARD_FACTOR or GRADIENT_FACTOR.
        case, plan: named in the report: the problem, and the kernel config or tile that computed
            it.
        floor: error allowed whatever the baseline's, relative to the fp64 reference's size and at
            least to
            1; None for that of the dtype. ``score_floor`` gives the one of large scores.
        rounding: returns what the algorithm's roundings can do to each element, ``out_rounding`` or
            one of ``gradient_rounding``; called where the baseline does not allow the error.

    Raises:
        AssertionError: with both errors, their bounds, the worst index and its values.
    """
    floor = FLOOR[torch.promote_types(got.dtype, torch.float32)] if floor is None else floor
    got, reference, baseline = comparable(name, got, reference, baseline, case=case, plan=plan)
    finite = reference.isfinite()
    error = torch.where(finite, got - reference, 0.0).abs()
    baseline_error = (baseline - reference).abs()
    # Plain PyTorch may overflow where the kernel does not; there it allows nothing.
    baseline_error = torch.where(baseline_error.isfinite(), baseline_error, 0.0)
    size = torch.where(finite, reference, 0.0).abs()
    for norm_name, norm in (("largest", largest), ("root mean square", root_mean_square)):
        bound = factor * norm(baseline_error) + floor * max(1.0, norm(size))
        if norm(error) <= bound:
            continue
        allowed = f"{bound:.3e} = {factor:g} x {norm(baseline_error):.3e} + floor"
        found = f"{norm_name} error {norm(error):.3e} > {allowed}"
        if rounding is not None:
            excess = error - rounding().to(error) - floor * size.clamp(min=1.0)
            if largest(excess) <= 0:
                return
            found += f", and {largest(excess):.3e} over what roundings can do to an element"
        raise AssertionError(report(name, found, error, got, reference, case, plan))


def check_fp8(
    name: str,
    got: Tensor,
    reference: Tensor,
    case: object,
    plan: object = "",
    bounds: Fp8Bounds = FP8_OF_QUANTIZED,
) -> None:
    """Hold a result of e4m3 products to a truth: that of the quantized inputs, of int8 q and k with
    bounds=INT8_OF_QUANTIZED, or of the 16-bit ones with FP8_OF_16_BIT."""
    got, reference = comparable(name, got, reference, case=case, plan=plan)
    finite = reference.isfinite()
    got, reference = torch.where(finite, got, 0.0), torch.where(finite, reference, 0.0)
    error = (got - reference).abs()
    bound = bounds.rmse * root_mean_square(reference) + FLOOR[torch.float32]
    cosine = float((got * reference).sum() / (got.norm() * reference.norm()).clamp(min=1e-30))
    if root_mean_square(error) > bound or (reference.any() and cosine < bounds.cosine):
        found = f"root mean square error {root_mean_square(error):.3e}, bound {bound:.3e}; "
        found += f"cosine {cosine:.6f}, bound {bounds.cosine}"
        raise AssertionError(report(name, found, error, got, reference, case, plan))


def comparable(name: str, *values: Tensor, case: object, plan: object) -> list[Tensor]:
    """All as float64 on one device, once the first two agree in shape and in their inf and NaN."""
    got, reference = values[:2]
    if got.shape != reference.shape:
        raise AssertionError(
            f"{case}: {name}.shape {tuple(got.shape)}, should be {tuple(reference.shape)} {plan}"
        )
    values = [x.detach().to(got.device, torch.float64) for x in values]
    got, reference = values[:2]
    same = (
        (got.isfinite() & reference.isfinite())
        | (got == reference)
        | (got.isnan() & reference.isnan())
    )
    if not same.all():
        found = f"inf or NaN differ in {int((~same).sum())} of {same.numel()} elements"
        raise AssertionError(report(name, found, (~same).double(), got, reference, case, plan))
    return values


def report(
    name: str, found: str, error: Tensor, got: Tensor, reference: Tensor, case: object, plan: object
) -> str:
    """error: where its largest element stands is the worst index."""
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    worst = f"worst at {index}: got {float(got[index])!r}, should be {float(reference[index])!r}"
    return "\n  ".join([f"{name}: {found}", worst, f"case: {case}", f"plan: {plan or 'not given'}"])


def largest(error: Tensor) -> float:
    return float(error.detach().max()) if error.numel() else 0.0


def root_mean_square(error: Tensor) -> float:
    return float(error.square().mean().sqrt()) if error.numel() else 0.0
