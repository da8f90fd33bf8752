"""Conversions around a kernel that reads dense rows: copies, V out of its permuted layout, and K's
mean, which is added to lse."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..call import permuted_v
from ..call.block_scaled import BlockScaled, lse_with_mean
from ..call.operands import Scaled, Tensors, data_of
from ..call.problem import Problem

Forward = Callable[[Tensors], tuple[Tensor, ...]]


def converting(problem: Problem, forward: Forward, reads_permuted_v: bool = False) -> Forward:
    """Wrap a forward in what this problem needs; return it as it is if that is nothing."""
    copies, adds_mean = problem.copied, problem.k.has_mean and problem.return_lse
    unpermutes = problem.v.permuted and not reads_permuted_v
    if not (copies or unpermutes or adds_mean):
        return forward

    def run(tensors: Tensors) -> tuple[Tensor, ...]:
        given = with_dense_rows(problem, tensors)
        results = forward(_with_unpermuted_v(given) if unpermutes else given)
        if not adds_mean:
            return results
        out, lse = results  # no max_logit: see expect_shared_shift
        return out, _with_mean(lse, given, problem.score_scale.softmax_scale)

    return run


def with_dense_rows(problem: Problem, tensors: Tensors) -> Tensors:
    """Copy the tensors whose last stride is not 1."""
    if not problem.copied:
        return tensors
    copies = {}
    for name in problem.copied:
        x = getattr(tensors, name)
        dense = data_of(x).contiguous()
        copies[name] = x._replace(data=dense) if type(x) is Scaled else dense
    return tensors._replace(**copies)


def _with_unpermuted_v(tensors: Tensors) -> Tensors:
    v, k = tensors.v, data_of(tensors.k)
    rows = permuted_v.unpermute_v(v.data, (*k.shape[:-1], v.head_dim), tensors.cu_seqlens_k)
    return tensors._replace(v=v._replace(data=rows, layout="rows", head_dim=None))


def _with_mean(lse: Tensor, tensors: Tensors, softmax_scale: float) -> Tensor:
    q, k = tensors.q, tensors.k
    if q.descale is None:  # there are no queries
        return lse
    of_q = BlockScaled(q.data, q.descale, q.block, q.hadamard, tensors.cu_seqlens_q)
    return lse_with_mean(lse, of_q, k.mean, softmax_scale)
