"""Cached calls of the Triton backend: every kind of problem, on Hopper too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.cached import CombineProblem, DecodeProblem
from ...call.dtypes import FP8, SIXTEEN_BIT
from ..base import head_dim_reason, score_factor_reason
from ..device import on_device_of
from .cache_tiles import CacheTile
from .tile_configs import MAX_HEAD_DIM

if TYPE_CHECKING:
    from ...call.cached import AppendTensors, CacheProblem, DecodeTensors, Lengths

COMBINE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonCachedCall:
    """See ``CachedLaunch``. Triton is imported with the first launch."""

    needs_lse = False
    keep = None
    rows_after_prefix = 0

    def __init__(self, problem: CacheProblem, tile: CacheTile) -> None:
        self.problem, self.tile = problem, tile

    def describe(self) -> dict[str, object]:
        return self.tile.describe()

    def describe_sizes(
        self, batch: int, total_q: int, seqlen_q: int, capacity: int
    ) -> dict[str, object]:
        _, programs, slots = self.tile.grid(self.problem, batch, total_q, seqlen_q, capacity)
        workspace = self.tile.workspace_bytes(slots, self.problem.head_dim_v)
        return {"grid": (programs, 1, 1), "workspace_bytes": workspace}

    def decode(
        self,
        out: Tensor | None,
        lse: Tensor | None,
        tensors: DecodeTensors,
        lengths: Lengths,
        options_hash: int,
    ) -> Tensor:
        with on_device_of(tensors.q):
            return self._decode(out, lse, tensors, lengths, options_hash)

    def append(self, tensors: AppendTensors, lengths: Lengths) -> None:
        with on_device_of(tensors.k):
            self._append(tensors, lengths)

    def combine(self, out: Tensor, lse: Tensor, out_partial: Tensor, lse_partial: Tensor) -> None:
        with on_device_of(out):
            self._combine(out, lse, out_partial, lse_partial)

    @cached_property
    def _decode(self) -> Callable:
        from .cached_launch import prepare_decode

        return prepare_decode(self.problem, self.tile)

    @cached_property
    def _append(self) -> Callable:
        from .cached_launch import prepare_append

        return prepare_append(self.problem, self.tile)

    @cached_property
    def _combine(self) -> Callable:
        from .cached_launch import prepare_combine

        return prepare_combine(self.problem, self.tile)


def decline_reason(problem: CacheProblem) -> str | None:
    """Why no kernel takes the problem, or None."""
    combines = isinstance(problem, CombineProblem)
    legal = COMBINE_DTYPES if combines else SIXTEEN_BIT
    if isinstance(problem, DecodeProblem) and problem.dtype == FP8:
        legal = (*COMBINE_DTYPES, FP8)
    if problem.dtype not in legal:
        return f"takes {', '.join(map(str, legal))}, not {problem.dtype}"
    if problem.out_dtype not in legal:
        return f"writes {', '.join(map(str, legal))}, not {problem.out_dtype}"
    reason = None if combines else head_dim_reason(problem, MAX_HEAD_DIM)
    if reason is None and isinstance(problem, DecodeProblem):
        return score_factor_reason(problem, 100, torch.float32)
    return reason
