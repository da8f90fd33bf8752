"""8-bit tensors with one descale per block of tokens and head."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import hadamard as rotation
from ..call import permuted_v
from ..call.arguments import boolean, expect_local, integer
from ..call.block_scaled import LAYOUTS, BlockScaled
from ..call.dtypes import EIGHT_BIT, FP8, INT8
from ..call.quantization_limits import BLOCKS
from ..errors import expect, type_error, value_error
from ..modes import refuse_gradients
from .lengths import checked_lengths

KINDS = ("q", "k", "v")
SOURCES = (torch.float16, torch.bfloat16, torch.float32)
_FUNCTION = "quantize_block_fp8"


def quantize_block_fp8(
    x: Tensor,
    *,
    block: int = 128,
    hadamard: bool = False,
    kind: str = "q",
    dtype: torch.dtype = FP8,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    layout: str | None = None,
    smooth: bool = False,
) -> BlockScaled:
    """Quantize q, k or v for attention. The amax of each block and head maps to 448 (int8: 127).

    With amax the largest finite magnitude of a block, descale = amax / 448 and data = x * (448 /
    amax), each rounded once in float32, then to e4m3. int8 uses 127 and rounds data to the nearest
    integer, ties to even. The bits are the same on every device.

    Args:
        x: (batch, seqlen, heads, head_dim) float16, bfloat16 or float32; with cu_seqlens
            (total, heads, head_dim).
        block: tokens that share a descale: 64, 128 or 256.
        hadamard: rotate the head dim first (hadamard.py); q and k must agree. Not for v, because
            out would have to be rotated back.
        kind: "q", "k" or "v".
        dtype: dtype of data, torch.float8_e4m3fn or, for q and k, which must agree, torch.int8.
            int8 has uniform steps, finer than e4m3's where no element of a block is far larger
            than the others, as after the rotation.
        cu_seqlens, max_seqlen: for a varlen batch, as for ``flash_attn_varlen_func``. data of
            tokens outside all sequences is undefined.
        layout: layout of data, "rows" or, for v with a head dim up to 256, "permuted"; None:
            "permuted" for v where the Hopper kernels run, else "rows".
        smooth: for k, first subtract from every token a vector near the mean of its sequence and
            head, which attention and dequantize account for (smoothing.py); 0 in columns where a
            sample of 128 tokens shows no significant mean. Calls that cap scores refuse it.

    Blocks with amax below 448 * 2**-126 (int8: 127 * 2**-126), including all-zero blocks, have
    descale 2**-126. In e4m3, NaN and infinite elements become NaN (with hadamard the whole vector
    of their token and head) and do not affect the descale. int8 has no NaN: a block with such an
    element has descale NaN and data 0, so the whole block is NaN. With hadamard elements from
    2**128 / head_dim on may count as infinite: their sums may leave float32.

    Raises: TypeError, ValueError; UnsupportedError if x requires a gradient, unless under
    ``torch.no_grad()``.
    """
    block = integer(_FUNCTION, "block", block)
    hadamard = boolean(_FUNCTION, "hadamard", hadamard)
    smooth = boolean(_FUNCTION, "smooth", smooth)
    _check(x, block, hadamard, kind, dtype, layout, smooth)
    max_seqlen = checked_lengths(_FUNCTION, "x", x, cu_seqlens, max_seqlen)
    refuse_gradients(_FUNCTION, x=x)
    # Imported here: the backends import the problem of a call, which may hold a BlockScaled.
    from . import dispatch

    with torch.no_grad():
        if layout is None:
            layout = dispatch.layout_of_v(x) if kind == "v" else "rows"
        mean = dispatch.sample_mean(x, cu_seqlens, max_seqlen) if smooth else None
        how = (block, hadamard, cu_seqlens, max_seqlen, layout, dtype, mean)
        data, descale = dispatch.quantize(x, *how)
    return BlockScaled(data, descale, block, hadamard, cu_seqlens, layout, x.shape, mean)


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    hadamard: bool,
    qk_dtype: torch.dtype,
    smooth_k: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Quantize q, k and v of one attention call as quantize_block_fp8 does, with its arguments. The
    caller has checked all arguments; q, k and v are 16-bit."""
    how = (block, hadamard, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, qk_dtype)
    from . import dispatch

    with torch.no_grad():
        *scaled, k_mean = dispatch.scaled_qkv(q, k, v, *how, smooth_k)
    q_data, q_descale, k_data, k_descale, v_data, v_descale = scaled
    layout = "permuted" if comes_permuted(v) else "rows"
    return (
        BlockScaled(q_data, q_descale, block, hadamard, cu_seqlens_q, "rows", q.shape),
        BlockScaled(k_data, k_descale, block, hadamard, cu_seqlens_k, "rows", k.shape, k_mean),
        BlockScaled(v_data, v_descale, block, False, cu_seqlens_k, layout, v.shape),
    )


def comes_permuted(v: Tensor) -> bool:
    """Return whether scaled_qkv returns permuted v, as it does where the Hopper kernels run."""
    from . import dispatch

    return dispatch.layout_of_v(v) == "permuted"


def _check(x, block, hadamard, kind, dtype, layout, smooth) -> None:
    """Raise for invalid arguments, except those of a varlen batch."""
    expect_local(_FUNCTION, "x", x)
    if x.dtype not in SOURCES:
        raise type_error(_FUNCTION, "x.dtype", f"one of {SOURCES}", x.dtype)
    expect(block in BLOCKS, _FUNCTION, "block", f"one of {BLOCKS}", block)
    _expect_one_of("kind", kind, KINDS)
    _expect_one_of("dtype", dtype, EIGHT_BIT)
    _expect_one_of("layout", layout, (*LAYOUTS, None))
    if dtype == INT8 and kind == "v":
        raise value_error(_FUNCTION, "dtype", f"{FP8} for kind 'v'", dtype)
    if hadamard and kind == "v":
        raise value_error(_FUNCTION, "hadamard", "False for kind 'v'", True)
    if layout == "permuted" and kind != "v":
        raise value_error(_FUNCTION, "layout", f"'rows' or None for kind {kind!r}", repr(layout))
    if smooth and kind != "k":
        raise value_error(_FUNCTION, "smooth", f"False for kind {kind!r}", smooth)
    head_dim = x.shape[-1] if x.ndim else 0
    expect(head_dim >= 1, _FUNCTION, "x.shape[-1]", "at least 1", head_dim)
    rotatable = not hadamard or rotation.is_rotatable(head_dim)
    expect(rotatable, _FUNCTION, "x.shape[-1]", "a power of two with hadamard", head_dim)
    largest = permuted_v.COLUMNS[-1]
    fits = layout != "permuted" or head_dim <= largest
    expect(fits, _FUNCTION, "x.shape[-1]", f"at most {largest} with layout 'permuted'", head_dim)


def _expect_one_of(name: str, value: object, legal: tuple) -> None:
    found = any(value is each or (type(value) is type(each) and value == each) for each in legal)
    expect(found, _FUNCTION, name, f"one of {legal}", repr(value))
