"""New keys and values into a cache in torch operations, rotated and in 8 bits where asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.cache_descales import HEADS, kind_of
from ...call.dtypes import EIGHT_BIT
from ...call.eight_bits import rounded, with_descale
from .cache_layout import cached_tokens, capacity_of, movable, of_sequence, wide_dtype
from .rotary import rotated

if TYPE_CHECKING:
    from ...call.cached import AppendProblem, AppendTensors, Lengths


def append(problem: AppendProblem, tensors: AppendTensors, lengths: Lengths) -> None:
    k, edges = tensors.k, tensors.cu_seqlens_k_new
    batch = k.shape[0] if edges is None else edges.shape[0] - 1
    capacity = capacity_of(tensors.k_cache, tensors.page_table)
    if batch == 0:  # rows of no sequence are not rotated
        if tensors.q is not None:
            tensors.q_out.copy_(tensors.q)
        return
    cached = cached_tokens(tensors, lengths, batch, capacity)
    if tensors.q is not None:
        sequence, token, exists = _tokens_of(tensors.q, tensors.cu_seqlens_q, batch)
        offset = 0 if problem.one_q_position else token
        turned = _rotate(problem, tensors, tensors.q, sequence, offset, cached)
        kept = tensors.q.reshape(turned.shape)
        turned = torch.where(exists[:, None, None], turned, kept)
        tensors.q_out.copy_(turned.view(tensors.q.shape))
    sequence, token, exists = _tokens_of(k, edges, batch)
    if 0 in (sequence.numel(), *tensors.k_cache.shape[:2]):
        return
    place, exists = _places(tensors, sequence, cached[sequence] + token, exists, capacity)
    k = _rotate(problem, tensors, k, sequence, token, cached)
    v = tensors.v.reshape(-1, *tensors.v.shape[-2:]).to(wide_dtype(k.dtype))
    for x, name in ((k.to(v.dtype), "k"), (v, "v")):
        fields = f"{name}_cache", f"{name}_descale", f"{name}_descale_out"
        cache, given, written = (getattr(tensors, field) for field in fields)
        if given is not None:
            of_heads = kind_of(given, cache) == HEADS
            given = of_sequence(given, sequence) if of_heads else given[place[0], 0]
            x = x / given.to(x.dtype).unsqueeze(-1)
        if written is not None:
            x, descale = with_descale(x, cache.dtype)
            _write(written, descale, place, exists)
        stored = rounded(x, cache.dtype) if cache.dtype in EIGHT_BIT else x.to(cache.dtype)
        _write(movable(cache), movable(stored), place, exists)


def _tokens_of(x: Tensor, edges: Tensor | None, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence of each row of x, the index in it, and whether a sequence has the row."""
    total = math.prod(x.shape[:-2])
    row = torch.arange(total, device=x.device)
    if edges is None:
        seqlen = max(1, x.shape[1])
        return row // seqlen, row % seqlen, torch.ones_like(row, dtype=torch.bool)
    edges = edges.long()
    sequence = torch.searchsorted(edges, row, right=True) - 1
    exists = (sequence >= 0) & (sequence < batch)
    sequence = sequence.clamp(0, max(0, batch - 1))
    return sequence, row - edges[sequence], exists


def _rotate(problem, tensors: AppendTensors, x: Tensor, sequence, offset, cached: Tensor) -> Tensor:
    """x as (rows, heads, dim), rotated to its positions where there are tables."""
    x = x.reshape(-1, *x.shape[-2:])
    if tensors.rotary_cos is None or x.shape[0] == 0:
        return x
    given = tensors.rotary_seqlens
    position = (cached if given is None else given.long())[sequence] + offset
    return rotated(x, tensors.rotary_cos, tensors.rotary_sin, position, problem.rotary_interleaved)


def _places(
    tensors: AppendTensors, sequence: Tensor, position: Tensor, exists: Tensor, capacity: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where each token goes, (page or cache, token), and whether such a place exists."""
    table = tensors.page_table
    num_rows = (tensors.k_cache if table is None else table).shape[0]
    row = sequence
    if tensors.cache_batch_idx is not None:
        row = tensors.cache_batch_idx[sequence].long()
    exists = exists & (position < capacity) & (row >= 0) & (row < num_rows)
    row, position = torch.where(exists, row, 0), torch.where(exists, position, 0)
    if table is None:
        return (row, position), exists
    num_pages, page_size = tensors.k_cache.shape[:2]
    if capacity == 0:
        return (row, position), exists
    page = table[row, position // page_size].long()
    exists = exists & (page >= 0) & (page < num_pages)
    return (torch.where(exists, page, 0), position % page_size), exists


def _write(cache: Tensor, values: Tensor, place: tuple[Tensor, Tensor], exists: Tensor) -> None:
    """cache[place] = values where exists, without reading exists on the host.

    Rows that do not exist write what the first existing row writes, to the same place; if there is
    none, all write back what the cache's first place holds.
    """
    first = exists.long().argmax()
    some = exists.any()
    page, token = (torch.where(exists, x, torch.where(some, x[first], 0)) for x in place)
    exists = exists.view(-1, *(1,) * (values.ndim - 1))
    spare = torch.where(some, values[first], cache[0, 0])
    cache.index_put_((page, token), torch.where(exists, values, spare))
