"""Keys and values of 8 bits in a cache: widened to the dtype of the math, and their descales."""

import triton
import triton.language as tl

from .fp8 import widened_e4m3

# The least unit of a row: the inverse of a smaller one may overflow.
SMALLEST_UNIT = tl.constexpr(2.0**-100)


@triton.jit
def widened(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Bytes of e4m3, or int8, in a dtype of 16 bits, exactly; others as they are."""
    if x.dtype == tl.uint8:
        wide = widened_e4m3(x, DTYPE, NATIVE_FP8)
    elif x.dtype == tl.int8:
        wide = x.to(DTYPE)
    else:
        wide = x
    return wide


@triton.jit
def of_keys(descale, page, row, strides, exists, MASKED: tl.constexpr):
    """Descales of keys, by page and row in it; of keys that do not exist 0. descale: a pointer to
    those of a head, of a dense cache, which has page 0, to those of the cache."""
    places = descale + page * strides.b + row * strides.s
    return tl.load(places, mask=exists, other=0.0) if MASKED else tl.load(places)


@triton.jit
def in_units(p, unit):
    """P times V's descales divided by a unit of each row, what an accumulator in units of the old
    unit is multiplied by, and the new unit: at least the old one and the row's largest magnitude.

    float16 has no number for P times a small descale or a large one. What other rows see changes no
    bit of a row.
    """
    largest = tl.maximum(unit, tl.max(tl.abs(p), 1))
    new_unit = tl.maximum(largest, SMALLEST_UNIT)
    return p * (1.0 / new_unit)[:, None], unit / new_unit, new_unit
