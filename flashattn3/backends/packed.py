"""The forward of few query rows, without a cache: the kernels of cached calls serve it as well.

They hold the query heads of a KV head in one tile, so each key is read once for all of them, and
cut the keys into parts unless the call has num_splits=1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.dtypes import SIXTEEN_BIT
from ..call.inputs import Tensors
from ..call.problem import Problem
from ..dispatch.device import DeviceInfo
from ..kvcache.problem import DecodeProblem, DecodeTensors, Lengths, packed_rows
from .results import result_shapes

FEW_ROWS = 64  # packed rows that one tile of the forward would have too
LONG_KEYS = 1024  # below, the forward's one launch ends sooner
VARLEN = frozenset(("cache_seqlens", "cache_leftpad", "cu_seqlens_q"))


class Grid(NamedTuple):
    """The grid of a backend's forward for a problem: num_ctas work tiles of block_m query rows."""

    num_ctas: int
    block_m: int


class PackedKernel(NamedTuple):
    """What the kernels of cached calls of a backend do with packed rows.

    tile_rows: of a work tile, each of which reads all keys of its KV head.
    slowness: time of a row on all SMs over that of the forward, also on all SMs.
    max_rows: that it takes of a KV head.
    """

    tile_rows: int
    slowness: float
    max_rows: int = 2**30 - 1  # packed rows are counted in 32 bits


class Choice(NamedTuple):
    """Whether the kernels of cached calls run the forward, and why."""

    packs: bool
    reason: str


def choose(problem: Problem, device: DeviceInfo, forward: Grid, kernel: PackedKernel) -> Choice:
    """Choose by the work tiles and SMs. forward: unsplit, a CTA for each work tile."""
    unfit = _unfit_reason(problem, kernel)
    if unfit is not None:
        return Choice(False, unfit)
    if problem.pack_gqa is not None:
        return Choice(problem.pack_gqa, f"pack_gqa={problem.pack_gqa}")
    if problem.seqlen_k < LONG_KEYS:
        return Choice(False, f"fewer than {LONG_KEYS} keys")
    rows = problem.qhead_per_kvhead * problem.seqlen_q
    if rows <= FEW_ROWS:
        return Choice(True, f"up to {FEW_ROWS} packed query rows")
    if problem.num_splits == 1:
        return Choice(False, f"num_splits=1, and over {FEW_ROWS} packed query rows")
    ctas = f"{forward.num_ctas} CTAs of {forward.block_m} query rows for {device.num_sms} SMs"
    return Choice(_is_faster(problem, device, forward, kernel), ctas)


def _unfit_reason(problem: Problem, kernel: PackedKernel) -> str | None:
    """Why the kernels of cached calls cannot compute the problem, or None."""
    if problem.dtype not in SIXTEEN_BIT:
        return f"packs query rows of 16 bits, not {problem.dtype}"
    if problem.q.has_seqused:
        return "packs no sequences with seqused_q"
    if problem.qhead_per_kvhead * problem.seqlen_q > kernel.max_rows:
        return f"packs up to {kernel.max_rows} query rows of a KV head"
    return None


def _is_faster(problem: Problem, device: DeviceInfo, forward: Grid, kernel: PackedKernel) -> bool:
    """Whether equal shares of all SMs take less time than a CTA of the forward, which is alone on
    its SM while others have none: both read all keys for each of their rows."""
    if forward.num_ctas >= device.num_sms:
        return False
    tiles = num_tiles(problem, kernel.tile_rows)
    return kernel.slowness * tiles * kernel.tile_rows < device.num_sms * forward.block_m


def num_tiles(problem: Problem, tile_rows: int) -> int:
    """Work tiles of packed rows."""
    rows = problem.qhead_per_kvhead * problem.seqlen_q
    return problem.batch * problem.num_heads_kv * ceil(rows / tile_rows)


def describe_splits(problem: Problem, num_ctas: int, tile_rows: int) -> dict[str, object]:
    """How many parts the work tiles of a packed forward have. num_ctas: of its launch."""
    if problem.num_splits > 0:
        return {"num_splits": problem.num_splits}
    tiles = num_tiles(problem, tile_rows)
    parts = max(1, num_ctas // max(1, tiles))
    return {"num_splits": f"about {parts} of each work tile: {num_ctas} CTAs for {tiles}"}


def as_cached(problem: Problem) -> DecodeProblem:
    """The same attention as a problem of cached calls: its keys are a full dense cache."""
    names = (field.name for field in fields(DecodeProblem))
    common = {name: getattr(problem, name) for name in names if hasattr(problem, name)}
    common |= {
        "page_size": 0,
        "rows": packed_rows(problem.qhead_per_kvhead * problem.seqlen_q),
        "given": VARLEN if problem.varlen else frozenset(),
        "sinks_dtype": None,
        "misaligned": frozenset(),
        "expanded": frozenset(),
    }
    return DecodeProblem(**common)


def prepare_packed(problem: Problem, decode: Callable) -> Callable:
    """Build a function of the tensors that returns (out, lse). decode: of the cached problem."""
    _, lse_shape = result_shapes(problem)
    cached = _varlen_as_cached if problem.varlen else _dense_as_cached
    lengths = Lengths(max_seqlen_q=problem.seqlen_q if problem.varlen else None)

    def run(tensors: Tensors) -> tuple[Tensor, Tensor]:
        lse = tensors.q.new_empty(lse_shape, dtype=torch.float32)
        return decode(None, lse, cached(tensors), lengths, 0), lse

    return run


def _dense_as_cached(tensors: Tensors) -> DecodeTensors:
    return DecodeTensors(*tensors[:3])


def _varlen_as_cached(tensors: Tensors) -> DecodeTensors:
    """Every sequence has the same cache, k and v as they are, and hides the keys before its own."""
    edges, used = tensors.lengths_k
    begins, ends = edges[:-1], edges[1:]
    if used is not None:
        ends = torch.minimum(begins + used, ends)
    caches = (x.unsqueeze(0).expand(len(begins), *x.shape) for x in (tensors.k, tensors.v))
    return DecodeTensors(
        tensors.q, *caches, ends, cache_leftpad=begins, cu_seqlens_q=tensors.cu_seqlens_q
    )
