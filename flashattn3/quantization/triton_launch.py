"""Block quantization by the Triton kernel. Importing this module imports Triton."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..scales import INT8
from ..triton_kernels.quantize import quantize_block
from .hadamard import signs
from .torch_operations import LARGEST

ELEMENTS_OF_THREAD = 64
MAX_WARPS = 16
MAX_WARPS_ROTATING = 8  # 8 KiB of shared memory for each on 8.x: what an RTX 3090 has room for


def quantize(
    x: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """data in rows and descale, as quantize_block_fp8 describes them; the last stride of x is 1.

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
    block_d = 1 << (head_dim - 1).bit_length()
    num_warps = max(4, block * block_d // (32 * ELEMENTS_OF_THREAD))
    num_warps = min(num_warps, MAX_WARPS_ROTATING if hadamard else MAX_WARPS)
    # Triton launches on the current device.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        quantize_block[(descale.numel(),)](
            x,
            data,
            descale,
            signs(head_dim, x.device) if hadamard else None,
            cu_seqlens,
            *((0, *x.stride()[:2]) if varlen else x.stride()[:3]),
            num_blocks,
            heads,
            seqlen,
            x.shape[0],
            BLOCK_T=block,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            VARLEN=varlen,
            ROTATE=hadamard,
            STAGES=head_dim.bit_length() - 1,
            LARGEST=LARGEST[dtype],
            INT8=dtype == INT8,
            num_warps=num_warps,
        )
    return data.view(dtype), descale
