"""Tile configs by head dim, lowering and shared memory of the device. No run-time autotuning.

A config applies if the head dim fits and the GPU has its shared memory; the first that applies is
selected. ``python benchmarks/tune.py`` measures candidates on the current GPU.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple


class Tile(NamedTuple):
    """block_m query rows by block_n keys; num_stages is the depth of the load pipeline.

    slice_n: in the forward for mma.sync, keys that it multiplies at a time (kernels/forward.py). It
        divides block_n, which then need not be a power of two, and makes the token strides of K
        and V constants of the kernel. 0: the whole n_block, run-time strides.
    biased: in the backward, -lse and -delta are the accumulator biases of S and dP, which takes no
        registers for them. If not, they are added to S and dP, and the load pipeline has them.
    max_registers: of a thread, so that one more program fits an SM; 0: the compiler's choice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    slice_n: int = 0
    biased: bool = True
    max_registers: int = 0

    def of_whole_blocks(self) -> Tile:
        """The tile for a kernel that multiplies a whole n_block at a time. For a sliced tile its
        n_block is a power of two, with the two stages that were measured without slices."""
        if not self.slice_n:
            return self
        block_n = 1 << (self.block_n.bit_length() - 1)
        return self._replace(block_n=block_n, slice_n=0, num_stages=2)

    @property
    def narrowest_part(self) -> int:
        """Columns of dQ that give every warp an mma.sync tile of 16 x 8. With fewer, warps hold
        copies of one tile, and each adds its own to dq_accum."""
        return max(16, 16 * 8 * self.num_warps // self.block_m)

    def num_m_blocks(self, rows: int) -> int:
        return ceil(rows / self.block_m)

    def num_n_blocks(self, keys: int) -> int:
        return ceil(keys / self.block_n)


class Tiles(NamedTuple):
    """One tile for each kernel.

    bwd: of the backward in five GEMMs, which adds dQ; None: it was slower or not measured.
    bwd_dkdv, bwd_dq: of the backward in seven GEMMs, dK and dV apart from dQ.
    """

    forward: Tile
    bwd_dkdv: Tile
    bwd_dq: Tile
    bwd: Tile | None = None

    @property
    def of_bwd_kernel(self) -> Tile:
        """The tile of the kernel of dK and dV, which both backwards launch."""
        return self.bwd or self.bwd_dkdv

    def with_bias(self, head_dim: int, wgmma: bool, shared_memory_bytes: int) -> Tiles:
        """The tiles of calls with a bias, a block of which takes shared memory and registers."""
        if wgmma and head_dim <= 32:
            dkdv = Tile(64, 64, 4, 3, max_registers=128)
            return self._replace(bwd_dkdv=dkdv, bwd_dq=Tile(64, 64, 4, 3))
        if wgmma and head_dim <= 64:
            return self._replace(bwd_dq=Tile(64, 64, 4, 3))
        if wgmma and 96 < head_dim <= 128:
            dkdv, dq = Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)
            return self._replace(forward=WIDE, bwd_dkdv=dkdv, bwd_dq=dq)
        if wgmma and head_dim > 192:  # three stages do not fit
            return self._replace(bwd_dq=self.bwd_dq._replace(num_stages=2))
        if not wgmma and head_dim > 64:
            dkdv = self.bwd_dkdv._replace(num_stages=min(self.bwd_dkdv.num_stages, 2))
            return self._replace(bwd_dkdv=dkdv, bwd_dq=_dq_with_terms(head_dim))
        if not wgmma and head_dim <= 32 and shared_memory_bytes < 163 * 1024:
            return self._replace(forward=self.forward._replace(block_n=64))  # 128 need 104 KiB
        return self

    def with_slopes(self, head_dim: int, wgmma: bool, masked: bool) -> Tiles:
        """The tiles of calls with ALiBi, whose numbers of columns stay in registers."""
        forward, bwd = self.forward, self.bwd
        if wgmma and head_dim <= 64 and forward[:3] == (64, 64, 4):
            return self._replace(forward=forward._replace(max_registers=128))
        if wgmma and 96 < head_dim <= 128 and not masked:
            return self._replace(bwd_dkdv=Tile(64, 64, 4, 2), bwd_dq=Tile(128, 64, 8, 3))
        if not wgmma and head_dim > 64:
            return self._replace(bwd_dq=_dq_with_terms(head_dim))
        if bwd is None:
            return self
        slice_n = 2 * forward.slice_n
        return self._replace(
            forward=forward._replace(slice_n=slice_n), bwd=bwd._replace(biased=True)
        )

    def describe_backward(self) -> str:
        if self.bwd is None:
            return "7 GEMMs, bitwise reproducible"
        return f"5 GEMMs, {self.bwd.block_m} rows x {self.bwd.block_n} keys, dq added in any order"


def _dq_with_terms(head_dim: int) -> Tile:
    """For mma.sync: with terms in a tile of 128 rows ptxas keeps 32 registers and spills 5 KB."""
    return Tile(64 if head_dim <= 128 else 32, 32, 4, 2)


class TileConfig(NamedTuple):
    """Tiles for head dims up to head_dim on GPUs with at least shared_memory_kib per block.

    wgmma: for code that uses WGMMA (lowering 90).
    head_dim_v: largest of V; None: head_dim.
    full, masked: without and with a causal mask or window.
    """

    head_dim: int
    wgmma: bool
    shared_memory_kib: int
    full: Tiles
    masked: Tiles
    head_dim_v: int | None = None

    def fits(self, head_dim: int, head_dim_v: int) -> bool:
        largest_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return head_dim <= self.head_dim and head_dim_v <= largest_v

    def describe(self) -> str:
        of_v = f", of V <= {self.head_dim_v}" if self.head_dim_v else ""
        products = "wgmma" if self.wgmma else "mma.sync"
        return f"head dim <= {self.head_dim}{of_v}, {self.shared_memory_kib} KiB, {products}"


# The backward in five GEMMs with mma.sync.
BWD_D64 = Tile(32, 128, 4, 2, biased=False)
BWD_D128 = Tile(64, 64, 4, 2)
BWD_D192 = Tile(16, 64, 4, 3)
BWD_D256 = Tile(64, 64, 8, 2, biased=False)
# fmt: off
D160 = Tiles(Tile(128, 32, 4, 3, 16), Tile(16, 64, 4, 3), Tile(64, 64, 4, 2), BWD_D192)
D160_99 = D160._replace(forward=Tile(64, 64, 4, 2, 32))
D192 = Tiles(Tile(64, 64, 4, 2, 16), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), BWD_D192)
# Triton 3.6 divides the columns of a tile of 64 rows x 128 columns of V among the warps, so that P
# goes through shared memory; not those of 128 rows.
D256_V128 = D192._replace(forward=Tile(128, 32, 4, 2, 16))
D256_99 = Tiles(Tile(32, 64, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
# WGMMA, full and masked. WIDE is for wide rows, and for rows that begin anywhere in a line of 128
# bytes: more queries share what a block of keys takes to load.
WIDE = Tile(128, 64, 8, 3)
WGMMA_D64 = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 4, 3))
WGMMA_D56 = WGMMA_D64._replace(forward=WIDE)
WGMMA_D96 = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
WGMMA_D128 = (
    Tiles(Tile(64, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 32, 8, 3)),
    Tiles(Tile(64, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
)
WGMMA_D192 = Tiles(WIDE, Tile(64, 128, 8, 2), Tile(64, 32, 4, 2))
TILE_CONFIGS = (
    TileConfig(32, True, 227,
        full=Tiles(Tile(64, 64, 4, 3), Tile(64, 128, 4, 3), Tile(64, 64, 4, 3)),
        masked=Tiles(Tile(128, 64, 4, 3), Tile(32, 128, 4, 3), Tile(64, 64, 4, 3))),
    TileConfig(56, True, 227, WGMMA_D56, WGMMA_D56),
    TileConfig(64, True, 227, WGMMA_D64, WGMMA_D64),
    TileConfig(80, True, 227, WGMMA_D96, WGMMA_D96),
    TileConfig(96, True, 227, WGMMA_D96._replace(forward=WIDE), WGMMA_D96),
    TileConfig(120, True, 227, *(tiles._replace(forward=WIDE) for tiles in WGMMA_D128)),
    TileConfig(128, True, 227, *WGMMA_D128),
    TileConfig(192, True, 227, WGMMA_D192, WGMMA_D192),
    TileConfig(256, True, 227,
        full=Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
        masked=Tiles(Tile(128, 32, 8, 3), Tile(32, 32, 4, 3), Tile(128, 32, 8, 3))),
    TileConfig(32, False, 99,
        full=Tiles(Tile(128, 64, 4, 3), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3)),
        masked=Tiles(Tile(128, 128, 4, 3), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3))),
    TileConfig(64, False, 99,
        full=Tiles(Tile(128, 64, 4, 3, 16), Tile(32, 128, 4, 3), Tile(128, 32, 4, 3), BWD_D64),
        masked=Tiles(Tile(128, 64, 4, 3, 16), Tile(32, 128, 4, 3), Tile(128, 64, 4, 2), BWD_D64)),
    TileConfig(96, False, 99,
        full=Tiles(Tile(128, 64, 4, 2, 16), Tile(64, 64, 4, 2), Tile(128, 32, 4, 2), BWD_D128),
        masked=Tiles(Tile(128, 64, 4, 2, 32), Tile(64, 64, 4, 2), Tile(128, 32, 4, 2), BWD_D128)),
    TileConfig(128, False, 163,
        full=Tiles(Tile(128, 32, 4, 3, 16), Tile(64, 32, 4, 2), Tile(128, 32, 4, 2), BWD_D128),
        masked=Tiles(Tile(128, 48, 4, 3, 16), Tile(64, 64, 4, 1), Tile(128, 32, 4, 3), BWD_D128)),
    TileConfig(128, False, 99,
        full=Tiles(Tile(128, 32, 4, 2, 16), Tile(32, 128, 8, 3), Tile(128, 32, 4, 2), BWD_D128),
        masked=Tiles(Tile(128, 32, 4, 2, 16), Tile(32, 128, 8, 3), Tile(128, 32, 4, 2), BWD_D128)),
    TileConfig(256, False, 99, D256_V128, D256_V128, head_dim_v=128),
    TileConfig(160, False, 163, D160, D160),
    TileConfig(160, False, 99, D160_99, D160_99),
    TileConfig(192, False, 99, D192, D192),
    TileConfig(256, False, 163,
        full=Tiles(Tile(64, 32, 4, 3), Tile(64, 64, 8, 1), Tile(32, 64, 4, 2), BWD_D256),
        masked=Tiles(Tile(32, 64, 4, 2), Tile(64, 64, 8, 1), Tile(32, 64, 4, 2), BWD_D256)),
    TileConfig(256, False, 99, D256_99, D256_99),
)
# fmt: on
MAX_HEAD_DIM = max(tile_config.head_dim for tile_config in TILE_CONFIGS)
FIRST_WITH_FP8 = 89  # lowest compute capability with e4m3 conversions and tensor cores
MIN_SHARED_MEMORY_KIB = min(tile_config.shared_memory_kib for tile_config in TILE_CONFIGS)


def select_tile_config(
    head_dim: int, head_dim_v: int, lowering: int | None, shared_memory_bytes: int
) -> TileConfig:
    """The first config that fits the head dims and that the GPU can run. Kernels that multiply all
    columns at a time pass ``widest`` for both.

    lowering: the compute capability that Triton compiles for, 90 for 9.0; None in the interpreter.
    """
    wgmma = lowering == 90
    for tile_config in TILE_CONFIGS:
        fits = tile_config.shared_memory_kib * 1024 <= shared_memory_bytes
        if tile_config.fits(head_dim, head_dim_v) and fits and tile_config.wgmma in (wgmma, False):
            return tile_config
    raise LookupError(
        f"no tiles for head dims {head_dim}, {head_dim_v} with {shared_memory_bytes} bytes of "
        "shared memory"
    )
