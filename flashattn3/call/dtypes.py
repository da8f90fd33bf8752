"""The dtypes that a call may have, in groups, and their names in kernel configs."""

from __future__ import annotations

import torch

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EIGHT_BIT = (FP8, INT8)  # dtypes of q and k that take descales
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
FULL_PRECISION = (torch.float32, torch.float64)
DTYPES = (*SIXTEEN_BIT, *FULL_PRECISION, *EIGHT_BIT)  # dtypes of q
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # for 8-bit calls; first is the default
NAMES = dict(zip((*SIXTEEN_BIT, *EIGHT_BIT), ("fp16", "bf16", "e4m3", "int8"), strict=True))


def out_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """dtype of out. dtype: q's. asked: the out_dtype argument."""
    return asked or (OUT_DTYPES[0] if dtype in EIGHT_BIT else dtype)


def v_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of v for q's dtype: v, like P, is e4m3 when q and k have 8 bits."""
    return FP8 if dtype in EIGHT_BIT else dtype


def best_qk_dtype(head_dim: int, hadamard: bool) -> torch.dtype:
    """Default dtype of quantized q and k.

    int8 steps are uniform, finer than e4m3's once the rotation has removed outliers; without the
    rotation one outlier makes the steps of its whole block coarse. Over more than 128 columns
    e4m3's errors average out to the same level, and e4m3 is faster.
    """
    return INT8 if hadamard and head_dim <= 128 else FP8
