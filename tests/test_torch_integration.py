"""torch's own machinery: operators, autograd, the compiler, fake tensors."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import EVERY_BACKEND, case_named
from support.inputs import make_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn3 import (
    UnsupportedError,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    use_backend,
)
from flashattn3.call.dtypes import FP8
from flashattn3.call.fields import Options
from flashattn3.call.operands import Scaled, Tensors, flat
from flashattn3.integrations.transformers import flash_attn_bhsd_func
from flashattn3.run import operators
from flashattn3.run.operators import operator_arguments

CASES = ("gqa-2", "varlen-seqused")
# On a CPU inductor needs a C++ compiler, which not every machine has.
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
COMPILERS = ("aot_eager", pytest.param(COMPILER, marks=pytest.mark.slow))


def arguments_for(name, backend, device):
    """The tensors and the options of a case."""
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16)
    tensors = Tensors(*(x.nan_to_num().requires_grad_() for x in tensors[:3]), *tensors[3:])
    lengths = (case.seqlen_q, case.seqlen_k) if case.varlen else (None, None)
    options = Options(*lengths, causal=case.causal, backend=backend)
    return tensors, options


@pytest.mark.interpreted(quick=lambda name, backend, **_: backend != "triton" or name == CASES[0])
@pytest.mark.parametrize("operator", ["forward", "backward", "backward of both results"])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, backend, operator, device):
    forward, backward = torch.ops.flashattn3.forward.default, torch.ops.flashattn3.backward.default
    tensors, options = arguments_for(name, backend, device)
    if operator == "forward":
        torch.library.opcheck(forward, operator_arguments(tensors, options))
        return
    tensors = Tensors(*(x if x is None else x.detach() for x in tensors))
    arguments = operator_arguments(tensors, options)
    out, lse = forward(*arguments)
    dlse = torch.randn_like(lse) if operator == "backward of both results" else None
    torch.library.opcheck(backward, (torch.randn_like(out), dlse, out, lse, *arguments))


def leaves(rows_q, rows_k, device, dtype=torch.float32, lead=(2,), dim=16):
    """q with 4 heads, k and v with 2."""
    shapes = ((*lead, rows_q, 4, dim), (*lead, rows_k, 2, dim), (*lead, rows_k, 2, dim))
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


def dense_loss(q, k, v):
    out, lse = flash_attn_func(2 * q, k, v, causal=True, softcap=3.0, return_lse=True)
    return out.square().sum() + lse.sin().sum()


def assert_compiles_once(function, calls, dynamic_compiler):
    """Values and gradients of every call as in eager mode, from one graph for all of them."""
    counter = CompileCounterWithBackend(dynamic_compiler)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for tensors, *rest in calls:
        wanted = function(*tensors, *rest)
        wanted_gradients = torch.autograd.grad(wanted, tensors)
        found = compiled(*tensors, *rest)
        gradients = torch.autograd.grad(found, tensors)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-3, atol=1e-3)
    # torch may try a backend on an empty graph first.
    graphs = [graph for graph in counter.graphs if "flashattn3" in graph.code]
    assert len(graphs) == 1, f"{len(graphs)} graphs"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_dense_calls(compiler, device, fresh_dynamo):
    calls = [(leaves(*rows, device),) for rows in ((73, 87), (96, 120), (77, 131))]
    assert_compiles_once(dense_loss, calls, compiler)


@pytest.mark.xfail(
    torch.__version__ < "2.9", reason="torch 2.8 compiles a second graph", strict=True
)
def test_compiled_varlen_calls(device, fresh_dynamo):
    def loss(q, k, v, edges_q, edges_k, longest_q, longest_k):
        out, lse = flash_attn_varlen_func(
            q, k, v, edges_q, edges_k, longest_q, longest_k, return_lse=True, window_size=(20, 5)
        )
        return out.square().sum() + lse.nan_to_num(0, 0, 0).sum()

    def call(lengths_q, lengths_k):
        edges = [
            torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
            for lengths in (lengths_q, lengths_k)
        ]
        tensors = leaves(sum(lengths_q), sum(lengths_k), device, lead=())
        return tensors, *edges, max(lengths_q), max(lengths_k)

    calls = [call((9, 23), (31, 6)), call((17, 40, 2), (5, 5, 33)), call((8, 9), (10, 11))]
    assert_compiles_once(loss, calls, "aot_eager")


@pytest.mark.parametrize("how", ["eager", "compiled", "exported"])
def test_the_operator_is_differentiable(how, device, fresh_dynamo):
    tensors = leaves(9, 11, device)

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            arguments = operator_arguments(Tensors(*tensors), Options(causal=True))
            return torch.ops.flashattn3.forward.default(*arguments)

    run = Model()
    if how == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    elif how == "exported":
        run = torch.export.export(run, tuple(tensors), strict=False).run_decompositions().module()
    out, lse = run(*tensors)
    wanted_out, wanted_lse = flash_attn_func(*tensors, causal=True, return_lse=True)
    wanted = torch.autograd.grad(wanted_out.sum() + wanted_lse.sin().sum(), tensors)
    found = torch.autograd.grad(out.sum() + lse.sin().sum(), tensors, create_graph=how == "eager")
    torch.testing.assert_close(found, wanted)
    if how == "eager":
        with pytest.raises(NotImplementedError, match="second derivative"):
            found[0].sum().backward()


@pytest.mark.parametrize("gradients", [False, True])
def test_use_backend_around_the_operator(gradients, device):
    """The operator takes the backend in force where its call names none, as exported calls do."""
    tensors = leaves(9, 11, device)
    arguments = operator_arguments(Tensors(*tensors), Options(causal=True, backend=None))
    operator = torch.ops.flashattn3.forward.default
    with torch.set_grad_enabled(gradients):
        with use_backend("triton"), pytest.raises(UnsupportedError, match="float32"):
            operator(*arguments)
        with use_backend("reference"):
            out, _ = operator(*arguments)
    assert torch.equal(out, flash_attn_func(*tensors, causal=True, backend="reference"))
    assert out.requires_grad == gradients


@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_has_no_tangent(compiled, device, fresh_dynamo):
    """It raises, and drops none."""
    q = torch.randn(2, 9, 4, 16, device=device)

    def tangent(q):
        return torch.func.jvp(lambda x: operator(x)[0], (q,), (q,))

    def operator(q):
        if compiled:
            return flash_attn_func(q, q, q, return_lse=True)
        arguments = operator_arguments(Tensors(q, q, q), Options())
        return torch.ops.flashattn3.forward.default(*arguments)

    if compiled:
        tangent = torch.compile(tangent, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="forward-mode differentiation"):
        tangent(q)


def test_a_descale_has_no_gradient(device):
    """Also where the operator is called directly."""
    data = torch.ones(1, 8, 1, 16, device=device).to(FP8)
    descale = torch.ones(1, 1, 1, device=device, requires_grad=True)
    arguments = operator_arguments(Tensors(Scaled(data, descale), data, data), Options())
    with pytest.raises(UnsupportedError, match=r"q_descale\.requires_grad"):
        torch.ops.flashattn3.forward.scaled(*arguments)


def test_use_backend_around_the_run_of_a_compiled_function(device, fresh_dynamo):
    def run(qkv):
        return flash_attn_qkvpacked_func(qkv, causal=True)

    qkv = torch.randn(2, 12, 3, 2, 16, device=device, requires_grad=True)  # float32
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    wanted = run(qkv)
    assert torch.equal(compiled(qkv), wanted)
    with use_backend("triton"), pytest.raises(UnsupportedError, match="float32"):
        compiled(qkv)
    with use_backend("reference"):
        assert torch.equal(compiled(qkv), wanted)


def test_the_second_derivative_is_an_error(device):
    q, k, v = leaves(5, 7, device)
    out = flash_attn_func(q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    # On Hopper torch's own error, of its node; elsewhere a NotImplementedError of ours.
    with pytest.raises(RuntimeError, match="is not implemented"):
        gradient.sum().backward()


def test_a_gate_in_place_is_an_error_and_not_a_wrong_gradient(device):
    """The backward reads out, so autograd refuses what was written over it."""
    tensors = leaves(9, 9, device)
    out = flash_attn_func(*tensors)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_fake_tensors_need_no_gpu(kind):
    with FakeTensorMode():

        def fake(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=kind)

        q, k, v = fake(2, 8, 4, 64), fake(2, 9, 2, 64), fake(2, 9, 2, 32)
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 8, 4, 32), torch.bfloat16, kind)
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 8), torch.float32, kind)
        given = (out, lse, out, lse, *flat(Tensors(q, k, v)), *Options())
        found = torch.ops.flashattn3.backward.default(*given)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, v)]
        with pytest.raises(ValueError, match=r"k\.shape\[-1\] must be 64"):
            flash_attn_func(q, v, v)

        edges = fake(3, dtype=torch.int32)
        longest = fake(dtype=torch.int32) if kind == "cuda" else 8  # one on a GPU is not read
        rows = fake(16, 4, 64), fake(18, 2, 64), fake(18, 2, 32)
        out, lse = flash_attn_varlen_func(*rows, edges, edges, longest, longest, return_lse=True)
        assert (out.shape, lse.shape) == ((16, 4, 32), (4, 16))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_torch_s_attention_does(device, compiled, fresh_dynamo):
    q, k, v = leaves(9, 9, device)
    run = flash_attn_func
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = run(q, k.bfloat16(), v, causal=True)
        in_float64 = flash_attn_func(*(x.double() for x in (q, k, v)))
    wanted = flash_attn_func(*(x.bfloat16() for x in (q, k, v)), causal=True)
    assert found.dtype == torch.bfloat16 and in_float64.dtype == torch.float64
    assert torch.equal(found, wanted)
    gradients = torch.autograd.grad(found.sum(), (q, k, v))
    assert all(x.dtype == torch.float32 for x in gradients)
    assert all(map(torch.equal, gradients, torch.autograd.grad(wanted.sum(), (q, k, v))))


def test_autocast_casts_what_is_quantized(device):
    q, k, v = (x.detach() for x in leaves(9, 9, device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = flash_attn_fp8_func(q, k.half(), v)
    wanted = flash_attn_fp8_func(q.bfloat16(), k.half().bfloat16(), v.bfloat16())
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    q, k, v = leaves(9, 9, device)
    wanted = flash_attn_func(q, k, v, causal=True)
    with mode():
        found = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(found, wanted) and not found.requires_grad


@pytest.fixture
def deterministic_torch():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def of_rows(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def of_packed_rows(q, k, v):
    edges = torch.tensor([0, 5, 18], dtype=torch.int32, device=q.device)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn_varlen_func(*packed, edges, edges, 13, 13, causal=True)


def of_heads(q, k, v):
    return flash_attn_bhsd_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("function", [of_rows, of_packed_rows, of_heads])
def test_torch_asks_for_deterministic_gradients(
    function, is_compiled, device, deterministic_torch, monkeypatch
):
    asked = set()
    plan = operators._plan

    def recorded(key, options):
        asked.add(options.deterministic)
        return plan(key, options)

    monkeypatch.setattr(operators, "_plan", recorded)
    torch.compiler.reset()
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if is_compiled else function
    for wanted in (True, False, True):
        torch.use_deterministic_algorithms(wanted)
        asked.clear()
        run(*leaves(9, 9, device)).sum().backward()
        assert asked == {wanted}
