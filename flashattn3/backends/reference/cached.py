"""Cached calls in torch operations, on any device: pages are gathered, scores written out.

No value is read on the host unless it lies there, so a GPU computes every sequence up to the
cache's capacity. Rows whose metadata or page numbers are wrong become NaN, as in every backend.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...call.cache_descales import OF_KEYS, PAGES, kind_of
from ...call.cached import new_out
from ...call.dtypes import FP8
from ...call.scheduler_metadata import HEADER, PER_SEQUENCE, make_metadata
from .cache_layout import cached_tokens, capacity_of, movable, of_sequence, wide_dtype
from .cached_append import append
from .spans import attend_spans, tokens_at_once
from .visibility import hidden_by_tree, hidden_keys

if TYPE_CHECKING:
    from ...call.cached import AppendTensors, CacheProblem, DecodeProblem, DecodeTensors, Lengths

_MAX_SCORES = 2**26  # alive at once


class ReferenceCachedCall(NamedTuple):
    """See ``CachedLaunch``."""

    problem: CacheProblem
    needs_lse = True
    keep = None
    rows_after_prefix = 0

    def describe(self) -> dict[str, object]:
        return {"computes in": wide_dtype(self.problem.dtype)}

    def describe_sizes(
        self, batch: int, total_q: int, seqlen_q: int, capacity: int
    ) -> dict[str, object]:
        return {}

    def decode(
        self,
        out: Tensor | None,
        lse: Tensor,
        tensors: DecodeTensors,
        lengths: Lengths,
        options_hash: int,
    ) -> Tensor:
        out = new_out(tensors, self.problem.out_dtype) if out is None else out
        with torch.autocast(out.device.type, enabled=False), _writing_to(out):
            _decode(self.problem, out, lse, tensors, lengths, options_hash)
        return out

    def append(self, tensors: AppendTensors, lengths: Lengths) -> None:
        written = *tensors[2:4], tensors.q_out, *tensors[-2:]
        with torch.autocast(tensors.k.device.type, enabled=False), _writing_to(*written):
            append(self.problem, tensors, lengths)

    def combine(self, out: Tensor, lse: Tensor, out_partial: Tensor, lse_partial: Tensor) -> None:
        wide = out_partial.to(wide_dtype(out_partial.dtype))
        total = torch.logsumexp(lse_partial, 0)
        weights = torch.exp(lse_partial - _finite(total)).unsqueeze(-1)
        # A part without keys has weight 0, whatever its rows hold.
        joined = torch.where(weights == 0, 0.0, wide * weights).sum(0)
        with _writing_to(out):
            out.copy_(joined)
        lse.copy_(total)


def _writing_to(*tensors: Tensor | None) -> AbstractContextManager:
    """What torch's operations need to write to tensors that were made in inference mode, as the
    kernels of other backends can anywhere."""
    of_inference = any(x is not None and x.is_inference() for x in tensors)
    return torch.inference_mode() if of_inference else nullcontext()


def _finite(x: Tensor) -> Tensor:
    """0 for -inf: what exponents of a row without keys are relative to."""
    return torch.where(x == -math.inf, 0.0, x)


def _new(tensors, lengths: Lengths, cached: Tensor) -> Tensor:
    edges = tensors.cu_seqlens_k_new
    if edges is None:
        return torch.full_like(cached, lengths.seqlen_new)
    return edges.long().diff().clamp(min=0)


def _spans(cu_seqlens: Tensor | None, batch: int, seqlen: int, total: int, device):
    """First row and length of each sequence; cut, so that wrong edges stay inside."""
    if cu_seqlens is None:
        begins = torch.arange(batch, device=device) * seqlen
        return begins, torch.full_like(begins, seqlen)
    edges = cu_seqlens.long().clamp(0, total)
    return edges[:-1], edges.diff().clamp(min=0)


class _Keys(NamedTuple):
    """Keys of one sequence, (keys, heads, ·), at least float32, 0 where no query sees them; times
    their descales, unless these are of the sequence.

    lost: (keys,), within the length, but of a page that does not exist.
    """

    k: Tensor
    v: Tensor
    lost: Tensor


def _gather(
    tensors: DecodeTensors, row: Tensor, row_exists: Tensor, lowest: Tensor, length: Tensor
) -> _Keys:
    table, caches = tensors.page_table, (tensors.k_cache, tensors.v_cache)
    bound = capacity_of(caches[0], table)
    if length.device.type == "cpu":
        bound = int(length)
    position = torch.arange(bound, device=length.device)
    seen = (position >= lowest) & (position < length)
    inside = seen & row_exists
    if table is None:
        page, token, exists = row.expand(bound), position, inside
    else:
        num_pages, page_size = caches[0].shape[:2]
        page = table[row][position // page_size].long()
        exists = inside & (page >= 0) & (page < num_pages)
        page, token = torch.where(exists, page, 0), position % page_size
    rows = []
    for cache, descale in zip(caches, (tensors.k_descale, tensors.v_descale), strict=True):
        kind, wide = kind_of(descale, cache), wide_dtype(cache.dtype)
        if 0 in cache.shape[:2]:  # no page exists
            rows.append(cache.new_zeros((bound, *cache.shape[2:]), dtype=wide))
            continue
        found = movable(cache)[page, token].view(cache.dtype).to(wide)
        if kind in OF_KEYS:
            found = found * descale[page, 0 if kind == PAGES else token].to(wide).unsqueeze(-1)
        rows.append(torch.where(exists[:, None, None], found, 0.0))
    return _Keys(*rows, seen & ~exists)


def _decode(
    problem: DecodeProblem,
    out: Tensor,
    lse: Tensor,
    tensors: DecodeTensors,
    lengths: Lengths,
    options_hash: int,
) -> None:
    q, edges = tensors.q, tensors.cu_seqlens_q
    device, capacity = q.device, capacity_of(tensors.k_cache, tensors.page_table)
    batch = q.shape[0] if edges is None else edges.shape[0] - 1
    total_q = q.shape[-3] * (1 if edges is not None else batch)
    longest = lengths.max_seqlen_q
    seqlen_q = q.shape[-3] if longest is None else min(longest, q.shape[-3])
    begins, seqlens_q = _spans(edges, batch, seqlen_q, total_q, device)
    cached = cached_tokens(tensors, lengths, batch, capacity)
    totals = (cached + _new(tensors, lengths, cached)).clamp(max=capacity)
    fits = _metadata_fits(tensors, lengths, options_hash, batch, seqlen_q, device)
    num_caches = (tensors.k_cache if tensors.page_table is None else tensors.page_table).shape[0]
    # One more row takes what lies past a sequence's end.
    shape = (total_q + 1, problem.num_heads_q)
    flat = q.new_zeros((*shape, problem.head_dim_v), dtype=out.dtype)
    flat_lse = lse.new_full(shape, -math.inf)
    rows = q.reshape(-1, *q.shape[-2:]).to(wide_dtype(q.dtype) if q.dtype == FP8 else q.dtype)
    tree = tensors.tree_mask
    if tree is not None:
        tree = tree.flatten(0, -2)
    for index in range(batch):
        row = torch.tensor(index, device=device)
        if tensors.cache_batch_idx is not None:
            row = tensors.cache_batch_idx[index].long()
        row_exists = (row >= 0) & (row < num_caches)
        row = torch.where(row_exists, row, 0)
        lowest = torch.zeros_like(row)
        if problem.window_left >= 0:
            lowest = totals[index] - seqlens_q[index] - problem.window_left
        if tensors.cache_leftpad is not None:
            lowest = torch.maximum(lowest, tensors.cache_leftpad[index])
        keys = _gather(tensors, row, row_exists, lowest, totals[index])
        bound = int(seqlens_q[index]) if device.type == "cpu" else seqlen_q
        chunk = max(1, _MAX_SCORES // max(1, problem.num_heads_q * keys.k.shape[0]))
        if problem.split_tokens:
            chunk = tokens_at_once(problem)
        for first in range(0, bound, chunk):
            token = torch.arange(first, min(first + chunk, bound), device=device)
            place = torch.where(token < seqlens_q[index], begins[index] + token, total_q)
            some = rows[place.clamp(max=max(0, total_q - 1))]
            diagonal = totals[index] - seqlens_q[index]
            of_sequence = keys, index, totals[index], token + diagonal, fits[index]
            words = None if tree is None else tree[place.clamp(max=max(0, total_q - 1))]
            found = _rows(problem, tensors, some, *of_sequence, words, diagonal)
            flat[place], flat_lse[place] = found[0].to(out.dtype), found[1].to(lse.dtype)
    out.copy_(flat[:-1].view(out.shape))
    flat_lse = flat_lse[:-1]
    if edges is None:
        flat_lse = flat_lse.view(batch, seqlen_q, problem.num_heads_q)
    lse.copy_(flat_lse.transpose(-1, -2))


def _metadata_fits(
    tensors: DecodeTensors, lengths: Lengths, options_hash: int, batch: int, seqlen_q: int, device
) -> Tensor:
    """Whether the scheduler metadata is that of the call, for each sequence."""
    found = tensors.scheduler_metadata
    if found is None:
        return torch.ones(batch, dtype=torch.bool, device=device)
    seqlen = tensors.cache_seqlens
    if seqlen is None:
        capacity = capacity_of(tensors.k_cache, tensors.page_table)
        seqlen = capacity if lengths.seqlen is None else lengths.seqlen
    wanted = make_metadata(
        batch,
        options_hash,
        seqlen,
        lengths.seqlen_new,
        tensors.cu_seqlens_k_new,
        seqlen_q,
        tensors.cu_seqlens_q,
        tensors.cache_leftpad,
        device,
    )
    same = (found == wanted)[HEADER:].view(batch, PER_SEQUENCE)
    same[:, 1] |= wanted[HEADER:].view(batch, PER_SEQUENCE)[:, 1] == 0  # without new tokens
    return same.all(1) & (found == wanted)[:HEADER].all()


def _rows(
    problem: DecodeProblem,
    tensors: DecodeTensors,
    q: Tensor,
    keys: _Keys,
    index: int,
    length: Tensor,
    positions: Tensor,
    fits: Tensor,
    tree: Tensor | None,
    diagonal: Tensor,
) -> tuple[Tensor, Tensor]:
    """out (tokens, heads, dv) and lse (tokens, heads) of some queries of one sequence.

    length: keys of the sequence. positions: of the queries, in keys. tree: their words.
    diagonal: the key of the first new token.
    """
    wide, heads_kv = wide_dtype(q.dtype), problem.num_heads_kv
    q = q.to(wide).unflatten(1, (heads_kv, -1)).permute(1, 2, 0, 3)  # heads_kv, group, tokens, d
    k, v = keys.k.transpose(0, 1), keys.v.transpose(0, 1)
    scale = problem.score_scale
    leftpad = None if tensors.cache_leftpad is None else tensors.cache_leftpad[index]
    slopes = tensors.alibi_slopes
    if slopes is not None:
        slopes = (slopes if slopes.ndim == 1 else slopes[index]).to(wide).view(heads_kv, -1, 1, 1)

    def shown(scores: Tensor, first_key: int) -> Tensor:
        for descale, kind in ((tensors.q_descale, None), (tensors.k_descale, problem.k_descale)):
            if descale is not None and kind not in OF_KEYS:
                scores = scores * of_sequence(descale, index).to(wide)[:, None, None, None]
        if scale.is_capped:
            scores = scale.unit * torch.tanh(scores / scale.unit)
        position = torch.arange(first_key, first_key + scores.shape[-1], device=q.device)
        if slopes is not None:
            scores = scores - slopes * (positions[:, None] - position).abs()
        lost = keys.lost[first_key : first_key + scores.shape[-1]]
        lost = torch.nn.functional.pad(lost, (0, scores.shape[-1] - lost.shape[0]))
        scores = torch.where(lost, math.nan, scores)
        hidden = hidden_keys(problem, leftpad, positions, position) | (position >= length)
        if tree is not None:
            hidden |= hidden_by_tree(tree, position - diagonal)
        return scores.masked_fill(hidden, -math.inf)

    q = q * scale.softmax_scale
    sinks = tensors.sinks
    if sinks is not None:
        sinks = sinks.to(wide).view(heads_kv, -1, 1, 1)
    if problem.split_tokens:
        out, lse = attend_spans(q, k, v, shown, problem.split_tokens, sinks)
    else:
        scores = shown(torch.einsum("hgtd,hnd->hgtn", q, k), 0)
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        lse = torch.logsumexp(scores, -1)
        p = torch.exp(scores - _finite(lse).unsqueeze(-1))[..., : k.shape[1]]
        out = torch.einsum("hgtn,hnd->hgtd", p, v)
    out = out.permute(2, 0, 1, 3)
    if tensors.v_descale is not None and problem.v_descale not in OF_KEYS:
        out = out * of_sequence(tensors.v_descale, index).to(wide)[:, None, None]
    poison = torch.where(fits, 0.0, math.nan).to(wide)
    out, lse = out.flatten(1, 2) + poison, lse.permute(2, 0, 1).flatten(1, 2) + poison
    return out, lse
