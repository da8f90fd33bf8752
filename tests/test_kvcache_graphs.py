"""Cached calls on a GPU: captured and replayed, on several streams, long, in batches with gaps."""

from __future__ import annotations

import math

import pytest
import torch
from cached_kernels import CAUSAL, FEW, PAGED, RAGGED, kernel_of
from helpers import CACHE_BACKENDS, needs_hopper
from support.kvcache import CacheCase, call_cached, check_cached, make_cache_inputs

from flashattn3 import flash_attn_with_kvcache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
GPU_BACKENDS = CACHE_BACKENDS[1:]
each_backend = pytest.mark.parametrize("backend", GPU_BACKENDS)
every_case = pytest.mark.parametrize("case", [FEW, PAGED, RAGGED])


@each_backend
@pytest.mark.parametrize("length", [2**10, 2**17, 2**20])
def test_long_contexts(length, backend):
    case = CacheCase("long", (length,), num_heads_q=2, num_heads_kv=1, page_size=16)
    inputs = make_cache_inputs(case, "cuda", torch.bfloat16)
    check_cached(case, inputs, *call_cached(inputs, backend=backend))


@pytest.mark.parametrize(
    ("backend", "num_splits"),
    [("triton", 0), ("triton", 2)]
    + [pytest.param("hopper", splits, marks=needs_hopper) for splits in (0, 1)],
)
def test_many_sequences(backend, num_splits):
    """Over 992, where FlashAttention-3 no longer splits; more than one step of the prefix sum."""
    case = CacheCase("many", tuple(range(600, 1600)), num_heads_kv=1, num_heads_q=1, page_size=16)
    inputs = make_cache_inputs(case, "cuda", torch.float16)
    check_cached(case, inputs, *call_cached(inputs, backend=backend, num_splits=num_splits))


def replayed(call, before: int = 0):
    """A graph of the call and its results; `before` other calls are in it first."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(before):
            call()
        found = call()
    return graph, found


@each_backend
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_call_is_right_for_other_lengths(page_size, rows, backend):
    """Captured at length 1; replayed at the capacity, with other tables and a smaller batch."""
    case = CacheCase("graph", (1000, 1, 700, 0), rows, page_size=page_size, capacity=1000)
    inputs = make_cache_inputs(case, "cuda", torch.float16)
    given = inputs.arguments
    seqlens = given["cache_seqlens"].clone()
    given["cache_seqlens"] = torch.ones_like(seqlens)
    graph, (out, lse) = replayed(lambda: call_cached(inputs, backend=backend), before=2)
    given["cache_seqlens"].copy_(seqlens)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        check_cached(case, inputs, out, lse, "replayed")
    if page_size:
        order = torch.randperm(given["k_cache"].shape[0], device="cuda")
        for name in ("k_cache", "v_cache"):
            given[name].copy_(given[name][order.argsort()])
        table = given["page_table"]
        table.copy_(torch.where(table >= 0, order[table.clamp(min=0)].int(), table))
        graph.replay()
        check_cached(case, inputs, out, lse, "replayed with another table")
    given["cache_seqlens"][2:] = 0
    graph.replay()
    assert not out[2:].any() and (lse[2:] == -math.inf).all()


@needs_hopper
def test_a_captured_ragged_chunk_is_right_for_other_edges():
    """A mixed batch of a server: the replay has other queries in each sequence."""
    inputs = make_cache_inputs(RAGGED, "cuda", torch.float16)
    given = inputs.arguments
    given["max_seqlen_q"] = 765  # of all later steps
    edges, seqlens = given["cu_seqlens_q"].clone(), given["cache_seqlens"].clone()
    given["cu_seqlens_q"] = torch.tensor([0, 3, 4, 5], dtype=torch.int32, device="cuda")
    given["cache_seqlens"] = torch.ones_like(seqlens)
    graph, (out, lse) = replayed(lambda: call_cached(inputs, backend="hopper"), before=1)
    for _ in range(3):
        given["cu_seqlens_q"].copy_(edges)
        given["cache_seqlens"].copy_(seqlens)
        out.fill_(math.nan)
        graph.replay()
        check_cached(RAGGED, inputs, out, lse, "replayed")
        given["cu_seqlens_q"].copy_(torch.tensor([0, 0, 9, 9], device="cuda"))
        given["cache_seqlens"].copy_(torch.tensor([5, 9, 0], device="cuda"))
        graph.replay()
        assert not out[9:].any() and (lse[:, 9:] == -math.inf).all()
        assert out[:9].isfinite().all() and out[:9].any()


# Single tokens beside a chunk: Hopper runs a decode and a forward kernel in two streams.
MIXED = [
    CacheCase(name, (1000, 3, 900, 700), (1, 1, queries, 1), page_size=16, options=CAUSAL)
    for name, queries in (("first", 300), ("second", 400))
]
GROUPS = {
    "few-queries": [
        CacheCase("first", (1000, 3)),
        CacheCase("second", (900, 700), 2, page_size=16),
    ],
    "mixed": MIXED,
    "chunks": [PAGED, RAGGED, CacheCase("dense", (900, 700), 300, options=CAUSAL)],
}


@pytest.mark.parametrize("one_stream", [False, True])
@each_backend
@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_captured_calls_run_side_by_side(cases, backend, one_stream):
    """Each graph has its own workspace and counters: replayed on two streams at once they do not
    disturb, although they were captured on one."""
    streams, graphs, kept = [torch.cuda.Stream() for _ in cases], [], []
    for case, stream in zip(cases, streams, strict=True):
        inputs = make_cache_inputs(case, "cuda", torch.float16)
        call_cached(inputs, backend=backend)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=streams[0] if one_stream else stream):
            kept.append((case, inputs, call_cached(inputs, backend=backend)))
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for case, inputs, found in kept:
        check_cached(case, inputs, *found, "side by side")


@needs_hopper
@every_case
@pytest.mark.parametrize("before", ["kernel", "copy", "memset"])
def test_capture_after_any_kind_of_node(case, before):
    """A kernel may start early behind a kernel; a graph may have other nodes there."""
    inputs = make_cache_inputs(case, "cuda", torch.float16)
    call_cached(inputs, backend="hopper")
    q = inputs.arguments["q"]
    source = q.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            if before == "kernel":
                torch.mul(source, 1.0, out=q)
            elif before == "copy":
                q.copy_(source)
            else:
                torch.empty(1 << 20, device="cuda", dtype=torch.uint8).zero_()
            found = call_cached(inputs, backend="hopper")
    if before != "memset":
        q.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    check_cached(case, inputs, *found, before)


@needs_hopper
def test_few_and_many_rows_in_turn_on_several_streams():
    """Every stream has counters of its own, which decode and forward kernels share."""
    many = make_cache_inputs(PAGED, "cuda", torch.float16)
    few = make_cache_inputs(CacheCase("few", (3000, 40), page_size=16), "cuda", torch.float16)
    assert kernel_of(few, backend="hopper").startswith("decode")
    ragged = make_cache_inputs(RAGGED, "cuda", torch.float16)
    wanted = [call_cached(inputs, backend="hopper") for inputs in (many, few, ragged)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append([call_cached(x, backend="hopper") for x in (many, few, ragged)])
    torch.cuda.synchronize()
    for results in found:
        for got, right in zip(results, wanted, strict=True):
            assert all(map(torch.equal, got, right))


@needs_hopper
@pytest.mark.parametrize(("scale", "keys"), [(1, 100), (100, 700)])
def test_rows_of_no_sequence_and_an_early_end(scale, keys):
    """Rows before, between and after the sequences, and those past max_seqlen_q, are cleared."""
    k, v = (torch.randn(2, keys, 2, 64, device="cuda").half() for _ in range(2))
    q = torch.randn(12 * scale, 4, 64, device="cuda").half()
    edges = scale * torch.tensor([2, 5, 9], dtype=torch.int32, device="cuda")
    given = {"max_seqlen_q": 3 * scale, "return_lse": True, "backend": "hopper"}
    out, lse = flash_attn_with_kvcache(q, k, v, cu_seqlens_q=edges, **given)
    unowned = [*range(2 * scale), *range(8 * scale, 12 * scale)]
    assert not out[unowned].any() and (lse[:, unowned] == -math.inf).all()
    for index, begin in enumerate((2 * scale, 5 * scale)):
        rows = slice(begin, begin + 3 * scale)
        alone = flash_attn_with_kvcache(
            q[None, rows], k[index, None], v[index, None], return_lse=True, backend="hopper"
        )
        torch.testing.assert_close(out[rows], alone[0][0], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[:, rows], alone[1][0], atol=2e-3, rtol=2e-3)
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    out, lse = flash_attn_with_kvcache(q, k[:0], v[:0], cu_seqlens_q=none, **given)
    assert not out.any() and (lse == -math.inf).all()


@each_backend
@pytest.mark.parametrize("rows", [1, 300])
def test_a_cache_of_more_than_two_to_the_31_elements(rows, backend):
    pages, size, heads, dim = 2**31 // (16 * 8 * 64) + 30, 16, 8, 64
    cache = torch.zeros(pages, size, heads, dim, device="cuda", dtype=torch.float16)
    cache[-20:] = torch.randn_like(cache[-20:])
    q = torch.randn(1, rows, 8, dim, device="cuda", dtype=torch.float16)
    table = torch.arange(pages - 20, pages, dtype=torch.int32, device="cuda")[None]
    found = flash_attn_with_kvcache(q, cache, cache, page_table=table, backend=backend)
    own = cache[-20:].clone()
    table = table - table[0, 0]
    assert torch.equal(
        found, flash_attn_with_kvcache(q, own, own, page_table=table, backend=backend)
    )
