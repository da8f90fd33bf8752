"""Exact attention in torch operations, on any device: blocked online softmax.

It is the default on a CPU and supports every feature of the interface. Time is linear in the number
of scores, memory in the number of tokens: only one tile of scores exists at a time, and backward
recomputes it (tiled_call.py). ``padded_layout`` defines the layout of a call.

A varlen call reads cu_seqlens and seqused on the host, so forward and backward each synchronize
with a GPU; max_seqlen does not affect the cost. During CUDA graph capture no value is read: every
sequence is padded to max_seqlen, which costs time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.cached import AppendProblem, CacheProblem, CombineProblem
from ...call.fields import HINTS
from ...call.operands import Tensors, data_of
from ...call.problem import Problem
from ...masks.block_lists import BLOCK_ROWS
from ...modes import without_autocast
from .. import packed
from ..base import score_factor_reason
from ..conversions import converting, with_dense_rows
from .buckets import CPU_BUDGET, GPU_BUDGET, ReferenceConfig, buckets
from .cached import ReferenceCachedCall
from .mask_tiles import with_query_heads
from .tiled_call import TiledCall, compute_dtype

if TYPE_CHECKING:
    from ...call.problem import CallProblem
    from ..device import DeviceInfo

_BLOCK_N = 512


class ReferenceBackend:
    """Computes 8-bit (dequantized), float16 and bfloat16 inputs in float32, float32 and float64 in
    their own dtype.
    """

    name = "reference"

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        return None

    def decline_reason(self, problem: CallProblem, device: DeviceInfo) -> str | None:
        if isinstance(problem, (AppendProblem, CombineProblem)):
            return None
        if isinstance(problem, Problem):
            reason = packed.spans_reason(problem)
            if reason is not None:
                return reason
        dtype = compute_dtype(problem)
        return score_factor_reason(problem, 900 if dtype == torch.float64 else 100, dtype)

    def unused_hints(self, problem: CallProblem, device: DeviceInfo) -> dict[str, str]:
        unused = "runs in torch operations, which have no such choice"
        return {field.name: unused for field in HINTS if field.name != "num_splits"}

    def prepare(
        self, problem: CallProblem, device: DeviceInfo
    ) -> ReferenceLaunch | ReferenceCachedCall:
        if isinstance(problem, CacheProblem):
            return ReferenceCachedCall(problem)
        return ReferenceLaunch(problem, self.configure(problem, device))

    def configure(self, problem: Problem, device: DeviceInfo) -> ReferenceConfig:
        scores, largest = CPU_BUDGET if device.kind == "cpu" else GPU_BUDGET
        if problem.mask is not None:
            # A tile within a block of queries sees no NaN of keys that this block does not see.
            largest = min(largest, BLOCK_ROWS)
        config = ReferenceConfig(largest, _BLOCK_N, scores)
        batch = 1 if problem.varlen else problem.batch
        block_m = config.queries(batch * problem.num_heads_q)
        config = ReferenceConfig(block_m, _BLOCK_N, scores)
        return config._replace(one_tile=_is_one_tile(problem, config))


@dataclass(frozen=True)
class ReferenceLaunch:
    """See ``Launch``."""

    keep = None

    problem: Problem
    config: ReferenceConfig

    def describe(self) -> dict[str, object]:
        return self.config.describe()

    @cached_property
    def forward(self) -> Callable[[Tensors], tuple[Tensor, ...]]:
        run = _prepare_one_tile(self.problem) if self.config.one_tile else self._forward
        if self.problem.split_tokens:
            decode = ReferenceCachedCall(packed.as_cached(self.problem)).decode
            run = packed.prepare_packed(self.problem, decode)
        return converting(self.problem, _without_autocast(self.problem, run))

    @cached_property
    def backward(self) -> Callable[..., tuple[Tensor | None, ...]]:
        return _without_autocast(self.problem, self._backward)

    def _by_query_head(self) -> ReferenceLaunch:
        """The launch of the same call in which every query head has its own k and v."""
        return replace(self, problem=replace(self.problem, num_heads_kv=self.problem.num_heads_q))

    def _forward(self, tensors: Tensors) -> tuple[Tensor, ...]:
        q, problem = data_of(tensors.q), self.problem
        if problem.mask is not None and problem.qhead_per_kvhead > 1:
            return self._by_query_head()._forward(with_query_heads(problem, tensors, None))
        dtype = compute_dtype(problem)
        out = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=problem.out_dtype)
        lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -math.inf, dtype=dtype)
        max_logit = q.new_full((problem.num_heads_q,), -math.inf, dtype=dtype)
        for bucket in buckets(problem, self.config, tensors):
            TiledCall(problem, self.config, tensors, bucket).forward(out, lse, max_logit)
        return (out, lse, max_logit) if problem.return_max_logit else (out, lse)

    def _backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        tensors: Tensors,
        *with_dbias: bool,
    ) -> tuple[Tensor | None, ...]:
        tensors, problem = with_dense_rows(self.problem, tensors), self.problem
        if problem.mask is not None and problem.qhead_per_kvhead > 1:
            given = with_query_heads(problem, tensors, compute_dtype(problem)), *with_dbias
            dq, dk, dv, *others = self._by_query_head()._backward(dout, dlse, out, lse, *given)
            sums = (x.unflatten(-2, (problem.num_heads_kv, -1)).sum(-2) for x in (dk, dv))
            return (dq, *(x.to(dq.dtype) for x in sums), *others)
        gradients = tuple(
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors[:3]
        )
        sinks, bias = tensors.sinks, tensors.bias if any(with_dbias) else None
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=_wide(sinks))
        dbias = None
        if bias is not None:
            dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
        for bucket in buckets(problem, self.config, tensors):
            call = TiledCall(problem, self.config, tensors, bucket)
            call.backward(dout, dlse, out, lse, gradients, dsinks, dbias)
        if not with_dbias:
            return gradients
        return (*gradients, None if sinks is None else dsinks.to(sinks.dtype), dbias)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _is_one_tile(problem: Problem, config: ReferenceConfig) -> bool:
    """Whether a dense call with nothing but q, k, v and a scale fits one tile."""
    return (
        0 < problem.seqlen_q <= config.block_m
        and problem.batch > 0
        and 0 < problem.seqlen_k <= config.block_n
        and problem.qhead_per_kvhead == 1
        and not (problem.varlen or problem.masked or problem.score_scale.is_capped)
        and problem.num_splits <= 1
        and not problem.score_options
        and not (problem.q.descales or problem.k.descales or problem.v.descales)
    )


def _prepare_one_tile(problem: Problem) -> Callable[[Tensors], tuple[Tensor, Tensor]]:
    """Build a function of the tensors that computes out and lse in few torch operations, because
    host time dominates a small call."""
    dtype = compute_dtype(problem)
    wide, out_is_wide = problem.dtype == dtype, problem.out_dtype == dtype
    lowest, heads = torch.finfo(dtype).min, (problem.batch, problem.num_heads_q)
    # A tensor saves 1 us per call, the time that torch takes to convert a Python number.
    scale = torch.tensor(problem.score_scale.softmax_scale, dtype=dtype, device="cpu")

    def run(tensors: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v = tensors[:3] if wide else map(data_of, tensors[:3])
        if not wide:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        q = q.transpose(1, 2).flatten(0, 1).mul(scale)
        p = torch.bmm(q, k.transpose(1, 2).flatten(0, 1).mT)
        # Where all scores are -inf, out is 0 and lse -inf, as in blocked calls; else total >= 1.
        maximum = p.amax(-1, True).clamp_min_(lowest)
        total = p.sub_(maximum).exp_().sum(-1, True)
        out = torch.bmm(p, v.transpose(1, 2).flatten(0, 1)).div_(total.clamp_min(1.0))
        lse = total.log_().add_(maximum).view(*heads, -1)
        out = out.view(*heads, -1, problem.head_dim_v).transpose(1, 2)
        return (out if out_is_wide else out.to(problem.out_dtype)).contiguous(), lse

    return run


def _without_autocast(problem: Problem, run: Callable) -> Callable:
    """``run`` without autocast, which would silently compute the GEMMs in 16 bits."""
    kind = problem.device.type

    def run_without(*arguments):
        with without_autocast(kind):
            return run(*arguments)

    return run_without


BACKEND = ReferenceBackend()
