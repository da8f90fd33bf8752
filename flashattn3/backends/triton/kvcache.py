"""The Triton backend of cached calls, for every GPU from compute capability 8.0, Hopper too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.dtypes import SIXTEEN_BIT
from ...dispatch.backend import score_factor_reason
from ...dispatch.device import DeviceInfo
from .backend import BACKEND as FORWARD
from .tile_configs import padded

if TYPE_CHECKING:
    from ...kvcache.problem import AppendTensors, DecodeTensors, Lengths

MAX_HEAD_DIM = 256
TILE_BYTES = 16 * 1024  # of K or of V in one stage
# With three stages of K and V two programs share the 227 KiB of a Hopper SM, one has the 163 of an
# A100; 99 KiB hold two stages.
THREE_STAGES_KIB = 163
PROGRAMS_PER_SM = 2
COMBINE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class CacheTile:
    """block_m packed rows by block_n keys; num_ctas: parts into which the batch is cut, about.

    arch: as in ``TritonConfig``.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_ctas: int
    arch: str | None = None

    def describe(self) -> dict[str, object]:
        return {
            "tile": f"{self.block_m} packed rows x {self.block_n} keys",
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "parts": f"about {self.num_ctas}",
        }


class TritonCachedCall:
    """The launches of one problem, prepared once. Triton is imported with the first."""

    def __init__(self, problem: object, tile: CacheTile) -> None:
        self.problem, self.tile = problem, tile

    def describe(self) -> dict[str, object]:
        return self.tile.describe()

    def decode(
        self,
        out: Tensor,
        lse: Tensor,
        tensors: DecodeTensors,
        lengths: Lengths,
        options_hash: int,
    ) -> None:
        with _current(out):
            self._decode(out, lse, tensors, lengths, options_hash)

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

    def decline_reason(self, problem: object, device: DeviceInfo) -> str | None:
        combines = not hasattr(problem, "num_heads_kv")
        legal = COMBINE_DTYPES if combines else SIXTEEN_BIT
        if problem.dtype not in legal:
            return f"takes {', '.join(map(str, legal))}, not {problem.dtype}"
        if problem.out_dtype not in legal:
            return f"writes {', '.join(map(str, legal))}, not {problem.out_dtype}"
        for name in ("head_dim", "head_dim_v"):
            if getattr(problem, name) > MAX_HEAD_DIM:
                return f"takes head dims up to {MAX_HEAD_DIM}, {name} is {getattr(problem, name)}"
        if device.interpreted and problem.dtype == torch.bfloat16:
            return "its interpreter (TRITON_INTERPRET) multiplies bfloat16 wrongly"
        if hasattr(problem, "score_scale"):
            return score_factor_reason(problem, 100, torch.float32)
        return None

    def prepare(self, problem: object, device: DeviceInfo) -> TritonCachedCall:
        return TritonCachedCall(problem, select_tile(problem, device))


def select_tile(problem: object, device: DeviceInfo) -> CacheTile:
    """By packed rows, head dims, page size and shared memory; only decode has a tile."""
    arch = None if device.lowering == device.capability else f"sm{device.lowering}"
    if not hasattr(problem, "rows"):
        return CacheTile(0, 0, 4, 2, 0, arch)
    widest = padded(max(problem.head_dim, problem.head_dim_v))
    block_m = min(problem.rows, 64 if widest > 128 else 128)
    block_n = min(128, max(16, TILE_BYTES // (2 * widest)))
    if block_m > 32:
        block_n = min(64, block_n)
    stages = 3 if device.shared_memory_bytes >= THREE_STAGES_KIB * 1024 else 2
    # Addresses from the page table, which is loaded a stage earlier.
    indirect = block_m <= 32 and problem.page_size % block_n != 0
    return CacheTile(
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if block_m > 64 else 4,
        num_stages=stages + indirect,
        num_ctas=max(1, device.num_sms - problem.sm_margin) * PROGRAMS_PER_SM,
        arch=arch,
    )


BACKEND = TritonCacheBackend()
_HERE = nullcontext()


def _current(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, where Triton launches."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE
