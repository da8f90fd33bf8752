"""Keys and values of 8 bits in a cache: widened to float16, and their descales.

Two neighbours of a row are one word of 16 bits, so that words reach the registers as the 16-bit
operands of a GEMM do, and a register holds two columns of two keys. Even and odd columns have a
GEMM each.
"""

import triton
import triton.language as tl

from .common import INTERPRETED
from .fp8 import as_float16

# The least unit of a row: the inverse of a smaller one may overflow.
SMALLEST_UNIT = tl.constexpr(2.0**-100)
# The largest element of a row of queries gets this exponent in float16, which then has every bit of
# elements down to 2^-31 of it. Rows of smaller elements than 2^-60 get the factor of those.
QUERY_EXPONENT, SMALLEST_EXPONENT = tl.constexpr(14), tl.constexpr(-60)
# Without the GPU's own conversion e4m3 is widened to its value divided by this.
SCALE_OF_E4M3 = tl.constexpr(256.0)

# h has the upper bytes of four halves, sign and six bits of a code each, l the lower ones, its last
# bit. The magnitude 0x7f alone carries into bit 7 of n, which makes an exponent of ones: NaN.
_E4M3 = """{{ .reg .b32 m, n, h, l;
    and.b32 m, $1, 0x7f7f7f7f; add.u32 n, m, 0x01010101; and.b32 n, n, 0x80808080; or.b32 m, m, n;
    shr.u32 h, m, 1; lop3.b32 h, $1, h, 0x80808080, 0xe4; shl.b32 l, m, 7; and.b32 l, l, 0x80808080;
    prmt.b32 $0, l, h, {}; }}"""
_NATIVE_E4M3 = """{{ .reg .b32 a; .reg .b16 even, odd;
    prmt.b32 a, $1, 0, 0x3120; mov.b32 {{even, odd}}, a; cvt.rn.f16x2.e4m3x2 $0, {}; }}"""
# 0x6480 is 1152, a half whose last bit is 1: 128 for the byte's sign, 1024 for its place.
_INT8 = """{{ .reg .b32 a, bias; mov.b32 bias, 0x64806480; {}; sub.rn.f16x2 $0, a, bias; }}"""

EVEN_E4M3, ODD_E4M3 = (tl.constexpr(_E4M3.format(bytes_of)) for bytes_of in ("0x6240", "0x7351"))
EVEN_NATIVE, ODD_NATIVE = (tl.constexpr(_NATIVE_E4M3.format(half)) for half in ("even", "odd"))
EVEN_INT8, ODD_INT8 = (
    tl.constexpr(_INT8.format(code))
    for code in (
        "lop3.b32 a, $1, 0x00ff00ff, bias, 0x6a",
        "xor.b32 a, $1, 0x80808080; prmt.b32 a, a, bias, 0x5351",
    )
)


@triton.jit
def widened(words, ODD: tl.constexpr, STORED: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """The even or odd columns of words of e4m3 or int8, in float16, divided by ``scale_of``."""
    if INTERPRETED:
        x = (words >> (8 * ODD)).to(tl.uint8)
        if tl.int8 == STORED:
            wide = x.to(tl.int8, bitcast=True).to(tl.float16)
        else:
            wide = (as_float16(x, False) / scale_of(STORED, NATIVE_FP8)).to(tl.float16)
    else:
        if tl.int8 == STORED:
            CODE: tl.constexpr = ODD_INT8 if ODD else EVEN_INT8
        elif NATIVE_FP8:
            CODE: tl.constexpr = ODD_NATIVE if ODD else EVEN_NATIVE
        else:
            CODE: tl.constexpr = ODD_E4M3 if ODD else EVEN_E4M3
        wide = tl.inline_asm_elementwise(
            CODE, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    return wide


@triton.jit
def scale_of(STORED: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """What ``widened`` numbers are multiplied by."""
    unit = 1.0
    if tl.uint8 == STORED and not NATIVE_FP8:
        unit = SCALE_OF_E4M3
    return unit


@triton.jit
def in_float16(q):
    """Rows of bfloat16 in float16, each divided by a power of two, and these powers."""
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, SMALLEST_EXPONENT), 127) - QUERY_EXPONENT
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q * inverse[:, None]).to(tl.float16), power


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
