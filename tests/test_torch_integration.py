"""torch's own machinery: operators, autograd, the compiler, fake tensors, CUDA graphs, streams, devices."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import GPU, case_named
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn3 import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, use_backend
from flashattn3.problem import Options
from flashattn3.testing import make_inputs

CASES = ("gqa-2", "varlen-seqused")
BACKENDS = ("triton", "reference")
# Compiled graphs take their layouts from the fake implementations, so a backend that runs them is enough.
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def operator_arguments(name, backend, device, requires_grad=True):
    """The forward operator's arguments for a case."""
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16, requires_grad=requires_grad)
    tensors = type(tensors)(*(x.detach().nan_to_num().requires_grad_() for x in tensors[:3]), *tensors[3:])
    lengths = (case.seqlen_q, case.seqlen_k) if case.varlen else (None, None)
    options = Options(*lengths, causal=case.causal, backend=backend)
    return (*tensors, *options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_opcheck_forward(name, backend, device):
    torch.library.opcheck(
        torch.ops.flashattn3.forward.default, operator_arguments(name, backend, device)
    )


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_opcheck_backward(name, backend, with_dlse, device):
    arguments = operator_arguments(name, backend, device, requires_grad=False)
    arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    out, lse = torch.ops.flashattn3.forward.default(*arguments)
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(
        torch.ops.flashattn3.backward.default, (torch.randn_like(out), dlse, out, lse, *arguments)
    )


def leaves(rows_q, rows_k, device, dtype=torch.float32, heads=(4, 2), lead=(2,)):
    shapes = ((*lead, rows, count, 16) for rows, count in zip((rows_q, rows_k, rows_k), (heads[0], *heads[1:] * 2)))
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
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", sorted({"aot_eager", COMPILER}))
def test_compiled_dense_calls(compiler, device, fresh_dynamo):
    calls = [(leaves(*rows, device),) for rows in ((33, 47), (64, 80), (5, 97))]
    assert_compiles_once(dense_loss, calls, compiler)


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


def test_compiled_under_use_backend(device, fresh_dynamo):
    def loss(qkv):
        return flash_attn_qkvpacked_func(qkv, causal=True).square().sum()

    qkv = torch.randn(2, 12, 3, 2, 16, device=device, requires_grad=True)
    with use_backend("reference"):
        assert_compiles_once(loss, [([qkv],)], "aot_eager")


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (3, 0)}, {"softcap": 2.0}])
def test_gradcheck(options, device):
    q, k, v = leaves(5, 7, device, torch.float64)

    def run(q, k, v):
        return flash_attn_func(q, k, v, softmax_scale=0.7, return_lse=True, **options)

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=False)


def test_gradcheck_varlen(device):
    q, k, v = leaves(9, 8, device, torch.float64, lead=())
    edges_q, edges_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 4, 9), (0, 5, 8)))

    def run(q, k, v):
        return flash_attn_varlen_func(q, k, v, edges_q, edges_k, 5, 5, causal=True)

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_the_second_derivative_is_an_error(device):
    q, k, v = leaves(5, 7, device)
    out = flash_attn_func(q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of attention is not implemented"):
        gradient.sum().backward()


def test_unused_outputs_cost_nothing_and_break_nothing(device):
    q, k, v = leaves(5, 7, device)
    _, lse = flash_attn_func(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    assert dq.any() and dk.any()


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_fake_tensors_need_no_gpu(kind):
    """Shapes for a GPU that is not there; with gradients where torch itself can."""
    edges = torch.zeros(4, dtype=torch.int32)
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, 64, device=kind, dtype=torch.bfloat16)
        k, v = q[:, :, :2], torch.empty(2, 8, 2, 32, device=kind, dtype=torch.bfloat16)
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 8, 4, 32), torch.bfloat16, kind)
        assert (lse.shape, lse.dtype) == ((2, 4, 8), torch.float32)
        edges = torch.zeros(3, dtype=torch.int32, device=kind)
        longest = torch.empty((), dtype=torch.int32, device=kind) if kind == "cuda" else 8
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, edges, edges, longest, longest)
        assert out.shape == (16, 4, 32)
        gradients = torch.ops.flashattn3.backward.default(
            out, None, out, lse, *(x.flatten(0, 1) for x in (q, k, v)), edges, edges, None, None, *Options()
        )
        assert [x.shape for x in gradients] == [(16, 4, 64), (16, 2, 64), (16, 2, 32)]
        with pytest.raises(ValueError, match=r"k\.shape\[-1\] must be 64"):
            flash_attn_func(q, v, v)


def test_vmap_and_autocast_do_not_change_the_numbers(device):
    q, k, v = leaves(9, 9, device)
    wanted = flash_attn_func(q, k, v, causal=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(found, wanted)


@pytest.mark.skipif(GPU, reason="interpreted kernels are slow; the GPU tier covers this")
def test_no_host_read_on_the_cpu_either():
    """Lengths stay on the device: a call with fake lengths plans and runs no `.item()`."""
    with FakeTensorMode():
        q = torch.empty(9, 4, 16, dtype=torch.float32)
        edges = torch.empty(4, dtype=torch.int32)
        assert flash_attn_varlen_func(q, q, q, edges, edges, 4, 4).shape == q.shape
