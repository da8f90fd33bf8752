"""Limits that the Hopper and the Triton kernels share: inputs have 16 bits or fewer."""

from __future__ import annotations

import torch

from ..call.dtypes import FULL_PRECISION, SIXTEEN_BIT
from ..call.problem import Problem
from .base import head_dim_reason, score_factor_reason

# Keeps positions of queries and of the keys they see, with tile and window, below 2**31.
MAX_ROWS = 2**30 - 1024


def decline_reason(problem: Problem, max_head_dim: int) -> str | None:
    """Why neither backend's kernels take the problem, or None."""
    if problem.dtype in FULL_PRECISION:
        return f"computes in float16 and bfloat16, not in {problem.dtype}"
    if problem.out_dtype not in SIXTEEN_BIT:
        return f"writes float16 and bfloat16, not {problem.out_dtype} (out_dtype)"
    reason = head_dim_reason(problem, max_head_dim)
    if reason is not None:
        return reason
    longest = max(problem.total_q, problem.total_k)
    if longest > MAX_ROWS:
        return f"counts rows in 32 bits: q, k and v may have up to {MAX_ROWS}, found {longest}"
    return score_factor_reason(problem, 100, torch.float32)
