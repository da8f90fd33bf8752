"""Exact attention in torch operations, on any device: blocked online softmax, memory linear in
length.

The default on a CPU, and the backend that takes every feature of the interface. Two choices carry
it:

- Heads first, groups folded: q becomes (batch * num_heads_kv, seqlen_q * group, head_dim). The
  query heads that share a key-value head are neighbouring rows, so K and V are never repeated, and
  a range of queries is a range of rows.
- Ragged sequences are padded in front. All of them then end at the same position, and a window
  aligned
  to the bottom right lies where it lies in a dense problem: the same tiles are skipped.

Everything steers by the lengths in ``Problem``. No value is read on the host, so nothing waits for
a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import DTYPES

if TYPE_CHECKING:
    from ..device import DeviceInfo
    from ..plan import Plan
    from ..problem import Problem, Tensors

_LOG2_E = math.log2(math.e)
_BLOCK_N = 512
_SMALLEST_BLOCK_M = 16


class _Budget(NamedTuple):
    """scores: of one tile, over all heads of the batch. block_m: at most so many queries."""

    scores: int
    block_m: int


# A CPU wants a tile that stays in its caches (8 MB of float32; measured at batch x heads = 8 and
# 48, seqlen 256 to 2048), a GPU few large launches.
_BUDGETS = {"cpu": _Budget(2**21, 128), "cuda": _Budget(2**26, 1024)}


@dataclass(frozen=True)
class ReferenceConfig:
    """A tile: block_m queries times block_n keys, of all heads and sequences at once."""

    block_m: int
    block_n: int

    def describe(self) -> dict[str, object]:
        return asdict(self)


class ReferenceBackend:
    """float16 and bfloat16 are computed in float32, float32 and float64 in themselves."""

    name = "reference"

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        return None

    def decline_reason(self, problem: Problem, device: DeviceInfo) -> str | None:
        if problem.dtype not in DTYPES:
            return f"takes float16, bfloat16, float32 and float64, not {problem.dtype}"
        if problem.pack_gqa:
            return "has no packed layout for pack_gqa=True"
        if problem.sm_margin:
            return "launches no grid of its own, so sm_margin cannot leave multiprocessors free"
        return None

    def configure(self, problem: Problem, device: DeviceInfo) -> ReferenceConfig:
        budget = _BUDGETS.get(device.kind, _BUDGETS["cuda"])
        fitting = budget.scores // max(1, problem.batch * problem.num_heads_q * _BLOCK_N)
        block_m = min(max(fitting, _SMALLEST_BLOCK_M), budget.block_m)
        return ReferenceConfig(block_m=1 << (block_m.bit_length() - 1), block_n=_BLOCK_N)

    def forward(self, plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
        problem = plan.problem
        # Under autocast the products below would silently drop to 16 bits.
        with torch.autocast(problem.device.type, enabled=False):
            call = _Call(plan, tensors)
            out = call.q.new_empty((*call.q.shape[:2], problem.head_dim_v))
            lse = call.q.new_empty((*call.q.shape[:2], 1))
            for queries in _blocks(range(problem.seqlen_q), plan.config.block_m):
                rows = call.rows_of(queries)
                out[:, rows], lse[:, rows] = call.attend(queries)
            out = call.query_side.unfold(out, tensors.q.dtype)
            lse = call.query_side.unfold(lse, lse.dtype, outside=-math.inf)
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
        problem, dtype = plan.problem, tensors.q.dtype
        with torch.autocast(problem.device.type, enabled=False):
            call = _Call(plan, tensors)
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= dlse.transpose(-1, -2).unsqueeze(-1)
            lse = call.query_side.fold(lse.transpose(-1, -2).unsqueeze(-1))
            blind = lse == -math.inf
            # With lse = +inf a row that sees no key has P = 0; then nothing but a finite delta is
            # needed.
            lse = lse.masked_fill(blind, math.inf)
            delta = call.query_side.fold(delta).masked_fill(blind, 0.0)
            dq, dk, dv = call.differentiate(call.query_side.fold(dout), lse, delta)
            return (
                call.query_side.unfold(dq, dtype),
                call.key_side.unfold(dk, dtype),
                call.key_side.unfold(dv, dtype),
            )


class _Call:
    """One call laid out for computing: operands heads first, and which keys which queries see.

    q (batch * num_heads_kv, seqlen_q * group, head_dim), k and v (batch * num_heads_kv, seqlen_k,
    ·), at least float32. q is scaled: q kᵀ is the score divided by ``unit``, which is 1, or the
    softcap so that it is tanh's argument.
    diagonal: the key that query 0 is aligned with.
    """

    def __init__(self, plan: Plan, tensors: Tensors) -> None:
        self.problem = problem = plan.problem
        self.block_m, self.block_n = plan.config.block_m, plan.config.block_n
        self.unit = problem.softcap or 1.0
        self.diagonal = problem.seqlen_k - problem.seqlen_q
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tensors
        lengths_q, lengths_k = (
            (problem.seqlen_q, problem.total_q),
            (problem.seqlen_k, problem.total_k),
        )
        self.query_side = _Side(problem, problem.group, *lengths_q, cu_seqlens_q, seqused_q)
        self.key_side = _Side(problem, 1, *lengths_k, cu_seqlens_k, seqused_k)
        self.q = self.query_side.fold(q) * (problem.softmax_scale / self.unit)
        self.k, self.v = self.key_side.fold(k), self.key_side.fold(v)

    def rows_of(self, queries: range) -> slice:
        return slice(queries.start * self.problem.group, queries.stop * self.problem.group)

    def keys_of(self, queries: range) -> range:
        """The keys that at least one of the queries can see."""
        left, right, end = (
            self.problem.window_left,
            self.problem.window_right,
            self.problem.seqlen_k,
        )
        first = max(0, queries[0] + self.diagonal - left) if left >= 0 else 0
        stop = min(end, queries[-1] + self.diagonal + right + 1) if right >= 0 else end
        return range(first, max(first, stop))

    def scores(self, queries: range, keys: range) -> Tensor:
        """The scores of a tile before the mask."""
        k = self.k[:, keys.start : keys.stop]
        scores = torch.bmm(self.q[:, self.rows_of(queries)], k.transpose(1, 2))
        return scores.tanh_().mul_(self.unit) if self.problem.softcap else scores

    def hide(self, scores: Tensor, queries: range, keys: range) -> None:
        """Set the scores of unseen keys to -inf, in place. A dense problem's clear tiles are free."""
        left, right = self.problem.window_left, self.problem.window_right
        cut_left = 0 <= left < queries[-1] + self.diagonal - keys[0]
        cut_right = 0 <= right < keys[-1] - (queries[0] + self.diagonal)
        ragged = self.key_side.first is not None
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
            hidden.append(j < self.key_side.first.view(-1, 1, 1, 1))
        # Added rather than filled: on a CPU masked_fill_ with a broadcast mask is ten times slower.
        bias = torch.where(functools.reduce(torch.logical_or, hidden), -math.inf, 0.0)
        scores.unflatten(0, (self.problem.batch, self.problem.num_heads_kv)).add_(bias)

    def attend(self, queries: range) -> tuple[Tensor, Tensor]:
        """out and lse of some queries, from num_splits parts of their keys."""
        keys = self.keys_of(queries)
        parts = _blocks(keys, math.ceil(len(keys) / max(1, self.problem.num_splits))) or [keys]
        return _merge([self._attend_part(queries, part) for part in parts])

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
        # The largest score contributes exactly 1, so the total is 0 without any key and else at
        # least 1.
        return acc_o.div_(total.clamp(min=1.0)), total.log_().add_(maximum)

    def differentiate(
        self, dout: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, heads first. lse is +inf where a row sees no key."""
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


class _Side:
    """The rows of the queries, or of the keys: between the caller's layout and heads first.

    Ragged rows pass through a padded (batch, seqlen) form whose sequences end at its end.

    group: heads per key-value head: the queries' group, 1 for the keys.
    first: (batch,) where each padded sequence begins; None for dense tensors.
    index: (batch * seqlen,) the caller's row behind each padded one. Padding, and whatever a
        corrupt
        cu_seqlens would put out of bounds, points at one extra row: zero to read, dropped when
            written.
    """

    def __init__(
        self,
        problem: Problem,
        group: int,
        seqlen: int,
        total: int,
        cu_seqlens: Tensor | None,
        seqused: Tensor | None,
    ) -> None:
        self.batch, self.num_heads_kv, self.group = problem.batch, problem.num_heads_kv, group
        self.seqlen, self.total = seqlen, total
        self.dtype = torch.promote_types(problem.dtype, torch.float32)
        self.first = self.index = None
        if cu_seqlens is not None:
            begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            length = end - begin if seqused is None else torch.minimum(end - begin, seqused)
            self.first = seqlen - length.clamp(0, seqlen)
            position = torch.arange(seqlen, device=begin.device) - self.first.unsqueeze(1)
            row = begin.unsqueeze(1) + position
            real = (position >= 0) & (row >= 0) & (row < total)
            self.index = torch.where(real, row, total).flatten()

    def fold(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, ·) or (total, heads, ·) -> (batch * num_heads_kv, rows, ·)."""
        if self.index is not None:
            x = F.pad(x, (0, 0, 0, 0, 0, 1)).index_select(0, self.index)
        x = x.view(self.batch, self.seqlen, self.num_heads_kv, self.group, x.shape[-1]).movedim(
            2, 1
        )
        return x.reshape(self.batch * self.num_heads_kv, self.seqlen * self.group, x.shape[-1]).to(
            self.dtype
        )

    def unfold(self, x: Tensor, dtype: torch.dtype, outside: float = 0.0) -> Tensor:
        """The inverse of ``fold``, contiguous; rows of no sequence are filled with ``outside``."""
        x = x.view(self.batch, self.num_heads_kv, self.seqlen, self.group, x.shape[-1]).movedim(
            1, 2
        )
        heads_and_dim = self.num_heads_kv * self.group, x.shape[-1]
        if self.index is None:
            return x.reshape(self.batch, self.seqlen, *heads_and_dim).to(dtype).contiguous()
        rows = x.new_full((self.total + 1, *heads_and_dim), outside, dtype=dtype)
        padded = x.reshape(self.batch * self.seqlen, *heads_and_dim).to(dtype)
        return rows.index_copy_(0, self.index, padded)[: self.total]


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
