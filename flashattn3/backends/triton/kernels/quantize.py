"""Quantizes a block of a head from 16 or 32 bits to 8, with optional smoothing (SageAttention) and
rotation; estimates the mean for smoothing from a sample."""

import triton
import triton.language as tl

from .common import load_tile, sequence, strides_of, tile_offsets

SMALLEST_DESCALE = tl.constexpr(2.0**-126)  # see quantization/torch_operations.py


@triton.jit
def to_e4m3(x):
    """Bits of x, float32 within ±448 or NaN, rounded to e4m3; ties to even.

    Integer operations, because Triton converts only on GPUs that have the type.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Round at the third bit of the mantissa, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the steps are 2**-9, the last place of a float32 at 2**14.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_int8(x):
    """Bits of x, float32 within ±127, rounded to int8; ties to even.

    Adding 1.5 * 2**23 makes the last place 1; the sum's low byte is the int8, because the
    constant's is 0.
    """
    return (x + 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def scales_of(amax, LARGEST: tl.constexpr):
    """Descales and their inverses, each rounded once. amax: infinity makes them NaN and 0."""
    floored = tl.maximum(amax, LARGEST * SMALLEST_DESCALE)
    descale = tl.math.div_rn(floored, LARGEST)
    descale = tl.where(amax < float("inf"), descale, float("nan"))
    return descale, tl.math.div_rn(LARGEST, floored)


@triton.jit
def sums_and_differences(x, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Replace each pair of columns WIDTH apart by its sum and difference."""
    pairs = tl.reshape(x, (BLOCK_T, BLOCK_D // (2 * WIDTH), 2, WIDTH))
    even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    both = tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2))
    return tl.reshape(both, (BLOCK_T, BLOCK_D))


@triton.jit
def transformed(x, BLOCK_T: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr):
    """Walsh-Hadamard transform of the columns, one stage per bit."""
    for stage in tl.static_range(STAGES):
        x = sums_and_differences(x, BLOCK_T, HEAD_DIM, 2**stage)
    return x * (HEAD_DIM**-0.5)


@triton.jit
def quantize_block(
    x_ptr,
    data_ptr,
    descale_ptr,
    mean_ptr,
    sign_ptr,
    cu_seqlens,
    x_stride_b,
    x_stride_s,
    x_stride_h,
    num_blocks,
    num_heads,
    seqlen,
    total,
    STRIDE_UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    SMOOTH: tl.constexpr,
    ROTATE: tl.constexpr,
    STAGES: tl.constexpr,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
):
    """data (b, s, h, d) as bytes and descale (b, h, blocks), both dense. Grid: blocks * heads * b.

    BLOCK_D: head dim rounded up to a power of two. SMOOTH: subtract mean (b, h, d), dense.
    ROTATE: the head dim is a power of two, STAGES its log2. INT8: the bytes are int8, else e4m3;
    LARGEST is the quantized value of a block's amax.
    """
    x_stride_b, x_stride_s, x_stride_h = strides_of(x_stride_b, x_stride_s, x_stride_h, STRIDE_UNIT)
    pid = tl.program_id(0)
    block = pid % num_blocks
    head = pid // num_blocks % num_heads
    batch = (pid // num_blocks // num_heads).to(tl.int64)
    start, length = sequence(cu_seqlens, None, batch, seqlen, total, VARLEN, False)
    place = (batch * num_heads + head) * num_blocks + block
    first = block * BLOCK_T
    if first >= length:
        tl.store(descale_ptr + place, SMALLEST_DESCALE)
        return
    tokens = first + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    data_entry = 0 if VARLEN else batch * seqlen
    source = x_ptr + batch * x_stride_b + head * x_stride_h + start * x_stride_s
    source += tile_offsets(tokens, columns, x_stride_s)
    x = load_tile(source, tokens, length, columns, HEAD_DIM, True, HEAD_DIM < BLOCK_D)
    sign = tl.load(sign_ptr + columns)[None, :] if ROTATE else 1.0
    x = x.to(tl.float32) * sign
    if SMOOTH:
        own = mean_ptr + (batch * num_heads + head) * HEAD_DIM + columns
        mean = tl.load(own, mask=columns < HEAD_DIM, other=0.0)[None, :]
        x = tl.where((tokens < length)[:, None], x - mean * sign, 0.0)
    if ROTATE:
        x = transformed(x, BLOCK_T, BLOCK_D, STAGES)
    target = data_ptr + (data_entry + start) * num_heads * HEAD_DIM + head * HEAD_DIM
    target += tile_offsets(tokens, columns, num_heads * HEAD_DIM)
    mask = (tokens < length)[:, None] & (columns < HEAD_DIM)[None, :]
    store_quantized(x, target, mask, descale_ptr + place, LARGEST, INT8)


@triton.jit
def store_quantized(x, target, mask, descale_ptr, LARGEST: tl.constexpr, INT8: tl.constexpr):
    """Quantize a block, 0 where it has no tokens, and store its bytes and its descale."""
    finite = tl.abs(x) < float("inf")
    # int8 has no NaN: amax = inf represents it and makes the factor 0.
    magnitude = tl.where(finite, tl.abs(x), float("inf") if INT8 else 0.0)
    amax = tl.max(tl.max(magnitude, 1), 0)
    descale, factor = scales_of(amax, LARGEST)
    tl.store(descale_ptr, descale)
    # The clamp also prevents fusing the multiply with the addition in to_int8.
    scaled = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)
    scaled = tl.where(finite, scaled, 0.0 if INT8 else float("nan"))
    tl.store(target, to_int8(scaled) if INT8 else to_e4m3(scaled), mask=mask)


@triton.jit
def sum_of_halves(x, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    halves = tl.permute(tl.reshape(x, (2, HALF, BLOCK_D)), (1, 2, 0))
    first, second = tl.split(halves)
    return first + second


@triton.jit
def tree_sum(x, SIZE: tl.constexpr, STAGES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum over axis 0: adds pairs SIZE / 2 apart, then SIZE / 4, and so on."""
    for stage in tl.static_range(STAGES):
        x = sum_of_halves(x, SIZE // 2 ** (stage + 1), BLOCK_D)
    return tl.reshape(x, (BLOCK_D,))


@triton.jit
def mean_of_sample(
    x_ptr,
    mean_ptr,
    cu_seqlens,
    x_stride_b,
    x_stride_s,
    x_stride_h,
    num_heads,
    seqlen,
    total,
    STRIDE_UNIT: tl.constexpr,
    SAMPLE: tl.constexpr,
    STAGES: tl.constexpr,
    SIGNIFICANT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """mean (b, h, d), dense; see quantization/smoothing.py. Grid: h * b, head dim / BLOCK_D.

    SAMPLE: number of tokens, STAGES its log2. BLOCK_D: columns per program.
    """
    x_stride_b, x_stride_s, x_stride_h = strides_of(x_stride_b, x_stride_s, x_stride_h, STRIDE_UNIT)
    head = tl.program_id(0) % num_heads
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    start, length = sequence(cu_seqlens, None, batch, seqlen, total, VARLEN, False)
    length = tl.minimum(length, seqlen)
    slots = tl.arange(0, SAMPLE)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tokens = tl.where(length <= SAMPLE, slots, slots.to(tl.int64) * length // SAMPLE)
    source = x_ptr + batch * x_stride_b + head * x_stride_h + start * x_stride_s
    source += tile_offsets(tokens, columns, x_stride_s)
    x = load_tile(source, slots, length, columns, HEAD_DIM, True, True).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    total_of_sample = tree_sum(x, SAMPLE, STAGES, BLOCK_D)
    squares = tree_sum(x * x, SAMPLE, STAGES, BLOCK_D)
    count = tl.minimum(length, SAMPLE).to(tl.float32)
    square = total_of_sample * total_of_sample
    spread = squares - tl.math.div_rn(square, count)
    # An empty sequence has spread NaN, so its mean is 0 too.
    mean = tl.where(square > SIGNIFICANT * spread, tl.math.div_rn(total_of_sample, count), 0.0)
    target = mean_ptr + (batch * num_heads + head) * HEAD_DIM + columns
    tl.store(target, mean, mask=columns < HEAD_DIM)
