"""On a Hopper GPU: gradients of sequences of unequal lengths cost their tokens, not the longest."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from helpers import needs_hopper

from flashattn3 import flash_attn_func, flash_attn_varlen_func

pytestmark = [pytest.mark.gpu, needs_hopper]


def ragged_step(lengths, head_dim, heads=4, longest=None):
    """Sequences of these lengths, to themselves: a function that makes their gradients."""
    tensors = [
        torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    dout, *leaves = tensors
    leaves = [leaf.requires_grad_() for leaf in leaves]
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    longest = max(lengths) if longest is None else longest
    out = flash_attn_varlen_func(*leaves, edges, edges, longest, longest, backend="hopper")
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def milliseconds(step) -> float:
    """The median of five times on the GPU, each after one that warms up."""
    times = []
    for _ in range(5):
        step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[2]


@pytest.mark.parametrize("longest", ["known", "on the GPU"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_gradient_of_unequal_lengths_costs_what_its_sequences_cost(head_dim, longest):
    """One of 16k tokens among 1023 of 64: at most 1.15 times both by themselves."""
    long, short = (16384,), (64,) * 1023
    on_gpu = torch.tensor(16384, device="cuda") if longest == "on the GPU" else None
    parts = sum(milliseconds(ragged_step(lengths, head_dim)) for lengths in (long, short))
    together = milliseconds(ragged_step(long + short, head_dim, longest=on_gpu))
    assert together <= 1.15 * parts, f"{together:.3f} ms, its parts {parts:.3f} ms"


def test_many_sequences_are_no_error_where_the_longest_is_on_the_gpu():
    """Its bound is all tokens: sequences times tiles of the longest would be above 2**30."""
    batch, length = 2**15, 256
    dense = [torch.randn(batch, length, 1, 8, device="cuda", dtype=torch.half) for _ in range(4)]
    edges = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device="cuda")
    longest = torch.tensor(length, device="cuda")

    def results(attend, tensors):
        dout, *leaves = tensors
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = attend(leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    wanted = results(lambda qkv: flash_attn_func(*qkv, backend="hopper"), dense)
    found = results(
        lambda qkv: flash_attn_varlen_func(*qkv, edges, edges, longest, longest, backend="hopper"),
        [x.flatten(0, 1) for x in dense],
    )
    for varlen, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(varlen, exact.flatten(0, 1), rtol=2e-3, atol=2e-3)
