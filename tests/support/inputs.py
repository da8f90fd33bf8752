"""Inputs whose surroundings are NaN: whatever a kernel reads beyond them shows in its result."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from flashattn3.call.dtypes import EIGHT_BIT, INT8, v_dtype
from flashattn3.call.operands import Tensors
from flashattn3_bench.checking.cases import Case
from flashattn3_bench.checking.inputs import values

# Elements of NaN on each side of a contiguous tensor; a multiple of 16 bytes in every dtype, so
# that what lies behind them is as well aligned as a fresh tensor.
_GUARD = 128
_HUGE = 2.0**110  # with room for the sums of a gradient
_FAR = 40.0  # of a sink from normal scores: exp(40) times the sum of a row
INT8_STEPS = 32  # to one: int8 ends at four standard deviations
# In each byte of 8 bits: a NaN of e4m3, and int8's largest number, as int8 has no NaN.
_ODD_BYTE = 0x7F


def make_inputs(
    case: Case,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    requires_grad: bool = False,
) -> Tensors:
    """q, k, v and the lengths of a case.

    q, k and v are views, in the case's layout, into larger storage full of NaN. Rows of
    no sequence are NaN as well. The values depend on the case and the seed alone: they are drawn on
    the CPU in float64 and rounded. With requires_grad, q, k and v are leaves. In int8, q and k hold
    INT8_STEPS to one, and v is e4m3.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = values(case, generator)
    if case.distribution == "huge" and v.numel():
        v = v * (min(_HUGE, torch.finfo(v_dtype(dtype)).max) / v.abs().max())
    if case.varlen:
        _erase_outside(q, case.seqlens_q, case.seqused_q)
        _erase_outside(k, case.seqlens_k, case.seqused_k)
        _erase_outside(v, case.seqlens_k, case.seqused_k)
    dtypes = (dtype, dtype, v_dtype(dtype))
    q, k, v = (_stored(x, of).to(device) for x, of in zip((q, k, v), dtypes, strict=True))
    if case.layout == "packed":
        heads = [x.shape[-2] for x in (q, k, v)]
        q, k, v = _place(torch.cat([q, k, v], dim=-2), "bshd").split(heads, dim=-2)
    else:
        q, k, v = (_place(x, case.layout) for x in (q, k, v))
    if dtype in EIGHT_BIT:
        q, k, v = (x.view(of) for x, of in zip((q, k, v), dtypes, strict=True))
    if requires_grad:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    lengths = map(_offsets, (case.seqlens_q, case.seqlens_k))
    lengths = (*lengths, case.seqused_q, case.seqused_k)
    scores = [
        None if x is None else x.to(device).requires_grad_(requires_grad and name != "alibi_slopes")
        for name, x in _of_scores(case, dtype, generator).items()
    ]
    return Tensors(q, k, v, *(_int32(x, device) for x in lengths), *scores)


def _of_scores(
    case: Case, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor | None]:
    """Sinks, slopes and the bias of a case, surrounded by NaN."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given: dict[str, Tensor | None] = dict.fromkeys(("sinks", "alibi_slopes", "bias"))
    own = torch.bfloat16 if dtype in EIGHT_BIT else dtype
    heads, batch = case.num_heads_q, case.batch
    if case.sinks:
        sinks = normal(heads)
        if case.sinks == "mixed":
            sinks[0::4], sinks[1::4], sinks[2::4] = _FAR, -_FAR, -math.inf
        given["sinks"] = sinks.to(own if case.sinks == "own" else torch.float32)
    if case.slopes:
        slopes = normal(*((batch, heads) if case.slopes == "batch" else (heads,))).abs()
        given["alibi_slopes"] = slopes.float()
    if case.bias:
        of = {"full": (batch, heads), "rows": (1, heads), "heads": (batch, 1), "shared": (1, 1)}
        given["bias"] = normal(*of[case.bias], case.seqlen_q, case.seqlen_k).to(own)
    return {name: x if x is None else _guarded(x) for name, x in given.items()}


def _guarded(values: Tensor) -> Tensor:
    """A contiguous copy, surrounded by NaN."""
    size = values.numel()
    home = _nan(values, size + 2 * _GUARD)[_GUARD : _GUARD + size]
    return home.view(values.shape).copy_(values)


def make_output_gradients(case: Case, tensors: Tensors, seed: int = 1) -> tuple[Tensor, Tensor]:
    """dout in q's dtype and dlse in lse's: standard normal, NaN at rows of no sequence."""
    q, v = tensors.q, tensors.v
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator, dtype=torch.float64)
    dlse = torch.randn(q.shape[:-1], generator=generator, dtype=torch.float64)
    if case.varlen:
        _erase_outside(dout, case.seqlens_q, case.seqused_q)
        _erase_outside(dlse, case.seqlens_q, case.seqused_q)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return dout.to(q.device, q.dtype), dlse.transpose(-1, -2).contiguous().to(q.device, lse_dtype)


def _erase_outside(x: Tensor, seqlens: tuple[int, ...], seqused: tuple[int, ...] | None) -> None:
    """Make the rows of x (total, ...) that belong to no sequence NaN, in place."""
    outside = torch.ones(x.shape[0], dtype=torch.bool)
    for begin, length in zip(_offsets(seqlens), seqused or seqlens, strict=False):
        outside[begin : begin + length] = False
    x[outside] = math.nan


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype, 8 bits as bytes: they lie in one storage where the layout is packed."""
    if dtype == INT8:
        x = (x * INT8_STEPS).nan_to_num(_ODD_BYTE).round().clamp(-127, 127)
    x = x.to(dtype)
    return x.view(torch.uint8) if dtype in EIGHT_BIT else x


def _place(values: Tensor, layout: str) -> Tensor:
    """A copy of values (..., rows, heads, dim) with other strides, surrounded by NaN."""
    *lead, rows, heads, dim = values.shape
    match layout:
        case "bshd" | "unaligned":  # contiguous; the second begins one element past any alignment
            begin = _GUARD + (layout == "unaligned")
            home = _nan(values, begin + values.numel() + _GUARD)
            home = home[begin : begin + values.numel()].view(values.shape)
        case "bhsd":  # heads before rows, a row of NaN on both ends of each head
            home = _nan(values, *lead, heads, rows + 2, dim)[..., 1:-1, :].transpose(-3, -2)
        case "padded":  # 8 elements of NaN after each row, a row of NaN on both ends
            home = _nan(values, *lead, rows + 2, heads * dim + 8)[..., 1:-1, : heads * dim]
            home = home.unflatten(-1, (heads, dim))
        case other:
            raise ValueError(f"make_inputs: case.layout must be a known one, got {other!r}")
    return home.copy_(values)


def _nan(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, _ODD_BYTE if like.dtype == torch.uint8 else math.nan)


def _offsets(seqlens: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if seqlens is None else tuple(itertools.accumulate(seqlens, initial=0))


def _int32(values: tuple[int, ...] | None, device: torch.device | str) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)
