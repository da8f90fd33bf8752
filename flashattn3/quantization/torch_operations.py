"""Block quantization in torch operations, on every device; bitwise equal to the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import hadamard as rotation
from ..call.eight_bits import LARGEST, magnitudes, rounded, scales
from ..call.permuted_v import unpermute_v
from ..call.token_positions import (
    TokenPositions,
    blocks_of,
    of_sequences,
    of_tokens,
    token_positions,
)


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
        return x.new_zeros(x.shape, dtype=dtype), descale
    of = token_positions(x.shape[-3], x.device, cu_seqlens)
    common = None if mean is None else of_sequences(mean, of)
    if hadamard:
        values = rotation.rotate(x, common)
    else:
        values = x.float() if common is None else x.float() - common
    largest = magnitudes(values, dtype).amax(-1)
    amax = _amax_of_blocks(largest, block, of, cu_seqlens, max_seqlen)
    descale, factor = scales(amax, LARGEST[dtype])
    scaled = values * of_tokens(factor, block, of)[..., None]
    data = rounded(scaled.where(values.isfinite(), torch.nan), dtype)
    return data.contiguous(), descale.where(amax.isfinite(), torch.nan)


class Stored(NamedTuple):
    """q, k or v of 8 bits, see ``Scaled``. descale, block: None where there are no tokens.
    shape: in rows; permuted data has more axes."""

    data: Tensor
    descale: Tensor | None
    block: int | None
    cu_seqlens: Tensor | None
    shape: torch.Size


def dequantize(
    stored: tuple[Stored, Stored, Stored], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The values of q, k and v, rotated as they are, in rows; 0 in rows of no sequence."""
    q, k, v = stored
    return _dequantized(*q, dtype), _dequantized(*k, dtype), _dequantized(*v, dtype)


def _dequantized(
    data: Tensor,
    descale: Tensor | None,
    block: int | None,
    cu_seqlens: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    if descale is None:
        return data.new_zeros(shape, dtype=dtype)
    of = token_positions(shape[-3], data.device, cu_seqlens)
    rows = data if data.ndim == len(shape) else unpermute_v(data, shape, cu_seqlens)
    x = (rows.float() * of_tokens(descale, block, of)[..., None]).to(dtype)
    return x if of.owned is None else torch.where(of.owned[:, None, None], x, 0.0)


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


def take_exact_rows(
    out: Tensor,
    exact: Tensor,
    dout: Tensor,
    lse: Tensor,
    exact_lse: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """lse and dlse for the backward of out (b, s, h, d) and lse (b, h, s), whose first rows are
    exact and exact_lse: these, and dlse or 0 plus what the rows' sums of dout * out change by."""
    count = exact.shape[1]
    # float32 takes 16 bits as they are: each product and difference is rounded once.
    moved = (out[:, :count].float() - exact) * dout[:, :count]
    moved = pad(moved.sum(-1).transpose(1, 2), (0, out.shape[1] - count))
    lse = torch.cat((exact_lse, lse[..., count:]), -1)
    return lse, (moved if dlse is None else dlse + moved).contiguous()
