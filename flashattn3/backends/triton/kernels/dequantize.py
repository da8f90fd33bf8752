"""Widens blocks of 8 bits to 16 bits, rotated as they are: the inverse of quantize_block but for
the rotation and the mean."""

import triton
import triton.language as tl

from .common import sequence, tile_offsets
from .fp8 import as_float16

KEY_GROUP, CORE_ROW_KEYS = tl.constexpr(32), tl.constexpr(16)  # see call/permuted_v.py


@triton.jit
def permuted_offsets(
    tokens,
    columns,
    first_row,
    batch,
    head,
    num_heads,
    groups,
    COLUMNS: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Offsets of V's elements in its permuted layout. first_row: of the sequence; groups: of
    CORE_ROW_KEYS keys in a head."""
    key = tokens % CORE_ROW_KEYS
    position = tokens - key + key % 8 // 2 * 4 + key // 8 * 2 + key % 2
    head_entry = head
    if VARLEN:
        position = position.to(tl.int64) + (first_row // KEY_GROUP + batch) * KEY_GROUP
    else:
        head_entry = batch * num_heads + head
    group = head_entry * groups + position // CORE_ROW_KEYS
    offsets = group[:, None] * COLUMNS + columns[None, :]
    return offsets * CORE_ROW_KEYS + (position % CORE_ROW_KEYS)[:, None]


@triton.jit
def dequantize_block(
    data_ptr,
    descale_ptr,
    out_ptr,
    cu_seqlens,
    num_blocks,
    num_heads,
    seqlen,
    total,
    groups,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    PERMUTED_COLUMNS: tl.constexpr,
):
    """out (b, s, h, d), dense. Grid: blocks * heads * b.

    data: int8, or e4m3 as bytes, dense; with PERMUTED_COLUMNS, if not 0, in the layout of V with so
    many columns and groups of keys. descale (b, h, blocks), dense. The constants are those of
    ``quantize_block``.
    """
    pid = tl.program_id(0)
    block = pid % num_blocks
    head = pid // num_blocks % num_heads
    batch = (pid // num_blocks // num_heads).to(tl.int64)
    start, length = sequence(cu_seqlens, None, batch, seqlen, total, VARLEN, False)
    first = block * BLOCK_T
    if first >= length:
        return
    tokens = first + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    entry = 0 if VARLEN else batch * seqlen
    rows = (entry + start) * num_heads * HEAD_DIM + head * HEAD_DIM
    rows += tile_offsets(tokens, columns, num_heads * HEAD_DIM)
    source = rows
    if PERMUTED_COLUMNS > 0:
        source = permuted_offsets(
            tokens, columns, start, batch, head, num_heads, groups, PERMUTED_COLUMNS, VARLEN
        )
    mask = (tokens < length)[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.load(data_ptr + source, mask=mask, other=0)
    if data_ptr.dtype.element_ty == tl.int8:
        wide = x.to(tl.float32)
    else:
        wide = as_float16(x, False).to(tl.float32)
    wide *= tl.load(descale_ptr + (batch * num_heads + head) * num_blocks + block)
    tl.store(out_ptr + rows, wide.to(out_ptr.dtype.element_ty), mask=mask)
