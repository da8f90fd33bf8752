"""What happens to the scores of a bucket besides scale and cap: slopes, bias and sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...call.operands import Tensors
from .padded_layout import PaddedLayout


class ScoreShifts:
    """The tensors that change the scores of a bucket. Tiles of scores, and what has one value for
    each row, come as (batch * num_heads_kv, qhead_per_kvhead * queries, ·).

    sinks: (num_heads_q,), slopes: (batch or 1, num_heads_q), in the dtype of the scores; bias as in
        ``Tensors``. None where the call has none.
    """

    def __init__(self, tensors: Tensors, queries: PaddedLayout, dtype: torch.dtype) -> None:
        self.queries, self.dtype, self.bias = queries, dtype, tensors.bias
        self.sinks = None if tensors.sinks is None else tensors.sinks.to(dtype)
        self.slopes = slopes = tensors.alibi_slopes
        if slopes is not None:
            rows = slopes[None] if slopes.ndim == 1 else slopes[queries.batch_indices]
            self.slopes = rows.to(dtype)

    def add(self, scores: Tensor, queries: range, keys: range, diagonal: int) -> None:
        """Add the bias and subtract slope * distance, in place."""
        if self.slopes is None and self.bias is None:
            return
        tiles = self._by_head(scores, len(queries))
        if self.slopes is not None:
            here = torch.arange(queries.start, queries.stop, device=scores.device) + diagonal
            there = torch.arange(keys.start, keys.stop, device=scores.device)
            distance = (here.unsqueeze(1) - there).abs().to(self.dtype)
            tiles.sub_(self.slopes[:, :, None, None] * distance)
        if self.bias is not None:
            tiles.add_(self._part(self.bias, queries, keys))

    def raise_max_logit(self, max_logit: Tensor, highest: Tensor, queries: range) -> None:
        """max_logit: (num_heads_q,), raised in place to the largest scores, those of each row."""
        rows = self._by_head(highest, len(queries)).squeeze(-1)
        if self.queries.first is not None:
            position = torch.arange(queries.start, queries.stop, device=highest.device)
            is_padding = position < self.queries.first.unsqueeze(1)
            rows = rows.masked_fill(is_padding.unsqueeze(1), -math.inf)
        max_logit.copy_(torch.maximum(max_logit, rows.amax((0, 2))))

    def with_sinks(
        self, acc_o: Tensor, total: Tensor, maximum: Tensor, num_queries: int
    ) -> tuple[Tensor, Tensor]:
        """out and lse of rows, in which the sink is one more score without a value.

        total: the row sums relative to maximum, which is finite.
        """
        sinks = self.sinks.view(-1, 1, 1).expand(-1, num_queries, 1)
        sinks = sinks.expand(self.queries.batch, -1, -1, -1).reshape(maximum.shape)
        limits = torch.finfo(self.dtype)
        highest = torch.maximum(maximum, sinks).clamp_(limits.min, limits.max)
        rescale = (maximum - highest).exp_()
        total = total * rescale + (sinks.clamp(max=limits.max) - highest).exp_()
        out = acc_o.mul_(rescale).div_(torch.where(total == 0, 1.0, total))
        return out, (total.log_() + highest).masked_fill_(sinks == math.inf, math.inf)

    def add_to_dsinks(self, dsinks: Tensor, lse: Tensor, delta: Tensor) -> None:
        """lse, delta: (batch * num_heads_q, seqlen_q, 1); delta without the gradient of lse."""
        lse, delta = (x.view(self.queries.batch, -1, x.shape[1]) for x in (lse, delta))
        weight = (self.sinks.unsqueeze(1) - lse).exp_()
        of_rows = torch.where(lse.isinf(), 0.0, weight * delta)
        dsinks.sub_(of_rows.sum((0, 2)))

    def write_dbias(self, dbias: Tensor, ds: Tensor, queries: range, keys: range) -> None:
        """Sum the gradient of a tile of scores over the axes that the bias does not have."""
        shared = [axis for axis in (0, 1) if dbias.shape[axis] == 1]
        tiles = self._by_head(ds, len(queries))
        found = tiles.sum(shared, keepdim=True) if shared else tiles
        self._part(dbias, queries, keys).copy_(found)

    def _by_head(self, rows: Tensor, num_queries: int) -> Tensor:
        """(batch, num_heads_q, queries, ·), a view."""
        return rows.view(self.queries.batch, -1, num_queries, rows.shape[-1])

    @staticmethod
    def _part(bias: Tensor, queries: range, keys: range) -> Tensor:
        return bias[:, :, queries.start : queries.stop, keys.start : keys.stop]
