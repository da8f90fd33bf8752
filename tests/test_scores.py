"""Sinks, slopes, a bias and the largest score, in every function, against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers import BACKEND_DTYPES, EVERY_BACKEND, GPU, TRITON_DTYPES, forward_holds, gradients_hold
from hypothesis import given
from support.inputs import make_inputs, make_output_gradients
from support.strategies import random_score_cases
from test_random import CHUNKS, DTYPES, HEAD_DIMS, MAX_SEQLEN, few_chunks, of_chunk

import flashattn3
from flashattn3 import UnsupportedError, flash_attn_func, flash_attn_varlen_func
from flashattn3.call.fields import Options
from flashattn3.call.operands import Tensors
from flashattn3.integrations.transformers import flash_attn_bhsd_func
from flashattn3.run.operators import operator_arguments
from flashattn3_bench.checking import FP8_OF_16_BIT, attention
from flashattn3_bench.checking.cases import dense, varlen

CASES = (
    dense("sinks", (65, 97), causal=True, sinks="normal"),
    dense("sinks-own-gqa", (40, 40), (8, 2), sinks="own", window=(9, 0)),
    dense("sinks-mixed", (40, 33), (4, 4), causal=True, sinks="mixed", softcap=4.0),
    dense("sinks-no-keys", (5, 0), sinks="mixed"),
    dense("sinks-no-queries", (0, 5), sinks="mixed"),
    dense("sinks-bias-no-batch", (5, 5), batch=0, sinks="normal", bias="shared"),
    dense("sinks-splits", (9, 300), (4, 1), sinks="mixed", num_splits=3),
    dense("slopes", (65, 97), causal=True, slopes="heads"),
    dense("slopes-batch", (97, 65), (4, 2), window=(20, 7), slopes="batch"),
    dense("bias", (33, 70), (4, 2), bias="full"),
    dense("bias-rows", (70, 33), (4, 2), (40, 24), batch=3, bias="rows", causal=True),
    dense("bias-heads", (33, 70), batch=3, bias="heads", softcap=3.0),
    dense("bias-shared", (33, 40), (4, 4), batch=3, bias="shared", window=(5, -1)),
    dense("all", (70, 130), (4, 2), causal=True, sinks="mixed", slopes="batch", bias="rows"),
    dense("all-capped", (40, 33), (4, 1), softcap=2.0, sinks="own", slopes="heads", bias="full"),
    dense("largest", (65, 97), causal=True),
    varlen("varlen", (40, 0, 33, 9), (33, 5, 0, 70), (4, 2), sinks="mixed", slopes="heads"),
    varlen(
        "varlen-batch", (33, 17), (40, 70), (4, 4), seqused_k=(0, 61), tail_rows=5, causal=True,
        sinks="normal", slopes="batch",
    ),
)  # fmt: skip

# The reference backend computes float16 as it does bfloat16.
DTYPES_HERE = [of for of in BACKEND_DTYPES if of.values != ("reference", torch.float16)]

# Of many kernels, Triton's interpreter takes 5 to 15 s.
INTERPRETED = pytest.param("triton", marks=() if GPU else pytest.mark.slow)
SLOWLY = (EVERY_BACKEND[0], INTERPRETED, "reference")


def holds(case, tensors, backend, **options) -> str | None:
    """Forward and backward; the sentence of a backend without a kernel. Hopper's kernels with
    slopes or a bias do not look for the largest score."""
    largest = backend != "hopper" or tensors.bias is tensors.alibi_slopes is None
    try:
        out, lse = forward_holds(case, tensors, backend, **{"return_max_logit": largest} | options)
    except UnsupportedError as error:
        return str(error)
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    dout, dlse = make_output_gradients(case, tensors)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    gradients_hold(case, tensors, got, dout, dlse, backend)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "dtype"), DTYPES_HERE)
def test_scores(case, backend, dtype, device, poisoned_memory):
    declined = holds(case, make_inputs(case, device, dtype, requires_grad=True), backend)
    if declined:
        pytest.skip(declined)


# On Hopper the decode kernels run the forward.
FEW_ROWS = (
    dense("few-rows", (3, 1100), (8, 2), causal=True, sinks="mixed"),
    varlen("few-rows-varlen", (1, 3, 0), (1100, 40, 9), (8, 2), causal=True, sinks="normal"),
)


@pytest.mark.parametrize("case", FEW_ROWS)
@pytest.mark.parametrize("backend", (EVERY_BACKEND[0], "reference"))
def test_few_query_rows_with_sinks(case, backend, device, poisoned_memory):
    tensors = make_inputs(case, device, torch.bfloat16, requires_grad=True)
    assert holds(case, tensors, backend, return_max_logit=False, pack_gqa=True) is None


@few_chunks
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("backend", SLOWLY)
def test_random_scores(backend, chunk, device, poisoned_memory):
    dtypes, declined = DTYPES[backend], []

    @of_chunk(chunk)
    @given(random_score_cases(MAX_SEQLEN, HEAD_DIMS[backend]))
    def run(case):
        dtype = dtypes[chunk % len(dtypes)]
        tensors = make_inputs(case, device, dtype, requires_grad=True)
        declined.append(holds(case, tensors, backend))

    run()
    print(f"{backend}: {declined.count(None)} of {len(declined)} random problems computed")
    if None not in declined:
        pytest.skip(declined[0])


def normal(*shape: int, dtype=torch.float32, device="cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def example(batch=2, length=12, heads=(4, 2), dim=16, dtype=torch.float32, device="cpu"):
    """q, k, v, and what changes their scores."""
    shapes = (batch, length, heads[0], dim), *((batch, length, heads[1], dim),) * 2
    sides = [normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)]
    scores = {
        "sinks": normal(heads[0], device=device),
        "alibi_slopes": normal(heads[0], device=device).abs(),
        "bias": normal(1, heads[0], length, length, dtype=dtype, device=device),
    }
    return sides, scores


def test_every_function_takes_them():
    """A case holds for flash_attn_func; the other functions of the same inputs agree with it."""
    (q, k, v), scores = example()
    asked = {"return_lse": True, "return_max_logit": True, "causal": True}
    out, lse, largest = flash_attn_func(q, k, v, **scores, **asked)
    kv, rows = torch.stack((k, v), 2), [x.flatten(0, 1) for x in (q, k, v)]
    few = {name: x for name, x in scores.items() if name != "bias"}
    packed_out, packed_lse, packed_largest = flash_attn_func(q, k, v, **few, **asked)
    edges = torch.tensor([0, 12, 24], dtype=torch.int32)
    wide = [x.repeat_interleave(4 // x.shape[2], 2) for x in (q, k, v)]
    qkv = torch.stack(wide, 2)
    dense_forms = {
        "kvpacked": partial(flashattn3.flash_attn_kvpacked_func, q, kv),
        "qkvpacked": partial(flashattn3.flash_attn_qkvpacked_func, qkv),
        "heads": partial(flashattn3.flash_attn_qkvpacked_func, torch.cat((q, k, v), 2),
                         num_heads_q=4),
        "bhsd": partial(flash_attn_bhsd_func, *(x.transpose(1, 2) for x in (q, k, v))),
    }  # fmt: skip
    of_kv = rows[0], kv.flatten(0, 1)
    varlen_forms = {
        "varlen": partial(flash_attn_varlen_func, *rows, edges, edges, 12, 12),
        "kvpacked": partial(
            flashattn3.flash_attn_varlen_kvpacked_func, *of_kv, edges, edges, 12, 12
        ),
        "qkvpacked": partial(
            flashattn3.flash_attn_varlen_qkvpacked_func, qkv.flatten(0, 1), edges, 12
        ),
    }
    for name, form in dense_forms.items():
        for found, wanted in zip(form(**scores, **asked), (out, lse, largest), strict=True):
            torch.testing.assert_close(found, wanted, msg=name)
    for name, form in varlen_forms.items():
        found = form(**few, **asked)
        torch.testing.assert_close(found[0], packed_out.flatten(0, 1), msg=name)
        torch.testing.assert_close(found[1], packed_lse.transpose(0, 1).flatten(1), msg=name)
        torch.testing.assert_close(found[2], packed_largest, msg=name)
    edges = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
    packed = [x.transpose(1, 2) for x in (q, k, v)]
    found = flash_attn_bhsd_func(*packed, **edges, **few, **asked)
    torch.testing.assert_close(found, (packed_out, packed_lse, packed_largest))
    aliased = scores | {"s_aux": scores["sinks"]}
    del aliased["sinks"]
    assert torch.equal(flash_attn_func(q, k, v, causal=True, **aliased), out)
    only = flash_attn_func(q, k, v, causal=True, return_max_logit=True, **scores)
    assert len(only) == 2 and torch.equal(only[1], largest) and not largest.requires_grad


def test_both_passes_take_them():
    (q, k, v), scores = example()
    leaves = [x.requires_grad_() for x in (q, k, v, scores["sinks"], scores["bias"])]
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, **scores)
    dout, dlse = normal(*out.shape), normal(*lse.shape)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    with torch.no_grad():
        asked = {"causal": True, "return_max_logit": True}
        found = flashattn3.flash_attn_forward(q, k, v, **asked, **scores)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse) and len(found) == 3
        given = dout, q, k, v, out, lse
        got = flashattn3.flash_attn_backward(*given, dlse=dlse, causal=True, **scores)
        assert all(map(torch.equal, got, wanted)) and len(got) == 5
        scores.pop("bias")
        assert len(flashattn3.flash_attn_backward(*given, **scores)) == 4


def test_explain_says_what_changes_scores():
    sides, scores = example()
    found = flashattn3.explain(*sides, **scores, return_max_logit=True, backend="reference")
    assert {*scores, "return_max_logit"} <= found.config.keys()
    assert not scores.keys() & flashattn3.explain(*sides, backend="reference").config.keys()


@pytest.mark.parametrize("backend", SLOWLY)
def test_strides_of_a_bias(backend, device):
    """Expanded along any axis, one element off its alignment, and keys before queries."""
    dtype = {"reference": torch.float32, "triton": TRITON_DTYPES[0]}.get(backend, torch.bfloat16)
    (q, k, v), _ = example(length=24, dim=64, dtype=dtype, device=device)
    whole = normal(2, 4, 24, 24, dtype=dtype, device=device)
    flat = normal(2 * 4 * 24 * 24 + 1, dtype=dtype, device=device)
    for bias in (
        whole[:, :, :1].expand_as(whole),
        whole[..., :1].expand_as(whole),
        whole[:1, :1].expand_as(whole),
        whole.mT,
        whole.transpose(0, 1).contiguous().transpose(0, 1),
        flat[1:].view_as(whole),
        normal(2, 4, 24, 25, dtype=dtype, device=device)[..., :24],
    ):
        results = []
        for x in (bias, bias.clone(memory_format=torch.contiguous_format)):
            leaf = x.detach().requires_grad_()
            try:
                out = flash_attn_func(q, k, v, causal=True, bias=leaf, backend=backend)
            except UnsupportedError as error:
                pytest.skip(str(error))
            results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted)


class Other(torch.Tensor):
    """A class of someone else's."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda x: x.as_subclass(Other)])
def test_gradients_of_parameters(kind):
    """A layer's sinks are a parameter; q need not be a leaf then."""
    (q, k, v), scores = example()
    results = []
    for make in (lambda x: x, kind):
        sinks, bias = (make(scores[name].clone()) for name in ("sinks", "bias"))
        leaves = [x.requires_grad_() for x in (sinks, bias)]
        out = flash_attn_func(q, k, v, causal=True, sinks=sinks, bias=bias)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor))


def test_parts_of_the_keys_have_the_sink_once():
    """As docs/training.md says: lse of the whole has the sink, parts are joined with it in one."""
    (q, k, v), scores = example(length=8)
    sinks = scores["sinks"]
    whole = flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
    halves = zip(k.split(4, 1), v.split(4, 1), (sinks, None), strict=True)
    parts = [flash_attn_func(q, *kv, sinks=of, return_lse=True) for *kv, of in halves]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = flashattn3.flash_attn_combine(outs, lses.transpose(-1, -2))
    torch.testing.assert_close((out, lse.transpose(-1, -2)), whole)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_8_bits(backend, device):
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    (q, k, v), scores = example(length=70, dim=64, dtype=dtype, device=device)
    tensors = Tensors(q, k, v, None, None, None, None, *scores.values())
    wanted, _ = attention(tensors, softmax_scale=0.125, window_right=0)
    rows = {"cu_seqlens_q": torch.tensor([0, 70, 140], dtype=torch.int32, device=device)}
    rows |= {"cu_seqlens_k": rows["cu_seqlens_q"], "max_seqlen_q": 70, "max_seqlen_k": 70}
    how = {"causal": True, "backend": backend}
    try:
        found = flashattn3.flash_attn_fp8_func(q, k, v, **scores, **how)
        bias = scores.pop("bias")
        packed = flashattn3.flash_attn_varlen_fp8_func(
            *(x.flatten(0, 1) for x in (q, k, v)), **rows, **scores, **how
        )
    except UnsupportedError as error:
        assert "has no kernel for" in str(error)
        pytest.skip(str(error))
    without, _ = attention(tensors._replace(bias=0 * bias), softmax_scale=0.125, window_right=0)
    for got, of in ((found, wanted), (packed.view_as(q), without)):
        assert (got - of).norm() <= FP8_OF_16_BIT.rmse * of.norm()


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_infinite_sinks(backend, device):
    """-inf is no sink; +inf takes all weight: out 0, lse +inf, gradients 0."""
    dtype = {"reference": torch.float32, "triton": TRITON_DTYPES[0]}.get(backend, torch.bfloat16)
    (q, k, v), _ = example(length=30, dim=64, dtype=dtype, device=device)
    sinks = torch.tensor([-math.inf, math.inf, 0.5, math.inf], device=device)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    how = {"causal": True, "return_lse": True, "backend": backend}
    try:
        out, lse = flash_attn_func(q, k, v, sinks=sinks, **how)
    except UnsupportedError as error:
        assert "has no kernel for" in str(error)
        pytest.skip(str(error))
    plain = flash_attn_func(q, k, v, **how)
    torch.testing.assert_close((out[:, :, 0], lse[:, 0]), (plain[0][:, :, 0], plain[1][:, 0]))
    assert not out[:, :, 1::2].any() and (lse[:, 1::2] == math.inf).all()
    finite = torch.where(lse.isinf(), 0.0, lse)
    dq, dk, _, dsinks = torch.autograd.grad(out.sum() + finite.sum(), leaves)
    assert not dq[:, :, 1::2].any() and dsinks[[0, 1, 3]].tolist() == [0.0] * 3
    assert dk.isfinite().all() and dsinks[2] != 0


def cached_call(q, k, v, **options):
    return flashattn3.flash_attn_with_kvcache(q, k, v, **options)


def quantized_call(q, k, v, **options):
    return flashattn3.flash_attn_fp8_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options)


ones = torch.ones
# What more than one argument says; test_odd_calls.py changes each by itself.
ERRORS = {
    "two names": (flash_attn_func, {"sinks": ones(4), "s_aux": ones(4)}, "s_aux must be None with"),
    "a cached gradient": (
        cached_call, {"sinks": ones(4, requires_grad=True)}, "sinks.requires_grad must be False",
    ),
    "a smoothed k": (
        quantized_call, {"sinks": ones(4), "smooth_k": True}, "sinks must be None with smooth_k",
    ),
    "a smoothed largest score": (
        quantized_call, {"return_max_logit": True, "smooth_k": True}, "return_max_logit must be Fa",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    (q, k, v), _ = example()
    call, options, sentence = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(q, k, v, **options)


def loss_of(q, k, v, sinks, bias, slopes):
    options = {"causal": True, "return_lse": True, "return_max_logit": True}
    options |= {"sinks": sinks, "alibi_slopes": slopes, "bias": bias}
    out, lse, largest = flash_attn_func(q, k, v, **options)
    return out.square().sum() + lse.sin().sum(), largest


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls(dynamic):
    """Values and gradients as in eager mode, without a graph break."""
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (12, 12, 20) if dynamic else (12,):
        (q, k, v), scores = example(length=length)
        leaves = [x.requires_grad_() for x in (q, k, v, scores["sinks"], scores["bias"])]
        results = [run(*leaves, scores["alibi_slopes"]) for run in (loss_of, compiled)]
        torch.testing.assert_close(*(largest for _, largest in results))
        torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss, _ in results))


GIVEN = {
    "all": ("sinks", "alibi_slopes", "bias"),
    "sinks": ("sinks",),
    "slopes": ("alibi_slopes",),
    "nothing": (),
}


@pytest.mark.parametrize("names", GIVEN.values(), ids=GIVEN)
def test_opcheck(names):
    sides, scores = example(length=6)
    tensors = Tensors(*sides)._replace(**{name: scores[name] for name in names})
    options = Options(causal=True, return_max_logit="bias" not in names)
    arguments = operator_arguments(tensors, options)
    operators = torch.ops.flashattn3
    torch.library.opcheck(
        operators.forward.scores,
        [
            x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.ndim == 4 else x
            for x in arguments
        ],
    )
    out, lse, _ = operators.forward.scores(*arguments)
    given = normal(*out.shape), normal(*lse.shape), out, lse
    torch.library.opcheck(operators.backward.scores, (*given, *arguments, "bias" in names))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return loss_of(*tensors)[0]

    def arguments(batch):
        (q, k, v), scores = example(batch)
        return q, k, v, scores["sinks"], scores["bias"], scores["alibi_slopes"].repeat(batch, 1)

    axes = {0: torch.export.Dim("batch", min=2)}
    shapes = {"tensors": (axes, axes, axes, None, None, axes)}
    program = torch.export.export(Layer(), arguments(2), dynamic_shapes=shapes)
    given = arguments(4)  # as many as heads
    torch.testing.assert_close(program.module()(*given), loss_of(*given)[0])


def test_a_checkpoint():
    """It compares what a call saves at two times."""
    (q, k, v), scores = example()
    leaves = [x.requires_grad_() for x in (q, k, v, scores["sinks"], scores["bias"])]

    def run(*leaves):
        return loss_of(*leaves, scores["alibi_slopes"])[0]

    wanted = torch.autograd.grad(run(*leaves), leaves)
    again = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, leaves), wanted))


def test_transforms():
    """grad, and vmap over inputs that share sinks."""
    (q, k, v), scores = example()

    def loss(q, k, v, sinks, bias):
        return loss_of(q, k, v, sinks, bias, scores["alibi_slopes"])[0]

    given = q, k, v, scores["sinks"], scores["bias"]
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))(*given)
    torch.testing.assert_close(found, wanted)
    several = torch.stack((q, 2 * q, -q))
    each = torch.func.grad(loss, argnums=(0, 3))
    found = torch.func.vmap(each, in_dims=(0, None, None, None, None))(several, *given[1:])
    for i, q in enumerate(several):
        torch.testing.assert_close([x[i] for x in found], list(each(q, *given[1:])))


def test_autocast_casts_the_bias():
    (q, k, v), scores = example()
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k, v, **scores)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), flash_attn_func(q, k, v, **scores), atol=0.05, rtol=0.05
    )
