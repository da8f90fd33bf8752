"""Exact attention in torch operations, on any device: blocked online softmax.

The default on a CPU, and the backend that takes every feature of the interface. Its memory is
linear in the lengths: of the scores only a tile exists at a time, and backward recomputes it.
``heads_first`` says how a call is laid out.

Everything steers by the lengths in ``Problem``. No value is read on the host, so nothing waits for
a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..scales import EIGHT_BIT
from .heads_first import HeadsFirst

if TYPE_CHECKING:
    from ..device import DeviceInfo
    from ..plan import Plan
    from ..problem import Problem, Tensors

_LOG2_E = math.log2(math.e)
_BLOCK_N = 512
_SMALLEST_BLOCK_M = 16
# Scores in a tile over all heads, and the largest block_m. A CPU wants what stays in its caches
# (8 MB of float32; measured at batch x heads 8 and 48, seqlen 256 to 2048), a GPU few launches.
_CPU_BUDGET, _GPU_BUDGET = (2**21, 128), (2**26, 1024)


@dataclass(frozen=True)
class ReferenceConfig:
    """A tile: block_m queries times block_n keys, of all heads and sequences at once."""

    block_m: int
    block_n: int

    def describe(self) -> dict[str, object]:
        return asdict(self)


class ReferenceBackend:
    """8 bits (dequantized), float16 and bfloat16 are computed in float32, float32 and float64 in
    themselves.
    """

    name = "reference"
    reads_slots = False

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        return None

    def decline_reason(self, problem: Problem, device: DeviceInfo) -> str | None:
        if problem.pack_gqa:
            return "has no packed layout for pack_gqa=True"
        if problem.sm_margin:
            return "launches no grid of its own, so sm_margin cannot leave multiprocessors free"
        return None

    def configure(self, problem: Problem, device: DeviceInfo) -> ReferenceConfig:
        scores, largest = _CPU_BUDGET if device.kind == "cpu" else _GPU_BUDGET
        fitting = scores // max(1, problem.batch * problem.num_heads_q * _BLOCK_N)
        block_m = min(max(fitting, _SMALLEST_BLOCK_M), largest)
        return ReferenceConfig(block_m=1 << (block_m.bit_length() - 1), block_n=_BLOCK_N)

    def forward(self, plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
        # Under autocast the products below would silently drop to 16 bits.
        with torch.autocast(tensors.q.device.type, enabled=False):
            call = _Call(plan, tensors)
            out, lse = call.attend()
            out = call.queries.unfold(out, plan.problem.out_dtype)
            lse = call.queries.unfold(lse, lse.dtype, outside=-math.inf)
            return out, lse.squeeze(-1).transpose(-1, -2).contiguous()

    def backward(
        self,
        plan: Plan,
        dout: Tensor,
        dlse: Tensor | None,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tile by tile, with P recomputed from lse.

        P = exp(S - lse), dS = P * (dO Vᵀ - delta), delta = rowsum(dO * O) - dlse.
        """
        with torch.autocast(tensors.q.device.type, enabled=False):
            call = _Call(plan, tensors)
            delta = (dout.to(call.dtype) * out.to(call.dtype)).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= dlse.transpose(-1, -2).unsqueeze(-1)
            dout, lse, delta = (
                call.queries.fold(x, call.dtype)
                for x in (dout, lse.transpose(-1, -2).unsqueeze(-1), delta)
            )
            # A row that sees no key gets P = 0 from lse = +inf, and dS = 0 from a finite delta.
            blind = lse == -math.inf
            lse, delta = lse.masked_fill(blind, math.inf), delta.masked_fill(blind, 0.0)
            dq, dk, dv = call.differentiate(dout, lse, delta)
            sides = call.queries, call.keys, call.keys
            return tuple(
                side.unfold(gradient, tensors.q.dtype)
                for side, gradient in zip(sides, (dq, dk, dv), strict=True)
            )


class _Call:
    """One call laid out for computing: operands heads first, and which keys which queries see.

    q: (batch * num_heads_kv, seqlen_q * group, head_dim) in ``dtype``, at least float32. It
        carries the scale: q kᵀ is the score divided by ``unit``, 1 or the softcap for tanh.
    k, v: (batch * num_heads_kv, seqlen_k, ·).
    diagonal: the key that query 0 is aligned with.
    """

    def __init__(self, plan: Plan, tensors: Tensors) -> None:
        self.problem = problem = plan.problem
        self.block_m, self.block_n = plan.config.block_m, plan.config.block_n
        # torch promotes no FP8.
        self.dtype = torch.promote_types(problem.out_dtype, torch.float32)
        self.unit = problem.softcap or 1.0
        self.diagonal = problem.seqlen_k - problem.seqlen_q
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tensors.without_descales
        axes_q = problem.batch, problem.seqlen_q, problem.num_heads_kv, problem.group
        axes_k = problem.batch, problem.seqlen_k, problem.num_heads_kv, 1
        self.queries = HeadsFirst(axes_q, problem.total_q, cu_seqlens_q, seqused_q)
        self.keys = HeadsFirst(axes_k, problem.total_k, cu_seqlens_k, seqused_k)
        self.q = self.queries.fold(q, self.dtype) * (problem.softmax_scale / self.unit)
        self.k, self.v = self.keys.fold(k, self.dtype), self.keys.fold(v, self.dtype)
        if problem.dtype in EIGHT_BIT:
            self._dequantize(tensors)

    def _dequantize(self, tensors: Tensors) -> None:
        problem = self.problem
        for side, x, descale, scales in (
            (self.queries, self.q, tensors.q_descale, problem.q_scales),
            (self.keys, self.k, tensors.k_descale, problem.k_scales),
            (self.keys, self.v, tensors.v_descale, problem.v_scales),
        ):
            if descale is not None:
                x.mul_(side.spread(descale, scales.block))

    def rows_of(self, queries: range) -> slice:
        return slice(queries.start * self.problem.group, queries.stop * self.problem.group)

    def keys_of(self, queries: range) -> range:
        """The keys that at least one of the queries can see."""
        left, right = self.problem.window_left, self.problem.window_right
        end = self.problem.seqlen_k
        first = max(0, queries[0] + self.diagonal - left) if left >= 0 else 0
        stop = min(end, queries[-1] + self.diagonal + right + 1) if right >= 0 else end
        return range(first, max(first, stop))

    def scores(self, queries: range, keys: range) -> Tensor:
        """The scores of a tile before the mask."""
        k = self.k[:, keys.start : keys.stop]
        scores = torch.bmm(self.q[:, self.rows_of(queries)], k.transpose(1, 2))
        return scores.tanh_().mul_(self.unit) if self.problem.softcap else scores

    def hide(self, scores: Tensor, queries: range, keys: range) -> None:
        """Set the scores of unseen keys to -inf, in place. Dense tiles without any are free."""
        left, right = self.problem.window_left, self.problem.window_right
        cut_left = 0 <= left < queries[-1] + self.diagonal - keys[0]
        cut_right = 0 <= right < keys[-1] - (queries[0] + self.diagonal)
        ragged = self.keys.first is not None
        if not (cut_left or cut_right or ragged):
            return
        rows = self.rows_of(queries)
        i = torch.arange(rows.start, rows.stop, device=scores.device) // self.problem.group
        j = torch.arange(keys.start, keys.stop, device=scores.device)
        distance = j - (i + self.diagonal).unsqueeze(1)
        hidden = []
        if cut_left:
            hidden.append(distance < -left)
        if cut_right:
            hidden.append(distance > right)
        if ragged:
            hidden.append(j < self.keys.first.view(-1, 1, 1, 1))
        # Added rather than filled: on a CPU masked_fill_ with a broadcast mask is ten times slower.
        bias = torch.where(functools.reduce(torch.logical_or, hidden), -math.inf, 0.0)
        scores.unflatten(0, (self.problem.batch, self.problem.num_heads_kv)).add_(bias)

    def attend(self) -> tuple[Tensor, Tensor]:
        """out (batch * num_heads_kv, seqlen_q * group, head_dim_v) and lse (the same, 1)."""
        out = self.q.new_empty((*self.q.shape[:2], self.problem.head_dim_v))
        lse = self.q.new_empty((*self.q.shape[:2], 1))
        for queries in _blocks(range(self.problem.seqlen_q), self.block_m):
            keys = self.keys_of(queries)
            size = math.ceil(len(keys) / max(1, self.problem.num_splits))
            parts = [self._attend_part(queries, part) for part in _blocks(keys, size) or [keys]]
            rows = self.rows_of(queries)
            out[:, rows], lse[:, rows] = _merge(parts)
        return out, lse

    def _attend_part(self, queries: range, keys: range) -> tuple[Tensor, Tensor]:
        q = self.q[:, self.rows_of(queries)]
        # The running maximum starts at a finite number: with it -inf - maximum is never NaN.
        maximum = q.new_full((*q.shape[:2], 1), torch.finfo(q.dtype).min)
        total = torch.zeros_like(maximum)
        acc_o = q.new_zeros((*q.shape[:2], self.problem.head_dim_v))
        for tile in _blocks(keys, self.block_n):
            scores = self.scores(queries, tile)
            self.hide(scores, queries, tile)
            previous, maximum = maximum, torch.maximum(maximum, scores.amax(-1, keepdim=True))
            p = _exp(scores.sub_(maximum))
            rescale = _exp(previous.sub_(maximum))
            total.mul_(rescale).add_(p.sum(-1, keepdim=True))
            acc_o.mul_(rescale).baddbmm_(p, self.v[:, tile.start : tile.stop])
        # The largest score adds exactly 1, so total is 0 without any key and else at least 1.
        return acc_o.div_(total.clamp(min=1.0)), total.log_().add_(maximum)

    def differentiate(self, dout: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """dq, dk and dv from operands heads first. lse is +inf where a row sees no key."""
        problem = self.problem
        dq, dk, dv = (torch.zeros_like(x) for x in (self.q, self.k, self.v))
        for queries in _blocks(range(problem.seqlen_q), self.block_m):
            rows = self.rows_of(queries)
            for tile in _blocks(self.keys_of(queries), self.block_n):
                keys = slice(tile.start, tile.stop)
                p = self.scores(queries, tile)
                slope = 1 - (p / problem.softcap).square_() if problem.softcap else None
                self.hide(p, queries, tile)
                p = _exp(p.sub_(lse[:, rows]))
                dv[:, keys].baddbmm_(p.transpose(1, 2), dout[:, rows])
                ds = torch.bmm(dout[:, rows], self.v[:, keys].transpose(1, 2))
                ds.sub_(delta[:, rows]).mul_(p)
                if slope is not None:
                    ds.mul_(slope)
                dq[:, rows].baddbmm_(ds, self.k[:, keys])
                dk[:, keys].baddbmm_(ds.transpose(1, 2), self.q[:, rows])
        return dq.mul_(problem.softmax_scale), dk.mul_(self.unit), dv


def _blocks(span: range, size: int) -> list[range]:
    return [span[start : start + size] for start in range(0, len(span), max(1, size))]


def _exp(x: Tensor) -> Tensor:
    """exp, in place. On a CPU exp2 takes a third of exp's time, and far less where x is -inf."""
    return x.mul_(_LOG2_E).exp2_()


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from that over parts of them."""
    if len(parts) == 1:
        return parts[0]
    lse = functools.reduce(torch.logaddexp, (part for _, part in parts))
    # -inf minus a finite number is -inf, so a part without keys weighs nothing.
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    return sum(out * _exp(part - finite) for out, part in parts), lse


BACKEND = ReferenceBackend()
