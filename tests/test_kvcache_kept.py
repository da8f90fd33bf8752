"""Cached calls that are like an earlier one: which of them an operator takes without checks in
Python. tests/host_cached_checks.py compares the others over the real operators.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import (
    cached_calls_of_an_h100,
    forget_cached_calls,
    ints,
    library_double,
    needs_hopper,
)

from flashattn3 import UnsupportedError, flash_attn_with_kvcache
from flashattn3.backends.base import PassOperators
from flashattn3.backends.hopper import cached as hopper_cached
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.library import find_library
from flashattn3.backends.reference.backend import BACKEND as REFERENCE
from flashattn3.backends.triton.backend import BACKEND as TRITON
from flashattn3.call.cached import DECODE, DecodeTensors, new_out
from flashattn3.run import cached_calls, cached_plans, launches
from flashattn3.run.launches import LaunchCache, cached_launch_cache


class Double:
    """A library whose operators of kept launches return ``result``. received: what each call passes
    to them, the operator's name first. kept: what the operators got with each launch."""

    def __init__(self):
        self.received, self.kept, self.result = [], [], torch.ones(3)
        prepared = iter(range(99))

        def decode(handle, lse, *arguments):
            return new_out(DecodeTensors(*arguments[4:]))

        operators = {"decode": decode, "keep_decode": lambda *given: self.kept.append(given)}
        for name in ("decode_kept", "decode_kept_with", "append_kept"):
            operators[name] = partial(self.run, name)
        operators["append"] = operators["decode_into"] = lambda *given: None
        self.library = library_double(**operators)._replace(
            prepare_decode=lambda *_: (torch.tensor([next(prepared)]), 384, 2048),
        )

    def run(self, name, number, *arguments):
        self.received.append((name, number, *arguments))
        return self.result


@pytest.fixture
def double(monkeypatch):
    """Plan cached calls on CPU tensors for an H100, with the library of a ``Double``."""
    double = Double()
    hopper = HopperBackend(library=lambda: double.library, only_measured=False)
    with cached_calls_of_an_h100(monkeypatch, hopper, TRITON, REFERENCE):
        yield double


def tensors_of(batch=2, seqlen_q=1, heads=(4, 2), d=64, dtype=torch.bfloat16):
    shapes = (seqlen_q, heads[0]), (32, heads[1]), (32, heads[1])
    return [torch.zeros(batch, *shape, d, dtype=dtype) for shape in shapes]


def launches_with(**options):
    options = {"backend": None, **options}
    return cached_launch_cache(DECODE.convert("flash_attn_with_kvcache", options))


def test_autocast_casts_the_queries_of_8_bit_caches(double):
    """A launch that is kept outside of autocast has queries of another dtype."""
    q, k, v = tensors_of(dtype=torch.half)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    flash_attn_with_kvcache(q, k, v)
    for more in ({}, {"k_descale": torch.ones(2, 2)}):
        assert flash_attn_with_kvcache(q, k, v, **more) is double.result
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert flash_attn_with_kvcache(q, k, v, **more).dtype == torch.bfloat16
            of_16_bits = tensors_of()
            flash_attn_with_kvcache(*of_16_bits)
            assert flash_attn_with_kvcache(*of_16_bits) is double.result


def test_new_tokens_that_triton_writes(double, monkeypatch):
    """The append kernel does not run before a GPU has measured it."""
    monkeypatch.setattr(hopper_cached, "APPEND_MEASURED", "")
    hopper = HopperBackend(library=lambda: double.library)
    monkeypatch.setattr(cached_plans, "BACKENDS", (hopper, TRITON, REFERENCE))
    q, k, v = tensors_of()
    for backend, appends in ((None, False), ("hopper", True)):
        flash_attn_with_kvcache(q, k, v, backend=backend)
        assert (launches_with(backend=backend).operators.append is not None) == appends


@pytest.mark.parametrize(
    "given",
    [
        {"sinks": torch.zeros(4).bfloat16()},
        {"q_descale": torch.ones(2, 2)},
        {"backend": "triton"},
        {"backend": "reference"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_calls_with_more_are_checked_each_time(given, double, monkeypatch):
    monkeypatch.setattr(cached_calls, "run_checked", lambda *arguments: arguments[3].q)
    q, k, v = tensors_of()
    if "backend" not in given:
        flash_attn_with_kvcache(q, k, v)
    for _ in range(2):
        flash_attn_with_kvcache(q, k, v, **given)
    assert double.received == []


def test_calls_whose_values_are_checked_are_checked_each_time(double, monkeypatch):
    monkeypatch.setattr(cached_plans, "is_checked", lambda device: True)
    q, k, v = tensors_of()
    for _ in range(2):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(3, 4))
    assert double.received == double.kept == []
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] must be between 0 and the capacity"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(3, 99))


def test_watched_calls_do_not_go_to_the_operator(double):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = tensors_of()
    flash_attn_with_kvcache(q, k, v)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert flash_attn_with_kvcache(*fake).shape == q.shape
    assert flash_attn_with_kvcache(*(x.to("meta") for x in (q, k, v))).is_meta
    q3, k3, v3 = (torch.stack((x, x)) for x in (q, k, v))
    with pytest.raises(UnsupportedError, match=r"torch.func.vmap is not supported"):
        torch.vmap(flash_attn_with_kvcache)(q3, k3, v3)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v).shape == q.shape
    assert double.received == []


def test_a_cache_beyond_the_last_with_a_node_has_none(monkeypatch):
    """Gradients may ask for any cache with a node, so that none is dropped."""
    monkeypatch.setattr(launches, "MOST", len(launches._with_node))
    operators = PassOperators(object(), *(None,) * 4)
    cache = LaunchCache(None)
    cache.keep(lambda number: operators)
    assert cache.operators is operators and cache.nodes == (None, None)


LIBRARY = find_library()


def test_a_launch_is_kept_for_its_gpu_and_a_full_cache_is_emptied():
    if LIBRARY.error is not None:
        pytest.skip(LIBRARY.error)
    from test_kvcache_hopper import prepared

    handle = prepared()[0]
    number, other = (LaunchCache(DECODE.Options()).number for _ in range(2))
    LIBRARY.keep_decode(number, handle, -1, 3, 0)
    caches = torch.zeros(2, 2, 128, 8, 128).bfloat16()
    call = torch.zeros(2, 3, 32, 128).bfloat16(), *caches, None, None, -1, None

    def is_found(number):
        try:
            return LIBRARY.decode_kept(number, *call) is not None
        except RuntimeError:
            return True  # it is about to run

    LIBRARY.keep_decode(other, handle, 0, 3, 0)
    assert is_found(number) and not is_found(other)
    for queries in range(4096):
        LIBRARY.keep_decode(other, handle, 0, queries, 0)
    assert not is_found(number)
    for wrong in (handle[:3], handle.int(), torch.zeros_like(handle), handle[:0]):
        said = "keep_decode: launch must be a result of prepare_decode, got another tensor"
        with pytest.raises(RuntimeError, match=said):
            LIBRARY.keep_decode(number, wrong, -1, 1, 0)


def with_more(given, more, tokens):
    """A call of flash_attn_with_kvcache with two queries, on a GPU, with further arguments."""
    q, lengths = given["q"], given["cache_seqlens"]
    batch, on_gpu = len(q), {"device": q.device, "dtype": torch.int32}
    if more == "out":
        return given | {"out": torch.empty_like(q)}
    if more == "cache_batch_idx":
        return given | {more: torch.randperm(batch, **on_gpu), "cache_leftpad": lengths // 2}
    if more == "prefix":
        if "page_table" not in given:
            return given
        pages = torch.randperm(len(given["k_cache"]), **on_gpu)[None, :3]
        return given | {"prefix_page_table": pages, "prefix_len": 40}
    if more == "cu_seqlens_q":
        edges = torch.arange(0, 2 * batch + 1, 2, **on_gpu)
        return given | {"q": q.flatten(0, 1), more: edges, "max_seqlen_q": 2}
    k, v = torch.randn(2, batch, 3, 8, 128, device=q.device).half()
    cos, sin = torch.randn(2, tokens + 3, 32, device=q.device)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    return given | {"k": k, "v": v} | (rotary if more == "rotary" else {})


@needs_hopper
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "more", ["", "out", "cache_batch_idx", "cu_seqlens_q", "prefix", "new", "rotary"]
)
def test_later_calls_give_the_bits_of_first_ones(more, return_lse, poisoned_memory):
    """Of other batches, capacities and page tables too, and in a CUDA graph."""
    forget_cached_calls()
    for page_size, causal in ((0, True), (16, False)):
        options = {"causal": causal, "return_lse": return_lse, "backend": "hopper"}
        for batch, tokens in ((2, 512), (2, 512), (5, 512), (2, 2048)):
            cache = torch.randn(2, batch * tokens, 8, 128, device="cuda").half()
            k, v = cache.unflatten(1, (-1, page_size or tokens))
            given = {"q": torch.randn(batch, 2, 32, 128, device="cuda").half()}
            given |= {"k_cache": k, "v_cache": v}
            lengths = torch.randint(1, tokens - 3, (batch,), device="cuda", dtype=torch.int32)
            given["cache_seqlens"] = lengths
            if page_size:
                pages = torch.randperm(len(k), device="cuda", dtype=torch.int32)
                given["page_table"] = pages.view(batch, -1)
            if more:
                given = with_more(given, more, tokens)
            written = [name for name in ("k_cache", "v_cache", "out") if name in given]
            copies = {name: given[name].clone() for name in written}
            checks = cached_plans._checked_decode.cache_info()
            found = [flash_attn_with_kvcache(**given, **options)]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found.append(flash_attn_with_kvcache(**given, **options))
            graph.replay()
            known = cached_plans._checked_decode.cache_info() == checks
            forget_cached_calls()
            wanted = flash_attn_with_kvcache(**(given | copies), **options)
            assert cached_plans._checked_decode.cache_info().misses == 1
            for results in found:
                pairs = zip(results, wanted, strict=True) if return_lse else [(results, wanted)]
                assert all(torch.equal(a, b) for a, b in pairs)
            assert all(torch.equal(given[name], copies[name]) for name in written)
        assert known
