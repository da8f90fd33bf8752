"""The forward of few query rows, without a cache: the kernels of cached calls serve it as well.

They hold the query heads of a KV head in one tile, so each key is read once for all of them, and
cut the keys into parts unless the call has num_splits=1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.cached import DecodeProblem, DecodeTensors, Lengths, packed_rows
from ..call.dtypes import EIGHT_BIT, SIXTEEN_BIT
from ..call.operands import Tensors, lengths_of_k
from ..call.problem import Problem
from .results import result_shapes

FEW_ROWS = 64  # packed rows that one tile of the forward would have too
LONG_KEYS = 1024  # below, the forward's one launch may end sooner
VARLEN = frozenset(("cache_seqlens", "cache_leftpad", "cu_seqlens_q"))
VARLEN_SPANS = frozenset(("cache_seqlens", "page_table", "cu_seqlens_q"))


class Limits(NamedTuple):
    """Packed rows of a KV head: few, which gain by packing with any batch, and the most that
    pack_gqa=True packs; they are counted in 32 bits."""

    few: int
    most: int = 2**30 - 1


class Choice(NamedTuple):
    """Whether the kernels of cached calls run the forward, and why."""

    packs: bool
    reason: str


def choose(problem: Problem, limits: Limits, estimated: Choice) -> Choice:
    """estimated: that of a backend for calls that ask for nothing and have more rows or fewer keys
    than gain by packing at any rate."""
    rows, whole = packed_rows_of(problem), problem.num_splits == 1
    if problem.split_tokens:
        return Choice(True, f"split_tokens={problem.split_tokens}")
    if problem.dtype not in SIXTEEN_BIT:
        return Choice(False, f"packs query rows of 16 bits, not {problem.dtype}")
    if problem.q.has_seqused:
        return Choice(False, "packs no sequences with seqused_q")
    unpacked = [name for name in problem.score_options if name != "sinks"]
    if unpacked:
        return Choice(False, f"packs no calls with {unpacked[0]}")
    if problem.pack_gqa is False or (problem.pack_gqa and rows <= limits.most):
        return Choice(problem.pack_gqa, f"pack_gqa={problem.pack_gqa}")
    few = FEW_ROWS if whole else limits.few
    if rows <= few and problem.seqlen_k >= LONG_KEYS:
        return Choice(True, f"up to {few} packed query rows")
    return Choice(False, "num_splits=1") if whole else estimated


def spans_reason(problem: Problem) -> str | None:
    """Why split_tokens cannot keep its promise for a call without a cache, or None."""
    if problem.split_tokens is None:
        return None
    asked = f"split_tokens={problem.split_tokens}"
    if problem.dtype in EIGHT_BIT:
        return f"{asked}: a block of tokens shares a descale of its 8 bits"
    if problem.q.has_seqused:
        return f"{asked}: takes no sequences with seqused_q"
    others = [name for name in problem.score_options if name != "sinks"]
    return f"{asked}: takes no {others[0]}" if others else None


def packed_rows_of(problem: Problem) -> int:
    """Query rows of a KV head."""
    return problem.qhead_per_kvhead * problem.seqlen_q


def visible_keys(problem: Problem) -> int:
    """Keys that any query of a sequence may see."""
    if problem.window_left < 0:
        return problem.seqlen_k
    return min(problem.seqlen_k, problem.window_left + problem.seqlen_q)


def num_tiles(problem: Problem, tile_rows: int) -> int:
    """Work tiles of packed rows."""
    return problem.batch * problem.num_heads_kv * ceil(packed_rows_of(problem) / tile_rows)


def describe_splits(
    problem: Problem, num_splits: int, num_ctas: int, tile_rows: int
) -> dict[str, object]:
    """How many parts the work tiles of a packed forward have. num_splits: 0: equal shares of all
    work for each of num_ctas."""
    if problem.split_tokens:
        return {"num_splits": f"a part for every {problem.split_tokens} keys"}
    if num_splits > 0:
        return {"num_splits": num_splits}
    tiles = num_tiles(problem, tile_rows)
    parts = max(1, num_ctas // max(1, tiles))
    return {"num_splits": f"about {parts} of each work tile: {num_ctas} CTAs for {tiles}"}


def as_cached(problem: Problem) -> DecodeProblem:
    """The same attention as a problem of cached calls: its keys are a full dense cache."""
    names = (field.name for field in fields(DecodeProblem))
    common = {name: getattr(problem, name) for name in names if hasattr(problem, name)}
    given = frozenset() if problem.sinks_dtype is None else frozenset(("sinks",))
    if problem.varlen:
        given |= VARLEN_SPANS if problem.split_tokens else VARLEN
    common |= {
        "cache_dtype": problem.dtype,
        "k_descale": None,
        "v_descale": None,
        "page_size": int(problem.varlen and problem.split_tokens is not None),
        "rows": packed_rows(packed_rows_of(problem)),
        "cached_tokens": 0,
        "given": given,
        "tree_words": 0,
        "sinks_dtype": problem.sinks_dtype,
        "misaligned": frozenset(),
        "expanded": frozenset(),
    }
    return DecodeProblem(**common)


def prepare_packed(problem: Problem, decode: Callable) -> Callable:
    """Build a function of the tensors that returns (out, lse). decode: of the cached problem."""
    _, lse_shape = result_shapes(problem)
    cached = _varlen_as_cached if problem.varlen else _dense_as_cached
    if problem.varlen and problem.split_tokens:
        cached = partial(_varlen_as_pages, problem.seqlen_k)
    lengths = Lengths(max_seqlen_q=problem.seqlen_q if problem.varlen else None)

    wide = torch.promote_types(problem.out_dtype, torch.float32)

    def run(tensors: Tensors) -> tuple[Tensor, Tensor]:
        lse = tensors.q.new_empty(lse_shape, dtype=wide)
        return decode(None, lse, cached(tensors), lengths, 0), lse

    return run


def _dense_as_cached(tensors: Tensors) -> DecodeTensors:
    return DecodeTensors(*tensors[:3], sinks=tensors.sinks)


def _key_lengths(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """First key of each sequence and the end of its keys."""
    edges, used = lengths_of_k(tensors)
    begins, ends = edges[:-1], edges[1:]
    return begins, ends if used is None else torch.minimum(begins + used, ends)


def _varlen_as_cached(tensors: Tensors) -> DecodeTensors:
    """Every sequence has the same cache, k and v as they are, and hides the keys before its own."""
    begins, ends = _key_lengths(tensors)
    caches = (x.unsqueeze(0).expand(len(begins), *x.shape) for x in (tensors.k, tensors.v))
    return DecodeTensors(
        tensors.q, *caches, ends, cache_leftpad=begins, cu_seqlens_q=tensors.cu_seqlens_q,
        sinks=tensors.sinks,
    )  # fmt: skip


def _varlen_as_pages(seqlen_k: int, tensors: Tensors) -> DecodeTensors:
    """Every token is a page: the keys of a sequence are counted from its own first one."""
    begins, ends = _key_lengths(tensors)
    tokens = torch.arange(seqlen_k, dtype=torch.int32, device=begins.device)
    table = begins.unsqueeze(1) + tokens
    pages = (x.unsqueeze(1) for x in (tensors.k, tensors.v))
    return DecodeTensors(
        tensors.q, *pages, ends - begins, table, cu_seqlens_q=tensors.cu_seqlens_q,
        sinks=tensors.sinks,
    )  # fmt: skip
