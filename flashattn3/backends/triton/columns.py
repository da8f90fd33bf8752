"""How many columns the kernels multiply, and how many at a time: constexpr arguments by head dims.

A tile of Triton has a power of two of columns, at least 16. BLOCK_D columns of Q and K, and
BLOCK_DV of V, are multiplied in parts of PART_D and PART_DV, of which the last may be narrower
(kernels/column_parts.py).
"""

from __future__ import annotations

WIDEST_SWIZZLE = 64  # columns of 16 bits in 128 bytes
SMALLEST_FP8_WIDTH = 32  # smallest head dim (K) of an 8-bit dot
BACKWARD_PART, WIDEST_IN_PARTS = 64, 192


def padded(head_dim: int) -> int:
    """head_dim rounded up to a power of two (tl.arange), at least 16 (tl.dot)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def widest(head_dim: int, head_dim_v: int) -> int:
    """The larger head dim, ``padded``."""
    return padded(max(head_dim, head_dim_v))


def whole_columns(head_dim: int, head_dim_v: int) -> dict[str, int]:
    """A kernel multiplies all columns at once."""
    return _constants(*((padded(dim),) * 2 for dim in (head_dim, head_dim_v)))


def forward_columns(head_dim: int, head_dim_v: int, narrowest: int = 16) -> dict[str, int]:
    """The forward multiplies at most two parts, the first as wide as fits."""
    dims = head_dim, head_dim_v
    return _constants(*(in_parts(dim, 1 << (dim.bit_length() - 1), narrowest) for dim in dims))


def backward_columns(head_dim: int, head_dim_v: int, narrowest: int | None) -> dict[str, int]:
    """The backward multiplies parts of 64 columns, up to 192 columns.

    narrowest: columns of the narrowest part; None: tcgen05 multiplies all columns at once.
    With more than 128 columns of V at once, at least 128 of Q and K are multiplied: with fewer,
    ptxas spills 7 KB per thread on 8.0 (docs/log/triton.md).
    """

    def of(dim: int) -> tuple[int, int]:
        parts = narrowest is not None and dim <= WIDEST_IN_PARTS
        return in_parts(dim, BACKWARD_PART, narrowest) if parts else (padded(dim),) * 2

    of_dv = of(head_dim_v)
    return _constants(of(max(head_dim, 128) if of_dv[1] > 128 else head_dim), of_dv)


def in_parts(head_dim: int, part: int, narrowest: int = 16) -> tuple[int, int]:
    """How many columns are multiplied in parts of ``part``, and this part; ``padded`` columns at
    once, where that is no more."""
    whole, rest = padded(head_dim), head_dim % part
    columns = head_dim - rest + (max(narrowest, padded(rest)) if rest else 0)
    return (columns, part) if 16 <= part < whole and columns < whole else (whole, whole)


def blocks_alike(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of the blocks of K and V where loads are not pipelined, because Triton loads single
    elements or has one stage: K and V have the same shared-memory swizzle, 32, 64 or 128 bytes.

    Without a pipeline K and V take turns in one buffer. With two swizzles ptxas 12.8 (of Triton
    3.6) computes V's matrix descriptors on 9.0 from an unrelated register, so WGMMA reads anywhere
    in shared memory (docs/log/triton.md).
    """
    block_d, block_dv = padded(head_dim), padded(head_dim_v)
    least = min(WIDEST_SWIZZLE, max(block_d, block_dv))
    return max(block_d, least), max(block_dv, least)


def columns_alike(head_dim: int, head_dim_v: int) -> dict[str, int]:
    """The forward's columns where loads of a tensor are not pipelined: parts have the swizzle of
    ``blocks_alike`` too. As one block, 160 columns of pipelined K and V exceed shared memory."""
    least = min(WIDEST_SWIZZLE, *blocks_alike(head_dim, head_dim_v))
    return forward_columns(max(head_dim, least), max(head_dim_v, least), least)


def fp8_columns(head_dim: int, head_dim_v: int, wgmma: bool) -> dict[str, int]:
    """The 8-bit forward multiplies all columns at once.

    wgmma: the swizzle of V, which is float16, is at least as wide in bytes as that of K: the
        matrix descriptors of a narrower one are wrong, as in ``blocks_alike``.
    """
    width = max(SMALLEST_FP8_WIDTH, padded(head_dim))
    least = min(WIDEST_SWIZZLE, width // 2) if wgmma else 0
    return whole_columns(width, max(head_dim_v, least))


def _constants(of_d: tuple[int, int], of_dv: tuple[int, int]) -> dict[str, int]:
    (block_d, part_d), (block_dv, part_dv) = of_d, of_dv
    return {"BLOCK_D": block_d, "BLOCK_DV": block_dv, "PART_D": part_d, "PART_DV": part_dv}
