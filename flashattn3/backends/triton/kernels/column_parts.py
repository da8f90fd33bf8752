"""Rows whose columns are tiles of their own: a head dim as a sum of powers of two.

A Triton tile has a power of two of columns, so that whole rows of 96 columns are multiplied as 128.
In parts they are tiles of 64 and of 32 columns, and every product is a sum over the parts, or has
an accumulator for each of them. Parts narrower than a row also take fewer registers, because Triton
loads all operands of a product before its first mma.

A tuple has an entry for each part: columns, pointers, tiles or accumulators.
"""

import triton
import triton.language as tl

from .common import load_tile, store_tile, tile_offsets


@triton.jit
def column_parts(BLOCK: tl.constexpr, PART: tl.constexpr):
    """BLOCK columns in parts of PART, of which the last may be narrower."""
    columns = ()
    for first in tl.static_range(0, BLOCK, PART):
        # Triton 3.5 makes no constexpr of min().
        columns += (first + tl.arange(0, PART if first + PART <= BLOCK else BLOCK - first),)
    return columns


@triton.jit
def tile_pointers(pointer, rows, columns, stride):
    """Pointers to the elements of a tile of each part."""
    pointers = ()
    for i in tl.static_range(len(columns)):
        pointers += (pointer + tile_offsets(rows, columns[i], stride),)
    return pointers


@triton.jit
def load_parts(
    pointers, offset, rows, num_rows, columns, NUM_COLUMNS: tl.constexpr, MASK_ROWS: tl.constexpr
):
    """Load a tile of each part, offset elements behind its pointers; elements out of bounds are
    zero."""
    tiles = ()
    for i in tl.static_range(len(columns)):
        tiles += (
            load_tile(
                pointers[i] + offset, rows, num_rows, columns[i], NUM_COLUMNS, MASK_ROWS,
                i * columns[0].shape[0] + columns[i].shape[0] > NUM_COLUMNS,
            ),
        )  # fmt: skip
    return tiles


@triton.jit
def store_parts(pointers, tiles, rows, num_rows, columns, NUM_COLUMNS: tl.constexpr):
    """Store a tile of each part in the tensor's dtype; elements out of bounds are not written."""
    for i in tl.static_range(len(columns)):
        store_tile(
            pointers[i], tiles[i], rows, num_rows, columns[i], NUM_COLUMNS,
            i * columns[0].shape[0] + columns[i].shape[0] > NUM_COLUMNS,
        )  # fmt: skip


@triton.jit
def zero_parts(ROWS: tl.constexpr, columns):
    """Accumulators in float32."""
    zeros = ()
    for i in tl.static_range(len(columns)):
        zeros += (tl.zeros((ROWS, columns[i].shape[0]), dtype=tl.float32),)
    return zeros


@triton.jit
def scale_parts(tiles, factor):
    scaled = ()
    for i in tl.static_range(len(tiles)):
        scaled += (tiles[i] * factor,)
    return scaled


@triton.jit
def dot_rows(a, b, acc=None):
    """acc + a b^T: the sum of the products of all parts."""
    for i in tl.static_range(len(a)):
        acc = tl.dot(a[i], tl.trans(b[i]), acc)
    return acc


@triton.jit
def dot_columns(a, b, acc):
    """acc + a b, part by part of b."""
    result = ()
    for i in tl.static_range(len(b)):
        result += (tl.dot(a, b[i], acc[i]),)
    return result
