"""Attention over sequences that are computed together, tile by tile: the online softmax of Milakov
& Gimelshein (2018, arXiv 1805.02867), and its gradients."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.operands import Scaled, Tensors, data_of
from .buckets import Bucket, ReferenceConfig, is_capturing
from .mask_tiles import MaskTiles
from .score_shifts import ScoreShifts

if TYPE_CHECKING:
    from ...call.descales import Descales
    from ...call.problem import Problem
    from .padded_layout import PaddedLayout

_LOG2_E = math.log2(math.e)


def compute_dtype(problem: Problem) -> torch.dtype:
    return torch.promote_types(problem.out_dtype, torch.float32)  # torch cannot promote FP8


class TiledCall:
    """Attention over one bucket: its inputs with heads first, and its mask.

    q: (batch * num_heads_kv, qhead_per_kvhead, seqlen_q, head_dim) in ``dtype``, at least float32,
        scaled so that q kᵀ is the score divided by ``unit``, before tanh where scores are capped.
    k, v: (batch * num_heads_kv, seqlen_k, ·).
    diagonal: index of the key that query 0 is aligned with.
    shifts: what the slopes and the bias add to scores.
    """

    def __init__(
        self, problem: Problem, config: ReferenceConfig, tensors: Tensors, bucket: Bucket
    ) -> None:
        self.problem = problem
        self.bucket = bucket
        self.dtype = compute_dtype(problem)
        self.seqlen_q, self.seqlen_k = bucket.queries.seqlen, bucket.keys.seqlen
        self.block_m = config.queries(bucket.queries.batch * problem.num_heads_q)
        self.block_n = config.block_n
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
            self.mask = MaskTiles(problem, tensors, reads=not is_capturing(problem.device))

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


def _column(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen) viewed as (batch, seqlen, heads, 1); varlen without batch."""
    return lse.transpose(-1, -2).unsqueeze(-1)
