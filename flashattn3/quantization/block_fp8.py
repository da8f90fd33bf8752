"""e4m3 tensors with a scale for each block of tokens of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import type_error, value_error
from . import hadamard as rotation

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
BLOCKS = (64, 128, 256)
KINDS = ("q", "k", "v")
SOURCES = (torch.float16, torch.bfloat16, torch.float32)
_FUNCTION = "quantize_block_fp8"


@dataclass(frozen=True)
class BlockScaled:
    """A quantized q, k or v: data * descale is the value, of the rotated tensor if hadamard.

    data: float8_e4m3fn (batch, seqlen, heads, head_dim), with cu_seqlens (total, heads, head_dim).
    descale: float32 (batch, heads, blocks), blocks of ``block`` tokens counted from the beginning
        of each sequence; where a sequence has none, 1.
    cu_seqlens: int32 (batch + 1), where the sequences of a ragged batch begin; else None.
    layout: "rows" as above; "slots" is the order in which the Hopper kernel reads v.
    """

    data: Tensor
    descale: Tensor
    block: int
    hadamard: bool = False
    cu_seqlens: Tensor | None = None
    layout: str = "rows"

    def in_rows(self) -> BlockScaled:
        """The same with the layout "rows"."""
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the numbers stand for, (batch, seqlen, heads, head_dim), rotated back."""
        x = self.data.float() * self.token_descale()[..., None]
        return (rotation.rotate_back(x) if self.hadamard else x).to(dtype)

    def token_descale(self) -> Tensor:
        """descale of every token and head: the shape of data without its last axis."""
        sequence, position = _places(self.data, self.cu_seqlens)
        if self.cu_seqlens is None:
            return self.descale[:, :, position // self.block].transpose(1, 2)
        return self.descale[sequence, :, position // self.block]


def quantize_block_fp8(
    x: Tensor,
    *,
    block: int = 128,
    hadamard: bool = False,
    kind: str = "q",
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> BlockScaled:
    """Quantize q, k or v for attention: amax of each block of each head becomes 448.

    Args:
        x: (batch, seqlen, heads, head_dim) float16, bfloat16 or float32; with cu_seqlens
            (total, heads, head_dim).
        block: tokens that share a scale: 64, 128 or 256.
        hadamard: rotate the head dim first (hadamard.py); q and k must agree. Not for v, whose
            rotation would have to be undone in out.
        kind: "q", "k" or "v".
        cu_seqlens, max_seqlen: of a ragged batch, as for ``flash_attn_varlen_func``.

    Blocks of zeros have descale 1. NaN and infinite elements become NaN (with hadamard their whole
    row) and leave the scale to the finite ones.

    Raises: TypeError, ValueError.
    """
    _check(x, block, hadamard, kind, cu_seqlens, max_seqlen)
    values = rotation.rotate(x) if hadamard else x.float()
    sequence, position = _places(x, cu_seqlens)
    largest = values.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)  # of a token and head
    if cu_seqlens is None:
        batch, seqlen, heads = largest.shape
        num_blocks = -(-seqlen // block)
        amax = largest.new_zeros(batch, heads, num_blocks)
        index = (position // block).expand(batch, heads, seqlen)
        amax.scatter_reduce_(2, index, largest.transpose(1, 2), "amax")
    else:
        heads, batch = largest.shape[1], cu_seqlens.numel() - 1
        num_blocks = -(-max_seqlen // block)
        amax = largest.new_zeros(batch * num_blocks, heads)
        index = (sequence * num_blocks + position // block)[:, None].expand(-1, heads)
        amax.scatter_reduce_(0, index, largest, "amax")
        amax = amax.view(batch, num_blocks, heads).transpose(1, 2).contiguous()
    descale = torch.where(amax > 0, amax / LARGEST, 1.0)
    empty = BlockScaled(values, descale, block, hadamard, cu_seqlens)
    scaled = values / empty.token_descale()[..., None]
    # The conversion makes NaN of what is too large, rounding included.
    scaled = torch.where(scaled.isinf(), torch.nan, scaled.clamp(-LARGEST, LARGEST))
    return BlockScaled(scaled.to(FP8), descale, block, hadamard, cu_seqlens)


def _places(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Of every token: its sequence (None without cu_seqlens) and its position there."""
    if cu_seqlens is None:
        return None, torch.arange(x.shape[1], device=x.device)
    token = torch.arange(x.shape[0], device=x.device)
    edges = cu_seqlens.long()
    # Tokens before the first and behind the last sequence belong to the nearest one.
    sequence = torch.searchsorted(edges, token, right=True).sub(1).clamp(0, edges.numel() - 2)
    length = (edges[1:] - edges[:-1])[sequence]
    return sequence, (token - edges[sequence]).clamp(min=0).minimum((length - 1).clamp(min=0))


def _check(x, block, hadamard, kind, cu_seqlens, max_seqlen) -> None:
    if not isinstance(x, Tensor):
        raise type_error(_FUNCTION, "x", "a torch.Tensor", type(x).__name__)
    if x.dtype not in SOURCES:
        raise type_error(_FUNCTION, "x.dtype", f"one of {SOURCES}", x.dtype)
    rank = 3 if cu_seqlens is not None else 4
    if x.ndim != rank:
        raise value_error(_FUNCTION, "x.ndim", rank, x.ndim)
    if block not in BLOCKS:
        raise value_error(_FUNCTION, "block", f"one of {BLOCKS}", block)
    if kind not in KINDS:
        raise value_error(_FUNCTION, "kind", f"one of {KINDS}", repr(kind))
    if hadamard and kind == "v":
        raise value_error(_FUNCTION, "hadamard", "False for kind 'v'", True)
    if hadamard and not rotation.is_rotatable(x.shape[-1]):
        raise value_error(_FUNCTION, "x.shape[-1]", "a power of two with hadamard", x.shape[-1])
    if (cu_seqlens is None) != (max_seqlen is None):
        raise value_error(
            _FUNCTION, "max_seqlen", "given with cu_seqlens and only then", max_seqlen
        )
