"""Times the append kernel on a GPU, after a comparison with the reference backend.

python benchmarks/append_time.py [backend ...]: "hopper", "auto" and "triton" if none is
named. Each GPU time is the median of replays of a CUDA graph of calls on different caches.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from flashattn3 import append_kvcache, flash_attn_with_kvcache

COPIES, HEADS, DIM = 20, 8, 128


def gpu_us(calls) -> float:
    """Microseconds of one of the calls, which a graph runs one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(samples)


def host_us(call) -> float:
    samples = []
    for _ in range(300):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)


def random(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def rotary(interleaved: bool):
    angles = torch.rand(65536, DIM // 2, device="cuda") * 6
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return {**tables, "rotary_interleaved": interleaved}


def check(backend: str | None, k, v, caches, named) -> None:
    found, right = ([cache.clone() for cache in caches] for _ in range(2))
    append_kvcache(k, v, *found, **named, backend=backend)
    append_kvcache(k, v, *right, **named, backend="reference")
    for got, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-2)


def time_decode(backend: str | None, interleaved: bool) -> None:
    """64 sequences of 256 to 319 cached tokens in pages of 16, a new token each."""
    pages = 64 * 24
    q, k, v = (random(64, 1, heads, DIM) for heads in (32, HEADS, HEADS))
    caches = [(random(pages, 16, HEADS, DIM), random(pages, 16, HEADS, DIM)) for _ in range(COPIES)]
    named = {
        "page_table": torch.randperm(pages, device="cuda").int().view(64, 24),
        "cache_seqlens": torch.arange(256, 320, device="cuda", dtype=torch.int32),
    }
    tables = rotary(interleaved)
    check(backend, k, v, caches[0], {**named, **tables})
    attend = [
        lambda c=c: flash_attn_with_kvcache(q, *c, **named, causal=True, backend=backend)
        for c in caches
    ]
    both = [
        lambda c=c: flash_attn_with_kvcache(
            q, *c, k, v, **named, **tables, causal=True, backend=backend
        )
        for c in caches
    ]
    times = gpu_us(attend), gpu_us(both)
    hosts = host_us(attend[0]), host_us(both[0])
    print(
        f"{backend}, 64 tokens: attention {times[0]:.2f} us, with append {times[1]:.2f}, ", end=""
    )
    print(f"the append adds {times[1] - times[0]:.2f}; host {hosts[0]:.1f}, {hosts[1]:.1f} us")


def time_prompt(backend: str | None, interleaved: bool) -> None:
    """8192 new tokens of one sequence, against copies of as many bytes."""
    tables, copies = rotary(interleaved), 6
    new = [(random(1, 8192, HEADS, DIM), random(1, 8192, HEADS, DIM)) for _ in range(copies)]
    caches = [(random(512, 16, HEADS, DIM), random(512, 16, HEADS, DIM)) for _ in range(copies)]
    named = {
        "page_table": torch.randperm(512, device="cuda").int().view(1, 512),
        "cache_seqlens": torch.zeros(1, device="cuda", dtype=torch.int32),
        **tables,
    }
    check(backend, *new[0], caches[0], named)
    appends = [
        lambda i=i: append_kvcache(*new[i], *caches[i], **named, backend=backend)
        for i in range(copies)
    ]
    flat = [(torch.stack(x), torch.empty(2, 1, 8192, HEADS, DIM).bfloat16().cuda()) for x in new]
    moves = [lambda x=x: x[1].copy_(x[0]) for x in flat]
    ours, copy = gpu_us(appends), gpu_us(moves)
    size = 2 * flat[0][0].numel() * 2
    print(f"{backend}, 8192 tokens: {ours:.2f} us, {size / ours / 1e6:.2f} TB/s; ", end="")
    print(f"a device copy {copy:.2f} us, {size / copy / 1e6:.2f} TB/s: {copy / ours:.2f} of it")


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in sys.argv[1:] or ("hopper", "auto", "triton"):
        backend = None if name == "auto" else name
        for interleaved in (True, False):
            print("interleaved" if interleaved else "halves")
            time_decode(backend, interleaved)
            time_prompt(backend, interleaved)


if __name__ == "__main__":
    main()
