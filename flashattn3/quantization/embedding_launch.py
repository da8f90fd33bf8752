"""The launch of the Triton kernel that normalizes, rotates and quantizes. Importing this module
imports Triton."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..backends.triton.kernels.rotate_quantize import rotate_block, rotate_quantize_block
from ..call import permuted_v
from ..call.dtypes import FP8, INT8
from ..call.hadamard import signs
from .embedding import Embedding, RotaryCall
from .torch_operations import LARGEST
from .triton_launch import tile


def rotate_and_quantize(call: RotaryCall, permuted: bool) -> list[Tensor]:
    """Data and descale of q, k and v, without elements where k and v are None. Rows of no sequence
    are not written. permuted: whether v is."""
    q, k, v, embedding, (cu_seqlens, max_seqlen), block, hadamard, qk_dtype, mean = call
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.numel() - 1, max_seqlen) if varlen else q.shape[:2]
    num_blocks, head_dim = -(-seqlen // block), q.shape[-1]
    q, k, v = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    data, descales, strides = [], [], []
    for x in (q, k, v):
        shape = (0,) if x is None else x.shape
        if x is not None and x is v and permuted:  # positions without a key are 0
            shape = permuted_v.shape_of(shape, cu_seqlens)
            data.append(torch.zeros(shape, dtype=torch.uint8, device=q.device))
        else:
            data.append(torch.empty(shape, dtype=torch.uint8, device=q.device))
        of_x = (0,) if x is None else (batch, x.shape[-2], num_blocks)
        descales.append(torch.empty(of_x, dtype=torch.float32, device=q.device))
        of_x = (0, 0, 0) if x is None else (0, *x.stride()[:2]) if varlen else x.stride()[:3]
        strides += of_x
    heads_kv = 0 if k is None else k.shape[-2]
    num_programs = batch * num_blocks * (q.shape[-2] + 2 * heads_kv)
    dim_v = head_dim if v is None else v.shape[-1]
    _, num_warps = tile(block, max(head_dim, dim_v), hadamard)
    cos, sin = (t if t is None else t.contiguous() for t in (embedding.cos, embedding.sin))
    half = 0 if cos is None else cos.shape[1]
    positions = embedding.positions
    if num_programs:
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            rotate_quantize_block[(num_programs,)](
                *(q, k, v, *data, *descales, embedding.q_norm, embedding.k_norm, mean),
                signs(head_dim, q.device) if hadamard else None,
                *(cos, sin, positions if positions is None else positions.contiguous()),
                *(None if cu_seqlens is None else cu_seqlens.contiguous(), *strides),
                half,
                0 if cos is None else cos.shape[0],
                *(q.shape[-2], heads_kv, num_blocks, seqlen, q.shape[-3]),
                data[2].shape[-3] if permuted else 0,
                embedding.eps,
                BLOCK_T=block,
                HEAD_DIM=head_dim,
                BLOCK_D=1 << (head_dim - 1).bit_length(),
                HEAD_DIM_V=dim_v,
                BLOCK_DV=1 << (dim_v - 1).bit_length(),
                HALF=half,
                INTERLEAVED=embedding.interleaved,
                VARLEN=varlen,
                ROTATE=hadamard,
                STAGES=head_dim.bit_length() - 1,
                LARGEST=LARGEST[qk_dtype],
                INT8=qk_dtype == INT8,
                PERMUTED_COLUMNS=data[2].shape[-2] if permuted else 0,
                num_warps=num_warps,
                enable_fp_fusion=False,  # each operation is rounded, as in torch
            )
    kinds = (qk_dtype, qk_dtype, FP8)
    return [
        y for x, of, kind in zip(data, descales, kinds, strict=True) for y in (x.view(kind), of)
    ]


ELEMENTS_OF_ROTATION = 4096  # of a program of rotate_block


def rotated(
    x: Tensor, embedding: Embedding, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    """x rotated, without a norm, in its dtype; 0 in rows of no sequence."""
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.numel() - 1, max_seqlen) if varlen else x.shape[:2]
    heads, head_dim = x.shape[-2:]
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = (torch.zeros if varlen else torch.empty)(x.shape, dtype=x.dtype, device=x.device)
    block_d = 1 << (head_dim - 1).bit_length()
    block = max(16, ELEMENTS_OF_ROTATION // block_d)
    num_blocks = -(-seqlen // block)
    cos, sin, positions = (
        t if t is None else t.contiguous()
        for t in (embedding.cos, embedding.sin, embedding.positions)
    )
    if out.numel() and batch * num_blocks:
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            rotate_block[(batch * num_blocks * heads,)](
                *(x, out, cos, sin, positions),
                None if cu_seqlens is None else cu_seqlens.contiguous(),
                *((0, *x.stride()[:2]) if varlen else x.stride()[:3]),
                *(cos.shape[1], cos.shape[0], heads, num_blocks, seqlen, x.shape[-3]),
                BLOCK_T=block,
                HEAD_DIM=head_dim,
                BLOCK_D=block_d,
                HALF=cos.shape[1],
                INTERLEAVED=embedding.interleaved,
                VARLEN=varlen,
                enable_fp_fusion=False,  # each operation is rounded, as in torch
            )
    return out
