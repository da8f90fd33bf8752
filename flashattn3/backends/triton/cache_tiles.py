"""Tiles, grids and workspaces of cached calls, from a problem and a device, without Triton."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...call.cached import CacheProblem, DecodeProblem
from ..device import DeviceInfo
from .columns import widest
from .tile_configs import Tile, select_tile_config

TILE_BYTES = 16 * 1024  # of K or of V in one stage
# With three stages of K and V two programs share the 227 KiB of a Hopper SM, one has the 163 of an
# A100; 99 KiB hold two stages.
THREE_STAGES_KIB = 163
PROGRAMS_PER_SM = 2
LARGEST_FEW_ROWS = 32


class CacheTile(NamedTuple):
    """block_m packed rows by block_n keys; num_ctas: parts into which the batch is cut, about.

    few_m, few_n: of sequences with at most few_m packed rows; 0 where all have block_m.
    arch: as in ``TritonConfig``.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_ctas: int
    few_m: int = 0
    few_n: int = 0
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
        self, problem: DecodeProblem, batch: int, total_q: int, seqlen_q: int
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
        if problem.num_splits > 0:
            parts = tiles * problem.num_splits
            return tiles, parts, parts if problem.num_splits > 1 else 0
        return tiles, tiles + self.num_ctas, self.num_ctas

    def workspace_bytes(self, slots: int, head_dim_v: int) -> int:
        """Float32 rows of out and lse for each slot."""
        return slots * self.block_m * (head_dim_v + 1) * 4


def select_tile(problem: CacheProblem, device: DeviceInfo) -> CacheTile:
    """By packed rows, head dims, page size and shared memory; only decode has a tile.

    Few rows read memory as fast as it goes. Many have the forward's tile in whole n_blocks. In
    a batch that has both a sequence of few rows gets its own tile.
    """
    arch = None if device.lowering == device.capability else f"sm{device.lowering}"
    if not isinstance(problem, DecodeProblem):
        return CacheTile(0, 0, 4, 2, 0, arch=arch)
    few = _tile_of_few_rows(problem, device)
    tile, few_m, few_n = few, 0, 0
    if problem.rows > LARGEST_FEW_ROWS:
        columns = widest(problem.head_dim, problem.head_dim_v)
        config = select_tile_config(columns, columns, device.lowering, device.shared_memory_bytes)
        tile = config.masked.forward.of_whole_blocks()
        of_one = problem.rows_of_one_query
        if problem.varlen and of_one <= LARGEST_FEW_ROWS < min(tile.block_m, problem.rows):
            few_m, few_n = of_one, few.block_n
    # The page table is loaded ahead too: Triton divides the stages between it and the keys.
    num_stages = 2 * tile.num_stages - 1 if problem.page_size else tile.num_stages
    return CacheTile(
        block_m=min(problem.rows, tile.block_m),
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=num_stages,
        num_ctas=max(1, device.num_sms - problem.sm_margin) * PROGRAMS_PER_SM,
        few_m=few_m,
        few_n=few_n,
        arch=arch,
    )


def _tile_of_few_rows(problem: DecodeProblem, device: DeviceInfo) -> Tile:
    columns = widest(problem.head_dim, problem.head_dim_v)
    block_n = min(128, max(16, TILE_BYTES // (2 * columns)))
    stages = 3 if device.shared_memory_bytes >= THREE_STAGES_KIB * 1024 else 2
    return Tile(min(problem.rows, LARGEST_FEW_ROWS), block_n, 4, stages)
