"""FP8 attention: every form of the inputs on every backend against float64 of what they stand for,
what 16-bit tensors lose by it, and the sentences for what is illegal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers import EVERY_BACKEND, GPU, case_named
from support.cases import FORWARD_CASES, call
from support.fp8 import FORMS, make_fp8_inputs
from support.inputs import make_inputs
from support.tolerance import FP8_LSE_TOLERANCE, check_exp2_lse, check_lse, score_floor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import pad

from flashattn3 import (
    UnsupportedError,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    quantize_block_fp8,
)
from flashattn3.backends.triton.kernels.fp8 import as_float16
from flashattn3.call.descales import BLOCKS
from flashattn3.call.dtypes import EIGHT_BIT, FP8, INT8
from flashattn3.call.fields import Options
from flashattn3.call.hadamard import rotate
from flashattn3.call.operands import Scaled, Tensors
from flashattn3.quantization import block_fp8
from flashattn3.run.operators import operator_arguments
from flashattn3_bench.checking import (
    FORWARD_FACTOR,
    FP8_OF_16_BIT,
    FP8_OF_QUANTIZED,
    INT8_OF_QUANTIZED,
    attention,
    check,
    check_fp8,
)
from flashattn3_bench.checking.cases import dense, varlen

poisoned = pytest.mark.usefixtures("poisoned_memory")
# Blocks of q, k and v that end elsewhere than the tiles, and more than one of each.
LONGER = (
    dense("blocks", (200, 300), heads=(4, 2), batch=2),
    dense("blocks-causal", (257, 385), heads=(2, 1), causal=True, dims=(128, 64), batch=1),
    dense("blocks-window", (200, 520), window=(150, 20), batch=1),
    dense("blocks-splits", (33, 700), num_splits=3, heads=(4, 2), softcap=20.0, batch=1),
    varlen("blocks-varlen", (200, 7, 129), (300, 260, 129), heads=(4, 2), causal=True),
    varlen("blocks-used", (200, 129), (300, 260), seqused_q=(200, 90), seqused_k=(65, 257)),
)
FEATURES = ("causal-empty-rows", "gqa-8", "window-both", "softcap-causal", "dim-72-40")
FEATURES += ("scale-negative", "varlen-seqused", "varlen-splits", "layout-packed", "no-keys")
MEANS = ("causal", "causal-empty-rows", "gqa-8", "dim-72-40", "scale-negative", "splits-causal")
MEANS += ("no-keys", "no-queries", "varlen-cross", "varlen-empty-sequences", "varlen-no-keys")
MEANS += ("varlen-no-queries", "varlen-seqused", "varlen-splits", "varlen-tail-rows")


def fits(case, form: str) -> bool:
    return "rotated" not in form or case.head_dim & (case.head_dim - 1) == 0


def holds(case, form: str, backend: str, device, **options) -> None:
    agrees(case, form, backend, *make_fp8_inputs(case, device, form), **options)


def agrees(case, form: str, backend: str, given: Tensors, values: Tensors, **options) -> None:
    """out and lse against float64: as tight as 16 bits, where e4m3 is multiplied in float16."""
    exact = backend == "reference"
    options.setdefault("out_dtype", torch.float32 if exact else torch.float16)
    out, lse = call(case, given, return_lse=True, backend=backend, **options)
    assert (out.dtype, lse.dtype) == (options["out_dtype"], torch.float32)
    reference, reference_lse = attention(values, **case.reference_options())
    if exact or not GPU:
        precision = torch.float32 if exact else torch.float16
        plain, _ = attention(values, **case.reference_options(), dtype=precision)
        floor = score_floor(lse) if exact else None
        check("out", out, reference, plain, FORWARD_FACTOR, case, backend, floor)
        check_lse(lse, reference_lse, case, backend)
        return
    if case.distribution == "large":
        pytest.skip("the tensor cores add e4m3 products in too few bits for scores of 1e4")
    int8 = backend == "hopper" and "int8" in form
    check_fp8("out", out, reference, case, backend, INT8_OF_QUANTIZED if int8 else FP8_OF_QUANTIZED)
    if backend == "hopper":
        check_exp2_lse(lse, reference_lse, case, backend, int8)
    else:
        check_lse(lse, reference_lse, case, backend, FP8_LSE_TOLERANCE)


def has_every_form(case) -> bool:
    return case in LONGER or case.name in FEATURES


# The others have two, which run where Triton does: the reference backend dequantizes first.
CASE_FORMS = [
    (case, form)
    for case in (*LONGER, *FORWARD_CASES)
    for form in FORMS
    if (has_every_form(case) or form in ("raw", "int8 block")) and fits(case, form)
]


def quick_form(case, form: str, **_) -> bool:
    """All features and forms, not each with each."""
    few = ("raw", "int8 block") if case.name in FEATURES else ("int8 block",)
    return case.name == "blocks-causal" or (has_every_form(case) and form in few)


@poisoned
@pytest.mark.interpreted(
    quick=quick_form,
    sweep=lambda case, form, backend: (
        not has_every_form(case) and (form == "raw" or backend == "reference")
    ),
)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    ("case", "form"), CASE_FORMS, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_every_case_and_form(case, form, backend, device):
    holds(case, form, backend, device)


def make_inputs_with_mean(case, device, form: str) -> tuple[Tensors, Tensors]:
    """Those of make_fp8_inputs, of BlockScaled, where k has a mean, not a dense one."""
    given, values = make_fp8_inputs(case, device, form)
    k = given.k
    heads, head_dim = k.shape[-2:]
    mean = torch.randn(case.batch, head_dim, heads, device=device).mT
    given = given._replace(k=replace(k, mean=mean))
    mean = rotate(mean.double()) if k.hadamard else mean.double()
    if case.varlen:
        mean = mean.repeat_interleave(k.cu_seqlens.diff(), dim=0)
        mean = pad(mean, (0, 0, 0, 0, 0, case.tail_rows))
    else:
        mean = mean.unsqueeze(1)
    return given, values._replace(k=values.k + mean)


@poisoned
@pytest.mark.interpreted(quick=lambda name, form, **_: form == "scaled" or name == "gqa-8")
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("form", ["scaled", "int8 scaled", "int8 rotated"])
@pytest.mark.parametrize("name", MEANS)
def test_what_was_subtracted_from_k_comes_back_in_lse(name, form, backend, device):
    """It changes no weight."""
    case = case_named(name)
    if not fits(case, form):
        pytest.skip("the head dim is no power of two")
    agrees(case, form, backend, *make_inputs_with_mean(case, device, form))


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_out_of_many_keys_keeps_its_scale(dtype, backend, device):
    """What an accumulator cuts off a sum of 4096 probabilities goes to one side: 9 % together."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64, device=device).bfloat16() for n in (32, 4096, 4096))
    out = flash_attn_fp8_func(q, k, v, qk_dtype=dtype, backend=backend).double()
    reference, _ = attention(Tensors(q, k, v), softmax_scale=64**-0.5)
    scale = (out * reference).sum() / reference.square().sum()
    assert abs(float(scale) - 1) < 0.02, scale


def test_both_lists_of_blocks_are_the_same():
    assert BLOCKS == block_fp8.BLOCKS


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    ("make", "form"), [(make_fp8_inputs, "block"), (make_inputs_with_mean, "scaled")]
)
@pytest.mark.parametrize("name", ["causal-empty-rows", "varlen-seqused", "varlen-empty-sequences"])
def test_rows_without_keys_are_zero(name, make, form, backend, device):
    case = case_named(name)
    given, values = make(case, device, form)
    out, lse = call(case, given, return_lse=True, backend=backend)
    _, wanted = attention(values, **case.reference_options())
    blind = wanted == float("-inf")
    assert blind.any()
    assert (lse[blind] == float("-inf")).all()
    assert (out.transpose(-2, -3)[blind] == 0).all()


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(("hadamard", "dtype"), [(False, FP8), (True, FP8), (True, INT8)])
def test_nan_stays_in_its_rows_or_blocks(hadamard, dtype, backend, device):
    q, k, v = (
        x.clone() for x in make_inputs(dense("nan", (150, 150), batch=1), device, torch.half)[:3]
    )
    q[0, 70, 1, 3] = float("nan")
    k[0, 140, 0, 5] = float("nan")
    found = flash_attn_fp8_func(q, k, v, hadamard=hadamard, qk_dtype=dtype, backend=backend)
    wrong = found.isnan()
    wanted = torch.zeros_like(wrong)
    rows = slice(0, 128) if dtype == INT8 else 70  # int8 has no NaN, so the descale is
    wanted[0, rows, 1] = wanted[0, :, 0] = True
    assert torch.equal(wrong, wanted)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_blocks_of_v_may_differ_by_any_factor(backend, device):
    """The accumulator changes its unit between them; 0 is a descale like others."""
    case = dense("far", (5, 256), batch=1, heads=(1, 1))
    given, _ = make_fp8_inputs(case, device, "raw")
    for factors in (
        (1e-30, 1.0, 1e-30, 1e3),
        (1.0, 1e-38, 1e30, 1.0),
        (1.0, 3e3, 20.0, 0.3),
        (0.0, 2.0, 0.0, 1.0),
        (0.0,),
    ):
        descale = torch.tensor(factors, device=device).view(1, 1, -1)
        out = call(
            case, given._replace(v_descale=descale), backend=backend, out_dtype=torch.bfloat16
        )
        whole = descale.repeat_interleave(256 // len(factors), 2).view(1, 256, 1, 1)
        values = given._replace(v=given.v.double() * whole.double())
        reference, _ = attention(values, **case.reference_options())
        scale = float(reference.abs().max()) or 1.0
        check_fp8("out", out.double() / scale, reference / scale, case, backend)


# Every row sees one key, or with a causal mask the first row does, of several tiles.
FIRST = 513 if GPU else 161
ONE_KEY = (
    dense("one-key", (5, 1), heads=(4, 2)),
    dense("one-key-each", (200, 200), batch=1, heads=(2, 1), dims=(128, 128), window=(0, 0)),
    dense("one-key-first", (FIRST,) * 2, batch=1, heads=(1, 1), dims=(256, 256), causal=True),
)


@pytest.mark.interpreted(quick=lambda case, form, **_: case.name == "one-key" and form == "head")
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("form", ["head", "block", "int8 block"])
@pytest.mark.parametrize("case", ONE_KEY)
def test_out_of_one_key_is_v(case, form, backend, device):
    """Softmax is 1 there, whatever a row of many keys needs as correction."""
    given, values = make_fp8_inputs(case, device, form)
    out = call(case, given, backend=backend, out_dtype=torch.float16)
    alone = slice(0, 1) if case.causal else slice(None)
    v = values.v.float().half().repeat_interleave(case.num_heads_q // case.num_heads_kv, 2)
    assert torch.equal(out[:, alone], v[:, alone].expand_as(out[:, alone]))


def test_a_group_of_query_heads_may_share_q_descales(device):
    case = dense("shared", (130, 70), heads=(4, 2))
    given, _ = make_fp8_inputs(case, device, "raw")
    shared = torch.rand(2, 2, 3, device=device) + 0.5
    outs = [
        call(case, given._replace(q_descale=descale), backend=backend)
        for descale in (shared, shared.repeat_interleave(2, 1), shared.mT.contiguous().mT)
        for backend in ("reference", "triton")
    ]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[0], outs[4])
    assert torch.equal(outs[1], outs[3]) and torch.equal(outs[1], outs[5])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_out_dtype(backend, device):
    given, _ = make_fp8_inputs(case_named("gqa-2"), device, "head")
    for asked, wanted in ((None, torch.bfloat16), (torch.float16, torch.float16)):
        assert call(case_named("gqa-2"), given, out_dtype=asked, backend=backend).dtype == wanted
    if backend != "reference":
        with pytest.raises(UnsupportedError, match=r"not torch.float32 \(out_dtype\)"):
            call(case_named("gqa-2"), given, out_dtype=torch.float32, backend=backend)


@pytest.mark.parametrize(
    ("head_dim", "hadamard", "dtype"),
    [(64, False, FP8), (64, True, INT8), (128, True, INT8), (256, True, FP8)],
)
def test_q_and_k_are_int8_where_that_is_best(head_dim, hadamard, dtype, device):
    case = dense("default", dims=(head_dim, head_dim), batch=1)
    q, k, v = make_inputs(case, device, torch.half)[:3]
    found, named = (
        flash_attn_fp8_func(q, k, v, hadamard=hadamard, qk_dtype=given) for given in (None, dtype)
    )
    q8, k8 = (
        quantize_block_fp8(x, hadamard=hadamard, kind=kind, dtype=dtype)
        for x, kind in ((q, "q"), (k, "k"))
    )
    in_two_steps = flash_attn_func(q8, k8, quantize_block_fp8(v, kind="v"), out_dtype=torch.half)
    assert torch.equal(found, named) and torch.equal(found, in_two_steps)


def test_packed_qkv_passes_descales_on(device):
    qkv = torch.randn(2, 9, 3, 2, 16, device=device).to(FP8)
    descales = {f"{side}_descale": torch.rand(2, 2, device=device) for side in "qkv"}
    found = flash_attn_qkvpacked_func(qkv, **descales, out_dtype=torch.float16)
    wanted = flash_attn_func(*qkv.unbind(2), **descales, out_dtype=torch.float16)
    assert found.dtype == torch.float16 and torch.equal(found, wanted)


def rmse(found, reference) -> float:
    return float((found.double() - reference).square().mean().sqrt())


@pytest.mark.parametrize("distribution", ["normal", "outlier"])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_what_16_bit_tensors_lose(distribution, backend, device):
    """q and k in int8 lose less than in e4m3. Outliers: block scales and the rotation lose clearly
    less than one scale for a tensor."""
    seqlen = 1024 if GPU or backend == "reference" else 512
    case = dense("loss", (seqlen, seqlen), batch=1, distribution=distribution)
    q, k, v = make_inputs(case, device, torch.bfloat16)[:3]
    reference, _ = attention(Tensors(q, k, v), **case.reference_options())
    found = flash_attn_fp8_func(q, k, v, backend=backend)
    assert found.dtype == torch.bfloat16
    coarse = flash_attn_fp8_func(q, k, v, qk_dtype=FP8, backend=backend)
    assert rmse(found, reference) < 0.9 * rmse(coarse, reference)
    if distribution == "normal":
        check_fp8("out", found, reference, case, backend, FP8_OF_16_BIT)
        check_fp8("out", coarse, reference, case, backend, FP8_OF_16_BIT)
        return
    scales = [x.float().abs().amax() / 448 for x in (q, k, v)]
    raw = [(x.float() / scale).to(FP8) for x, scale in zip((q, k, v), scales, strict=True)]
    descales = {
        f"{side}_descale": scale.expand(1, 2) for side, scale in zip("qkv", scales, strict=True)
    }
    per_tensor = flash_attn_func(*raw, **descales, backend=backend)
    assert rmse(coarse, reference) < 0.8 * rmse(per_tensor, reference)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_smoothing_takes_what_the_tokens_have_in_common(backend, device):
    seqlen = 1024 if GPU else 256
    case = dense("shifted", (seqlen, seqlen), batch=1, distribution="shifted", causal=True)
    q, k = make_inputs(case, device, torch.bfloat16)[:2]
    k = k + 8 * k.mean(1, keepdim=True)
    v = make_inputs(replace(case, distribution="normal"), device, torch.bfloat16)[2]
    reference, reference_lse = attention(Tensors(q, k, v), **case.reference_options())
    how = {"causal": True, "return_lse": True, "backend": backend}
    plain, plain_lse = flash_attn_fp8_func(q, k, v, **how)
    smooth, lse = flash_attn_fp8_func(q, k, v, smooth_k=True, **how)
    assert rmse(smooth, reference) < 0.5 * rmse(plain, reference)
    # What q lost is multiplied with the mean of k here as there.
    assert rmse(lse, reference_lse) < 1.1 * rmse(plain_lse, reference_lse)


@triton.jit
def widen(source, target):
    token_positions = tl.arange(0, 256)
    codes = tl.load(source + token_positions)
    tl.store(target + token_positions, as_float16(codes, False))


def test_every_e4m3_is_widened_exactly(device):
    """Without the chip's own conversion, NaN and the smallest numbers among them."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    found = torch.empty(256, dtype=torch.float16, device=device)
    widen[(1,)](codes, found)
    wanted = codes.view(FP8).to(found.dtype)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("varlen", [False, True])
def test_v_in_slots_is_v_in_rows(backend, dtype, varlen, device):
    q, k = (torch.randn(2, 90, 2, 64, device=device) for _ in range(2))
    v = torch.randn(2, 90, 2, 40, device=device)
    options, edges = {}, {}
    if varlen:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu_seqlens = torch.tensor([0, 53, 53, 180], dtype=torch.int32, device=device)
        edges = {"cu_seqlens": cu_seqlens, "max_seqlen": 127}
        options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        options |= {"max_seqlen_q": 127, "max_seqlen_k": 127}
    q, k = (
        quantize_block_fp8(x, kind=kind, dtype=dtype, **edges) for x, kind in ((q, "q"), (k, "k"))
    )
    attend = flash_attn_varlen_func if varlen else flash_attn_func
    rows, slots = (
        attend(
            q,
            k,
            quantize_block_fp8(v, kind="v", layout=layout, **edges),
            backend=backend,
            **options,
        )
        for layout in ("rows", "permuted")
    )
    assert rows.shape == (*q.data.shape[:-1], 40)
    assert torch.equal(slots, rows)


def test_gradients_of_v_and_descales_are_refused_beside_int8(device):
    q = torch.ones(1, 5, 2, 16, dtype=INT8, device=device)
    v, descale = torch.ones(1, 5, 2, 16, device=device).to(FP8), torch.ones(1, 2, device=device)
    for arguments in (
        {"v": v.clone().requires_grad_()},
        {"v": v, "q_descale": descale.clone().requires_grad_()},
    ):
        with pytest.raises(UnsupportedError, match=r"torch\.no_grad\(\)$"):
            flash_attn_func(q, q, **arguments)
        with torch.no_grad():
            assert not flash_attn_func(q, q, **arguments).requires_grad


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(("name", "form"), [("gqa-2", "head"), ("varlen-seqused", "int8 head")])
def test_opcheck(name, form, backend, device):
    case = case_named(name)
    given, _ = make_fp8_inputs(case, device, form)
    q, k, v = (x.float().nan_to_num().to(x.dtype) for x in given[:3])
    descales = [x.unsqueeze(-1) for x in given[-3:]]
    lengths = (case.seqlen_q, case.seqlen_k) if case.varlen else (None, None)
    options = Options(*lengths, causal=case.causal, backend=backend, out_dtype=torch.float16)
    scaled = map(Scaled, (q, k, v), descales)
    arguments = operator_arguments(Tensors(*scaled, *given[3:7]), options)
    # test_schema compares inputs by arithmetic that torch does not have for e4m3.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.flashattn3.forward.scaled
    torch.library.opcheck(operator, arguments, test_utils=checks)


one_graph = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="torch 2.8 cannot trace an 8-bit call into one graph"
)


@one_graph
@pytest.mark.parametrize(
    ("dynamic", "dtype"), [pytest.param(False, FP8, marks=pytest.mark.slow), (True, INT8)]
)
def test_compiled_calls(dynamic, dtype, device):
    torch._dynamo.reset()

    def block_scaled(q, k, v):
        how = {"block": 64, "hadamard": False, "qk_dtype": dtype, "use_fast_accum": True}
        slopes = torch.full((2,), 0.1, device=q.device)
        return flash_attn_fp8_func(q, k, v, causal=True, alibi_slopes=slopes, **how)

    def raw(q, k, v, descale):
        return flash_attn_func(q.to(dtype), k.to(dtype), v.to(FP8), k_descale=descale)

    counter, counts = CompileCounterWithBackend("aot_eager"), []
    for batch, *rows in ((3, 70, 130), (5, 90, 150)):
        q, k, v = (torch.randn(batch, s, 2, 32, device=device).half() for s in (*rows, rows[1]))
        for function, arguments in (
            (block_scaled, (q, k, v)),
            (raw, (q, k, v, torch.rand(batch, 2, device=device))),
        ):
            compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
            torch.testing.assert_close(
                compiled(*arguments), function(*arguments), rtol=2e-2, atol=2e-2
            )
        counts.append(counter.frame_count)
    assert not dynamic or counts[0] == counts[1]
    torch._dynamo.reset()


@one_graph
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_compiled_calls_take_block_scaled_inputs(dtype, device):
    torch._dynamo.reset()
    q, k, v = (
        quantize_block_fp8(torch.randn(1, 70, 2, 32, device=device), kind=kind, dtype=of)
        for kind, of in zip("qkv", (dtype, dtype, FP8), strict=True)
    )
    k = replace(k, mean=torch.randn(1, 2, 32, device=device))
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    results = zip(*(f(q, k, v, return_lse=True) for f in (compiled, flash_attn_func)), strict=True)
    for found, wanted in results:
        assert torch.equal(found, wanted)
    torch._dynamo.reset()
