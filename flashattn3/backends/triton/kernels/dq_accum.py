"""dq_accum, to which the programs of ``bwd_kernel`` add dS K: its layout, and the kernel that
converts it to dQ."""

import triton
import triton.language as tl

from .backward_parts import block_and_head, lse_delta_start
from .column_parts import column_parts, scale_parts, store_parts, tile_pointers
from .common import INTERPRETED, row_pointer, sequence, strides_of


@triton.jit
def _dq_accum_index(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Index of each element of a (BLOCK_M, WIDTH) tile of dq_accum, as two parts to be added.

    The index is register * threads + thread, of the thread and the register that hold the element
    in the accumulator of dS K: mma.sync tiles of 16 x 8 with two columns of rows r and r + 8 per
    lane, warps side by side along the columns. So an addition of a warp hits 32 consecutive floats,
    and the addresses of a thread differ by constants. It is a permutation of the tile: with another
    layout of the accumulator the additions are scattered, not wrong. FlashAttention-2 also keeps
    dq_accum in the order of its accumulator (flash_bwd_kernel.h, atomicAdd of acc_dq).
    """
    # Not min(), of which Triton 3.5 makes no constexpr.
    WARPS: tl.constexpr = NUM_WARPS if NUM_WARPS <= WIDTH // 8 else WIDTH // 8
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    thread = (rows % 8 * 4)[:, None] + (columns // 8 % WARPS * 32 + columns // 2 % 4)[None, :]
    register = (rows // 8 * 2)[:, None] + (
        columns // (8 * WARPS) * (BLOCK_M // 4) + columns % 2
    )[None, :]  # fmt: skip
    return thread, register * (32 * WARPS)


@triton.jit
def dq_accum_pointers(tile, BLOCK_M: tl.constexpr, columns, NUM_WARPS: tl.constexpr):
    """Pointers to the elements of a tile of dq_accum, one part of its columns after the other."""
    pointers = ()
    for i in tl.static_range(len(columns)):
        thread, register = _dq_accum_index(BLOCK_M, columns[i].shape[0], NUM_WARPS)
        pointers += (tile + i * BLOCK_M * columns[0].shape[0] + thread + register,)
    return pointers


@triton.jit
def add_unordered(pointers, values):
    """Add in float32 in global memory, in any order.

    One RED per register, by assembly: tl.atomic_add first converts the accumulator's layout, which
    takes a round trip through shared memory and four barriers.
    """
    if INTERPRETED:
        tl.atomic_add(pointers, values, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            "{ red.relaxed.gpu.global.add.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f",
            [pointers.to(tl.int64, bitcast=True), values],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_m_blocks", "num_heads", "seqlen_q", "total_q"])
def bwd_postprocess_kernel(
    dq_accum_ptr,
    dq_ptr,
    cu_seqlens_q,
    seqused_q,
    lse_delta_stride_b,
    lse_delta_stride_h,
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    num_m_blocks,
    num_heads,
    seqlen_q,
    total_q,
    softmax_scale,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    VARLEN: tl.constexpr,
    USED_Q: tl.constexpr,
):
    """dQ = softmax_scale * dq_accum. Grid: num_m_blocks * num_heads * batch.

    BLOCK_M, NUM_WARPS: of the ``bwd_kernel`` that added to dq_accum.
    """
    dq_strides = strides_of(dq_stride_b, dq_stride_s, dq_stride_h, STRIDE_UNIT)
    m_block, batch_idx, head = block_and_head(num_m_blocks, num_heads)
    first_row = m_block * BLOCK_M
    start_q, length_q = sequence(
        cu_seqlens_q, seqused_q, batch_idx, seqlen_q, total_q, VARLEN, USED_Q
    )
    if first_row >= length_q:
        return
    row_offsets = tl.arange(0, BLOCK_M)
    columns = column_parts(BLOCK_D, PART_D)
    lse_delta = batch_idx * lse_delta_stride_b + head * lse_delta_stride_h
    lse_delta += lse_delta_start(start_q, batch_idx, VARLEN)
    accum_tile = dq_accum_ptr + (lse_delta + first_row) * BLOCK_D
    accum_pointers = dq_accum_pointers(accum_tile, BLOCK_M, columns, NUM_WARPS)
    dq = ()
    for i in tl.static_range(len(columns)):
        dq += (tl.load(accum_pointers[i]),)
    first_q_row = start_q + first_row
    dq_tile = row_pointer(dq_ptr, dq_strides, batch_idx, head, first_q_row)
    dq_pointers = tile_pointers(dq_tile, row_offsets, columns, dq_strides.s)
    rows = first_row + row_offsets
    store_parts(dq_pointers, scale_parts(dq, softmax_scale), rows, length_q, columns, HEAD_DIM)
