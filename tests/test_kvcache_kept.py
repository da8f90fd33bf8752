"""Cached calls that are like an earlier one: which of them an operator takes without checks in
Python, and what happens to the others. tests/host_checks.py has the same over the real operator.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import (
    cached_calls_of_an_h100,
    forget_cached_calls,
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
from flashattn3.call.scheduler_metadata import hash_of_options
from flashattn3.run import cached_calls, cached_plans, launches
from flashattn3.run.launches import LaunchCache, cached_launch_cache


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Double:
    """A library whose operators of kept launches return ``result``. received: by that of the calls
    with the fewest arguments; more: by the others, the operator's name first. kept: number of the
    options, launch, device and queries of each launch that the operators got. hashes: what the
    metadata of calls of each must hold."""

    def __init__(self):
        self.received, self.more, self.result, self.error = [], [], torch.ones(3), None
        self.kept, self.hashes = [], []
        prepared = iter(range(99))

        def decode(handle, lse, *arguments):
            return new_out(DecodeTensors(*arguments[4:]))

        operators = {"decode": decode, "decode_kept": self.run}
        for name in ("decode_kept_with", "append_kept"):
            operators[name] = partial(self.run_with_more, name)
        operators["keep_decode"] = self.keep
        for name in ("decode_into", "append"):
            operators[name] = lambda *given: None
        self.library = library_double(**operators)._replace(
            prepare_decode=lambda *_: (torch.tensor([next(prepared)]), 384, 2048),
        )

    def keep(self, number, launch, device, queries, options_hash):
        self.kept.append((number, launch.item(), device, queries))
        self.hashes.append(options_hash)

    def run(self, number, *arguments):
        self.received.append((number, *arguments))
        return self.answer()

    def run_with_more(self, name, number, *arguments):
        self.more.append((name, number, *arguments))
        return self.answer()

    def answer(self):
        if self.error is not None:
            raise self.error
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


def test_the_second_call_goes_to_the_operator(double):
    q, k, v = tensors_of()
    lengths = ints(3, 4)
    first = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert first.shape == q.shape and double.received == []
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths) is double.result
    number, *given = double.received.pop()
    assert number == launches_with().number and double.kept == [(number, 0, -1, 1)]
    assert all(a is b for a, b in zip(given, (q, k, v, lengths, None, -1, None), strict=True))


def test_a_call_that_returns_lse(double):
    q, k, v = tensors_of()
    flash_attn_with_kvcache(q, k, v, return_lse=True)
    for found in (double.result, None):
        double.result = found
        out, lse = flash_attn_with_kvcache(q, k, v, return_lse=True)
        *_, given = double.received.pop()
        assert (lse is given, out is found) == (found is not None,) * 2
        assert given.shape == lse.shape == (2, 4, 1) and given.dtype == torch.float32
    said = r"flash_attn_with_kvcache: q.shape must be \(batch"
    with pytest.raises(ValueError, match=said):
        flash_attn_with_kvcache(q[0], k, v, return_lse=True)


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_launch_is_kept_with_what_its_metadata_must_hold(page_size, double):
    q, k, v = tensors_of(d=64)
    table = None
    if page_size:
        k, v = (x.view(4, page_size, 2, 64) for x in (k, v))
        table = torch.zeros(2, 2, dtype=torch.int32)
    flash_attn_with_kvcache(q, k, v[..., :32].clone(), page_table=table, causal=True)
    sizes = 4, 2, 64, 32, page_size
    assert double.hashes == [hash_of_options(sizes, q.dtype, launches_with(causal=True).options)]


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


def test_sizes_and_lengths_that_grow_need_no_new_launch(double):
    flash_attn_with_kvcache(*tensors_of(), cache_seqlens=7)
    for step in range(3):
        q, k, v = tensors_of(batch=3 + step)
        for length, passed in ((8 + step, 8 + step), (None, -1)):
            assert flash_attn_with_kvcache(q, k, v, cache_seqlens=length) is double.result
            assert double.received[-1][4:] == (None, None, passed, None)
    table = torch.zeros(2, 3, dtype=torch.int32)
    q, k, v = tensors_of()
    flash_attn_with_kvcache(q, k, v, page_table=table)
    double.result = None  # a page size that the operator does not know
    flash_attn_with_kvcache(q, k, v, page_table=table)
    assert len(double.received) == 8 and double.received[-1][5] is table
    assert cached_plans._checked_decode.cache_info().misses == 2


def test_a_call_that_the_operator_does_not_know_is_planned(double):
    double.result = None
    for number, changes in enumerate(({}, {"heads": (8, 2)}, {"dtype": torch.half}, {"d": 128})):
        tensors = tensors_of(**changes)
        assert flash_attn_with_kvcache(*tensors).shape == tensors[0].shape
        of = launches_with().number, number, -1, 1
        assert len(double.kept) == number + 1 and double.kept[-1] == of


def test_each_number_of_queries_has_a_launch(double):
    """A plan depends on it by its mask and its number of packed rows."""
    double.result = None
    for seqlen_q in (1, 2, 2, 3, 96):
        flash_attn_with_kvcache(*tensors_of(seqlen_q=seqlen_q), causal=True)
    flash_attn_with_kvcache(*tensors_of(seqlen_q=97), causal=True)  # over 192 packed rows
    assert [queries for *_, queries in double.kept] == [1, 2, 3, 96]


def test_options_are_told_apart(double):
    q, k, v = tensors_of()
    options = [{}, {"causal": True}, {"softmax_scale": 0.5}, {"window_size": (3, 0)}]
    options += [{"num_splits": 1}, {"sm_margin": 8}, {"softcap": 2.0}, {"backend": "hopper"}]
    for given in options:
        flash_attn_with_kvcache(q, k, v, **given)
    assert double.received == []
    for given in options:
        flash_attn_with_kvcache(q, k, v, **given)
    assert len(double.received) == len(options)
    numbers = [received[0] for received in double.received]
    assert len({*numbers}) == len(options) and numbers == [number for number, *_ in double.kept]


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"out": torch.zeros(2, 1, 4, 64).bfloat16()}, 0),
        ({"cache_batch_idx": ints(0, 1)}, 2),
        ({"cache_leftpad": ints(0, 1)}, 3),
        ({"cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1}, 4),
        ({"sinks": torch.zeros(4)}, 5),
        ({"scheduler_metadata": torch.zeros(10, dtype=torch.int32)}, 6),
        ({"k_descale": torch.ones(2, 2)}, 7),
        ({"v_descale": torch.ones(2, 2)}, 8),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_further_arguments_go_to_an_operator_of_their_own(given, place, double):
    q, k, v = tensors_of()
    flash_attn_with_kvcache(q, k, v)
    if "cu_seqlens_q" in given:
        q = q.flatten(0, 1)
    for return_lse in (False, True):
        flash_attn_with_kvcache(q, k, v, **given, return_lse=return_lse)
        found = flash_attn_with_kvcache(q, k, v, **given, return_lse=return_lse)
        name, number, *passed = double.more[-1]
        out, lse = found if return_lse else (found, None)
        assert out is double.result and lse is passed[6]
        wanted = [None, given.get("max_seqlen_q", -1), *(None,) * 7]
        wanted[place] = next(iter(given.values()))
        assert name == "decode_kept_with"
        assert number == launches_with(return_lse=return_lse).number
        assert all(a is b for a, b in zip(passed[:3], (q, k, v), strict=True))
        assert all(a is b or a == b for a, b in zip(passed[7:], wanted, strict=True))
    double.result = None
    count = len(double.more)
    flash_attn_with_kvcache(q, k, v, **given)
    assert len(double.more) == count + 1 and double.received == []


def new_tokens(batch=2, heads=2, d=64, dtype=torch.bfloat16):
    k, v = torch.zeros(2, batch, 1, heads, d, dtype=dtype)
    return {"k": k, "v": v, "cache_seqlens": torch.zeros(batch, dtype=torch.int32)}


@pytest.mark.parametrize("causal", [False, True])
def test_new_tokens_go_to_an_operator_of_their_own(causal, double):
    q, k, v = tensors_of()
    new, tables = new_tokens(), torch.zeros(2, 99, 16)
    rotary = {"rotary_cos": tables[0], "rotary_sin": tables[1], "rotary_interleaved": 0}
    flash_attn_with_kvcache(q, k, v, **new, causal=causal)
    assert double.more == []
    for more in ({}, rotary, {"out": torch.zeros(2, 1, 4, 64).bfloat16()}):
        versions = [x._version for x in (k, v, *more.values()) if isinstance(x, torch.Tensor)]
        found = flash_attn_with_kvcache(q, k, v, **new, **more, causal=causal)
        name, _, *passed = double.more.pop()
        assert found is double.result and name == "append_kept"
        wanted = [q, k, v, new["cache_seqlens"], None, -1, None, more.get("out"), -1]
        wanted += [*(None,) * 5, new["k"], new["v"], None, more.get("rotary_cos")]
        wanted += [more.get("rotary_sin"), more.get("rotary_interleaved", True), not causal]
        assert all(a is b or a == b for a, b in zip(passed, wanted, strict=True))
        written = [x._version for x in (k, v, *more.values()) if isinstance(x, torch.Tensor)]
        changes = [b - a for a, b in zip(versions, written, strict=True)]
        assert changes == [1, 1, *(int(name == "out") for name in more if name[-1] != "d")]
    edges = {"k": new["k"][0], "v": new["v"][0], "cu_seqlens_k_new": ints(0, 1, 1)}
    flash_attn_with_kvcache(q, k, v, **(new | edges), causal=causal)
    assert double.more.pop()[18] is edges["cu_seqlens_k_new"]


def test_new_tokens_that_the_operator_does_not_take(double):
    """They, or their error, are those of a first call."""
    q, k, v = tensors_of()
    new, tables = new_tokens(), torch.zeros(2, 99, 16)
    rotary = {"rotary_cos": tables[0], "rotary_sin": tables[1]}
    flash_attn_with_kvcache(q, k, v, **new)
    ones = torch.ones(2, 2)
    for more in (
        {"k_descale": ones, "v_descale": ones},
        {**rotary, "rotary_seqlens": ints(1, 2)},
        {"sinks": torch.zeros(4).bfloat16()},
        {"k": torch.nn.Parameter(new["k"], requires_grad=False)},
        {"out": torch.nn.Parameter(torch.zeros(2, 1, 4, 64).bfloat16(), requires_grad=False)},
    ):
        assert flash_attn_with_kvcache(q, k, v, **{**new, **more}).shape == q.shape
    for more, error, said in (
        ({"v": None}, ValueError, "v must be a tensor"),
        ({"k": None}, ValueError, "k must be a tensor"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens must be >= 0"),
        ({**rotary, "rotary_interleaved": "no"}, TypeError, "rotary_interleaved must be a bool"),
    ):
        with pytest.raises(error, match=said):
            flash_attn_with_kvcache(q, k, v, **{**new, **more})
    assert double.more == []
    with pytest.raises(UnsupportedError, match=r"rotary_cos.requires_grad must be False"):
        flash_attn_with_kvcache(
            q, k, v, **new, rotary_cos=torch.nn.Parameter(tables[0]), rotary_sin=tables[1]
        )
    for name in ("k", "v"):
        given = {**new, name: new[name].clone().requires_grad_()}
        with pytest.raises(UnsupportedError, match=rf"{name}.requires_grad must be False"):
            flash_attn_with_kvcache(q, k, v, **given)
        with torch.no_grad():
            assert flash_attn_with_kvcache(q, k, v, **given) is double.result
    out = torch.zeros(2, 1, 4, 64).bfloat16().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"out.requires_grad must be False"):
        flash_attn_with_kvcache(q, k, v, out=out)


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
    assert double.received == double.more == []


def test_calls_whose_values_are_checked_are_checked_each_time(double, monkeypatch):
    monkeypatch.setattr(cached_plans, "is_checked", lambda device: True)
    q, k, v = tensors_of()
    for _ in range(2):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(3, 4))
    assert double.received == double.kept == []
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] must be between 0 and the capacity"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(3, 99))


def test_invalid_arguments_have_the_errors_of_a_first_call(double):
    q, k, v = tensors_of()
    flash_attn_with_kvcache(q, k, v, cache_seqlens=3)
    double.error = RuntimeError("decode: something must be something else")
    for given, error, said in (
        ({"cache_seqlens": -2}, ValueError, "cache_seqlens must be >= 0, got -2"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens must be an int"),
        ({"cache_seqlens": ints(1)}, ValueError, r"cache_seqlens.shape\[0\] must be 2"),
        ({"page_table": [[0]]}, TypeError, "page_table must be a torch.Tensor"),
        ({"v_cache": None}, TypeError, "v_cache must be a torch.Tensor"),
        ({"v_cache": v[:, 1:]}, ValueError, r"v_cache.shape\[:3\] must be"),
        ({"max_seqlen_q": 1}, ValueError, "max_seqlen_q must be None without cu_seqlens_q"),
        ({"v_cache": v.clone().requires_grad_()}, UnsupportedError, "v_cache.requires_grad"),
        ({"k_cache": k.to_sparse()}, TypeError, "k_cache.layout must be torch.strided"),
    ):
        with pytest.raises(error, match=f"flash_attn_with_kvcache: {said}"):
            flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v, **given})
    with torch.no_grad():
        double.error = None
        assert flash_attn_with_kvcache(q, k, v.clone().requires_grad_()) is double.result


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


@pytest.fixture
def number():
    """Of options with launches for one query and for three, on no GPU."""
    if LIBRARY.error is not None:
        pytest.skip(LIBRARY.error)
    from test_kvcache_hopper import prepared

    number = LaunchCache(DECODE.Options()).number
    for queries in (1, 3):
        LIBRARY.keep_decode(number, prepared()[0], -1, queries, 0)
    return number


def call_of(**changes):
    caches = torch.zeros(2, 2, 128, 8, 128).bfloat16()
    given = {"q": torch.zeros(2, 3, 32, 128).bfloat16(), "k_cache": caches[0]}
    given |= {"v_cache": caches[1], "cache_seqlens": None, "page_table": None, "seqlen": -1}
    given["lse"] = None
    return (given | changes).values()


def test_the_operator_takes_the_calls_that_a_launch_is_kept_for(number):
    def run(number=number, **changes):
        return LIBRARY.decode_kept(number, *call_of(**changes))

    with pytest.raises(RuntimeError, match=r"decode: q.device must be a GPU"):
        run()  # it is about to run
    with pytest.raises(RuntimeError, match=r"decode: q.device must be a GPU"):
        run(q=torch.zeros(2, 1, 32, 128).bfloat16())
    wide = torch.zeros(2, 128, 8, 132).bfloat16()[..., :128]
    shifted = torch.zeros(2 * 3 * 32 * 128 + 1).bfloat16()[1:].view(2, 3, 32, 128)
    others = torch.zeros(2, 128, 4, 128).bfloat16()
    for changes in (
        {"q": torch.zeros(2, 2, 32, 128).bfloat16()},
        {"q": torch.zeros(2, 3, 32, 128).half()},
        {"q": torch.zeros(2, 3, 32, 128)},
        {"q": torch.zeros(2, 3, 16, 128).bfloat16()},
        {"q": torch.zeros(2, 3, 32, 64).bfloat16()},
        {"q": torch.zeros(6, 32, 128).bfloat16()},
        {"q": torch.zeros(2, 3, 128, 32).bfloat16().mT},
        {"q": shifted},
        {"k_cache": wide},
        {"v_cache": wide},
        {"k_cache": others, "v_cache": others},
        {"v_cache": torch.zeros(2, 128, 8, 64).bfloat16()},
        {"page_table": torch.zeros(2, 1, dtype=torch.int32)},
        {"number": number + 1},
    ):
        assert run(**changes) is None, changes
    with pytest.raises(RuntimeError, match=r"cache_seqlens.shape must be \(2,\), got \(1,\)"):
        run(cache_seqlens=ints(1))
    with pytest.raises(RuntimeError, match=r"lse.shape must be \(2, 32, 3\), got \(2, 3, 32\)"):
        run(lse=torch.zeros(2, 3, 32))


def test_a_launch_is_kept_for_its_gpu_and_a_full_cache_is_emptied(number):
    from test_kvcache_hopper import prepared

    handle, other = prepared()[0], LaunchCache(DECODE.Options()).number

    def is_found(number):
        try:
            return LIBRARY.decode_kept(number, *call_of()) is not None
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
    if more == "cu_seqlens_q":
        edges = torch.arange(0, 2 * batch + 1, 2, **on_gpu)
        return given | {"q": q.flatten(0, 1), more: edges, "max_seqlen_q": 2}
    k, v = torch.randn(2, batch, 3, 8, 128, device=q.device).half()
    cos, sin = torch.randn(2, tokens + 3, 32, device=q.device)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    return given | {"k": k, "v": v} | (rotary if more == "rotary" else {})


@needs_hopper
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("more", ["", "out", "cache_batch_idx", "cu_seqlens_q", "new", "rotary"])
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
