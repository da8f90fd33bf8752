"""The tolerance rule passes right results, fails each kind of wrong one, and says where it is."""

from __future__ import annotations

import math

import pytest
import torch

from flashattn3.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    attention,
    check,
    check_code_lse,
    check_lse,
    check_rounded_p,
    gradients,
    make_inputs,
    make_output_gradients,
    score_floor,
)
from flashattn3.testing.cases import dense, varlen

CASE = dense("causal-empty-rows", (129, 65), (4, 2), causal=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def outcome(request):
    """truth, baseline and result of out; the result is the truth rounded, the best there is."""
    tensors = make_inputs(CASE, "cpu", request.param)
    truth, _ = attention(tensors, **CASE.truth_options())
    baseline, _ = attention(tensors, **CASE.truth_options(), dtype=request.param)
    return truth, baseline, truth.to(request.param)


@pytest.fixture(scope="module")
def lse():
    _, lse = attention(make_inputs(CASE, "cpu", torch.float32), **CASE.truth_options())
    return lse


def test_right_results_pass(outcome):
    truth, baseline, got = outcome
    check("out", got, truth, baseline, FORWARD_FACTOR, CASE)
    check("out", baseline, truth, baseline, FORWARD_FACTOR, CASE)


@pytest.mark.parametrize("wrong", (math.nan, math.inf, -math.inf))
def test_a_value_that_is_not_finite_fails(outcome, wrong):
    truth, baseline, got = outcome
    got = got.clone()
    got[1, 100, 2, 3] = wrong
    with pytest.raises(
        AssertionError, match=r"inf or NaN differ in 1 of .*\n.*\(1, 100, 2, 3\): got -?(nan|inf)"
    ):
        check("out", got, truth, baseline, FORWARD_FACTOR, CASE)


def test_a_nan_in_the_truth_must_be_there(outcome):
    truth, baseline, got = (x.clone() for x in outcome)
    truth[0, 90, 0, 0] = baseline[0, 90, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="inf or NaN differ in 1 "):
        check("out", got, truth, baseline, FORWARD_FACTOR, CASE)
    got[0, 90, 0, 0] = math.nan
    check("out", got, truth, baseline, FORWARD_FACTOR, CASE)


def test_one_wrong_element_fails_and_is_named(outcome):
    truth, baseline, got = outcome
    got = got.clone()
    got[1, 77, 3, 5] += 4 * (baseline - truth).abs().max() + 1e-4
    with pytest.raises(AssertionError) as error:
        check("out", got, truth, baseline, FORWARD_FACTOR, CASE, plan="tile 64 x 64")
    report = str(error.value)
    assert report.startswith("out: largest error")
    for part in (
        "(1, 77, 3, 5)",
        "causal-empty-rows",
        "tile 64 x 64",
        repr(float(truth[1, 77, 3, 5])),
    ):
        assert part in report


def test_a_slight_scale_fails_although_no_element_stands_out(outcome):
    truth, baseline, got = outcome
    relative = float((baseline - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    scaled = truth * (1 + 4 * relative + 1e-4)
    with pytest.raises(AssertionError, match=r"^out: (root mean square|largest)"):
        check("out", scaled.to(got.dtype), truth, baseline, FORWARD_FACTOR, CASE)


def test_noise_everywhere_fails_by_its_mean_alone(outcome):
    truth, baseline, _ = outcome
    largest_allowed = 2 * (baseline - truth).abs().max() + 1e-5 * truth.abs().max()
    noise = torch.full_like(truth, 0.6 * float(largest_allowed))
    with pytest.raises(AssertionError, match="root mean square"):
        check("out", (truth + noise).to(baseline.dtype), truth, baseline, FORWARD_FACTOR, CASE)


def test_a_wrong_shape_fails(outcome):
    truth, baseline, got = outcome
    with pytest.raises(AssertionError, match="shape"):
        check("out", got[:, 1:], truth, baseline, FORWARD_FACTOR, CASE)


def test_a_baseline_that_overflows_allows_nothing(outcome):
    truth, baseline, got = outcome
    broken = baseline.clone()
    broken[0, 100, 0, 0] = math.inf
    check("out", got, truth, broken, FORWARD_FACTOR, CASE)
    got = got.clone()
    got[0, 100, 0, 0] += 0.5
    with pytest.raises(AssertionError, match=r"\(0, 100, 0, 0\)"):
        check("out", got, truth, broken, FORWARD_FACTOR, CASE)


@every_dtype
@pytest.mark.parametrize("name", ("dq", "dk", "dv"))
def test_gradients_of_a_shifted_mask_fail(name, dtype):
    """The classic off-by-one: one key too many on the diagonal."""
    tensors = make_inputs(CASE, "cpu", dtype)
    dout, dlse = make_output_gradients(CASE, tensors)
    options = CASE.truth_options()
    _, lse = attention(tensors, **options, dtype=dtype)
    place = ("dq", "dk", "dv").index(name)
    truth, baseline, shifted = (
        gradients(tensors, dout, dlse, **given)[place]
        for given in (options, options | {"dtype": dtype}, options | {"window_right": 1})
    )
    check(name, truth.to(dtype), truth, baseline, GRADIENT_FACTOR, CASE, floor=score_floor(lse))
    with pytest.raises(AssertionError, match=rf"^{name}: largest error"):
        check(
            name,
            shifted.to(dtype),
            truth,
            baseline,
            GRADIENT_FACTOR,
            CASE,
            floor=score_floor(lse),
        )


def test_lse_gate(lse):
    check_lse(lse.float(), lse, CASE)
    check_lse(lse, lse, CASE)
    with pytest.raises(AssertionError, match=r"^lse: largest error"):
        check_lse((lse * (1 + 2e-4)).float(), lse, CASE)
    with pytest.raises(AssertionError, match=r"^lse: largest error"):
        check_lse(lse + 1e-9, lse, CASE)


@pytest.mark.parametrize(
    "index, wrong", (((1, 2, 3), 0.0), ((1, 2, 3), math.inf), ((1, 2, 100), -math.inf))
)
def test_lse_infinity_in_the_wrong_place_fails(lse, index, wrong):
    got = lse.float()
    got[index] = wrong
    with pytest.raises(AssertionError, match="inf or NaN differ in 1 "):
        check_lse(got, lse, CASE)


def test_nothing_is_right():
    empty = torch.empty(0, 4)
    check("out", empty, empty.double(), empty, FORWARD_FACTOR, CASE)
    check_lse(empty, empty.double(), CASE)


@pytest.mark.parametrize("layout", ("bshd", "unaligned", "bhsd", "padded", "packed"))
@pytest.mark.parametrize("is_varlen", (False, True), ids=("dense", "varlen"))
def test_inputs_lie_in_nan(layout, is_varlen):
    """What lies in the storage behind q, k and v and is not theirs is NaN."""
    if is_varlen:
        case = varlen("any", (5, 0, 7), (5, 0, 7), (4, 2), (8, 8), layout=layout, tail_rows=2)
    else:
        case = dense("any", (6, 6), (4, 2), (8, 8), layout=layout)
    tensors = make_inputs(case, "cpu", torch.float16)
    q, k, v = tensors[:3]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    used = sum(x.isfinite().sum() for x in (q, k, v))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (q, k, v)}
    flat = [torch.tensor([], dtype=q.dtype).set_(storage) for storage in storages.values()]
    assert used == sum(x.isfinite().sum() for x in flat)
    assert used < sum(x.numel() for x in flat)
    assert bool(q.isfinite().all()) is not is_varlen
    again = make_inputs(case, "cpu", torch.float16, requires_grad=True)
    assert all(x.equal(y) or is_varlen for x, y in zip(again[:3], (q, k, v), strict=True))
    assert all(
        x.is_leaf and x.requires_grad and x.stride() == y.stride()
        for x, y in zip(again[:3], (q, k, v), strict=True)
    )


def test_lse_of_codes_gate(lse):
    truth = lse.double()
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    check_code_lse(truth + 0.01 * noise.clamp(-3, 3), truth, CASE)
    with pytest.raises(AssertionError, match="root mean square"):
        check_code_lse(truth + 0.03, truth, CASE)
    check_code_lse(truth + 0.03, truth, CASE, int8=True)
    with pytest.raises(AssertionError, match="root mean square"):
        check_code_lse(truth + 0.08, truth, CASE, int8=True)
    one = truth.clone()
    one[truth.isfinite()] += torch.eye(1, int(truth.isfinite().sum()))[0]
    with pytest.raises(AssertionError, match="largest"):
        check_code_lse(one, truth, CASE)


def test_rounded_p_gate():
    """Half of one row, a value that belongs to no key, and a little of all."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(1, 50, 2, 16, generator=generator, dtype=torch.float64)
    weights = truth.abs() + 0.5
    check_rounded_p("out", truth * 1.05, truth, weights, 4, CASE)
    for wrong in (0.5, 1.0):
        spoilt = truth.clone()
        spoilt[0, 7] -= wrong * weights[0, 7]
        with pytest.raises(AssertionError, match=r"of the sum of P"):
            check_rounded_p("out", spoilt, truth, weights, 4, CASE)
    with pytest.raises(AssertionError, match="root mean square"):
        check_rounded_p("out", truth + 0.1 * weights, truth, weights, 4, CASE)
