"""Block quantization by the Triton kernel. Importing this module imports Triton."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..backends.triton.kernels.dequantize import dequantize_block
from ..backends.triton.kernels.launch import stride_unit
from ..backends.triton.kernels.quantize import mean_of_sample, quantize_block
from ..call.dtypes import FP8, INT8
from ..call.hadamard import signs
from ..call.quantization_limits import SAMPLE, SIGNIFICANT
from .torch_operations import LARGEST

ELEMENTS_OF_THREAD = 64
MAX_WARPS = 16
MAX_WARPS_ROTATING = 8  # 8 KiB of shared memory for each on 8.x: what an RTX 3090 has room for
COLUMNS_OF_SAMPLE = 32  # of a program of mean_of_sample


def sample_mean(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """smoothing.sample_mean; the last stride of x is 1."""
    heads, head_dim = x.shape[-2:]
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.numel() - 1, max_seqlen) if varlen else x.shape[:2]
    mean = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=x.device)
    if mean.numel() == 0:
        return mean
    # Triton launches on the current device.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        mean_of_sample[(batch * heads, -(-head_dim // COLUMNS_OF_SAMPLE))](
            x,
            mean,
            cu_seqlens,
            *((0, *x.stride()[:2]) if varlen else x.stride()[:3]),
            heads,
            seqlen,
            x.shape[0],
            STRIDE_UNIT=stride_unit(*x.stride()[:-1]),
            SAMPLE=SAMPLE,
            STAGES=SAMPLE.bit_length() - 1,
            SIGNIFICANT=SIGNIFICANT,
            HEAD_DIM=head_dim,
            BLOCK_D=COLUMNS_OF_SAMPLE,
            VARLEN=varlen,
            enable_fp_fusion=False,  # each operation is rounded
        )
    return mean


def quantize(
    x: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    dtype: torch.dtype,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """torch_operations.quantize; the last stride of x is 1, mean is dense.

    Rows of no sequence are not written.
    """
    heads, head_dim = x.shape[-2:]
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.numel() - 1, max_seqlen) if varlen else x.shape[:2]
    num_blocks = -(-seqlen // block)
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    descale = torch.empty(batch, heads, num_blocks, dtype=torch.float32, device=x.device)
    if descale.numel() == 0:
        return data.view(dtype), descale
    block_d, num_warps = tile(block, head_dim, hadamard)
    # Triton launches on the current device.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        quantize_block[(descale.numel(),)](
            x,
            data,
            descale,
            mean,
            signs(head_dim, x.device) if hadamard else None,
            cu_seqlens,
            *((0, *x.stride()[:2]) if varlen else x.stride()[:3]),
            num_blocks,
            heads,
            seqlen,
            x.shape[0],
            STRIDE_UNIT=stride_unit(*x.stride()[:-1]),
            BLOCK_T=block,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            VARLEN=varlen,
            SMOOTH=mean is not None,
            ROTATE=hadamard,
            STAGES=head_dim.bit_length() - 1,
            LARGEST=LARGEST[dtype],
            INT8=dtype == INT8,
            num_warps=num_warps,
        )
    return data.view(dtype), descale


def tile(block: int, head_dim: int, rotates: bool) -> tuple[int, int]:
    """Columns and warps of a program, which has one block of a head."""
    block_d = 1 << (head_dim - 1).bit_length()
    num_warps = max(4, block * block_d // (32 * ELEMENTS_OF_THREAD))
    return block_d, min(num_warps, MAX_WARPS_ROTATING if rotates else MAX_WARPS)


def dequantize(
    data: Tensor,
    descale: Tensor,
    block: int,
    cu_seqlens: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """torch_operations.dequantize. data and descale are dense; data of another shape than ``shape``
    has V's permuted layout."""
    heads, head_dim = shape[-2:]
    varlen = cu_seqlens is not None
    # Rows of no sequence, and rows behind max_seqlen, have no descale.
    out = (torch.zeros if varlen else torch.empty)(shape, dtype=dtype, device=data.device)
    if descale.numel() == 0 or out.numel() == 0:
        return out
    permuted = data.shape != out.shape
    block_d, num_warps = tile(block, head_dim, False)
    with torch.cuda.device(data.device) if data.is_cuda else nullcontext():
        dequantize_block[(descale.numel(),)](
            data.view(torch.uint8) if data.dtype == FP8 else data,
            descale,
            out,
            cu_seqlens,
            descale.shape[-1],
            heads,
            shape[-3],
            shape[-3],
            data.shape[-3] if permuted else 0,
            BLOCK_T=block,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            VARLEN=varlen,
            PERMUTED_COLUMNS=data.shape[-2] if permuted else 0,
            num_warps=num_warps,
            enable_fp_fusion=False,  # each operation is rounded, as in torch
        )
    return out
