"""The Triton backend: FlashAttention-2 kernels for every GPU from compute capability 8.0."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

import torch
from torch import Tensor

from ...call.cached import CacheProblem, DecodeProblem
from ...call.dtypes import EIGHT_BIT
from ...call.mask_tensors import COLUMNS, ROWS
from ...call.operands import Tensors
from ...call.problem import CallProblem, Problem
from .. import gpu_limits, packed
from ..conversions import converting
from ..device import DeviceInfo
from . import cached
from .cache_tiles import select_tile
from .columns import widest
from .config import TCGEN05, TritonConfig
from .tile_configs import (
    BWD_D256,
    FIRST_WITH_FP8,
    MAX_HEAD_DIM,
    MIN_SHARED_MEMORY_KIB,
    Tile,
    select_tile_config,
)

PACKED = packed.Limits(few=packed.FEW_ROWS)
# Below these keys the second launch, which combines the parts, takes the host longer than the GPU
# gains (H100): of packed rows, and of splits of other work tiles.
PACKED_KEYS = 4096
SPLIT_KEYS = 8192
# SMs for a work tile of many packed rows from which on packing is faster than splits of others.
SMS_PER_TILE = 8
FEW_ROWS = 16  # of a sequence, on average: dq_accum, in float32, has 128 rows for each


@dataclass(frozen=True)
class TritonLaunch:
    """See ``Launch``. Triton is imported when a pass first runs."""

    keep = None

    problem: Problem
    config: TritonConfig

    def describe(self) -> dict[str, object]:
        described, tile = self.config.describe(), self.config.packed
        if tile is not None:
            splits = self.config.num_splits, self.config.grid[0], tile.block_m
            described |= packed.describe_splits(self.problem, *splits)
        if self.problem.dtype in EIGHT_BIT:
            return described
        return described | {"backward": self.config.tiles.describe_backward()}

    @cached_property
    def forward(self) -> Callable[[Tensors], tuple[Tensor, ...]]:
        from . import launch

        if self.config.packed is None:
            run = launch.prepare_forward(self.problem, self.config)
        else:
            run = packed.prepare_packed(self.problem, self._decode())
        run = launch.on_device(self.problem, run)
        return converting(self.problem, run)

    def _decode(self) -> Callable:
        from .cached_launch import prepare_decode

        return prepare_decode(packed.as_cached(self.problem), self.config.packed)

    @cached_property
    def backward(self) -> Callable[..., tuple[Tensor | None, ...]]:
        from . import launch
        from .backward_launch import prepare_backward

        return launch.on_device(self.problem, prepare_backward(self.problem, self.config))


class TritonBackend:
    """See ``Backend``."""

    name = "triton"

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if device.interpreted:
            return None
        if device.kind != "cuda":
            return f"needs an NVIDIA GPU, the tensors are on {device.kind!r}"
        if device.capability < 80:
            return (
                f"needs compute capability 8.0 or newer, {device.name} has {device.capability / 10}"
            )
        if device.shared_memory_bytes < MIN_SHARED_MEMORY_KIB * 1024:
            found = device.shared_memory_bytes // 1024
            needed = f"needs {MIN_SHARED_MEMORY_KIB} KiB of shared memory for a block"
            return f"{needed}, {device.name} has {found}"
        return None

    def decline_reason(self, problem: CallProblem, device: DeviceInfo) -> str | None:
        if isinstance(problem, CacheProblem):
            reason = cached.decline_reason(problem)
        else:
            reason = packed.spans_reason(problem)
            reason = reason or gpu_limits.decline_reason(problem, MAX_HEAD_DIM)
        # Caches of 8 bits are multiplied in float16.
        stored = problem.cache_dtype if isinstance(problem, DecodeProblem) else problem.dtype
        if reason is None and device.interpreted and problem.dtype == stored == torch.bfloat16:
            return "its interpreter (TRITON_INTERPRET) multiplies bfloat16 wrongly"
        return reason

    def unused_hints(self, problem: CallProblem, device: DeviceInfo) -> dict[str, str]:
        if isinstance(problem, CacheProblem):
            return {}
        unused = {"use_fast_accum": "accumulates in float32"}
        if problem.split_tokens:
            return unused | {"pack_gqa": "packs the query rows of every call with split_tokens"}
        if self.configure(problem, device).packed is None:
            unused["pack_gqa"] = "packs the query rows of 16-bit calls alone"
            if problem.mask is not None:
                unused["num_splits"] = "computes the blocks of a mask in one program"
            unused["sm_margin"] = "launches one program per tile, which leaves no SM free"
        return unused

    def prepare(
        self, problem: CallProblem, device: DeviceInfo
    ) -> TritonLaunch | cached.TritonCachedCall:
        if isinstance(problem, CacheProblem):
            return cached.TritonCachedCall(problem, select_tile(problem, device))
        return TritonLaunch(problem, self.configure(problem, device))

    def configure(self, problem: Problem, device: DeviceInfo) -> TritonConfig:
        dims, eight_bit = (problem.head_dim, problem.head_dim_v), problem.dtype in EIGHT_BIT
        if eight_bit or device.lowering in TCGEN05:
            dims = (widest(*dims),) * 2
        tile_config = select_tile_config(*dims, device.lowering, device.shared_memory_bytes)
        tiles = tile_config.masked if problem.masked else tile_config.full
        if problem.bias is not None:
            tiles = tiles.with_bias(max(dims), device.lowering == 90, device.shared_memory_bytes)
        if problem.slopes is not None:
            tiles = tiles.with_slopes(max(dims), device.lowering == 90, problem.masked)
        tiles = tiles._replace(
            forward=_forward_tile(tiles.forward, problem, device),
            bwd=tiles.bwd if _adds_dq(tiles.bwd, problem, device) else None,
        )
        m_blocks = tiles.forward.num_m_blocks(problem.seqlen_q)
        if problem.mask is not None:  # programs for whole blocks of the mask
            m_blocks = ceil(problem.seqlen_q / ROWS) * (ROWS // tiles.forward.block_m)
        programs = m_blocks * problem.num_heads_q * problem.batch
        arch = None if device.lowering == device.capability else f"sm{device.lowering}"
        config = partial(TritonConfig, tile_config, tiles, arch=arch, lowering=device.lowering)
        block_m = tiles.forward.block_m
        packed_tiles = packed.num_tiles(problem, block_m)
        long = packed.visible_keys(problem) >= PACKED_KEYS
        pays = long and SMS_PER_TILE * packed_tiles <= device.num_sms
        why = f"{packed_tiles} tiles of packed rows for {device.num_sms} SMs"
        estimated = packed.Choice(pays, why)
        packing = packed.choose(problem, PACKED, estimated)
        if packing.packs and problem.mask is None:
            few_rows = packed.as_cached(problem)
            tile, sizes = select_tile(few_rows, device), (problem.batch, problem.total_q)
            grid = (tile.grid(few_rows, *sizes, problem.seqlen_q, problem.seqlen_k)[1], 1, 1)
            return config(few_rows.num_splits, packing.reason, grid, packed=tile)
        num_splits = _num_splits(problem, programs, tiles.forward, device.num_sms)
        why = f"{programs} work tiles of {block_m} rows for {device.num_sms} SMs"
        grid = (programs * num_splits, 1, 1)
        native_fp8 = eight_bit and (device.lowering or 0) >= FIRST_WITH_FP8
        return config(num_splits, why, grid, native_fp8=native_fp8)


BACKEND = TritonBackend()


def _forward_tile(tile: Tile, problem: Problem, device: DeviceInfo) -> Tile:
    """The tile of a config, or the next smaller one that the problem and the device allow."""
    descales = (problem.k.descales, problem.v.descales)
    blocks = [of.block for of in descales if of is not None and of.num_blocks > 1]
    if problem.mask is not None:
        blocks.append(COLUMNS)
        tile = tile._replace(max_registers=0)  # bounds were measured without lists
    if device.lowering in TCGEN05:
        tile = tile.of_whole_blocks()
    if not blocks:
        return tile
    # An n_block divides every descale block, so that its keys share a descale, and every block of a
    # mask.
    block_n = 1 << (min(tile.block_n, *blocks).bit_length() - 1)
    return tile._replace(block_n=block_n, slice_n=min(tile.slice_n, block_n))


def _adds_dq(tile: Tile | None, problem: Problem, device: DeviceInfo) -> bool:
    """Return whether the backward of a problem may compute five GEMMs, which add dQ in any order.
    It may not with tcgen05, where five were not measured, nor with a mask where its second copy of
    K, without infinities, exceeds shared memory."""
    sequences = problem.batch if problem.varlen else 1
    short = problem.total_q < FEW_ROWS * sequences
    fits = problem.mask is None or tile != BWD_D256
    return fits and not problem.deterministic and not short and device.lowering not in TCGEN05


def _num_splits(problem: Problem, programs: int, tile: Tile, num_sms: int) -> int:
    """Number of KV splits: as requested, or, for <= 0, enough to occupy every SM."""
    n_blocks = max(1, tile.num_n_blocks(problem.seqlen_k))
    if problem.mask is not None:
        return 1
    if problem.num_splits > 0:
        return min(problem.num_splits, n_blocks)
    if programs >= num_sms or programs == 0 or packed.visible_keys(problem) < SPLIT_KEYS:
        return 1
    # With fewer than four n_blocks per split, combine costs more than idle SMs.
    return max(1, min(num_sms // programs, n_blocks // 4))
