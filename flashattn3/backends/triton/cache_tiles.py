"""Tiles, grids and workspaces of cached calls, from a problem and a device, without Triton."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...call.cached import CacheProblem, DecodeProblem
from ...call.dtypes import EIGHT_BIT
from ..device import DeviceInfo
from .columns import widest
from .tile_configs import FIRST_WITH_FP8, Tile, select_tile_config

TILE_BYTES = 16 * 1024  # of K or of V in one stage
# With three stages of K and V two programs share the 227 KiB of a Hopper SM, one has the 163 of an
# A100; 99 KiB hold two stages.
THREE_STAGES_KIB = 163
PROGRAMS_PER_SM = 2
LARGEST_FEW_ROWS = 32
# With split_tokens one tile serves a token and a chunk of a prompt. Reading a tile's keys takes
# longer than multiplying them by 64 rows, and a chunk reads them once for 64.
SPAN_ROWS = 64
# Spans have programs of their own while their results take no more memory than this. The bits are
# those of one program for all spans of a tile.
SPREAD_BYTES = 2**26
EVERY_SPAN = 2**30  # as num_splits: more parts than a sequence has spans


class CacheTile(NamedTuple):
    """block_m packed rows by block_n keys; num_ctas: parts into which the batch is cut, about.

    few_m, few_n: of sequences with at most few_m packed rows; 0 where all have block_m.
    slot_m: rows of a part in the workspace: block_m, or fewer where no call has as many.
    native_fp8: whether the GPU converts e4m3. arch: as in ``TritonConfig``.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_ctas: int
    slot_m: int
    few_m: int = 0
    few_n: int = 0
    native_fp8: bool = False
    arch: str | None = None

    def describe(self) -> dict[str, object]:
        tile = f"{self.block_m} packed rows x {self.block_n} keys"
        if self.few_m:
            tile += f", short sequences {self.few_m} x {self.few_n}"
        return {
            "tile": tile,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "parts": f"about {self.num_ctas}",
        }

    def grid(
        self, problem: DecodeProblem, batch: int, total_q: int, seqlen_q: int, capacity: int
    ) -> tuple[int, int, int]:
        """Tiles of rows, programs and slots of the workspace that there can be at any lengths.

        A program's share is at least the num_ctas-th part of all work, and a tile of n shares has n
        parts, rounded down, but one at least. So tiles that are cut have no more than num_ctas.
        """
        group = problem.qhead_per_kvhead
        tiles = batch * ceil(seqlen_q * group / self.block_m)
        if problem.varlen:
            tiles = min(tiles, total_q * group // self.block_m + batch)
        tiles *= problem.num_heads_kv
        num_splits = problem.num_splits
        if problem.split_tokens:
            num_splits = max(1, ceil(capacity / problem.split_tokens))
            if self.workspace_bytes(tiles * num_splits, problem.head_dim_v) > SPREAD_BYTES:
                num_splits = 1
        if num_splits > 0:
            parts = tiles * num_splits
            return tiles, parts, parts if num_splits > 1 else 0
        return tiles, tiles + self.num_ctas, self.num_ctas

    def workspace_bytes(self, slots: int, head_dim_v: int) -> int:
        """Float32 rows of out and lse for each slot."""
        return slots * self.slot_m * (head_dim_v + 1) * 4


def select_tile(problem: CacheProblem, device: DeviceInfo) -> CacheTile:
    """By packed rows, head dims, page size and shared memory; only decode has a tile.

    Few rows read memory as fast as it goes. Many have the forward's tile in whole n_blocks. In
    a batch that has both a sequence of few rows gets its own tile.
    """
    arch = None if device.lowering == device.capability else f"sm{device.lowering}"
    native_fp8 = (device.lowering or 0) >= FIRST_WITH_FP8
    if not isinstance(problem, DecodeProblem):
        return CacheTile(0, 0, 4, 2, 0, 0, native_fp8=native_fp8, arch=arch)
    few = _tile_of_few_rows(problem, device)
    tile, few_m, few_n = few, 0, 0
    if problem.split_tokens:
        # One tile for all calls; stages and programs change no bits.
        wide = widest(problem.head_dim, problem.head_dim_v) >= 128
        tile = few._replace(block_m=SPAN_ROWS, num_warps=8 if wide else 4)
    elif problem.rows > LARGEST_FEW_ROWS:
        columns = widest(problem.head_dim, problem.head_dim_v)
        config = select_tile_config(columns, columns, device.lowering, device.shared_memory_bytes)
        tile = config.masked.forward.of_whole_blocks()
        of_one = problem.rows_of_one_query
        if problem.varlen and of_one <= LARGEST_FEW_ROWS < min(tile.block_m, problem.rows):
            few_m, few_n = of_one, few.block_n
    # The page table is loaded ahead too: Triton divides the stages between it and the keys.
    num_stages = 2 * tile.num_stages - 1 if problem.page_size else tile.num_stages
    slot_m = min(problem.rows, tile.block_m)
    return CacheTile(
        block_m=SPAN_ROWS if problem.split_tokens else slot_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=num_stages,
        num_ctas=max(1, device.num_sms - problem.sm_margin) * PROGRAMS_PER_SM,
        slot_m=slot_m,
        few_m=few_m,
        few_n=few_n,
        native_fp8=native_fp8,
        arch=arch,
    )


def _tile_of_few_rows(problem: DecodeProblem, device: DeviceInfo) -> Tile:
    columns = widest(problem.head_dim, problem.head_dim_v)
    block_n, num_warps = min(128, max(16, TILE_BYTES // (2 * columns))), 4
    stages = 3 if device.shared_memory_bytes >= THREE_STAGES_KIB * 1024 else 2
    few_alone = problem.rows <= LARGEST_FEW_ROWS and not problem.split_tokens
    in_pages = problem.page_size % (2 * block_n) == 0  # of a dense cache too
    wide = problem.cache_dtype in EIGHT_BIT and columns >= 128 and stages == 3
    if wide and few_alone and in_pages:
        # As many bytes as 16 bits have, and warps that widen them: 32 x 4k 124 -> 94 us.
        block_n, num_warps = 2 * block_n, 8
    return Tile(min(problem.rows, LARGEST_FEW_ROWS), block_n, num_warps, stages)
