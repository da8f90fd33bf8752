"""The tolerance rule passes right results, fails each kind of wrong one, and says where it is."""

from __future__ import annotations

import math

import pytest
import torch
from support.fp8 import FORMS, make_fp8_inputs, scales_of_v
from support.inputs import make_inputs, make_output_gradients
from support.rounding import dropped_values, gradient_rounding, out_rounding
from support.tolerance import (
    FP8_DROPPED_WEIGHT,
    check_exp2_lse,
    check_lse,
    check_rounded_p,
    score_floor,
)

from flashattn3 import BlockScaled
from flashattn3.call.operands import Tensors
from flashattn3_bench.checking import FORWARD_FACTOR, GRADIENT_FACTOR, attention, check, gradients
from flashattn3_bench.checking.cases import dense, varlen
from flashattn3_bench.checking.fp64_reference import heads_of

CASE = dense("causal-empty-rows", (129, 65), (4, 2), causal=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module", params=DTYPES)
def outcome(request):
    """truth, baseline and result of out; the result is the fp64 reference rounded, the best there
    is; and what rounding can do to it.
    """
    tensors = make_inputs(CASE, "cpu", request.param)
    reference, _ = attention(tensors, **CASE.reference_options())
    baseline, _ = attention(tensors, **CASE.reference_options(), dtype=request.param)
    rounding = out_rounding(tensors, request.param, **CASE.reference_options())
    return reference, baseline, reference.to(request.param), lambda: rounding


@pytest.fixture(scope="module")
def lse():
    _, lse = attention(make_inputs(CASE, "cpu", torch.float32), **CASE.reference_options())
    return lse


def checked(outcome, got, reference=None, baseline=None):
    """``check`` of out. reference, baseline: in place of those of the outcome."""
    of_reference, of_baseline, _, rounding = outcome
    reference = of_reference if reference is None else reference
    baseline = of_baseline if baseline is None else baseline
    place = CASE, "tile 64 x 64"
    check("out", got, reference, baseline, FORWARD_FACTOR, *place, rounding=rounding)


def test_right_results_pass(outcome):
    _, baseline, got, _ = outcome
    checked(outcome, got)
    checked(outcome, baseline)


def with_value(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def with_one_wrong_element(reference, baseline, got):
    error = 4 * (baseline - reference).abs().max() + 1e-4
    return with_value(got, (1, 77, 3, 5), got[1, 77, 3, 5] + error)


def with_a_slight_scale(reference, baseline, got):
    """No element stands out."""
    relative = (baseline - reference).square().mean().sqrt() / reference.square().mean().sqrt()
    return (reference * (1 + 4 * float(relative) + 1e-4)).to(got.dtype)


def with_noise_everywhere(reference, baseline, got):
    largest_allowed = 2 * (baseline - reference).abs().max() + 1e-5 * reference.abs().max()
    return (reference + 0.6 * float(largest_allowed)).to(got.dtype)


PLACE = r"inf or NaN differ in 1 of .*\n.*\(1, 100, 2, 3\): got -?(nan|inf)"
WRONG = [
    *((lambda r, b, got, x=x: with_value(got, (1, 100, 2, 3), x), PLACE)
      for x in (math.nan, math.inf, -math.inf)),
    (with_one_wrong_element, r"^out: largest error"),
    (with_a_slight_scale, r"^out: (root mean square|largest)"),
    (with_noise_everywhere, "root mean square"),
    (lambda r, b, got: got[:, 1:], "shape"),
]  # fmt: skip


@pytest.mark.parametrize(("spoilt", "said"), WRONG)
def test_a_wrong_result_fails(outcome, spoilt, said):
    with pytest.raises(AssertionError, match=said) as error:
        checked(outcome, spoilt(*outcome[:3]))
    if spoilt is with_one_wrong_element:
        truth = repr(float(outcome[0][1, 77, 3, 5]))
        for part in ("(1, 77, 3, 5)", "causal-empty-rows", "tile 64 x 64", truth):
            assert part in str(error.value)


def test_a_nan_in_the_truth_must_be_there(outcome):
    reference, baseline, got = (x.clone() for x in outcome[:3])
    reference[0, 90, 0, 0] = baseline[0, 90, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="inf or NaN differ in 1 "):
        checked(outcome, got, reference, baseline)
    got[0, 90, 0, 0] = math.nan
    checked(outcome, got, reference, baseline)


def test_a_baseline_that_overflows_allows_nothing(outcome):
    _, baseline, got, _ = outcome
    index = 0, 100, 0, 0
    broken = with_value(baseline, index, math.inf)
    checked(outcome, got, baseline=broken)
    with pytest.raises(AssertionError, match=r"\(0, 100, 0, 0\)"):
        checked(outcome, with_value(got, index, got[index] + 0.5), baseline=broken)


@every_dtype
@pytest.mark.parametrize("name", ("dq", "dk", "dv"))
def test_gradients_of_a_shifted_mask_fail(name, dtype):
    """The classic off-by-one: one key too many on the diagonal."""
    tensors = make_inputs(CASE, "cpu", dtype)
    dout, dlse = make_output_gradients(CASE, tensors)
    options = CASE.reference_options()
    _, lse = attention(tensors, **options, dtype=dtype)
    place = ("dq", "dk", "dv").index(name)
    reference, baseline, shifted = (
        gradients(tensors, dout, dlse, **given)[place]
        for given in (options, options | {"dtype": dtype}, options | {"window_right": 1})
    )
    how = {
        "floor": score_floor(lse),
        "rounding": lambda: gradient_rounding(tensors, dout, dlse, dtype, **options)[place],
    }
    check(name, reference.to(dtype), reference, baseline, GRADIENT_FACTOR, CASE, **how)
    with pytest.raises(AssertionError, match=rf"^{name}: largest error"):
        check(name, shifted.to(dtype), reference, baseline, GRADIENT_FACTOR, CASE, **how)


def test_lse_gate(lse):
    for right in (lse.float(), lse):
        check_lse(right, lse, CASE)
    for wrong in ((lse * (1 + 2e-4)).float(), lse + 1e-9):
        with pytest.raises(AssertionError, match=r"^lse: largest error"):
            check_lse(wrong, lse, CASE)
    for index, value in (((1, 2, 3), 0.0), ((1, 2, 3), math.inf), ((1, 2, 100), -math.inf)):
        with pytest.raises(AssertionError, match="inf or NaN differ in 1 "):
            check_lse(with_value(lse.float(), index, value), lse, CASE)


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
    for x, y in zip(again[:3], (q, k, v), strict=True):
        assert x.equal(y) or is_varlen
        assert x.is_leaf and x.requires_grad and x.stride() == y.stride()


def test_lse_of_codes_gate(lse):
    noise = torch.randn(lse.shape, generator=torch.Generator().manual_seed(0)).double()
    finite = lse.isfinite()
    one = lse.clone()
    one[finite] += torch.eye(1, int(finite.sum()))[0]
    for right, int8 in ((lse + 0.01 * noise.clamp(-3, 3), False), (lse + 0.03, True)):
        check_exp2_lse(right, lse, CASE, int8=int8)
    for wrong, int8, said in (
        (lse + 0.03, False, "root mean square"),
        (lse + 0.08, True, "root mean square"),
        (one, False, "largest"),
    ):
        with pytest.raises(AssertionError, match=said):
            check_exp2_lse(wrong, lse, CASE, int8=int8)


def test_rounded_p_gate():
    """Half of one row, a value that belongs to no key, and a little of all."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(1, 50, 2, 16, generator=generator, dtype=torch.float64)
    weights = reference.abs() + 0.5
    dropped = FP8_DROPPED_WEIGHT * weights
    check_rounded_p("out", reference * 1.05, reference, weights, dropped, CASE)
    for wrong in (0.5, 1.0):
        spoilt = reference.clone()
        spoilt[0, 7] -= wrong * weights[0, 7]
        with pytest.raises(AssertionError, match=r"of the sum of P"):
            check_rounded_p("out", spoilt, reference, weights, dropped, CASE)
    with pytest.raises(AssertionError, match="root mean square"):
        check_rounded_p("out", reference + 0.1 * weights, reference, weights, dropped, CASE)


def kernel(tensors, dout, dlse, dtype):
    """out, dq, dk and dv of one head without a mask, rounded to dtype where a kernel rounds."""

    def rounded(x):
        return x.to(dtype).float()

    q, k, v, do = (x[0, :, 0].float() for x in (*tensors[:3], dout))
    scale = q.shape[-1] ** -0.5
    s = q @ k.T * scale
    top = s.amax(1, keepdim=True)
    p = (s - top).exp()
    out = rounded(rounded(p) @ v / p.sum(1, keepdim=True))
    p = p / p.sum(1, keepdim=True)
    ds = rounded(p * (do @ v.T - (do * out).sum(1, keepdim=True) + dlse[0, 0].unsqueeze(1)))
    results = out, ds @ k * scale, ds.T @ q * scale, rounded(p).T @ do
    return [x.to(dtype)[None, :, None] for x in results]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 3, 4)], ids=str)
def test_a_right_kernel_passes_where_the_baseline_is_right_by_luck(shape, dtype):
    sq, sk, head_dim = shape
    case, lucky = dense("tiny", (sq, sk), (1, 1), (head_dim, head_dim), batch=1), 0
    for seed in range(25):
        tensors = make_inputs(case, "cpu", dtype, seed)
        dout, dlse = make_output_gradients(case, tensors, seed + 1)
        options = case.reference_options()
        references, baselines = (
            (attention(tensors, **how)[0], *gradients(tensors, dout, dlse, **how))
            for how in (options, options | {"dtype": dtype})
        )
        roundings = (
            out_rounding(tensors, dtype, **options),
            *gradient_rounding(tensors, dout, dlse, dtype, **options),
        )
        found = kernel(tensors, dout, dlse, dtype)
        factors = FORWARD_FACTOR, *[GRADIENT_FACTOR] * 3
        for got, reference, baseline, factor, rounding in zip(
            found, references, baselines, factors, roundings, strict=True
        ):
            check("x", got, reference, baseline, factor, case, rounding=lambda x=rounding: x)
            lucky += fails("x", got, reference, baseline, factor, case)
            wrong = reference + 1.01 * rounding + 2e-5 * reference.abs().clamp(min=1)
            assert fails(
                "x", wrong, reference, reference, factor, case, rounding=lambda x=rounding: x
            )
    assert lucky > 0
    without = gradient_rounding(tensors, dout, None, dtype, **options)
    zero = gradient_rounding(tensors, dout, 0 * dlse, dtype, **options)
    assert all(map(torch.equal, without, zero))


def test_no_rounding_moves_a_row_whose_keys_a_bias_hides():
    case = dense("hidden", (3, 4), (1, 1), (4, 4), batch=1)
    tensors = make_inputs(case, "cpu", torch.float16)
    bias = torch.zeros(1, 1, 3, 4)
    bias[:, :, 1] = -math.inf
    tensors, options = tensors._replace(bias=bias), case.reference_options()
    dout, dlse = make_output_gradients(case, tensors)
    found = gradient_rounding(tensors, dout, dlse, torch.float16, **options)
    of_rows = out_rounding(tensors, torch.float16, **options), found[0]
    assert all(x.isfinite().all() and x[:, 0].all() and not x[:, 1].any() for x in of_rows)
    assert all(x.isfinite().all() for x in found if x is not None)


def fails(*arguments, **options) -> bool:
    try:
        check(*arguments, **options)
    except AssertionError:
        return True
    return False


def in_codes(p, first_octave):
    """P, whose largest is 2 ** first_octave, in the codes of e4m3 that the 8-bit kernels make."""
    largest = p.amax(-1, keepdim=True)
    codes = (8 * (torch.log2(p / largest) + first_octave + 7) - 0.46).round().clamp(0, 126)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()


def test_light_keys_may_be_dropped_and_others_may_not():
    """Beside a heavy key whose value is 0 light keys show, whatever its other columns hold."""
    generator = torch.Generator().manual_seed(0)
    for num_keys in (3, 20):
        case = dense("dropped", (64, num_keys), (1, 1), (1, 1), batch=1)
        q, v = (torch.rand(1, n, 1, 1, generator=generator).double() for n in (64, num_keys))
        octaves = 8 + 2 * torch.rand(num_keys, generator=generator).double()
        octaves[0], v[0, 0] = 0.0, 0.0
        k = -octaves.mul(math.log(2)).view(1, -1, 1, 1)
        values = Tensors(1 + q / 2, k, v)
        reference, _ = attention(values, softmax_scale=1.0)
        scales = torch.ones(1, num_keys, 1, 1).double()
        dropped = dropped_values(values, scales, FP8_DROPPED_WEIGHT, softmax_scale=1.0)
        p = (values.q[0, :, 0] @ k[0, :, 0].T).exp()
        for first_octave in (5, 8):
            codes = in_codes(p, first_octave)
            got = (codes @ v[0, :, 0] / codes.sum(1, keepdim=True))[None, :, None]
            check_rounded_p("out", got, reference, reference, dropped, case)
        codes = in_codes(p, 5).where(p > 2.0**-8, 0.0)
        got = (codes @ v[0, :, 0] / codes.sum(1, keepdim=True))[None, :, None]
        with pytest.raises(AssertionError, match="out: "):
            check_rounded_p("out", got, reference, reference, dropped, case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_varlen", (False, True), ids=("dense", "varlen"))
def test_the_scales_of_v_make_values_of_what_is_stored(is_varlen, form):
    if is_varlen:
        case = varlen("any", (5, 0, 130), (5, 0, 130), (4, 2), (16, 16), tail_rows=2)
    else:
        case = dense("any", (70, 130), (4, 2), (16, 16), batch=2)
    tensors, values = make_fp8_inputs(case, "cpu", form)
    stored = tensors.v.data if isinstance(tensors.v, BlockScaled) else tensors.v
    found = stored.double() * scales_of_v(tensors)
    places = [keys for _, keys in heads_of(values)]
    assert all(torch.equal(found[keys], values.v[keys]) for keys in places)
    least = FP8_DROPPED_WEIGHT
    dropped = dropped_values(values, scales_of_v(tensors), least, **case.reference_options())
    assert dropped.isfinite().all()
