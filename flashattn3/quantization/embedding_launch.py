"""The launch of the Triton kernel that normalizes, rotates and quantizes. Importing this module
imports Triton."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from ..backends.device import on_device_of, run_on_device_of
from ..backends.triton.kernels.rotate_quantize import rotate_blocks, rotate_quantize_block
from ..backends.triton.kernels.variable_launch import VariableLaunch
from ..call import permuted_v
from ..call.dtypes import FP8, INT8
from ..call.hadamard import signs
from .embedding import Embedding, Lengths, RotaryCall
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
        with on_device_of(q):
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


def rotated(
    x: Tensor, y: Tensor | None, embedding: Embedding, lengths: Lengths, back: bool
) -> tuple[Tensor, Tensor | None]:
    """x and, if there is one, y of the same tokens rotated, without a norm, in their dtype; 0 in
    rows of no sequence. back: by the negative angles."""
    cu_seqlens, max_seqlen = lengths
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin, positions = embedding.cos.contiguous(), embedding.sin.contiguous(), None
    empty, edges, num_edges, of_positions = torch.empty_like, None, None, None
    if cu_seqlens is not None:
        empty, edges, num_edges = torch.zeros_like, cu_seqlens.contiguous(), cu_seqlens.shape[0]
    if embedding.positions is not None:
        positions, of_positions = embedding.positions.contiguous(), embedding.positions.dtype
    of_x, of_y, of = empty(x, memory_format=torch.contiguous_format), None, ()
    if y is not None:
        y = y if y.stride(-1) == 1 else y.contiguous()
        of_y, of = empty(y, memory_format=torch.contiguous_format), (y.shape, y.stride())
    launch, grid, strides, numbers = _rotation(
        x.get_device(), x.dtype, cos.dtype, cos.shape, embedding.interleaved, back, of_positions,
        num_edges, max_seqlen, x.shape, x.stride(), *of,
    )  # fmt: skip
    tensors = x, y, of_x, of_y, cos, sin, positions, edges
    run_on_device_of(x, launch, grid, tensors, strides, numbers)
    return of_x, of_y


@lru_cache(maxsize=4096)
def _rotation(
    device: int,
    dtype: torch.dtype,
    of_tables: torch.dtype,
    table: torch.Size,
    interleaved: bool,
    back: bool,
    of_positions: torch.dtype | None,
    num_edges: int | None,
    max_seqlen: int | None,
    x: torch.Size,
    x_strides: tuple[int, ...],
    y: torch.Size | None = None,
    y_strides: tuple[int, ...] = (),
) -> tuple[VariableLaunch, tuple[int, int, int], tuple[int, ...], tuple[int, ...]]:
    """The launch of ``rotated``, its grid, strides and numbers. x, y: their shapes."""
    varlen = num_edges is not None
    batch, seqlen = (num_edges - 1, max_seqlen) if varlen else x[:2]
    num_positions, half = table
    launch, block = _rotation_launch(
        device,
        dtype,
        of_tables,
        of_positions,
        y is not None,
        x[-1],
        half,
        interleaved,
        varlen,
        back,
    )
    strides = [(0, *of[:2]) if varlen else of[:3] for of in (x_strides, y_strides)]
    heads = x[-2], 0 if y is None else y[-2]
    if y is None:
        strides[1] = 0, 0, 0
    num_blocks = -(-seqlen // block)
    grid = batch * num_blocks * sum(heads), 1, 1
    numbers = num_positions, *heads, num_blocks, seqlen, x[-3]
    return launch, grid, (*strides[0], *strides[1], half), numbers


@cache
def _rotation_launch(
    device: int,
    dtype: torch.dtype,
    of_tables: torch.dtype,
    of_positions: torch.dtype | None,
    has_two: bool,
    head_dim: int,
    half: int,
    interleaved: bool,
    varlen: bool,
    back: bool,
) -> tuple[VariableLaunch, int]:
    """That of one device, and the tokens of a program."""
    block_d = 1 << (head_dim - 1).bit_length()
    block = max(16, ELEMENTS_OF_ROTATION // block_d)
    constants = {
        "BLOCK_T": block,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "VARLEN": varlen,
        "BACK": back,
    }
    # Each operation is rounded, as in torch.
    return VariableLaunch(rotate_blocks, IN_VECTORS, constants, {"enable_fp_fusion": False}), block


ELEMENTS_OF_ROTATION = 4096  # of a program of rotate_blocks
IN_VECTORS = 6  # its first tensors, which it reads or writes in vectors
