"""8-bit inputs (Q and K e4m3 or int8, V e4m3) and their descales, on every GPU: e4m3 is loaded as
bytes.

The descales of Q and K are part of the score factor. The accumulator is in units of the descale of
V's current block: a change of unit is folded into the rescale. P stays in float16.

From compute capability 8.9 the tensor cores multiply e4m3. Below, or in the interpreter, integer
operations convert the bytes to 16 bits, which hold every e4m3: Triton converts only on GPUs with
the type. All of them multiply int8.
"""

import triton
import triton.language as tl

from .common import INTERPRETED


def _widening() -> str:
    """Assembly that widens four e4m3 bytes, two in each register. A byte is moved to the high end
    of its half, its exponent and mantissa down to the fields of float16, whose greater bias a
    product takes away, exactly for subnormals too. The magnitude 0x7f alone carries into one bit
    more, n, which makes an exponent of ones."""
    text = "{ .reg .b32 a, m, n, x;"
    for half, bytes_of in enumerate((0x1404, 0x3424)):
        text += f"""
        prmt.b32 a, $2, 0, {bytes_of}; shr.u32 m, a, 1; and.b32 m, m, 0x3f803f80;
        add.u32 n, m, 0x00800080; and.b32 n, n, 0x40004000; or.b32 m, m, n;
        and.b32 a, a, 0x80008000; or.b32 m, m, a;
        mov.b32 x, 0x5c005c00; mul.f16x2 ${half}, m, x;"""
    return text + " }"


TO_FLOAT16 = tl.constexpr(_widening())

# V descales are raised to at least this times the largest that the program has read: smaller values
# are far below the last place of that block's, and the ratio of descales then cannot overflow.
SMALLEST_RATIO = tl.constexpr(2.0**-80)


@triton.jit
def as_operand(x, NATIVE: tl.constexpr):
    """Convert to the cheapest tensor core type: bytes to e4m3 or float16; int8 is unchanged."""
    if x.dtype == tl.int8:
        operand = x
    elif NATIVE:
        operand = x.to(tl.float8e4nv, bitcast=True)
    else:
        operand = as_float16(x, NATIVE)
    return operand


@triton.jit
def as_float16(x, NATIVE: tl.constexpr):
    """Convert e4m3 bytes to float16, exactly."""
    if NATIVE:
        wide = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif INTERPRETED:
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        code = ((bits & 0x80) << 8) | (magnitude << 7)
        code = tl.where(magnitude == 0x7F, 0x7E00, code)
        wide = (code.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    else:
        wide = tl.inline_asm_elementwise(
            TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    return wide


@triton.jit
def descale_of(
    tokens, head, batch_idx, descale_ptr, stride_b, stride_h, stride_n, group, block, num_blocks
):
    """Load the descales of tokens of a sequence; 1 without descales. Never reads out of bounds.

    group: query heads per head of descales; ``head`` is a query head.
    """
    descale = 1.0
    if descale_ptr is not None:
        place = tl.minimum(tokens // block, num_blocks - 1)
        descale_ptr += batch_idx * stride_b + head // group * stride_h
        descale = tl.load(descale_ptr + place * stride_n)
    return descale


@triton.jit
def with_unit(new_unit, unit, largest_unit, decay):
    """The unit of the accumulator, the largest one so far, and the factor of the sums so far.

    new_unit: V's descale of a block; raised to SMALLEST_RATIO of the largest one.
    """
    largest_unit = tl.maximum(largest_unit, tl.abs(new_unit))
    smallest = largest_unit * SMALLEST_RATIO
    new_unit = tl.where(tl.abs(new_unit) < smallest, smallest, new_unit)
    decay = decay * tl.where(new_unit == unit, 1.0, unit / new_unit)
    return new_unit, largest_unit, decay
