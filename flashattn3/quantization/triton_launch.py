"""Block quantization by the Triton kernel. Importing this module imports Triton."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from ..backends.device import on_device_of, run_on_device_of
from ..backends.triton.kernels.dequantize import dequantize_blocks
from ..backends.triton.kernels.exact_rows import take_exact_rows as exact_rows_kernel
from ..backends.triton.kernels.launch import stride_unit
from ..backends.triton.kernels.quantize import mean_of_sample, quantize_block
from ..backends.triton.kernels.variable_launch import VariableLaunch
from ..call.dtypes import FP8, INT8
from ..call.hadamard import signs
from ..call.quantization_limits import SAMPLE, SIGNIFICANT
from .torch_operations import LARGEST, Stored

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
    with on_device_of(x):
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
    with on_device_of(x):
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
    stored: tuple[Stored, Stored, Stored], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_operations.dequantize, in one launch."""
    (q, of_q, block_q, edges_q, _), (k, of_k, block_k, edges_k, _) = stored[:2]
    v, of_v, block_v, _, v_shape = stored[2]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    varlen, k_shape, q_scales, k_scales, v_scales = edges_q is not None, k.shape, None, None, None
    if varlen:
        edges_q, edges_k = edges_q.contiguous(), edges_k.contiguous()
    if of_q is not None:
        of_q = of_q.contiguous()
        q_scales = of_q.shape
    if of_k is not None:
        of_k = of_k.contiguous()
        k_scales = of_k.shape
    if of_v is not None:
        of_v = of_v.contiguous()
        v_scales = of_v.shape
    launch, grid, numbers, clears = _dequantization(
        q.get_device(), q.dtype, k.dtype, v.dtype, dtype, varlen, block_q, block_k, block_v,
        q.shape, k_shape, v.shape, v_shape, q_scales, k_scales, v_scales,
    )  # fmt: skip
    empty = torch.zeros_like if clears else torch.empty_like
    wide_q, wide_k = empty(q, dtype=dtype), empty(k, dtype=dtype)
    wide_v = empty(wide_k if v_shape == k_shape else wide_k.new_empty(v_shape))
    if q.dtype == FP8:
        q, k = q.view(torch.uint8), k.view(torch.uint8)
    data = q, k, v.view(torch.uint8), wide_q, wide_k, wide_v
    tensors = *data, of_q, of_k, of_v, edges_q, edges_k
    run_on_device_of(q, launch, grid, tensors, (), numbers)
    return wide_q, wide_k, wide_v


@lru_cache(maxsize=4096)
def _dequantization(
    device: int,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    dtype: torch.dtype,
    varlen: bool,
    q_block: int | None,
    k_block: int | None,
    v_block: int | None,
    q: torch.Size,
    k: torch.Size,
    v_data: torch.Size,
    v: torch.Size,
    *descales: torch.Size | None,
) -> tuple[VariableLaunch, tuple[int, int, int], tuple[int, ...], bool]:
    """The launch of ``dequantize``, its grid and numbers, and whether some rows have no descale, as
    those of no sequence and those behind max_seqlen. The others are shapes."""
    groups, columns = v_data[-3:-1] if len(v_data) > len(v) else (0, 0)
    blocks = [block or ROWS for block in (q_block, k_block, v_block)]
    programs = [
        0 if of is None else of.numel() * block // ROWS
        for of, block in zip(descales, blocks, strict=True)
    ]
    given = tuple(of is not None for of in descales)
    launch = _dequantize_launch(
        *(device, q_dtype, k_dtype, v_dtype, dtype, varlen, given, *blocks, q[-1], v[-1], columns)
    )
    num_blocks = (0 if of is None else of[-1] for of in descales)
    numbers = *programs[:2], *num_blocks, q[-2], k[-2], q[-3], k[-3], groups
    return launch, (sum(programs), 1, 1), numbers, varlen or None in descales


@cache
def _dequantize_launch(
    device: int,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    dtype: torch.dtype,
    varlen: bool,
    given: tuple[bool, bool, bool],
    block_q: int,
    block_k: int,
    block_v: int,
    head_dim: int,
    head_dim_v: int,
    columns: int,
) -> VariableLaunch:
    """That of one device. given: which have descales, since Triton compiles None as a constant.
    columns: of permuted v, or 0."""
    block_d, num_warps = tile(ROWS, head_dim, False)
    block_dv, num_warps_v = tile(ROWS, head_dim_v, False)
    constants = {
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "BLOCK_T": ROWS,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_DV": block_dv,
        "VARLEN": varlen,
        "PERMUTED_COLUMNS": columns,
    }
    # Each operation is rounded, as in torch.
    options = {"num_warps": max(num_warps, num_warps_v), "enable_fp_fusion": False}
    return VariableLaunch(dequantize_blocks, NUM_IN_VECTORS, constants, options)


ROWS = 64  # of a program of dequantize_blocks: tokens of the smallest block
NUM_IN_VECTORS = 6  # tensors that it reads or writes in vectors


def take_exact_rows(
    out: Tensor,
    exact: Tensor,
    dout: Tensor,
    lse: Tensor,
    exact_lse: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """torch_operations.take_exact_rows, in one launch."""
    out = out if out.stride(3) == 1 else out.contiguous()
    exact = exact if exact.stride(3) == 1 else exact.contiguous()
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    lse = lse if lse.stride(2) == 1 else lse.contiguous()
    exact_lse = exact_lse if exact_lse.stride(2) == 1 else exact_lse.contiguous()
    kinds = out.get_device(), out.dtype, exact.dtype, dout.dtype, dlse is None
    launch, grid, numbers = _exact_rows(*kinds, out.shape, exact.shape[1])
    new_lse = torch.empty_like(lse, memory_format=torch.contiguous_format)
    new_dlse = torch.empty_like(new_lse)
    of_dlse = (0, 0, 0) if dlse is None else dlse.stride()
    rows = *out.stride()[:3], *exact.stride()[:3], *dout.stride()[:3]
    strides = *rows, *lse.stride()[:2], *exact_lse.stride()[:2], *of_dlse
    tensors = out, exact, dout, lse, exact_lse, dlse, new_lse, new_dlse
    run_on_device_of(out, launch, grid, tensors, strides, numbers)
    return new_lse, new_dlse


@lru_cache(maxsize=4096)
def _exact_rows(
    device: int,
    dtype: torch.dtype,
    exact_dtype: torch.dtype,
    dout_dtype: torch.dtype,
    no_dlse: bool,
    out: torch.Size,
    count: int,
) -> tuple[VariableLaunch, tuple[int, int, int], tuple[int, ...]]:
    """The launch of ``take_exact_rows``, its grid and numbers. out: the shape."""
    batch, seqlen, heads, head_dim = out
    launch, block = _exact_rows_launch(device, dtype, exact_dtype, dout_dtype, no_dlse, head_dim)
    blocks = -(-seqlen // block)
    return launch, (batch * blocks * heads, 1, 1), (blocks, heads, seqlen, count)


@cache
def _exact_rows_launch(
    device: int,
    dtype: torch.dtype,
    exact_dtype: torch.dtype,
    dout_dtype: torch.dtype,
    no_dlse: bool,
    head_dim: int,
) -> tuple[VariableLaunch, int]:
    """That of one device, and the rows of a program. no_dlse: Triton compiles None as a
    constant."""
    block_d = 1 << (head_dim - 1).bit_length()
    block = max(16, ELEMENTS_OF_EXACT_ROWS // block_d)
    sizes = {"BLOCK_M": block, "HEAD_DIM_V": head_dim, "BLOCK_DV": block_d}
    constants = {"STRIDE_UNIT": 1, **sizes}
    launch = VariableLaunch(exact_rows_kernel, 3, constants, {}, num_row_strides=9)
    return launch, block


ELEMENTS_OF_EXACT_ROWS = 4096  # of a program of take_exact_rows
