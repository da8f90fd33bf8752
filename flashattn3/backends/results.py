"""The shapes of a forward's results."""

from __future__ import annotations

from ..call.problem import Problem


def result_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse."""
    lead = () if problem.varlen else (problem.batch,)
    heads = problem.num_heads_q
    return (*lead, problem.total_q, heads, problem.head_dim_v), (*lead, heads, problem.total_q)
