"""Block quantization in torch operations: what the kernels give bit for bit, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scales import FP8
from . import hadamard as rotation
from .tokens import Places, places

LARGEST = torch.finfo(FP8).max  # 448
# Blocks below are scaled as if they reached it: LARGEST / amax is finite and descale not denormal.
SMALLEST_AMAX = LARGEST * 2.0**-126


def quantize(
    x: Tensor, block: int, hadamard: bool, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[Tensor, Tensor]:
    """data in rows and descale, as quantize_block_fp8 describes them."""
    values = rotation.rotate(x) if hadamard else x.float()
    of = places(x.shape[-3], x.device, cu_seqlens)
    amax = _amax_of_blocks(values, block, of, cu_seqlens, max_seqlen)
    descale, factor = scales(amax)
    scaled = values * of_tokens(factor, block, of)[..., None]
    # The conversion makes NaN of what is too large, rounding included.
    scaled = torch.where(values.isfinite(), scaled.clamp(-LARGEST, LARGEST), torch.nan)
    return scaled.to(FP8), descale


def scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """descale and its inverse, rounded each for itself."""
    largest = torch.full_like(amax, LARGEST)  # by a number torch divides in two roundings
    floored = amax.clamp(min=SMALLEST_AMAX)
    return floored / largest, largest / floored


def of_tokens(of_blocks: Tensor, block: int, of: Places) -> Tensor:
    """(batch, heads, blocks) → (batch, seqlen, heads), ragged (total, heads)."""
    if of.sequence is None:
        return of_blocks[:, :, of.position // block].transpose(1, 2)
    return of_blocks[of.sequence, :, of.position // block]


def _amax_of_blocks(values, block, of: Places, cu_seqlens, max_seqlen) -> Tensor:
    """Largest finite magnitude, (batch, heads, blocks)."""
    largest = values.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)  # of a token and head
    if of.sequence is None:
        batch, seqlen, heads = largest.shape
        amax = largest.new_zeros(batch, heads, -(-seqlen // block))
        index = (of.position // block).expand(batch, heads, seqlen)
        return amax.scatter_reduce_(2, index, largest.transpose(1, 2), "amax")
    heads, batch = largest.shape[1], cu_seqlens.numel() - 1
    num_blocks = -(-max_seqlen // block)
    amax = largest.new_zeros(batch * num_blocks, heads)
    index = (of.sequence * num_blocks + of.position // block)[:, None].expand(-1, heads)
    amax.scatter_reduce_(0, index, largest * of.owned[:, None], "amax")
    return amax.view(batch, num_blocks, heads).transpose(1, 2).contiguous()
