"""Rows of one head of an append: copied or rotated, in 16 bits or in 8 with a descale."""

import triton
import triton.language as tl

from .quantize import scales_of, to_e4m3, to_int8

PER_SEQUENCE, PAGES, TOKENS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MEASURE, DIVIDE, MULTIPLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LARGEST_E4M3, LARGEST_INT8 = tl.constexpr(448.0), tl.constexpr(127.0)


@triton.jit
def put(target, x, scale, mask, MODE: tl.constexpr):
    """Store x, float32, divided by or times the scales of its rows, in the dtype of the target; or
    measure it. Returns the largest magnitude of each row, of MEASURE alone.

    Numbers of 8 bits saturate; what is not finite is as in call/eight_bits.py. e4m3 are bytes where
    the GPU does not convert them.
    """
    kind: tl.constexpr = target.dtype.element_ty
    largest = scale * 0.0
    if MODE == MEASURE:
        magnitude = tl.abs(x)
        of_others: tl.constexpr = float("inf") if kind == tl.int8 else 0.0
        magnitude = tl.where(magnitude < float("inf"), magnitude, of_others)
        largest = tl.max(tl.where(mask, magnitude, 0.0), 1)
    elif kind.primitive_bitwidth > 8:
        tl.store(target, (x / scale[:, None]).to(kind), mask=mask)
    else:
        if MODE == DIVIDE:
            scaled = tl.math.div_rn(x, scale[:, None] + tl.zeros_like(x))
        else:
            scaled = tl.where(tl.abs(x) < float("inf"), x * scale[:, None], float("nan"))
        bound: tl.constexpr = LARGEST_INT8 if kind == tl.int8 else LARGEST_E4M3
        held = tl.minimum(tl.maximum(scaled, -bound), bound)
        held = tl.where(scaled == scaled, held, 0.0 if kind == tl.int8 else float("nan"))
        if kind == tl.int8:
            codes = to_int8(held).to(kind, bitcast=True)
        elif kind == tl.uint8:
            codes = to_e4m3(held)
        else:
            codes = held.to(kind)
        tl.store(target, codes, mask=mask)
    return largest


@triton.jit
def copy_columns(
    source,
    target,
    scale,
    exists,
    columns,
    first_column,
    num_columns,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
):
    """Columns first_column .. num_columns of rows; source and target: pointers to the rows."""
    largest = scale * 0.0
    for begin in tl.static_range(0, WIDTH, 64):
        places = first_column + begin + columns
        mask = exists[:, None] & (places < num_columns)[None, :]
        x = tl.load(source[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, put(target[:, None] + places[None, :], x, scale, mask, MODE))
    return largest


@triton.jit
def rotate_columns(
    source,
    target,
    scale,
    exists,
    position,
    columns,
    rotary_cos,
    rotary_sin,
    rotary_stride,
    num_positions,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
):
    """The first 2 * HALF columns of rows, rotated; NaN where the tables have no such position."""
    known = (position >= 0) & (position < num_positions)
    table_rows = position.to(tl.int64) * rotary_stride
    largest = scale * 0.0
    for begin in tl.static_range(0, HALF, 64):
        pairs = begin + columns
        inside = (pairs < HALF)[None, :]
        first, second = pairs, pairs + HALF
        if INTERLEAVED:
            first, second = 2 * pairs, 2 * pairs + 1
        mask = exists[:, None] & inside
        x = tl.load(source[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
        angles = table_rows[:, None] + pairs[None, :]
        table_mask = mask & known[:, None]
        cos = tl.load(rotary_cos + angles, mask=table_mask, other=float("nan")).to(tl.float32)
        sin = tl.load(rotary_sin + angles, mask=table_mask, other=float("nan")).to(tl.float32)
        turned = put(target[:, None] + first[None, :], x * cos - y * sin, scale, mask, MODE)
        largest = tl.maximum(largest, turned)
        turned = put(target[:, None] + second[None, :], x * sin + y * cos, scale, mask, MODE)
        largest = tl.maximum(largest, turned)
    return largest


@triton.jit
def write_rows(
    source,
    target,
    scale,
    exists,
    position,
    columns,
    rotary_cos,
    rotary_sin,
    rotary_stride,
    num_positions,
    NUM_COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
):
    """Rows of one head, their first 2 * HALF columns rotated. Returns what ``put`` does."""
    largest = scale * 0.0
    if HALF > 0:
        largest = rotate_columns(
            source, target, scale, exists, position, columns, rotary_cos, rotary_sin,
            rotary_stride, num_positions, HALF, INTERLEAVED, MODE,
        )  # fmt: skip
    rest = copy_columns(source, target, scale, exists, columns, 2 * HALF, NUM_COLUMNS,
                        NUM_COLUMNS - 2 * HALF, MODE)  # fmt: skip
    return tl.maximum(largest, rest)


@triton.jit
def append_rows(
    source,
    target,
    descale,
    batch_idx,
    cache_idx,
    place,
    head,
    descale_strides,
    exists,
    position,
    columns,
    rotary_cos,
    rotary_sin,
    rotary_stride,
    num_positions,
    NUM_COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OF: tl.constexpr,
):
    """Rows of one head of K or V, divided by the descales of their sequences or pages; or those of
    tokens are written, which fit the largest magnitudes of the rows. OF: of ``append_kernel``."""
    scale = tl.zeros_like(position).to(tl.float32) + 1.0
    if OF == TOKENS:
        largest = write_rows(
            source, target, scale, exists, position, columns, rotary_cos, rotary_sin, rotary_stride,
            num_positions, NUM_COLUMNS, HALF, INTERLEAVED, MEASURE,
        )  # fmt: skip
        own, scale = scales_of(
            largest, LARGEST_INT8 if target.dtype.element_ty == tl.int8 else LARGEST_E4M3
        )
        descale += cache_idx * descale_strides.b + place * descale_strides.s
        tl.store(descale + head * descale_strides.h, own, mask=exists)
    elif descale is not None:
        row = cache_idx if OF == PAGES else batch_idx
        descale += row * descale_strides.b + head * descale_strides.h
        scale = tl.load(descale, mask=exists, other=1.0)
    write_rows(
        source, target, scale, exists, position, columns, rotary_cos, rotary_sin, rotary_stride,
        num_positions, NUM_COLUMNS, HALF, INTERLEAVED, MULTIPLY if OF == TOKENS else DIVIDE,
    )  # fmt: skip
