"""The public functions that quantize 16-bit tensors to 8 bits and attend in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .api import options_of
from .autograd import attention
from .backends import BACKENDS
from .call.arguments import boolean, integer
from .call.descales import BLOCKS, EIGHT_BIT, best_qk_dtype, check_out_dtype, v_dtype
from .call.inputs import with_mean_of_keys
from .call.problem import (
    SIXTEEN_BIT,
    Options,
    Tensors,
    check,
    check_tensor_types,
    describe,
    key_of,
    metadata_under,
)
from .call.value_checks import check_values, is_checked
from .dispatch.device import describe_device
from .dispatch.planner import choose
from .errors import expect, shown, type_error, value_error
from .modes import is_traced, refuse_gradients
from .quantization import BlockScaled, comes_permuted, scaled_qkv
from .quantization.hadamard import is_rotatable

QK_DTYPES = (None, *EIGHT_BIT)


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
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
    use_fast_accum: bool = False,
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
    options = options_of(
        "flash_attn_fp8_func",
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sm_margin=sm_margin,
        use_fast_accum=use_fast_accum,
        backend=backend,
        out_dtype=out_dtype,
    )
    scheme = _Scheme(block, hadamard, qk_dtype, smooth_k)
    return _quantized_and_attended(Tensors(q, k, v), options, scheme, False, return_lse)


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
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
    use_fast_accum: bool = False,
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
    options = options_of(
        "flash_attn_varlen_fp8_func",
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sm_margin=sm_margin,
        use_fast_accum=use_fast_accum,
        backend=backend,
        out_dtype=out_dtype,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    tensors = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    scheme = _Scheme(block, hadamard, qk_dtype, smooth_k)
    return _quantized_and_attended(tensors, options, scheme, True, return_lse)


def _quantized_and_attended(
    tensors: Tensors, options: Options, scheme: _Scheme, varlen: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """tensors: q, k and v of 16 bits. All that is refused is refused before the first launch."""
    function = options.function
    return_lse = boolean(function, "return_lse", return_lse)
    check_tensor_types(function, tensors, varlen)
    q, k, v = tensors.q, tensors.k, tensors.v
    scheme = _resolved(function, q, scheme)
    refuse_gradients(function, q=q, k=k, v=v)
    if is_traced():
        scaled_options = _checked(tensors, options, scheme)
    else:
        scaled_options = _checked_once(key_of(tensors), options, scheme)
        if varlen and is_checked(q.device):
            check_values(tensors, options)
    block, hadamard, qk_dtype, smooth_k = scheme
    edges = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    longest = scaled_options.max_seqlen_q, scaled_options.max_seqlen_k
    how = (block, hadamard, *edges, *longest, qk_dtype, smooth_k)
    q_data, q_descale, k_data, k_descale, v_data, v_descale, mean = scaled_qkv(q, k, v, *how)
    scaled = Tensors(
        *(q_data, k_data, v_data, *edges, tensors.seqused_q, tensors.seqused_k),
        q_descale if scaled_options.q_block else None,
        k_descale if scaled_options.k_block else None,
        v_descale if scaled_options.v_block else None,
    )
    out, lse = attention(scaled, scaled_options)
    if not return_lse:
        return out
    if mean is None:
        return out, lse
    of_q = BlockScaled(q_data, q_descale, block, hadamard, edges[0])
    of_k = BlockScaled(k_data, k_descale, block, hadamard, edges[1], mean=mean)
    return out, with_mean_of_keys(lse, of_q, of_k, options.softmax_scale)


def _resolved(function: str, q: Tensor, scheme: _Scheme) -> _Scheme:
    """The scheme in plain values, with the dtype of q and k that it leaves open."""
    block = integer(function, "block", scheme.block)
    hadamard = boolean(function, "hadamard", scheme.hadamard)
    smooth_k = boolean(function, "smooth_k", scheme.smooth_k)
    dtype = scheme.qk_dtype
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise type_error(function, "qk_dtype", f"one of {QK_DTYPES}", shown(dtype))
    if dtype not in QK_DTYPES:
        raise value_error(function, "qk_dtype", f"one of {QK_DTYPES}", dtype)
    if dtype is None and q.ndim:
        dtype = best_qk_dtype(q.shape[-1], hadamard)
    return _Scheme(block, hadamard, dtype, smooth_k)


@lru_cache(maxsize=4096)
def _checked_once(key: tuple, options: Options, scheme: _Scheme) -> Options:
    """Run _checked and the planner on metadata. The result is cached: a call is checked once."""
    tensors = Tensors(*metadata_under(key))
    scaled_options = _checked(tensors, options, scheme)
    dtype = scheme.qk_dtype
    eight_bit = {
        name: getattr(tensors, name)._replace(dtype=to)
        for name, to in (("q", dtype), ("k", dtype), ("v", v_dtype(dtype)))
    }
    problem = describe(tensors._replace(**eight_bit), options)
    choose(problem, describe_device(problem.device), BACKENDS)
    return scaled_options


def _checked(tensors: Tensors, options: Options, scheme: _Scheme) -> Options:
    """Check the 16-bit tensors, or their metadata, and return the options of the 8-bit call."""
    _check(tensors, options, scheme)
    q, k, v, edges, block = tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q, scheme.block
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if edges is not None:
        batch = edges.shape[0] - 1
        seqlen_q = _longest(q, options.max_seqlen_q)
        seqlen_k = _longest(k, options.max_seqlen_k)
    q_block = block if batch and seqlen_q else 0  # 0: no tokens, so no descales
    k_block = block if batch and seqlen_k else 0
    return options._replace(
        max_seqlen_q=None if edges is None else seqlen_q,
        max_seqlen_k=None if edges is None else seqlen_k,
        out_dtype=options.out_dtype or q.dtype,
        q_block=q_block,
        k_block=k_block,
        v_block=k_block,
        v_permuted=v.shape[-1] if comes_permuted(v) else 0,
    )


def _longest(rows: Tensor, max_seqlen: int | None) -> int:
    """No sequence is longer than all rows."""
    return rows.shape[0] if max_seqlen is None else min(max_seqlen, rows.shape[0])


def _check(tensors: Tensors, options: Options, scheme: _Scheme) -> None:
    """Raise if the tensors cannot be quantized."""
    function, q = options.function, tensors.q
    expect(q.dtype in SIXTEEN_BIT, function, "q.dtype", f"one of {SIXTEEN_BIT}", q.dtype)
    check(tensors, options._replace(out_dtype=None))
    check_out_dtype(function, scheme.qk_dtype, options.out_dtype)
    expect(scheme.block in BLOCKS, function, "block", f"one of {BLOCKS}", scheme.block)
    fits = not scheme.hadamard or is_rotatable(q.shape[-1])
    expect(fits, function, "q.shape[-1]", "a power of two with hadamard=True", q.shape[-1])
    capped = scheme.smooth_k and options.softcap > 0  # a cap sees what all keys have in common
    expect(not capped, function, "smooth_k", "False with softcap", scheme.smooth_k)
