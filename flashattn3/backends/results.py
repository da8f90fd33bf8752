"""Allocates the results of a forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..call.problem import Problem


def result_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse."""
    lead = () if problem.varlen else (problem.batch,)
    heads = problem.num_heads_q
    return (*lead, problem.total_q, heads, problem.head_dim_v), (*lead, heads, problem.total_q)


def result_allocator(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Build a function that allocates out and lse on q's device.

    For varlen they are initialised, because no kernel writes rows outside the sequences.
    """
    out_shape, lse_shape = result_shapes(problem)
    varlen, out_dtype = problem.varlen, problem.out_dtype

    def allocate(q: Tensor) -> tuple[Tensor, Tensor]:
        # q.new_empty instead of torch.empty avoids reading q.device in Python.
        out = q.new_empty(out_shape, dtype=out_dtype)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if varlen:
            out.zero_()
            lse.fill_(float("-inf"))
        return out, lse

    return allocate
