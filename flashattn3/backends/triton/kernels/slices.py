"""Slices of SLICE_N keys, in which the forward multiplies an n_block for mma.sync.

There is one softmax update for all of them. Triton emits all ldmatrix instructions of a tile before
its first mma: at head dim 128 a V tile of 64 keys takes 128 registers per thread, a slice of 16
keys, the depth of one mma, takes 32.
"""

import triton
import triton.language as tl

from .column_parts import tile_pointers


@triton.jit
def block_pointers(pointer, keys, columns, stride, STRIDE: tl.constexpr):
    """Pointers of the first slice of a tensor's first n_block, for each part of its columns; with a
    STRIDE, to the first element of the slice."""
    if STRIDE:
        pointers = ()
        for _ in tl.static_range(len(columns)):
            pointers += (pointer,)
    else:
        pointers = tile_pointers(pointer, keys, columns, stride)
    return pointers


@triton.jit
def slice_pointers(block, first_key, slice_key, stride, keys, columns, STRIDE: tl.constexpr):
    """Pointers of the slice that begins slice_key keys after the n_block that begins at first_key.

    block: ``block_pointers``. With a STRIDE the pointers of a thread, which are 8 keys apart,
    differ by constants and need one register pair.
    """
    pointers = ()
    for i in tl.static_range(len(columns)):
        pointer = block[i] + first_key * stride
        if STRIDE:
            pointer += (keys % 8)[:, None] * STRIDE + columns[i][None, :]
            pointer += (keys // 8 * 8 + slice_key)[:, None] * STRIDE
        elif slice_key > 0:
            pointer += slice_key * stride
        pointers += (pointer,)
    return pointers
