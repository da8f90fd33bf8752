"""The public functions that quantize 16-bit tensors to 8 bits and attend in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .api import flash_attn_func, flash_attn_varlen_func, host_length
from .errors import expect, type_error
from .problem import (
    SIXTEEN_BIT,
    Options,
    Tensors,
    check,
    check_option_types,
    check_tensor_types,
    refuse_gradients,
)
from .quantization import BlockScaled, quantize_qkv
from .quantization.hadamard import is_rotatable
from .scales import BLOCKS, EIGHT_BIT, best_qk_dtype


class _Scheme(NamedTuple):
    """How to quantize: the options of flash_attn_fp8_func with these names."""

    block: int
    hadamard: bool
    qk_dtype: torch.dtype | None
    smooth_k: bool


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in 8 bits on 16-bit tensors: quantizes q, k, v in blocks and attends, in one call.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16 or bfloat16.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim) and (batch, seqlen_k, num_heads_kv,
            head_dim_v), in q's dtype.
        block: tokens of a head that share a scale: 64, 128 or 256.
        hadamard: rotate q and k first, which spreads outliers over the head dim; head_dim must
            then be a power of two.
        qk_dtype: of quantized q and k, torch.int8 or torch.float8_e4m3fn; v becomes float8_e4m3fn.
            None: int8 with hadamard and head dims up to 128, else float8_e4m3fn
            (``scales.best_qk_dtype`` says why).
        smooth_k: subtract from k, before it is rotated, a vector for each head near its mean. No
            probability changes, and scores are finer where the keys have a large component in
            common. Not with softcap.
        out_dtype: float16, bfloat16 or, on the reference backend, float32; None stands for q's.
        All other arguments are those of ``flash_attn_func``.

    Returns: what ``flash_attn_func`` does, in out_dtype.

    Raises: what ``flash_attn_func`` does; UnsupportedError where a tensor requires a gradient,
        unless under ``torch.no_grad()``.

    Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), section 3.3.
    """
    scheme = _Scheme(block, hadamard, qk_dtype, smooth_k)
    scaled = _quantized("flash_attn_fp8_func", Tensors(q, k, v), Options(softcap=softcap), scheme)
    return flash_attn_func(
        *scaled,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=softcap,
        sm_margin=sm_margin,
        return_lse=return_lse,
        backend=backend,
        out_dtype=out_dtype or q.dtype,
    )


def flash_attn_varlen_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_fp8_func`` over sequences of different lengths, packed one after another.

    Rows beyond seqused do not count in the result, but in the scale of their block and the vectors
    of smooth_k, one for each sequence and head; one that is not finite makes its block
    of int8 NaN.

    Args: q (total_q, num_heads_q, head_dim), k and v (total_k, num_heads_kv, ·), of 16 bits; the
        others are those of ``flash_attn_varlen_func`` and ``flash_attn_fp8_func``, as are the
        results and the errors.
    """
    function = "flash_attn_varlen_fp8_func"
    tensors = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options = Options(
        host_length(function, "max_seqlen_q", max_seqlen_q),
        host_length(function, "max_seqlen_k", max_seqlen_k),
        softcap=softcap,
    )
    scheme = _Scheme(block, hadamard, qk_dtype, smooth_k)
    scaled = _quantized(function, tensors, options, scheme, varlen=True)
    return flash_attn_varlen_func(
        *scaled,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=softcap,
        sm_margin=sm_margin,
        return_lse=return_lse,
        backend=backend,
        out_dtype=out_dtype or q.dtype,
    )


def _quantized(
    function: str,
    tensors: Tensors,
    options: Options,
    scheme: _Scheme,
    varlen: bool = False,
) -> tuple[BlockScaled, BlockScaled, BlockScaled]:
    """q, k and v of 16 bits in blocks; options: the softcap and the lengths of varlen."""
    block, hadamard, qk_dtype, smooth_k = scheme
    check_tensor_types(tensors, varlen)
    check_option_types(function, options)
    check(tensors, options)
    q, k, v, cu_seqlens_q, cu_seqlens_k = tensors[:5]
    expect(q.dtype in SIXTEEN_BIT, function, "q.dtype", f"one of {SIXTEEN_BIT}", q.dtype)
    for name in ("hadamard", "smooth_k"):
        value = getattr(scheme, name)
        if not isinstance(value, bool):
            raise type_error(function, name, "a bool", type(value).__name__)
    expect(block in BLOCKS, function, "block", f"one of {BLOCKS}", block)
    legal = (None, *EIGHT_BIT)
    expect(qk_dtype in legal, function, "qk_dtype", f"one of {legal}", qk_dtype)
    fits = not hadamard or is_rotatable(q.shape[-1])
    expect(fits, function, "q.shape[-1]", "a power of two with hadamard=True", q.shape[-1])
    capped = smooth_k and options.softcap > 0  # a cap sees what all keys have in common
    expect(not capped, function, "smooth_k", "False with softcap", smooth_k)
    refuse_gradients(function, q, k, v)

    ragged = {}
    if varlen:
        longest_q, longest_k = options.max_seqlen_q, options.max_seqlen_k
        ragged = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": q.shape[0] if longest_q is None else longest_q,
            "max_seqlen_k": k.shape[0] if longest_k is None else longest_k,
        }
    scheme = scheme._replace(qk_dtype=qk_dtype or best_qk_dtype(q.shape[-1], hadamard))
    return quantize_qkv(q, k, v, **scheme._asdict(), **ragged)
