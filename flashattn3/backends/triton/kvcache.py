"""The Triton backend of cached calls, for every GPU from compute capability 8.0, Hopper too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.cached import CombineProblem, DecodeProblem
from ...call.dtypes import SIXTEEN_BIT
from ..base import head_dim_reason, score_factor_reason
from ..device import DeviceInfo
from .backend import BACKEND as FORWARD
from .cache_tiles import CacheTile, select_tile
from .tile_configs import MAX_HEAD_DIM

if TYPE_CHECKING:
    from ...call.cached import AppendTensors, CacheProblem, DecodeTensors, Lengths

COMBINE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonCachedCall:
    """The launches of one problem, prepared once. Triton is imported with the first.

    needs_lse: whether a call that does not return lse needs its memory all the same.
    """

    needs_lse = True

    def __init__(self, problem: CacheProblem, tile: CacheTile) -> None:
        self.problem, self.tile = problem, tile

    def describe(self) -> dict[str, object]:
        return self.tile.describe()

    def describe_sizes(
        self, batch: int, total_q: int, seqlen_q: int, capacity: int
    ) -> dict[str, object]:
        """The grid and the workspace of a call of the problem, at any lengths of its cache."""
        _, programs, slots = self.tile.grid(self.problem, batch, total_q, seqlen_q)
        workspace = self.tile.workspace_bytes(slots, self.problem.head_dim_v)
        return {"grid": (programs, 1, 1), "workspace_bytes": workspace}

    def decode(
        self,
        out: Tensor | None,
        lse: Tensor,
        tensors: DecodeTensors,
        lengths: Lengths,
        options_hash: int,
    ) -> Tensor:
        with _current(tensors.q):
            return self._decode(out, lse, tensors, lengths, options_hash)

    def planned(self, seqlen_q: int) -> None:
        """Every call is checked in Python."""

    def append(self, tensors: AppendTensors, lengths: Lengths) -> None:
        with _current(tensors.k):
            self._append(tensors, lengths)

    def combine(self, out: Tensor, lse: Tensor, out_partial: Tensor, lse_partial: Tensor) -> None:
        with _current(out):
            self._combine(out, lse, out_partial, lse_partial)

    @cached_property
    def _decode(self) -> Callable:
        from .kvcache_launch import prepare_decode

        return prepare_decode(self.problem, self.tile)

    @cached_property
    def _append(self) -> Callable:
        from .kvcache_launch import prepare_append

        return prepare_append(self.problem, self.tile)

    @cached_property
    def _combine(self) -> Callable:
        from .kvcache_launch import prepare_combine

        return prepare_combine(self.problem, self.tile)


class TritonCacheBackend:
    """Takes every problem of cached calls: decode, append, combine."""

    name = "triton"

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        return FORWARD.unavailable_reason(device)

    def unused_hints(self, problem: CacheProblem, device: DeviceInfo) -> dict[str, str]:
        return {}

    def decline_reason(self, problem: CacheProblem, device: DeviceInfo) -> str | None:
        legal = COMBINE_DTYPES if isinstance(problem, CombineProblem) else SIXTEEN_BIT
        if problem.dtype not in legal:
            return f"takes {', '.join(map(str, legal))}, not {problem.dtype}"
        if problem.out_dtype not in legal:
            return f"writes {', '.join(map(str, legal))}, not {problem.out_dtype}"
        combines = isinstance(problem, CombineProblem)
        reason = None if combines else head_dim_reason(problem, MAX_HEAD_DIM)
        if reason is not None:
            return reason
        if device.interpreted and problem.dtype == torch.bfloat16:
            return "its interpreter (TRITON_INTERPRET) multiplies bfloat16 wrongly"
        if isinstance(problem, DecodeProblem):
            return score_factor_reason(problem, 100, torch.float32)
        return None

    def prepare(self, problem: CacheProblem, device: DeviceInfo) -> TritonCachedCall:
        return TritonCachedCall(problem, select_tile(problem, device))


BACKEND = TritonCacheBackend()
_HERE = nullcontext()


def _current(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, where Triton launches."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE
