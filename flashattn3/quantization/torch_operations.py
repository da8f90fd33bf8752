"""Block quantization in torch operations, on every device; bitwise equal to the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import hadamard as rotation
from ..call import quantization_limits
from ..call.dtypes import FP8, INT8
from ..call.quantization_limits import SMALLEST_DESCALE
from ..call.token_positions import (
    TokenPositions,
    blocks_of,
    of_sequences,
    of_tokens,
    token_positions,
)

LARGEST = {FP8: quantization_limits.LARGEST["e4m3"], INT8: quantization_limits.LARGEST["int8"]}


def quantize(
    x: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    dtype: torch.dtype,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """data in rows and descale, as quantize_block_fp8 describes them.

    mean: float32 (batch, heads, head_dim), subtracted from the tokens of each sequence first.
    """
    if cu_seqlens is not None and (cu_seqlens.numel() == 1 or max_seqlen == 0):  # nothing to scale
        shape = (cu_seqlens.numel() - 1, x.shape[-2], -(-max_seqlen // block))
        descale = x.new_empty(shape, dtype=torch.float32)
        return torch.zeros_like(x, dtype=dtype), descale
    largest = LARGEST[dtype]
    of = token_positions(x.shape[-3], x.device, cu_seqlens)
    common = None if mean is None else of_sequences(mean, of)
    if hadamard:
        values = rotation.rotate(x, common)
    else:
        values = x.float() if common is None else x.float() - common
    finite = values.isfinite()
    # int8 has no NaN: amax = inf represents it and makes the factor 0.
    magnitude = torch.where(finite, values.abs(), torch.inf if dtype == INT8 else 0.0)
    amax = _amax_of_blocks(magnitude.amax(-1), block, of, cu_seqlens, max_seqlen)
    descale, factor = scales(amax, largest)
    scaled = values * of_tokens(factor, block, of)[..., None]
    # The conversion turns values that are, or round, above the range into NaN.
    scaled = torch.where(finite, scaled.clamp(-largest, largest), torch.nan)
    if dtype == INT8:
        scaled = scaled.round().nan_to_num(0.0)
    return scaled.to(dtype), descale.where(amax.isfinite(), torch.nan)


def scales(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """descale and its inverse, each rounded once."""
    wanted = torch.full_like(amax, largest)  # torch rounds a division with a number twice
    floored = amax.clamp(min=largest * SMALLEST_DESCALE)
    return floored / wanted, wanted / floored


def _amax_of_blocks(largest, block, of: TokenPositions, cu_seqlens, max_seqlen) -> Tensor:
    """amax (batch, heads, blocks). largest: largest magnitude of each token and head."""
    if of.sequence is None:
        batch, seqlen, heads = largest.shape
        amax = largest.new_zeros(batch, heads, -(-seqlen // block))
        index = (of.position // block).expand(batch, heads, seqlen)
        return amax.scatter_reduce_(2, index, largest.transpose(1, 2), "amax")
    heads, batch = largest.shape[1], cu_seqlens.numel() - 1
    num_blocks = -(-max_seqlen // block)
    amax = largest.new_zeros(batch * num_blocks, heads)
    index = of.sequence * num_blocks + blocks_of(of, block, num_blocks)
    index = index[:, None].expand(-1, heads)
    amax.scatter_reduce_(0, index, largest.where(of.owned[:, None], 0.0), "amax")
    return amax.view(batch, num_blocks, heads).transpose(1, 2).contiguous()
