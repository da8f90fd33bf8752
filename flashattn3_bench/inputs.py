"""Random inputs of a cell, and the calls that are checked and timed on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flashattn3.call.block_scaled import BlockScaled
from flashattn3.quantization import quantize_block_fp8

from .checking import Case
from .providers import Attention
from .suites import Cell

Call = Callable[[], tuple[Tensor, ...]]
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


class Inputs(NamedTuple):
    """q and dout (batch, seqlen_q, heads, ·), k and v (batch, seqlen_k, heads, ·): normal."""

    q: Tensor | BlockScaled
    k: Tensor | BlockScaled
    v: Tensor | BlockScaled
    dout: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self)

    @property
    def leaves(self) -> list[Tensor]:
        """q, k and v as tensors that get a gradient, new ones in every access."""
        return [x.detach().requires_grad_() for x in self[:3]]


def normal_numbers(
    device: torch.device, dtype: torch.dtype | None = None, seed: int = 0
) -> Callable[..., Tensor]:
    """A function of sizes that draws normal tensors, one after the other from one generator."""
    generator = torch.Generator(device).manual_seed(seed)
    return partial(torch.randn, generator=generator, device=device, dtype=dtype)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Drawn on the device: the tests' NaN-guarded inputs come from the CPU, seconds a cell."""
    draw = normal_numbers(device, dtype, seed)

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        if case.layout == "bhsd":
            return draw(case.batch, heads, seqlen, dim).transpose(1, 2)
        return draw(case.batch, seqlen, heads, dim)

    return Inputs(
        normal(case.seqlen_q, case.num_heads_q, case.head_dim),
        normal(case.seqlen_k, case.num_heads_kv, case.head_dim),
        normal(case.seqlen_k, case.num_heads_kv, case.head_dim_v),
        normal(case.seqlen_q, case.num_heads_q, case.head_dim_v),
    )


def quantized(inputs: Inputs, qk_dtype: torch.dtype) -> Inputs:
    """q, k and v as flash_attn_fp8_func makes them: blocks of 128 tokens, q and k rotated."""
    return inputs._replace(
        q=quantize_block_fp8(inputs.q, hadamard=True, kind="q", dtype=qk_dtype),
        k=quantize_block_fp8(inputs.k, hadamard=True, kind="k", dtype=qk_dtype),
        v=quantize_block_fp8(inputs.v, kind="v"),
    )


def with_all_heads(inputs: Inputs) -> Inputs:
    """k and v with a head of their own, the group's, for each query head."""
    qhead_per_kvhead = inputs.q.shape[2] // inputs.k.shape[2]
    k, v = (x.repeat_interleave(qhead_per_kvhead, dim=2) for x in (inputs.k, inputs.v))
    return inputs._replace(k=k, v=v)


def prepare(attention: Attention, cell: Cell, inputs: Inputs) -> Call:
    """The work to time. Its results are named by RESULTS[cell.direction].

    fwd: a forward pass without gradients. bwd: the backward pass alone; its forward runs here.
    """
    q, k, v, dout = inputs
    causal = cell.case.causal
    if cell.direction == "fwd":
        return lambda: (attention(q, k, v, causal),)
    leaves = inputs.leaves
    out = attention(*leaves, causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
