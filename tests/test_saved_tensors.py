"""Checkpoints, offloading and hooks on saved tensors. tests/host_saved_checks.py does the same over
the Hopper kernels without a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from helpers import EVERY_BACKEND, GPU
from saved_tensors import (
    AROUND,
    LENGTHS,
    RIGHT,
    WRONG,
    attention_of,
    gradients_of,
    inputs,
    of_two_shapes,
    on_backend,
    on_cpu,
    saved_by,
    saved_of,
    under_compiled_autograd,
    with_hook,
)
from torch.utils.flop_counter import FlopCounterMode

from flashattn3 import flash_attn_varlen_func, use_backend
from flashattn3.integrations.transformers import flash_attn_bhsd_func
from flashattn3.run import aten_node, launches
from flashattn3.run import bhsd as bhsd_module

ON_PINNED = pytest.param("pinned", marks=pytest.mark.gpu)


BACKENDS = (EVERY_BACKEND[0], pytest.param("triton", marks=pytest.mark.slow), "reference")
LENGTHS_HERE = LENGTHS if GPU else (8, 10, 8)


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("around", [*AROUND, ON_PINNED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_without_a_checkpoint(backend, around, bhsd, device):
    model = of_two_shapes(on_backend(backend, attention_of(bhsd)))
    run = partial({**AROUND, "pinned": partial(on_cpu, pinned=True)}[around], model)
    torch.use_deterministic_algorithms(True)
    try:
        for n in LENGTHS_HERE:
            tensors = inputs(n, device)
            for a, b in zip(gradients_of(run, tensors), gradients_of(model, tensors), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_call_saves_depends_on_the_call_alone(backend, bhsd, device):
    with use_backend(backend):
        for n in LENGTHS_HERE:
            for other in ({}, {"d": 20}, {"dv": 12}, {"heads": (2, 2)}):
                tensors = inputs(n, device, **other)
                call = partial(attention_of(bhsd), *tensors)
                saved = saved_of(*tensors, bhsd)
                assert saved_by(call) == saved
                with FlopCounterMode(display=False):
                    watched = saved_by(call)
                assert watched == saved_of(*tensors)


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_return_other_tensors(backend, bhsd, device):
    n = LENGTHS_HERE[0]
    call, tensors = attention_of(bhsd), inputs(n, device)
    names = "k", "q", "v", "lse", "out"
    with use_backend(backend):
        wanted = gradients_of(call, tensors)
        for unpack in RIGHT.values():
            for a, b in zip(gradients_of(with_hook(call, unpack), tensors), wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        for kind, unpack in WRONG.items():
            for index, name in enumerate(names):
                if kind == "shape" and name in "kv":  # of which there may be any number of rows
                    continue
                match = (
                    rf"saved \w+\.{kind} must be" if kind == "shape" else rf"saved {name}.{kind}"
                )
                with pytest.raises((ValueError, RuntimeError), match=match):
                    gradients_of(with_hook(call, unpack, index), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_autograd_of_an_eager_forward(backend, bhsd, device):
    attention, tensors = attention_of(bhsd), inputs(16, device)
    with use_backend(backend):
        found = under_compiled_autograd(attention, tensors, "aot_eager")
        leaves = [x.detach().requires_grad_() for x in tensors]
        wanted = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_query_row_and_an_expanded_gradient(backend, device):
    q, k, v = (torch.zeros(n, 2, 16, device=device).half().requires_grad_() for n in (0, 8, 8))
    edges = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 0], [0, 8])]
    out = flash_attn_varlen_func(q, k, v, *edges, 1, 8, backend=backend)
    out.sum().backward()
    assert q.grad.shape == q.shape and not k.grad.any() and not v.grad.any()


def test_the_gradient_keeps_what_was_in_force_in_its_forward(device, monkeypatch):
    """Eager calls of the layout with heads first, and operators of a graph that runs eagerly."""
    seen = []
    backward_of = bhsd_module.backward_of

    def spy(dout, dlse, out, lse, tensors, options):
        seen.append((options.backend, options.deterministic))
        return backward_of(dout, dlse, out, lse, tensors, options)

    monkeypatch.setattr(bhsd_module, "backward_of", spy)
    leaves = [x.transpose(1, 2) for x in inputs(16, device)]
    torch.compiler.reset()
    run = torch.compile(partial(flash_attn_bhsd_func, causal=True), backend="eager")
    torch.use_deterministic_algorithms(True)
    try:
        with use_backend("reference"):
            out = run(*leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    out.sum().backward()
    assert seen == [("reference", True)]


@pytest.mark.parametrize("node", aten_node.NODES, ids=lambda node: node.register)
@pytest.mark.parametrize("kind", ["switch", "schema", "oldest"])
def test_a_node_is_used_only_where_torch_has_the_known_operator(kind, node, monkeypatch):
    torch_version = f"torch {torch.__version__}"
    if kind == "switch":
        has_kernel = "_dispatch_has_kernel_for_dispatch_key"  # an earlier call's, on a GPU
        monkeypatch.setattr(torch._C, has_kernel, lambda *_: False)
        for on in ("", "true"):
            monkeypatch.setenv(aten_node.SWITCH, on)
            assert aten_node.unusable_reason.__wrapped__(node) is None
        monkeypatch.setenv(aten_node.SWITCH, "0")
        wanted = "FLASHATTN3_AUTOGRAD_NODE=0"
    elif kind == "schema":
        forward, backward = node.arguments
        backward = backward.replace("is_causal, ", "is_causal, int window=0, ")
        node = node._replace(arguments=(forward, backward))
        wanted = f"{torch_version} has another aten::{node.name}_backward"
    else:
        node = node._replace(oldest=(99, 1))
        wanted = f"{torch_version} is older than 99.1"
    assert aten_node.unusable_reason.__wrapped__(node) == wanted
    monkeypatch.setattr(aten_node, "NODES", (node, node))
    monkeypatch.setattr(aten_node, "unusable_reason", lambda node: wanted)
    assert aten_node.registered_nodes.__wrapped__(None) == (None, None)


@pytest.mark.parametrize("node", aten_node.NODES, ids=lambda node: node.register)
def test_this_torch_has_the_known_operators(node):
    for name, schema in node.schemas.items():
        assert aten_node.schema_of(name) == schema


def test_threads_that_begin_together_register_the_nodes_once(monkeypatch):
    """Else torch warns of a second kernel, and one thread may take the kernels of another for those
    of another copy of the library."""
    registered = []

    def impl(name, *_):
        registered.append(name)
        sleep(0.01)

    class Operators:
        name = "operators_of_a_test"
        register_autograd_node = register_score_node = SimpleNamespace(default=lambda: None)

    monkeypatch.setattr(torch.library, "impl", impl)
    monkeypatch.setattr(aten_node, "unusable_reason", lambda node: None)
    kept = SimpleNamespace(namespace=Operators)
    with ThreadPoolExecutor(4) as pool:
        nodes = {*pool.map(launches.nodes_of, [kept] * 4)}
    assert len(nodes) == 1 and len(registered) == 2, registered
