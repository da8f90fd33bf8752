"""Rotary embedding and attention: in 8 bits by rotate_and_quantize, and in 16 bits after a pass of
its own over q and k; forward alone, and with the backward, as a training step runs them."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

import flashattn3
from flashattn3.call.operands import Tensors
from flashattn3.quantization.embedding import Embedding, embedded
from flashattn3.quantization.embedding_dispatch import rotated

from . import gate
from .checking import attention, gradients
from .inputs import Call, Inputs, make_inputs
from .providers import IN_8_BITS, OURS
from .runner import Record, Settings, run_providers
from .suites import Cell
from .timing import make_clock

SUITE = "rotary"
PROVIDERS = (OURS, IN_8_BITS)
Sides = tuple[Tensor, Tensor, Tensor]


@cache
def tables(seqlen: int, rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (seqlen, rotary_dim / 2), float32, of RoFormer's frequencies."""
    steps = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64) / rotary_dim
    places = torch.arange(seqlen, device=device, dtype=torch.float64)
    angles = torch.outer(places, 10000**-steps)
    return angles.cos().float(), angles.sin().float()


class Rotary(torch.autograd.Function):
    """The rotation of q or k in 16 bits, one launch on a GPU, and as many back."""

    @staticmethod
    def forward(ctx, x: Tensor, embedding: Embedding) -> Tensor:
        ctx.embedding = embedding
        return rotated(x, None, embedding)[0]

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        return rotated(dx, None, ctx.embedding, back=True)[0], None


def run_rotary(cell: Cell, settings: Settings) -> list[Record]:
    """A record for each of PROVIDERS."""
    inputs = make_inputs(cell.case, settings.device, settings.dtype)
    cos_sin = tables(cell.case.seqlen_k, cell.case.head_dim, settings.device)
    embedding = Embedding(None, None, *cos_sin, None, False, 0.0)

    def checked(name: str) -> tuple[Call, Record]:
        attend = partial(ATTENTION[name], embedding, cell.case.causal)
        call = _work(cell, attend, inputs)
        check_results(cell, name, inputs, embedding, call())
        if cell.direction == "fwd":
            return call, {}
        return call, {"saved_bytes": _saved_bytes(attend, inputs, cos_sin)}

    clock = make_clock(settings.device, inputs.num_bytes)
    return run_providers(cell, PROVIDERS, checked, settings, clock)


def _in_16_bits(embedding: Embedding, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (Rotary.apply(x, embedding) for x in (q, k))
    return flashattn3.flash_attn_func(q, k, v, causal=causal)


def _in_8_bits(embedding: Embedding, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scaled = flashattn3.rotate_and_quantize(q, k, v, embedding.cos, embedding.sin)
    return flashattn3.flash_attn_func(*scaled, causal=causal, out_dtype=q.dtype)


ATTENTION = {OURS: _in_16_bits, IN_8_BITS: _in_8_bits}


def _work(cell: Cell, attend, inputs: Inputs) -> Call:
    """The work to time: the forward, or both passes. It returns out, or dq, dk and dv."""
    q, k, v, dout = inputs
    if cell.direction == "fwd":
        return lambda: (attend(q, k, v),)
    leaves = inputs.leaves
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def _saved_bytes(attend, inputs: Inputs, shared: tuple[Tensor, ...]) -> int:
    """Bytes that autograd keeps between the passes, of each storage once. shared: by all layers of
    a model, not counted."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(*inputs.leaves)
    for x in shared:
        storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def check_results(
    cell: Cell, name: str, inputs: Inputs, embedding: Embedding, results: tuple[Tensor, ...]
) -> None:
    """AssertionError if a result of the last sequence and head breaks its rule. Gradients of 8 bits
    are held to those at the quantized values."""
    last, case = slice(-1, None), cell.case
    q, k, v, dout = (x[last, :, last] for x in inputs)
    options = case.reference_options()
    turned = [embedded(x, None, embedding, None, torch.float64) for x in (q, k)]
    if cell.direction == "fwd":
        with torch.no_grad():
            exact = attention(Tensors(*turned, v.double()), **options)[0]
            narrow = Tensors(*(x.to(q.dtype) for x in turned), v)
            low = attention(narrow, **options, dtype=q.dtype)[0]
        gate.check_results(cell, name, [results[0][last, :, last]], [exact], [low])
        return
    values = [*turned, v.double()]
    if name == IN_8_BITS:
        scaled = flashattn3.rotate_and_quantize(*inputs[:3], embedding.cos, embedding.sin)
        values = [x.dequantize()[last, :, last].double() for x in scaled]
    back = embedding._replace(sin=-embedding.sin)
    expected = []
    for dtype in (torch.float64, q.dtype):
        given = Tensors(*(x.to(dtype) for x in values))
        dq, dk, dv = gradients(given, dout, **options, dtype=dtype)[:3]
        wide = torch.promote_types(dtype, torch.float32)
        dq, dk = (embedded(x, None, back, None, wide).to(dtype) for x in (dq, dk))
        expected.append((dq, dk, dv))
    gate.check_results(cell, name, [x[last, :, last] for x in results], *expected)
