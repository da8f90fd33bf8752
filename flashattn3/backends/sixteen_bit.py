"""What the kernels on a GPU share, whoever compiled them: they compute in 16 bits or fewer."""

from __future__ import annotations

import torch

from ..problem import FULL_PRECISION, Problem

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def decline_reason(problem: Problem, max_head_dim: int) -> str | None:
    """Why none of these kernels computes the problem, or None."""
    if problem.dtype in FULL_PRECISION:
        return f"computes in float16 and bfloat16, not in {problem.dtype}"
    if problem.out_dtype not in DTYPE_NAMES:
        return f"writes float16 and bfloat16, not {problem.out_dtype} (out_dtype)"
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > max_head_dim:
            return f"takes head dims up to {max_head_dim}, {name} is {getattr(problem, name)}"
    for name, value in _score_factors(problem).items():
        if value != 0 and not 2.0**-100 <= abs(value) <= 2.0**100:
            return f"computes scores in float32, which {name} {value:g} would leave"
    if problem.pack_gqa:
        return "has no packed layout of grouped queries (pack_gqa)"
    return None


def _score_factors(problem: Problem) -> dict[str, float]:
    """What the kernels multiply scores with."""
    factors = {"softmax_scale": problem.softmax_scale}
    if problem.softcap > 0:
        factors["softcap"] = problem.softcap
        factors["softmax_scale / softcap"] = problem.softmax_scale / problem.softcap
    return factors
