"""8-bit operands and their descales, on every chip: the bits of e4m3 are read as bytes.

From 8.9 on the tensor cores multiply e4m3. Before, or in the interpreter, the bytes are widened to
float16, which holds every e4m3, by integer operations: Triton converts only on chips with the type.
int8 is multiplied on all of them.
"""

import triton
import triton.language as tl

# Over all blocks of v that a program has met, descales below the largest times this count as this:
# their values are far under the last place of that block's, and their ratio does not overflow.
SMALLEST_RATIO = tl.constexpr(2.0**-80)


@triton.jit
def as_operand(x, NATIVE: tl.constexpr):
    """What tensor cores multiply with the least work: bytes as e4m3 or float16, int8 as it is."""
    if x.dtype == tl.int8:
        operand = x
    elif NATIVE:
        operand = x.to(tl.float8e4nv, bitcast=True)
    else:
        operand = as_float16(x, NATIVE)
    return operand


@triton.jit
def as_float16(x, NATIVE: tl.constexpr):
    """Of bytes that hold e4m3: the same values in float16."""
    if NATIVE:
        wide = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        # Exponent and mantissa in float16's places, whose bias is 8 more: small ones as well.
        code = ((bits & 0x80) << 8) | (magnitude << 7)
        code = tl.where(magnitude == 0x7F, 0x7E00, code)
        wide = code.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return wide


@triton.jit
def descale_of(
    tokens, head, batch_idx, descale_ptr, stride_b, stride_h, stride_n, group, block, num_blocks
):
    """Of tokens of a sequence, 1 without descales. Whatever the lengths, it reads inside.

    group: query heads to one head of descales; ``head`` is a query head.
    """
    descale = 1.0
    if descale_ptr is not None:
        place = tl.minimum(tokens // block, num_blocks - 1)
        descale_ptr += batch_idx * stride_b + head // group * stride_h
        descale = tl.load(descale_ptr + place * stride_n)
    return descale
