"""Captured calls on a Hopper GPU: kernels start early in a CUDA graph too, and a capture has
counters of its own. Lengths that change while a call reads them."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from helpers import needs_hopper

from flashattn3 import flash_attn_fp8_func, flash_attn_func, flash_attn_with_kvcache

pytestmark = [pytest.mark.gpu, needs_hopper]


def inputs(d: int) -> list[torch.Tensor]:
    """q, k, v and dout of tiles that differ in length."""
    generator = torch.Generator("cuda").manual_seed(d)
    of = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(2, 1500, 4, d, **of) for _ in range(4)]


def forward(q, k, v, dout):
    return (flash_attn_func(q, k, v, causal=True, backend="hopper"),)


def gradients(q, k, v, dout):
    # New leaves: autograd ties a leaf to the stream on which it is first used.
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True, deterministic=True, backend="hopper")
    return (out, *torch.autograd.grad(out, leaves, dout))


def fp8(q, k, v, dout):
    return (flash_attn_fp8_func(q, k, v, causal=True, backend="hopper"),)


def on_a_new_stream(call):
    """Run once before a capture, as kernels are prepared then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()


def captured(call, tensors, repeats=1):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            found = call(*tensors)
    return graph, found[0]


@pytest.mark.parametrize("before", ["kernel", "copy", "memset", "attention"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("call", [forward, gradients, fp8], ids=lambda call: call.__name__)
def test_capture_after_any_kind_of_node(call, d, before):
    """A kernel that starts early reads what the node before it writes."""
    tensors = inputs(d)
    wanted = call(*tensors)
    source = [x.clone() for x in tensors]
    on_a_new_stream(lambda: call(*tensors))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            for x, values in zip(tensors, source, strict=True):
                if before == "kernel":
                    torch.mul(values, 1.0, out=x)
                elif before == "copy":
                    x.copy_(values)
            if before == "memset":
                torch.empty(1 << 20, device="cuda", dtype=torch.uint8).zero_()
            elif before == "attention":
                torch.mul(source[0], 1.0, out=tensors[0])
                flash_attn_func(*tensors[:3], causal=True, backend="hopper")
            found = call(*tensors)
    changed = {"memset": 0, "attention": 1}.get(before, 4)
    for _ in range(3):
        for x in tensors[:changed]:
            x.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, found, wanted))


def cached(q, k, v, dout):
    return (flash_attn_with_kvcache(q[:1, :1], k[:1], v[:1], backend="hopper"),)


@pytest.mark.parametrize("call", [forward, cached], ids=lambda call: call.__name__)
def test_a_replay_runs_the_kernel_alone(call):
    """Counters are zero after each launch, so a replay does not clear them."""
    tensors = inputs(128)
    on_a_new_stream(lambda: call(*tensors))
    graph, found = captured(call, tensors)
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_gpu) == 2 and "flashattn3" in on_gpu[0], on_gpu
    assert torch.equal(found, call(*tensors)[0])


@pytest.mark.parametrize("call", [forward, gradients, cached], ids=lambda call: call.__name__)
def test_two_streams_of_one_capture(call):
    """Both branches run at the same time, with counters and parts of their own."""
    tensors = [inputs(128), inputs(64)]
    wanted = [call(*given) for given in tensors]
    for given in tensors:
        on_a_new_stream(lambda given=given: call(*given))
    graph, branch = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            first = [call(*tensors[0]) for _ in range(3)]
        second = [call(*tensors[1]) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(branch)
    for _ in range(5):
        graph.replay()
    for results, of in ((first, wanted[0]), (second, wanted[1])):
        assert all(all(map(torch.equal, found, of)) for found in results)


def test_each_call_of_a_long_graph_reads_the_one_before():
    """Attention of attention: a kernel that started too early would read old rows."""
    q, k, v, _ = inputs(128)

    def chain(x):
        for _ in range(16):
            x = flash_attn_func(x, k, v, causal=True, backend="hopper")
        return (x,)

    (wanted,) = chain(q)
    on_a_new_stream(lambda: chain(q))
    graph, found = captured(chain, [q])
    for _ in range(5):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_graphs_that_are_no_more_give_their_counters_back(tmp_path):
    """The library allocates counters for 64 captures at a time, and clears them by a memset."""
    tensors = inputs(128)
    wanted = cached(*tensors)[0]
    on_a_new_stream(lambda: cached(*tensors))

    def allocations(captures) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            captures()
            torch.cuda.synchronize()
        path = tmp_path / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        return sum(e.get("cat") == "gpu_memset" and e["args"]["bytes"] > 1e5 for e in events)

    def one_after_another():
        for _ in range(300):
            graph, found = captured(cached, tensors)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, wanted)
            del graph, found

    # More than keep their counters and than earlier tests can have given back.
    alive = []
    assert allocations(lambda: alive.extend(captured(cached, tensors) for _ in range(400))) > 0
    alive.clear()
    # Four or more without those of graphs that are destroyed, which CUDA gives back a little later.
    assert allocations(one_after_another) <= 1


def test_lengths_that_change_spoil_their_own_call_alone():
    """Neither what is left of a call nor a hang meets the next one."""
    for batch, heads_kv, keys, tokens in ((4, 8, 4096, 1), (6, 2, 2048, 1), (40, 8, 1024, 1)):
        q, k, v, _ = (
            torch.randn(batch, n, h, 128, device="cuda", dtype=torch.bfloat16)
            for n, h in ((tokens, 4 * heads_kv), (keys, heads_kv), (keys, heads_kv), (1, 1))
        )
        lengths = torch.randint(1, keys + 1, (64, batch), device="cuda", dtype=torch.int32)
        changing, fixed = lengths[0].clone(), lengths[1].clone()
        call = partial(flash_attn_with_kvcache, q, k, v, backend="hopper")
        wanted, writer = call(cache_seqlens=fixed), torch.cuda.Stream()
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(writer):
                for new in lengths:
                    changing.copy_(new)
            for _ in range(20):
                call(cache_seqlens=changing)
            found = call(cache_seqlens=fixed)
            torch.cuda.synchronize()
            assert torch.equal(found, wanted)


def test_a_graph_that_is_destroyed_while_it_runs_keeps_its_memory():
    """A capture that followed would write where the old one still reads."""
    first, second = inputs(128), inputs(64)
    wanted = cached(*first)[0], cached(*second)[0]
    for tensors in (first, second):
        on_a_new_stream(lambda tensors=tensors: cached(*tensors))
    for _ in range(10):
        graph, found = captured(cached, first, repeats=400)
        graph.replay()
        graph.reset()
        other, found_other = captured(cached, second, repeats=100)
        with torch.cuda.stream(torch.cuda.Stream()):
            other.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted[0])
        assert torch.equal(found_other, wanted[1])
