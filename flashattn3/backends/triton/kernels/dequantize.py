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
def widen(
    program,
    data_ptr,
    descale_ptr,
    out_ptr,
    cu_seqlens,
    num_blocks,
    num_heads,
    seqlen,
    groups,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    PERMUTED_COLUMNS: tl.constexpr,
):
    """BLOCK_T tokens of a head of a tensor; program: their index. The others are those of
    ``dequantize_blocks``."""
    PARTS: tl.constexpr = BLOCK // BLOCK_T
    tile = program % (num_blocks * PARTS)
    head = program // (num_blocks * PARTS) % num_heads
    batch = (program // (num_blocks * PARTS) // num_heads).to(tl.int64)
    start, length = sequence(cu_seqlens, None, batch, seqlen, seqlen, VARLEN, False)
    first = tile * BLOCK_T
    if first < length:
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
        wide *= tl.load(descale_ptr + (batch * num_heads + head) * num_blocks + tile // PARTS)
        tl.store(out_ptr + rows, wide.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k", "programs_q",
        "programs_k", "blocks_q", "blocks_k", "blocks_v", "num_heads_q", "num_heads_kv", "seqlen_q",
        "seqlen_k", "groups",
    ]
)  # fmt: skip
def dequantize_blocks(
    q_data,
    k_data,
    v_data,
    q_out,
    k_out,
    v_out,
    q_descale,
    k_descale,
    v_descale,
    cu_seqlens_q,
    cu_seqlens_k,
    programs_q,
    programs_k,
    blocks_q,
    blocks_k,
    blocks_v,
    num_heads_q,
    num_heads_kv,
    seqlen_q,
    seqlen_k,
    groups,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    VARLEN: tl.constexpr,
    PERMUTED_COLUMNS: tl.constexpr,
):
    """q, k and v (b, s, h, d), dense. Grid: BLOCK_T tokens of a head of q, of k and of v.

    Data: int8, or e4m3 as bytes, dense; that of v, with PERMUTED_COLUMNS if not 0, in its layout
    with so many columns and groups of keys. Descales (b, h, blocks), dense: one of BLOCK_Q, BLOCK_K
    or BLOCK_V tokens; None: the tensor has no program. programs: those of q, and of k. seqlen: with
    VARLEN the number of all tokens. The other constants are those of ``quantize_block``.
    """
    program = tl.program_id(0)
    if program < programs_q:
        if q_descale is not None:
            widen(program, q_data, q_descale, q_out, cu_seqlens_q, blocks_q, num_heads_q, seqlen_q,
                  0, BLOCK_Q, BLOCK_T, HEAD_DIM, BLOCK_D, VARLEN, 0)  # fmt: skip
    elif program < programs_q + programs_k:
        if k_descale is not None:
            widen(program - programs_q, k_data, k_descale, k_out, cu_seqlens_k, blocks_k,
                  num_heads_kv, seqlen_k, 0, BLOCK_K, BLOCK_T, HEAD_DIM, BLOCK_D, VARLEN,
                  0)  # fmt: skip
    elif v_descale is not None:
        widen(program - programs_q - programs_k, v_data, v_descale, v_out, cu_seqlens_k, blocks_v,
              num_heads_kv, seqlen_k, groups, BLOCK_V, BLOCK_T, HEAD_DIM_V, BLOCK_DV, VARLEN,
              PERMUTED_COLUMNS)  # fmt: skip
