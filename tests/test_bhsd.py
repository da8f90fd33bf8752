"""Attention of tensors with heads before tokens: eager, as the operators of a compiled graph, and
what a graph passes to them."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers import EVERY_BACKEND, needs_hopper
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from flashattn3 import UnsupportedError, flash_attn_func, flash_attn_varlen_func, use_backend
from flashattn3.integrations.flop_counter import register_flop_formulas
from flashattn3.integrations.transformers import flash_attn_bhsd_func

BATCH, SEQLEN = 2, 12
EDGES = 0, 5, 12, 24, 24  # sequences within the rows of the batch, the last one empty
OPTIONS = {"softmax_scale": 0.3, "causal": True, "window_size": (6, 0), "softcap": 4.0}


def make_leaves(device, dtype, tokens_first, dims=(16, 16)):
    """q with 4 heads, k and v with 2, heads first; tokens_first: in memory."""
    generator, leaves = torch.Generator(device).manual_seed(0), []
    for heads, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1])):
        shape = (SEQLEN, heads) if tokens_first else (heads, SEQLEN)
        leaf = torch.randn(BATCH, *shape, dim, device=device, dtype=dtype, generator=generator)
        leaf = leaf.transpose(1, 2) if tokens_first else leaf
        leaves.append(leaf.detach().requires_grad_())
    return leaves


def edges_on(device, packed):
    return (torch.tensor(EDGES, dtype=torch.int32, device=device),) * 2 if packed else (None, None)


def loss_of(function, leaves, edges):
    out, lse = function(*leaves, *edges, return_lse=True, **OPTIONS)
    lse = torch.where(lse.isinf(), 0.0, lse)
    return out, lse, (out.float().square().sum() + lse.sin().sum())


def in_rows(q, k, v, edges_q, edges_k, **options):
    """The same by the public functions of rows."""
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    if edges_q is None:
        return flash_attn_func(*rows, **options)
    rows = [x.flatten(0, 1) for x in rows]
    out, lse = flash_attn_varlen_func(*rows, edges_q, edges_k, SEQLEN, SEQLEN, **options)
    return out.unflatten(0, (BATCH, SEQLEN)), lse.unflatten(1, (BATCH, SEQLEN)).transpose(0, 1)


def within(backend, function):
    def run(*arguments):
        with use_backend(backend):
            return function(*arguments)

    return run


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    ("dims", "packed", "tokens_first", "is_compiled"),  # every pair of values
    [
        ((16, 16), False, False, False),
        ((16, 16), True, True, True),
        ((20, 12), False, True, True),
        ((20, 12), True, False, True),
        ((20, 12), True, True, False),
    ],
)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_results_are_those_of_rows(dims, backend, packed, tokens_first, is_compiled, device):
    dtype = torch.float16
    leaves = make_leaves(device, dtype, tokens_first, dims)
    edges = edges_on(device, packed)
    run = compiled(loss_of) if is_compiled else loss_of
    with use_backend(backend):
        found = run(flash_attn_bhsd_func, leaves, edges)
        gradients = torch.autograd.grad(found[2], leaves)
        wanted = loss_of(in_rows, leaves, edges)
        wanted_gradients = torch.autograd.grad(wanted[2], leaves)
    for a, b in zip((*found[:2], *gradients), (*wanted[:2], *wanted_gradients), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["eager", "compiled", "compiled-with-the-block"])
def test_a_call_runs_on_the_backend_in_force(kind, packed, needs_gradient, device):
    """The Hopper kernels take no float32."""
    function = flash_attn_bhsd_func
    if kind == "compiled":
        function = compiled(function)
    function = within("hopper", function)
    if kind == "compiled-with-the-block":
        function = compiled(function)
    leaves = make_leaves(device, torch.float32, True)
    leaves = [x.requires_grad_(needs_gradient) for x in leaves]
    with pytest.raises(UnsupportedError, match="'hopper'"):
        function(*leaves, *edges_on(device, packed))


@pytest.mark.parametrize(
    ("backend", "packed"),
    [
        pytest.param("hopper", False, marks=needs_hopper),
        pytest.param("hopper", True, marks=needs_hopper),
        pytest.param("triton", True, marks=pytest.mark.slow),
        ("reference", False),
    ],
)
def test_opcheck(backend, packed, device):
    leaves = make_leaves(device, torch.float16, True, (20, 12))
    values = 0.3, True, 6, 0, 4.0
    arguments = *leaves, *edges_on(device, packed), *values
    operators = torch.ops.flashattn3
    # The gradient of a traced graph is a call of its own: use_backend counts for it in this thread.
    with use_backend(backend), torch.autograd.set_multithreading_enabled(False):
        torch.library.opcheck(operators.forward_bhsd.default, arguments)
        leaves = [x.detach() for x in leaves]
        arguments = *leaves, *edges_on(device, packed), *values
        out, lse = operators.forward_bhsd.default(*arguments)
        for dlse in (None, torch.randn_like(lse)):
            given = torch.randn_like(out), dlse, out, lse, *arguments
            torch.library.opcheck(operators.backward_bhsd.default, given)


def test_the_operators_have_no_second_derivative_and_no_tangents(device):
    q, k, v = make_leaves(device, torch.float32, True)
    forward = torch.ops.flashattn3.forward_bhsd.default
    values = None, None, 0.3, True, -1, -1, 0.0
    out, _ = forward(q, k, v, *values)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of attention"):
        dq.sum().backward()
    q, k, v = (x.detach() for x in (q, k, v))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, k)
        with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
            forward(q, dual, v, *values)


def test_a_graph_passes_its_own_tensors(device):
    """A view of q or k in their place would be copied by inductor."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def layer(hidden, cos, edges):
        x = hidden.view(BATCH, SEQLEN, 4, 16).transpose(1, 2)
        rotated = x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * cos
        return flash_attn_bhsd_func(rotated, rotated, x, edges, edges, causal=True).flatten(2)

    hidden = torch.randn(BATCH, SEQLEN, 64, device=device, requires_grad=True)
    cos = torch.randn(SEQLEN, 16, device=device)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    out = compiled(hidden, cos, edges_on(device, True)[0])
    out.sum().backward()
    forward, backward = graphs
    operators = torch.ops.flashattn3
    (call,) = forward.graph.find_nodes(op="call_function", target=operators.forward_bhsd.default)
    assert call.args[0].target == call.args[1].target == torch.ops.aten.add.Tensor
    (call,) = backward.graph.find_nodes(op="call_function", target=operators.backward_bhsd.default)
    assert {x.op for x in call.args[4:7]} == {"placeholder"}


def test_autocast_reaches_a_compiled_call(device):
    leaves = make_leaves(device, torch.float32, True)
    with torch.autocast(device.type, torch.bfloat16):
        out = compiled(flash_attn_bhsd_func)(*leaves)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)


@pytest.mark.parametrize("packed", [False, True])
def test_flop_counts_are_those_of_rows(packed, device):
    register_flop_formulas()
    leaves = make_leaves(device, torch.float32, True, (20, 12))
    counts = []
    for function in (in_rows, torch.compile(flash_attn_bhsd_func, backend="aot_eager")):
        torch.compiler.reset()
        with FlopCounterMode(display=False) as mode:
            out = function(*leaves, *edges_on(device, packed), causal=True, return_lse=True)[0]
            out.sum().backward()
        counts.append(mode.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("is_compiled", [False, True])
def test_errors_name_the_argument(is_compiled, device):
    q, k, v = make_leaves(device, torch.float16, True)
    edges = edges_on(device, True)
    run = compiled(flash_attn_bhsd_func) if is_compiled else flash_attn_bhsd_func
    calls = {
        "k.dtype": lambda: run(q, k.float(), v),
        "cu_seqlens_q.dtype": lambda: run(q, k, v, edges[0].long(), edges[1]),
        "cu_seqlens_k": lambda: run(q, k, v, edges[0]),
        "cu_seqlens_q": lambda: run(q, k, v, None, edges[1]),
    }
    for name, call in calls.items():
        with pytest.raises(Exception, match=f"flash_attn_bhsd_func: {name} must be"):
            call()
