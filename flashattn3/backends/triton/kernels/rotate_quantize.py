"""q, k and v of a projection to 8 bits in one launch, with RMSNorm (Zhang and Sennrich, arXiv
1910.07467) and rotary position embedding (Su et al., arXiv 2104.09864) of q and k on the way."""

import triton
import triton.language as tl

from .common import load_tile, sequence, tile_offsets
from .dequantize import permuted_offsets
from .quantize import SMALLEST_DESCALE, store_quantized, transformed


@triton.jit
def load_embedded(
    source,
    stride_s,
    tokens,
    length,
    columns,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    position,
    table_stride,
    num_positions,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):
    """Load rows of a head in float32, normalized if there are weights, their first 2 * HALF columns
    rotated, with BACK by the negative angle; NaN where the tables have no such position."""
    wide = HEAD_DIM < BLOCK_D
    places = source + tile_offsets(tokens, columns, stride_s)
    x = load_tile(places, tokens, length, columns, HEAD_DIM, True, wide).to(tl.float32)
    scale = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * scale * weight[None, :]
    if HALF > 0:
        if INTERLEAVED:
            partner, pair, first = columns ^ 1, columns // 2, columns % 2 == 0
        else:
            first = columns < HALF
            partner = tl.where(first, columns + HALF, columns - HALF)
            pair = tl.where(first, columns, columns - HALF)
        turns = columns < 2 * HALF
        mask = (tokens < length)[:, None] & turns[None, :]
        places = source + tile_offsets(tokens, partner, stride_s)
        y = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + partner, mask=turns, other=0.0).to(tl.float32)
            y = y * scale * weight[None, :]
        known = (position >= 0) & (position < num_positions)
        angles = tile_offsets(position, pair, table_stride)
        mask = mask & known[:, None]
        cos = tl.load(cos_ptr + angles, mask=mask, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=mask, other=float("nan")).to(tl.float32)
        if BACK:
            sin = -sin
        turned = tl.where(first[None, :], x * cos - y * sin, y * sin + x * cos)
        x = tl.where(turns[None, :], turned, x)
    return x


@triton.jit
def positions_of(positions_ptr, row, tokens, length):
    """Positions of a sequence, whose first row is `row`: those given, else its tokens."""
    position = tokens
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row + tokens, mask=tokens < length, other=0)
    return position


@triton.jit
def quantize_embedded(
    x_ptr,
    data_ptr,
    descale_ptr,
    weight_ptr,
    mean_ptr,
    sign_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    x_stride_b,
    x_stride_s,
    x_stride_h,
    table_stride,
    num_positions,
    batch,
    head,
    block,
    start,
    length,
    num_heads,
    num_blocks,
    seqlen,
    eps,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    VARLEN: tl.constexpr,
    ROTATE: tl.constexpr,
    STAGES: tl.constexpr,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
):
    """A block of q or k."""
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    row = (0 if VARLEN else batch * seqlen) + start
    position = positions_of(positions_ptr, row, tokens, length)
    source = x_ptr + batch * x_stride_b + head * x_stride_h + start * x_stride_s
    x = load_embedded(source, x_stride_s, tokens, length, columns, weight_ptr, cos_ptr, sin_ptr,
                      position, table_stride, num_positions, eps, HEAD_DIM, BLOCK_D, HALF,
                      INTERLEAVED, False)  # fmt: skip
    sign = tl.load(sign_ptr + columns)[None, :] if ROTATE else 1.0
    x = x * sign
    place = batch * num_heads + head
    if mean_ptr is not None:
        own = mean_ptr + place * HEAD_DIM + columns
        mean = tl.load(own, mask=columns < HEAD_DIM, other=0.0)[None, :]
        x = x - mean * sign
    x = tl.where((tokens < length)[:, None], x, 0.0)
    if ROTATE:
        x = transformed(x, BLOCK_T, BLOCK_D, STAGES)
    target = data_ptr + row * num_heads * HEAD_DIM + head * HEAD_DIM
    target += tile_offsets(tokens, columns, num_heads * HEAD_DIM)
    mask = (tokens < length)[:, None] & (columns < HEAD_DIM)[None, :]
    store_quantized(x, target, mask, descale_ptr + place * num_blocks + block, LARGEST, INT8)


@triton.jit
def quantize_values(
    x_ptr,
    data_ptr,
    descale_ptr,
    x_stride_b,
    x_stride_s,
    x_stride_h,
    batch,
    head,
    block,
    start,
    length,
    num_heads,
    num_blocks,
    seqlen,
    groups,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    PERMUTED_COLUMNS: tl.constexpr,
):
    """A block of v, to e4m3."""
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    source = x_ptr + batch * x_stride_b + head * x_stride_h + start * x_stride_s
    source += tile_offsets(tokens, columns, x_stride_s)
    x = load_tile(source, tokens, length, columns, HEAD_DIM, True, HEAD_DIM < BLOCK_D)
    if PERMUTED_COLUMNS > 0:
        target = permuted_offsets(
            tokens, columns, start, batch, head, num_heads, groups, PERMUTED_COLUMNS, VARLEN
        )
    else:
        target = ((0 if VARLEN else batch * seqlen) + start) * num_heads * HEAD_DIM
        target = target + head * HEAD_DIM + tile_offsets(tokens, columns, num_heads * HEAD_DIM)
    mask = (tokens < length)[:, None] & (columns < HEAD_DIM)[None, :]
    descale_ptr += (batch * num_heads + head) * num_blocks + block
    store_quantized(x.to(tl.float32), data_ptr + target, mask, descale_ptr, 448.0, False)


@triton.jit
def rotate_quantize_block(
    q_ptr,
    k_ptr,
    v_ptr,
    q_data,
    k_data,
    v_data,
    q_descale,
    k_descale,
    v_descale,
    q_weight,
    k_weight,
    mean_ptr,
    sign_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    cu_seqlens,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    table_stride,
    num_positions,
    num_heads_q,
    num_heads_kv,
    num_blocks,
    seqlen,
    total,
    groups,
    eps,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    VARLEN: tl.constexpr,
    ROTATE: tl.constexpr,
    STAGES: tl.constexpr,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
    PERMUTED_COLUMNS: tl.constexpr,
):
    """data (b, s, h, d) as bytes, or of v with PERMUTED_COLUMNS in its permuted layout, and descale
    (b, h, blocks), all dense. Grid: blocks * (q's heads + k's + v's) * b.

    k None: q alone, and 0 is num_heads_kv. HALF: rotated columns / 2. The other constants are those
    of ``quantize_block`` and ``dequantize_block``.
    """
    pid = tl.program_id(0)
    num_heads = num_heads_q + 2 * num_heads_kv
    block = pid % num_blocks
    head = pid // num_blocks % num_heads
    batch = (pid // num_blocks // num_heads).to(tl.int64)
    start, length = sequence(cu_seqlens, None, batch, seqlen, total, VARLEN, False)
    if head < num_heads_q:
        if block * BLOCK_T < length:
            quantize_embedded(
                q_ptr, q_data, q_descale, q_weight, None, sign_ptr, cos_ptr, sin_ptr,
                positions_ptr, q_stride_b, q_stride_s, q_stride_h, table_stride, num_positions,
                batch, head, block, start, length, num_heads_q, num_blocks, seqlen, eps, BLOCK_T,
                HEAD_DIM, BLOCK_D, HALF, INTERLEAVED, VARLEN, ROTATE, STAGES, LARGEST, INT8,
            )  # fmt: skip
        else:
            place = (batch * num_heads_q + head) * num_blocks + block
            tl.store(q_descale + place, SMALLEST_DESCALE)
    elif k_ptr is not None:
        of_k = head < num_heads_q + num_heads_kv
        head = (head - num_heads_q) % num_heads_kv
        place = (batch * num_heads_kv + head) * num_blocks + block
        if block * BLOCK_T < length:
            if of_k:
                quantize_embedded(
                    k_ptr, k_data, k_descale, k_weight, mean_ptr, sign_ptr, cos_ptr, sin_ptr,
                    positions_ptr, k_stride_b, k_stride_s, k_stride_h, table_stride,
                    num_positions, batch, head, block, start, length, num_heads_kv, num_blocks,
                    seqlen, eps, BLOCK_T, HEAD_DIM, BLOCK_D, HALF, INTERLEAVED, VARLEN, ROTATE,
                    STAGES, LARGEST, INT8,
                )  # fmt: skip
            else:
                quantize_values(
                    v_ptr, v_data, v_descale, v_stride_b, v_stride_s, v_stride_h, batch, head,
                    block, start, length, num_heads_kv, num_blocks, seqlen, groups, BLOCK_T,
                    HEAD_DIM_V, BLOCK_DV, VARLEN, PERMUTED_COLUMNS,
                )  # fmt: skip
        else:
            if of_k:
                tl.store(k_descale + place, SMALLEST_DESCALE)
            else:
                tl.store(v_descale + place, SMALLEST_DESCALE)


@triton.jit
def rotate_rows(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_b,
    stride_s,
    stride_h,
    table_stride,
    num_positions,
    batch,
    head,
    block,
    start,
    length,
    num_heads,
    seqlen,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    VARLEN: tl.constexpr,
    BACK: tl.constexpr,
):
    """A block of a head."""
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    row = (0 if VARLEN else batch * seqlen) + start
    position = positions_of(positions_ptr, row, tokens, length)
    source = x_ptr + batch * stride_b + head * stride_h + start * stride_s
    x = load_embedded(
        source, stride_s, tokens, length, columns, None, cos_ptr, sin_ptr, position,
        table_stride, num_positions, 0.0, HEAD_DIM, BLOCK_D, HALF, INTERLEAVED, BACK,
    )  # fmt: skip
    target = out_ptr + row * num_heads * HEAD_DIM + head * HEAD_DIM
    target += tile_offsets(tokens, columns, num_heads * HEAD_DIM)
    mask = (tokens < length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(target, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "positions_ptr", "cu_seqlens", "num_positions", "heads_x", "heads_y", "num_blocks",
        "seqlen", "total",
    ]
)  # fmt: skip
def rotate_blocks(
    x_ptr,
    y_ptr,
    x_out,
    y_out,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    cu_seqlens,
    x_stride_b,
    x_stride_s,
    x_stride_h,
    y_stride_b,
    y_stride_s,
    y_stride_h,
    table_stride,
    num_positions,
    heads_x,
    heads_y,
    num_blocks,
    seqlen,
    total,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    VARLEN: tl.constexpr,
    BACK: tl.constexpr,
):
    """x and y of the same tokens, of any strides, rotated; outputs (b, s, h, d), dense. y None:
    heads_y is 0. Grid: blocks of tokens * (heads_x + heads_y) * b. BACK: by the negative angles."""
    pid = tl.program_id(0)
    num_heads = heads_x + heads_y
    head = pid % num_heads
    block = pid // num_heads % num_blocks
    batch = (pid // num_heads // num_blocks).to(tl.int64)
    start, length = sequence(cu_seqlens, None, batch, seqlen, total, VARLEN, False)
    if head < heads_x:
        rotate_rows(
            x_ptr, x_out, cos_ptr, sin_ptr, positions_ptr, x_stride_b, x_stride_s, x_stride_h,
            table_stride, num_positions, batch, head, block, start, length, heads_x, seqlen,
            BLOCK_T, HEAD_DIM, BLOCK_D, HALF, INTERLEAVED, VARLEN, BACK,
        )  # fmt: skip
    elif y_ptr is not None:
        rotate_rows(
            y_ptr, y_out, cos_ptr, sin_ptr, positions_ptr, y_stride_b, y_stride_s, y_stride_h,
            table_stride, num_positions, batch, head - heads_x, block, start, length, heads_y,
            seqlen, BLOCK_T, HEAD_DIM, BLOCK_D, HALF, INTERLEAVED, VARLEN, BACK,
        )  # fmt: skip
