"""Exact attention in torch operations, on any device: blocked online softmax (Milakov & Gimelshein
2018, arXiv 1805.02867).

It is the default on a CPU and supports every feature of the interface. Time is linear in the number
of scores, memory in the number of tokens: only one tile of scores exists at a time, and backward
recomputes it. ``padded_layout`` defines the layout of a call.

A varlen call reads cu_seqlens and seqused on the host, so forward and backward each synchronize
with a GPU; max_seqlen does not affect the cost. During CUDA graph capture no value is read: every
sequence is padded to max_seqlen, which costs time and memory.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...call.cached import AppendProblem, CacheProblem, CombineProblem
from ...call.fields import HINTS
from ...call.operands import Scaled, Tensors, data_of, lengths_of_k, lengths_of_q
from ...call.problem import Problem
from ...masks.block_lists import BLOCK_ROWS
from .. import packed
from ..base import score_factor_reason
from ..conversions import converting, with_dense_rows
from .cached import ReferenceCachedCall
from .mask_tiles import MaskTiles, with_query_heads
from .padded_layout import PaddedLayout, padded
from .score_shifts import ScoreShifts

if TYPE_CHECKING:
    from ...call.descales import Descales
    from ...call.problem import CallProblem
    from ..device import DeviceInfo

_LOG2_E = math.log2(math.e)
_BLOCK_N = 512
_SMALLEST_BLOCK_M = 16
# Scores per tile over all heads, and the largest block_m. A CPU tile has to stay in the caches
# (8 MB of float32; measured at batch x heads 8 and 48, seqlen 256 to 2048), a GPU needs few
# launches.
_CPU_BUDGET, _GPU_BUDGET = (2**21, 128), (2**26, 1024)


class ReferenceConfig(NamedTuple):
    """Tile sizes: at most block_m queries times block_n keys, over all heads and all sequences that
    are computed together.

    max_scores: limit for the scores of a tile over all of these; block_m stays at least 16.
    one_tile: the whole problem is one tile without a mask.
    """

    block_m: int
    block_n: int
    max_scores: int = _CPU_BUDGET[0]
    one_tile: bool = False

    def describe(self) -> dict[str, object]:
        return {"block_m": self.block_m, "block_n": self.block_n}

    def queries(self, heads: int) -> int:
        """block_m for this number of heads, summed over all sequences."""
        fitting = max(self.max_scores // max(1, heads * self.block_n), _SMALLEST_BLOCK_M)
        return min(self.block_m, 1 << (fitting.bit_length() - 1))

    def sequences(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of sequences of these lengths that fill the tile of one long sequence."""
        tile = min(self.block_m, seqlen_q) * min(self.block_n, max(1, seqlen_k))
        return self.block_m * self.block_n // tile


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
        dtype = _compute_dtype(problem)
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
        scores, largest = _CPU_BUDGET if device.kind == "cpu" else _GPU_BUDGET
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
        dtype = _compute_dtype(problem)
        out = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=problem.out_dtype)
        lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -math.inf, dtype=dtype)
        max_logit = q.new_full((problem.num_heads_q,), -math.inf, dtype=dtype)
        for bucket in _buckets(self, tensors):
            _Call(self, tensors, bucket).forward(out, lse, max_logit)
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
            given = with_query_heads(problem, tensors, _compute_dtype(problem)), *with_dbias
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
        for bucket in _buckets(self, tensors):
            call = _Call(self, tensors, bucket)
            call.backward(dout, dlse, out, lse, gradients, dsinks, dbias)
        if not with_dbias:
            return gradients
        return (*gradients, None if sinks is None else dsinks.to(sinks.dtype), dbias)


def _compute_dtype(problem: Problem) -> torch.dtype:
    return torch.promote_types(problem.out_dtype, torch.float32)  # torch cannot promote FP8


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
    dtype = _compute_dtype(problem)
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


def _column(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen) viewed as (batch, seqlen, heads, 1); varlen without batch."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def _without_autocast(problem: Problem, run: Callable) -> Callable:
    """``run`` without autocast, which would silently compute the GEMMs in 16 bits."""
    kind = problem.device.type

    def run_without(*arguments):
        if not torch.is_autocast_enabled(kind):
            return run(*arguments)
        with torch.autocast(kind, enabled=False):
            return run(*arguments)

    return run_without


class _Bucket(NamedTuple):
    """Sequences that are computed together, as one dense problem."""

    queries: PaddedLayout
    keys: PaddedLayout


def _buckets(launch: ReferenceLaunch, tensors: Tensors) -> Iterator[_Bucket]:
    """Yield the sequences of a call: all at once, or, for varlen, those of equal lengths together.

    Sequences without queries are skipped, and without sinks those without keys: out and lse already
    hold 0 and -inf.
    """
    problem = launch.problem
    if problem.varlen and not _is_capturing(problem.device):
        yield from _buckets_by_length(launch, tensors)
    elif problem.batch and problem.seqlen_q and (problem.seqlen_k or problem.sinks_dtype):
        if problem.varlen:
            queries = padded(problem.seqlen_q, problem.total_q, *lengths_of_q(tensors))
            keys = padded(problem.seqlen_k, problem.total_k, *lengths_of_k(tensors))
        else:
            queries = PaddedLayout(problem.batch, problem.seqlen_q)
            keys = PaddedLayout(problem.batch, problem.seqlen_k)
        yield _Bucket(queries, keys)


def _buckets_by_length(launch: ReferenceLaunch, tensors: Tensors) -> Iterator[_Bucket]:
    problem = launch.problem
    begins_q, lengths_q = _spans(*lengths_of_q(tensors), problem.total_q)
    begins_k, lengths_k = _spans(*lengths_of_k(tensors), problem.total_k)
    batch_indices_of = defaultdict(list)
    for batch_idx, lengths in enumerate(zip(lengths_q, lengths_k, strict=True)):
        batch_indices_of[lengths].append(batch_idx)
    for (seqlen_q, seqlen_k), batch_indices in batch_indices_of.items():
        if seqlen_q == 0 or (seqlen_k == 0 and problem.sinks_dtype is None):
            continue
        size = launch.config.sequences(seqlen_q, seqlen_k)
        for some in (batch_indices[i : i + size] for i in range(0, len(batch_indices), size)):
            queries = _together(some, begins_q, seqlen_q, problem.device)
            yield _Bucket(queries, _together(some, begins_k, seqlen_k, problem.device))


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured; reading a tensor on the host would end it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _spans(cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> tuple[list[int], list[int]]:
    """First token and length of each sequence, clamped to the tensor for any cu_seqlens."""
    edges = [min(max(edge, 0), total) for edge in cu_seqlens.tolist()]
    lengths = [max(end - begin, 0) for begin, end in pairwise(edges)]
    if seqused is not None:
        lengths = [max(0, min(pair)) for pair in zip(lengths, seqused.tolist(), strict=True)]
    return edges[:-1], lengths


def _together(
    batch_indices: list[int], begins: list[int], seqlen: int, device: torch.device
) -> PaddedLayout:
    """Layout of sequences of one length: a view of the packed tensors if they are contiguous."""
    starts = [begins[batch_idx] for batch_idx in batch_indices]
    batch, first = len(starts), starts[0]
    if starts == [first + index * seqlen for index in range(batch)] or seqlen == 0:
        rows = slice(first, first + batch * seqlen)
    else:
        rows = torch.tensor(starts, device=device).unsqueeze(1)
        rows = (rows + torch.arange(seqlen, device=device)).flatten()
    return PaddedLayout(batch, seqlen, rows, batch_indices=batch_indices)


class _Call:
    """Attention over one bucket: its inputs with heads first, and its mask.

    q: (batch * num_heads_kv, qhead_per_kvhead, seqlen_q, head_dim) in ``dtype``, at least float32,
        scaled so that q kᵀ is the score divided by ``unit``, before tanh where scores are capped.
    k, v: (batch * num_heads_kv, seqlen_k, ·).
    diagonal: index of the key that query 0 is aligned with.
    shifts: what the slopes and the bias add to scores.
    """

    def __init__(self, launch: ReferenceLaunch, tensors: Tensors, bucket: _Bucket) -> None:
        self.problem = problem = launch.problem
        self.bucket = bucket
        self.dtype = _compute_dtype(problem)
        self.seqlen_q, self.seqlen_k = bucket.queries.seqlen, bucket.keys.seqlen
        self.block_m = launch.config.queries(bucket.queries.batch * problem.num_heads_q)
        self.block_n = launch.config.block_n
        self.unit = problem.score_scale.unit
        self.diagonal = self.seqlen_k - self.seqlen_q
        queries, keys = bucket
        q = self.dequantized(queries, tensors.q, problem.q.descales)
        q = q * (problem.score_scale.softmax_scale / self.unit)
        self.q = q.view(-1, problem.qhead_per_kvhead, self.seqlen_q, problem.head_dim)
        self.k = self.dequantized(keys, tensors.k, problem.k.descales)
        self.v = self.dequantized(keys, tensors.v, problem.v.descales)
        self.shifts = ScoreShifts(tensors, bucket.queries, self.dtype)
        self.mask = None
        if problem.mask is not None:
            self.mask = MaskTiles(problem, tensors, reads=not _is_capturing(problem.device))

    def dequantized(
        self, side: PaddedLayout, x: Tensor | Scaled, descales: Descales | None
    ) -> Tensor:
        data = data_of(x)
        rows = side.fold(data, self.dtype)
        if descales is None:
            return rows
        return rows.mul_(side.spread(x.descale, descales.block, data.shape[-2]))

    def rows(self, x: Tensor, queries: range) -> Tensor:
        """The rows of a tile: (batch * num_heads_kv, qhead_per_kvhead * len(queries), ·), dense.

        x: (batch * num_heads_kv, qhead_per_kvhead, seqlen_q, ·) or (batch * num_heads_q, ...).
        """
        x = x.view(-1, self.problem.qhead_per_kvhead, self.seqlen_q, x.shape[-1])
        return x[:, :, queries.start : queries.stop].flatten(1, 2)

    def put(self, rows: Tensor, queries: range, result: Tensor) -> None:
        """The inverse of ``rows``. result: (batch * num_heads_q, seqlen_q, ·)."""
        rows = rows.view(-1, len(queries), rows.shape[-1])
        result[:, queries.start : queries.stop] = rows

    def keys_of(self, queries: range) -> range:
        """The range of keys that at least one of the queries sees."""
        left, right = self.problem.window_left, self.problem.window_right
        end = self.seqlen_k
        first = max(0, queries[0] + self.diagonal - left) if left >= 0 else 0
        stop = min(end, queries[-1] + self.diagonal + right + 1) if right >= 0 else end
        return range(first, max(first, stop))

    def scores(self, q: Tensor, keys: range) -> Tensor:
        """The scores of a tile before ``shifts`` and masking. q: the rows of the tile."""
        scores = torch.bmm(q, self.k[:, keys.start : keys.stop].transpose(1, 2))
        return scores.tanh_().mul_(self.unit) if self.problem.score_scale.is_capped else scores

    def tiles(self, queries: range, keys: range) -> list[range]:
        """The blocks of some keys that the queries may see."""
        tiles = _blocks(keys, self.block_n)
        if self.mask is None:
            return tiles
        return [tile for tile in tiles if self.mask.sees_any(queries, tile)]

    def values(self, queries: range, keys: range) -> Tensor:
        """v of a tile, without NaN that no query sees."""
        v = self.v[:, keys.start : keys.stop]
        return v if self.mask is None else self.mask.without_hidden(v, queries, keys)

    def sees_all(self, queries: range, keys: range) -> bool:
        """Whether this is a full block: each query sees each key."""
        if self.mask is not None:
            return False
        left, right = self.problem.window_left, self.problem.window_right
        offset = queries[0] + self.diagonal - keys[0]
        cut_left = 0 <= left < offset + len(queries) - 1
        cut_right = 0 <= right < len(keys) - 1 - offset
        return not (cut_left or cut_right) and self.bucket.keys.first is None

    def clear(self, x: Tensor, queries: range, keys: range) -> None:
        """Set x to 0 in place where a query does not see a key, even where x is NaN.

        x: (batch * num_heads_kv, qhead_per_kvhead * len(queries), len(keys)), or one head for all.
        """
        if self.mask is not None:
            return self.mask.fill_hidden(x, queries, keys, 0.0)
        left, right = self.problem.window_left, self.problem.window_right
        # Query i of the tile is aligned with key i + offset of the tile.
        offset = queries[0] + self.diagonal - keys[0]
        # On a CPU triu_ and tril_ are twenty times faster than masked_fill_ with a broadcast mask.
        squares = x.view(-1, len(queries), len(keys))
        if left >= 0:
            squares.triu_(offset - left)
        if right >= 0:
            squares.tril_(offset + right)
        first = self.bucket.keys.first
        if first is not None:
            position = torch.arange(keys.start, keys.stop, device=x.device)
            before = (position < first.unsqueeze(1)).view(-1, 1, 1, len(keys))
            x.view(len(first), -1, len(queries), len(keys)).masked_fill_(before, 0.0)

    def hide(self, scores: Tensor, queries: range, keys: range) -> None:
        """Set the scores of masked keys to -inf in place."""
        if self.mask is not None:
            return self.mask.fill_hidden(scores, queries, keys, -math.inf)
        first = self.bucket.keys.first
        batch = 1 if first is None else len(first)
        seen = scores.new_ones((batch, 1, len(queries), len(keys)))
        self.clear(seen, queries, keys)
        self.clear(scores, queries, keys)
        scores.view(batch, -1, len(queries), len(keys)).add_(seen.log2_())

    def forward(self, out: Tensor, lse: Tensor, max_logit: Tensor) -> None:
        """Write the bucket's rows of out and lse, and raise max_logit to its largest scores."""
        queries = self.bucket.queries
        self.max_logit = max_logit
        found_out, found_lse = self.attend()
        queries.unfold(found_out, out)
        queries.unfold(found_lse, _column(lse))

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
        dsinks: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        """Write the bucket's rows of dq, dk and dv, add to dsinks and write dbias.

        Each tile recomputes P from lse: P = exp(S - lse), dS = P * (dO Vᵀ - delta), delta =
        rowsum(dO * O) - dlse.
        """
        queries, keys = self.bucket
        dout = queries.fold(dout, self.dtype)
        delta = (dout * queries.fold(out, self.dtype)).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= queries.fold(_column(dlse), self.dtype)
        lse = queries.fold(_column(lse), self.dtype)
        if dsinks is not None:
            self.shifts.add_to_dsinks(dsinks, lse, delta)
        # A row that sees no key gets P = 0 from lse = +inf, and dS = 0 from a finite delta.
        blind = lse == -math.inf
        lse, delta = lse.masked_fill(blind, math.inf), delta.masked_fill_(blind, 0.0)
        found = self.differentiate(dout, lse, delta, dbias)
        for side, rows, gradient in zip((queries, keys, keys), found, gradients, strict=True):
            side.unfold(rows, gradient)

    def attend(self) -> tuple[Tensor, Tensor]:
        """Compute out (batch * num_heads_q, seqlen_q, head_dim_v) and lse with last axis 1."""
        blocks = _blocks(range(self.seqlen_q), self.block_m)
        if len(blocks) == 1:
            return self._attend_block(blocks[0])
        heads = self.q.shape[0] * self.q.shape[1]
        out = self.q.new_empty((heads, self.seqlen_q, self.v.shape[-1]))
        lse = self.q.new_empty((heads, self.seqlen_q, 1))
        for queries in blocks:
            for found, result in zip(self._attend_block(queries), (out, lse), strict=True):
                self.put(found, queries, result)
        return out, lse

    def _attend_block(self, queries: range) -> tuple[Tensor, Tensor]:
        keys = self.keys_of(queries)
        size = math.ceil(len(keys) / max(1, self.problem.num_splits))
        splits = _blocks(keys, size) or [keys]
        # The first of the splits has the sinks.
        parts = [self._attend_split(queries, split, split is splits[0]) for split in splits]
        return _combine(parts)

    def _attend_split(self, queries: range, keys: range, sinks: bool) -> tuple[Tensor, Tensor]:
        q = self.rows(self.q, queries)
        # The running maximum is at least a finite number, so that -inf - maximum is never NaN.
        lowest = torch.finfo(q.dtype).min
        acc_o = None
        for tile in self.tiles(queries, keys):
            scores = self.scores(q, tile)
            self.shifts.add(scores, queries, tile, self.diagonal)
            if not self.sees_all(queries, tile):
                self.hide(scores, queries, tile)
            v = self.values(queries, tile)
            highest = scores.amax(-1, keepdim=True)
            if self.problem.return_max_logit:
                self.shifts.raise_max_logit(self.max_logit, highest, queries)
            if acc_o is None:
                maximum = highest.clamp_(min=lowest)
                p = _exp(scores.sub_(maximum))
                total, acc_o = p.sum(-1, keepdim=True), torch.bmm(p, v)
            else:
                previous, maximum = maximum, torch.maximum(maximum, highest)
                p = _exp(scores.sub_(maximum))
                rescale = _exp(previous.sub_(maximum))
                total.mul_(rescale).add_(p.sum(-1, keepdim=True))
                acc_o.mul_(rescale).baddbmm_(p, v)
        if acc_o is None:
            acc_o = q.new_zeros((*q.shape[:2], self.v.shape[-1]))
            total, maximum = q.new_zeros((*q.shape[:2], 1)), q.new_full((*q.shape[:2], 1), lowest)
        if sinks and self.problem.sinks_dtype is not None:
            return self.shifts.with_sinks(acc_o, total, maximum, len(queries))
        # The largest score adds exactly 1, so total is at least 1, or 0 without visible keys.
        return acc_o.div_(total.clamp(min=1.0)), total.log_().add_(maximum)

    def differentiate(
        self, dout: Tensor, lse: Tensor, delta: Tensor, dbias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute dq, dk and dv, heads first, and write dbias. lse is +inf where a row sees no
        key."""
        problem = self.problem
        dq = self.q.new_zeros((dout.shape[0], self.seqlen_q, problem.head_dim))
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        # The dS of a masked key is 0, but 0 * NaN is NaN, so k must be finite.
        finite_k = self.k.nan_to_num(0.0, 0.0, 0.0) if problem.masked else self.k
        for queries in _blocks(range(self.seqlen_q), self.block_m):
            rows = [self.rows(x, queries) for x in (self.q, dout, lse, delta)]
            q, dout_rows, lse_rows, delta_rows = rows
            dq_rows = torch.zeros_like(q)
            for tile in self.tiles(queries, self.keys_of(queries)):
                keys = slice(tile.start, tile.stop)
                masked = not self.sees_all(queries, tile)
                p = self.scores(q, tile)
                slope = 1 - (p / self.unit).square_() if problem.score_scale.is_capped else None
                self.shifts.add(p, queries, tile, self.diagonal)
                _exp(p.sub_(lse_rows))
                ds = torch.bmm(dout_rows, self.v[:, keys].transpose(1, 2))
                ds.sub_(delta_rows).mul_(p)
                if masked:
                    self.clear(p, queries, tile)
                    self.clear(ds, queries, tile)
                if dbias is not None:
                    self.shifts.write_dbias(dbias, ds, queries, tile)
                if slope is not None:
                    if masked:
                        self.clear(slope, queries, tile)
                    ds.mul_(slope)
                dv[:, keys].baddbmm_(p.transpose(1, 2), dout_rows)
                dq_rows.baddbmm_(ds, finite_k[:, keys])
                dk[:, keys].baddbmm_(ds.transpose(1, 2), q)
            self.put(dq_rows, queries, dq)
        return dq.mul_(problem.score_scale.softmax_scale), dk.mul_(self.unit), dv


def _blocks(span: range, size: int) -> list[range]:
    return [span[start : start + size] for start in range(0, len(span), max(1, size))]


def _exp(x: Tensor) -> Tensor:
    """Compute exp in place. On a CPU exp2 takes a third of exp's time, far less where x is -inf."""
    return x.mul_(_LOG2_E).exp2_()


def _combine(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine the out and lse of parts of the keys exactly, by lse."""
    if len(parts) == 1:
        return parts[0]
    lse = functools.reduce(torch.logaddexp, (part for _, part in parts))
    # -inf minus a finite number is -inf, so a part without keys has weight 0.
    limits = torch.finfo(lse.dtype)
    finite = lse.clamp(limits.min, limits.max)
    return sum(out * _exp(part.clamp(max=limits.max) - finite) for out, part in parts), lse


BACKEND = ReferenceBackend()
