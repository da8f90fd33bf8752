"""8-bit inputs of a case in every form that the interface takes, and the values they stand for."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import Tensor

from flashattn3.call.block_scaled import BlockScaled
from flashattn3.call.descales import num_blocks
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.call.operands import Tensors
from flashattn3.quantization import quantize_block_fp8
from flashattn3_bench.checking.cases import Case

from .inputs import INT8_STEPS, make_inputs

# "raw" without descales, "head" with FlashAttention-3's (batch, num_heads_kv), "block" with one for
# each block, "scaled" BlockScaled, "rotated" BlockScaled with q and k rotated; "int8 ...": of q and
# k, else e4m3.
FORMS = ("raw", "head", "block", "scaled", "rotated", "int8 block", "int8 rotated")
BLOCKS = {"q": 64, "k": 128, "v": 64}


# The tensors of a call as its caller passes them, descales beside the others.
DESCALES = ("q_descale", "k_descale", "v_descale")
Given = namedtuple("Given", (*Tensors._fields, *DESCALES), defaults=(None,) * len(Tensors._fields))


def make_fp8_inputs(
    case: Case, device: torch.device | str, form: str, seed: int = 0
) -> tuple[Given, Tensors]:
    """Arguments of a call, and the same problem in float64, of which nothing is quantized further.

    Raw data lies among NaN, as from ``make_inputs``. Where q and k are rotated the second has them
    rotated too: the scores are the same.
    """
    dtype = INT8 if form.startswith("int8 ") else FP8
    form = form.removeprefix("int8 ")
    if form in ("scaled", "rotated"):
        given = make_inputs(case, device, torch.float32, seed)
        options = {"hadamard": form == "rotated", "dtype": dtype}
        scaled = {
            side: _quantized(case, given, side, **({} if side == "v" else options))
            for side in "qkv"
        }
        return Given(*given._replace(**scaled)), given._replace(
            **{side: _values(x.in_rows()) for side, x in scaled.items()}
        )
    given = make_inputs(case, device, dtype, seed)
    descales, values = {}, {}
    for side in "qkv":
        x = getattr(given, side)
        descale, block = _descale(case, side, form, seed)
        values[side] = x.double()
        if descale is not None:
            descale = descale.to(device)
            if x.dtype == INT8:
                descale /= INT8_STEPS
            descales[f"{side}_descale"] = descale.squeeze(-1) if form == "head" else descale
            descale = descale.repeat_interleave(x.shape[-2] // descale.shape[1], dim=1)
            edges = given.cu_seqlens_q if side == "q" else given.cu_seqlens_k
            values[side] = _values(BlockScaled(x, descale, block, cu_seqlens=edges))
    return Given(*given, **descales), given._replace(**values)


def _quantized(case: Case, given: Tensors, side: str, **options: object) -> BlockScaled:
    x, varlen = getattr(given, side), {}
    if options.get("dtype") == INT8:  # rows that do not count would make their blocks NaN
        x = x.nan_to_num()
    if case.varlen:
        edges = given.cu_seqlens_q if side == "q" else given.cu_seqlens_k
        longest = case.seqlen_q if side == "q" else case.seqlen_k
        varlen = {"cu_seqlens": edges, "max_seqlen": longest}
    return quantize_block_fp8(x, block=BLOCKS[side], kind=side, **options, **varlen)


def _descale(case: Case, side: str, form: str, seed: int) -> tuple[Tensor | None, int]:
    """(batch, heads, blocks), factors around 1 a few times larger or smaller, and the block."""
    if form == "raw":
        return None, 0
    seqlen = case.seqlen_q if side == "q" else case.seqlen_k
    block = BLOCKS[side] if form == "block" else max(1, seqlen)
    heads = case.num_heads_q if side == "q" and form == "block" else case.num_heads_kv
    generator = torch.Generator().manual_seed(seed + ord(side))
    shape = case.batch, heads, num_blocks(seqlen, block)
    return torch.randn(shape, generator=generator).mul(0.7).exp(), block


def _values(x: BlockScaled) -> Tensor:
    """In float64, where the product is exact; q and k as they are rotated."""
    return x.data.double() * x.token_descale()[..., None].double()


def scales_of_v(tensors: Given) -> Tensor:
    """What V's stored numbers are multiplied with: float64 (..., seqlen_k, num_heads_kv, 1)."""
    v, descale = tensors.v, tensors.v_descale
    if not isinstance(v, BlockScaled):
        if descale is None:
            return torch.ones_like(v[..., :1], dtype=torch.float64)
        one = descale.ndim == 2
        block = max(1, v.shape[-3]) if one else BLOCKS["v"]
        descale = descale.unsqueeze(-1) if one else descale
        v = BlockScaled(v, descale, block, cu_seqlens=tensors.cu_seqlens_k)
    return v.in_rows().token_descale()[..., None].double()
