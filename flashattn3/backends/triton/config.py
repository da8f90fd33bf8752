"""The tiles and the number of splits that a plan of the Triton backend has."""

from __future__ import annotations

from typing import NamedTuple

from .cache_tiles import CacheTile
from .tile_configs import TileConfig, Tiles

TCGEN05 = range(100, 120)  # capabilities whose own tensor core instructions are tcgen05's


class TritonConfig(NamedTuple):
    """The tile config of a plan and its tiles for the mask.

    num_splits: number of KV splits; 0: of a packed forward, chosen.
    why: it has as many, or is packed.
    arch: target architecture for Triton, such as "sm80"; None for the GPU's own.
    native_fp8: whether it multiplies e4m3; if not, the kernel converts e4m3 to float16. int8 is
        always native.
    packed: the tile of a forward that the kernels of cached calls run; None: forward.py runs it.
    lowering: of the device.
    """

    tile_config: TileConfig
    tiles: Tiles
    num_splits: int
    why: str
    grid: tuple[int, int, int]
    arch: str | None = None
    native_fp8: bool = False
    packed: CacheTile | None = None
    lowering: int | None = None

    @property
    def in_parts(self) -> bool:
        """Whether kernels for 16 bits multiply 96 columns, for example, as 64 and 32, not as 128
        (columns.py)."""
        return self.lowering not in TCGEN05

    @property
    def wgmma(self) -> bool:
        """Whether Triton multiplies by WGMMA."""
        return self.lowering == 90

    def describe(self) -> dict[str, object]:
        if self.packed is not None:
            return self.packed.describe() | {"packed": self.why, "grid": self.grid}
        forward = self.tiles.forward
        return {
            "tile": f"{forward.block_m} rows x {forward.block_n} keys",
            "num_warps": forward.num_warps,
            "num_stages": forward.num_stages,
            "num_splits": f"{self.num_splits}: {self.why}",
            "grid": self.grid,
            "shared_memory_bytes": self.tile_config.shared_memory_kib * 1024,
            "tile config": self.tile_config.describe(),
        }
