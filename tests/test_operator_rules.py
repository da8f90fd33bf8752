"""FLOP formulas, and the warning where a GPU call runs on the reference backend."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import forget_cached_calls
from torch.utils.flop_counter import FlopCounterMode

from flashattn3 import (
    append_kvcache,
    flash_attn_combine,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flashattn3.integrations.flop_counter import register_flop_formulas
from flashattn3.run import cached_plans, operator_rules


def flops(function, *tensors, **options):
    """Count the forward's and the backward's, in units of a multiplication and an addition."""
    register_flop_formulas()
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in tensors]
    with FlopCounterMode(display=False) as forward:
        out = function(*leaves, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops() / 2, backward.get_total_flops() / 2


@pytest.mark.parametrize("heads_kv", [1, 4])
def test_flops_are_those_of_torch_s_attention(heads_kv):
    """2 GEMMs forward, 5 backward, of all scores, masked or not."""
    q, (k, v) = torch.randn(2, 8, 4, 16), torch.randn(2, 2, 12, heads_kv, 16)
    scores = 2 * 4 * 8 * 12
    found = flops(flash_attn_func, q, k, v, causal=True)
    assert found == (2 * scores * 16, 5 * scores * 16)
    wanted = torch.utils.flop_counter.sdpa_flop_count((2, 4, 8, 16), (2, 4, 12, 16), (2, 4, 12, 16))
    assert 2 * found[0] == wanted


def test_flops_with_another_head_dim_of_v_and_of_sequences():
    (q, k), v, scores = torch.randn(2, 1, 8, 2, 16), torch.randn(1, 8, 2, 32), 2 * 8 * 8
    found = flops(flash_attn_func, q, k, v)
    assert found == (scores * (16 + 32), scores * (3 * 16 + 2 * 32))
    q, (k, v) = torch.randn(10, 2, 16), torch.randn(2, 12, 2, 16)
    edges = torch.tensor([[0, 3, 10], [0, 8, 12]], dtype=torch.int32)
    found = flops(partial(flash_attn_varlen_func, max_seqlen_q=7, max_seqlen_k=8), q, k, v, *edges)
    scores = 2 * (3 * 8 + 7 * 4)
    assert found == (2 * scores * 16, 5 * scores * 16)


TABLE = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)
LENGTHS, EDGES_Q = (torch.tensor(x, dtype=torch.int32) for x in ([5, 7], [0, 1, 4]))
PAGES = {"page_table": TABLE, "cache_seqlens": LENGTHS}
IN_FRONT = {"prefix_page_table": TABLE[:1], "prefix_len": 6}
Q, KV = torch.randn(2, 3, 4, 16), torch.randn(4, 4, 2, 16)
NEW = KV[:2, :1]
# Each: q, caches and options of a cached call, and the queries times keys of its sequences.
CACHED = {
    "capacity": (Q, KV[:2], {}, 2 * 3 * 4),
    "one length": (Q, KV[:2], {"cache_seqlens": 3}, 2 * 3 * 3),
    "pages": (Q, KV, PAGES, 3 * 5 + 3 * 7),
    "new tokens": (Q, KV, PAGES | {"k": NEW, "v": NEW}, 3 * 6 + 3 * 8),
    "varlen": (Q.view(6, 4, 16), KV, PAGES | {"cu_seqlens_q": EDGES_Q, "max_seqlen_q": 3}, 5 + 21),
    "prefix": (Q, KV, PAGES | IN_FRONT, 3 * 11 + 3 * 13),
    "prefix alone": (Q, KV, IN_FRONT | {"page_table": TABLE, "cache_seqlens": 0}, 2 * 3 * 6),
    "meta": (Q.to("meta"), KV[:2].to("meta"), {"cache_seqlens": 3}, 2 * 3 * 4),
}


@pytest.mark.parametrize("name", CACHED)
def test_flops_of_cached_calls_are_those_of_their_keys(name):
    register_flop_formulas()
    q, cache, options, scores = CACHED[name]
    with FlopCounterMode(display=False) as mode:
        flash_attn_with_kvcache(q, cache.clone(), cache.clone(), **options)
    assert mode.get_total_flops() == 2 * 4 * scores * (16 + 16)


def test_flops_of_sequences_without_data_are_those_of_the_longest():
    """With sinks the operator is another overload, whose arguments lie elsewhere."""
    register_flop_formulas()
    q, edges, sinks = (x.to("meta") for x in (Q.view(6, 4, 16), EDGES_Q, torch.zeros(4)))
    with FlopCounterMode(display=False) as mode:
        flash_attn_varlen_func(q, q, q, edges, edges, 3, 3, sinks=sinks)
    assert mode.get_total_flops() == 2 * 4 * (2 * 3 * 3) * (16 + 16)


X, EDGES = torch.randn(1, 8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
LEAF, LENGTH = X.clone().requires_grad_(), {"cache_seqlens": 4}
# Each: a call and the names that torch's profiler shows of it.
RECORDED = {
    "dense": (
        lambda: flash_attn_func(LEAF, X, X).sum().backward(),
        ("flash_attn_func", "flash_attn_func backward"),
    ),
    "varlen": (
        lambda: flash_attn_varlen_func(*[LEAF[0]] * 3, EDGES, EDGES, 8, 8).sum().backward(),
        ("flash_attn_varlen_func", "flash_attn_varlen_func backward"),
    ),
    "8 bits": (lambda: flash_attn_fp8_func(*[X.half()] * 3), ("flash_attn_fp8_func",)),
    "cached": (lambda: flash_attn_with_kvcache(X, X, X), ("flash_attn_with_kvcache",)),
    "new tokens": (
        lambda: flash_attn_with_kvcache(X, X, X, X[:, :4], X[:, :4], **LENGTH),
        ("flash_attn_with_kvcache append", "flash_attn_with_kvcache"),
    ),
    "append": (lambda: append_kvcache(X[:, :4], X[:, :4], X, X, **LENGTH), ("append_kvcache",)),
    "combine": (lambda: flash_attn_combine(X[None], X[None, ..., 0]), ("flash_attn_combine",)),
}


@pytest.mark.parametrize("call", RECORDED)
def test_the_profiler_shows_function_and_backend(call):
    run, wanted = RECORDED[call]
    with use_backend("reference"):
        run()
        with torch.autograd.profiler.profile() as profile:
            run()
    own = [event.name for event in profile.function_events if event.name.startswith("flashattn3::")]
    assert own == [f"flashattn3::{name} [reference]" for name in wanted]


def test_the_profiler_shows_the_kernel():
    of_hopper = {"kernel config": "forward_bf16", "tile": "64", "gradient": "backward_bf16"}
    for kernel, of, wanted in (
        ("kernel config", of_hopper, "forward_bf16"),
        ("gradient", of_hopper, "backward_bf16"),
        ("kernel config", {"tile": "128 rows x 32 keys"}, "128 rows x 32 keys"),
    ):
        planned = plan(backend="one")
        planned.launch = SimpleNamespace(describe=lambda of=of: of)
        run = operator_rules.recorded(planned, lambda x: x + 1, " part", kernel)
        with torch.autograd.profiler.profile() as profile:
            assert run(1) == 2
        names = {event.name for event in profile.function_events}
        assert names == {f"flashattn3::flash_attn_func part [one {wanted}]"}


def plan(kind="cuda", backend="reference", asked=None):
    return SimpleNamespace(
        problem=SimpleNamespace(backend=asked, function="flash_attn_func"),
        device=SimpleNamespace(kind=kind),
        backend=SimpleNamespace(name=backend),
        declined=(("triton", "does not take float32"),),
    )


def test_one_warning_where_a_gpu_call_lands_on_reference(monkeypatch):
    monkeypatch.setattr(operator_rules, "_told", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for of in ({"kind": "cpu"}, {"backend": "triton"}, {"asked": "reference"}):
            operator_rules.warn_of_reference(plan(**of))
        with pytest.warns(UserWarning, match=r"reference backend, slowly \(triton: does not take"):
            operator_rules.warn_of_reference(plan())
        operator_rules.warn_of_reference(plan())


def test_cached_calls_warn_too(monkeypatch):
    planned = []
    monkeypatch.setattr(cached_plans, "warn_of_reference", planned.append)
    forget_cached_calls()
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)
    flash_attn_with_kvcache(q, cache, cache)
    assert [found.backend.name for found in planned] == ["reference"]


@pytest.mark.gpu
def test_a_float32_call_on_a_gpu_warns(monkeypatch):
    monkeypatch.setattr(operator_rules, "_told", [])
    q = torch.randn(1, 5, 1, 24, device="cuda")
    with pytest.warns(UserWarning, match="flash_attn_func: runs on the reference backend"):
        flash_attn_func(q, q, q, softmax_scale=0.123)
