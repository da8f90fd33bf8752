"""The public functions that quantize 16-bit tensors to 8 bits and attend in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .api import attended, options_of
from .arguments import boolean, integer
from .backends import BACKENDS
from .contents import check_contents, is_checked
from .device import describe_device
from .errors import expect, shown, type_error
from .modes import is_traced, refuse_gradients
from .plan import choose
from .problem import (
    SIXTEEN_BIT,
    Metadata,
    Options,
    Tensors,
    check,
    check_tensor_types,
    describe,
    metadata_fields,
)
from .quantization import quantize_qkv
from .quantization.hadamard import is_rotatable
from .scales import BLOCKS, EIGHT_BIT, best_qk_dtype, check_out_dtype, v_dtype


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
    scheme = _resolved(function, tensors.q, scheme)
    options = options._replace(out_dtype=options.out_dtype or tensors.q.dtype)
    refuse_gradients(function, q=tensors.q, k=tensors.k, v=tensors.v)
    if is_traced():
        _check(tensors, options, scheme)
    else:
        fields = tuple(None if x is None else metadata_fields(x) for x in tensors)
        _check_once(fields, options, scheme)
        if varlen and is_checked(tensors.q.device):
            check_contents(tensors, options)
    ragged = {}
    if varlen:
        options = options._replace(
            max_seqlen_q=_longest(tensors.q, options.max_seqlen_q),
            max_seqlen_k=_longest(tensors.k, options.max_seqlen_k),
        )
        names = ("cu_seqlens_q", "cu_seqlens_k")
        ragged = {name: getattr(tensors, name) for name in names}
        ragged |= {name: getattr(options, name) for name in ("max_seqlen_q", "max_seqlen_k")}
    scaled = quantize_qkv(*tensors[:3], **scheme._asdict(), **ragged)
    return attended(Tensors(*scaled, *tensors[3:]), options, varlen, return_lse, False)


def _longest(rows: Tensor, max_seqlen: int | None) -> int:
    """No sequence is longer than all rows."""
    return rows.shape[0] if max_seqlen is None else min(max_seqlen, rows.shape[0])


def _resolved(function: str, q: Tensor, scheme: _Scheme) -> _Scheme:
    """The scheme in plain values, with the dtype of q and k that it leaves open."""
    block = integer(function, "block", scheme.block)
    switches = {
        name: boolean(function, name, getattr(scheme, name)) for name in ("hadamard", "smooth_k")
    }
    dtype, legal = scheme.qk_dtype, (None, *EIGHT_BIT)
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise type_error(function, "qk_dtype", f"one of {legal}", shown(dtype))
    expect(dtype in legal, function, "qk_dtype", f"one of {legal}", dtype)
    if dtype is None and q.ndim:
        dtype = best_qk_dtype(q.shape[-1], switches["hadamard"])
    return _Scheme(block, qk_dtype=dtype, **switches)


@lru_cache(maxsize=4096, typed=True)
def _check_once(fields: tuple, options: Options, scheme: _Scheme) -> None:
    """_check and the planner's, of metadata."""
    tensors = Tensors(*(None if of is None else Metadata(*of) for of in fields))
    _check(tensors, options, scheme)
    dtype = scheme.qk_dtype
    eight_bit = {
        name: getattr(tensors, name)._replace(dtype=to)
        for name, to in (("q", dtype), ("k", dtype), ("v", v_dtype(dtype)))
    }
    problem = describe(tensors._replace(**eight_bit), options)
    choose(problem, describe_device(problem.device), BACKENDS)


def _check(tensors: Tensors, options: Options, scheme: _Scheme) -> None:
    """Raise for what cannot be quantized; tensors or their metadata."""
    function, q = options.function, tensors.q
    expect(q.dtype in SIXTEEN_BIT, function, "q.dtype", f"one of {SIXTEEN_BIT}", q.dtype)
    check(tensors, options._replace(out_dtype=None))
    check_out_dtype(function, scheme.qk_dtype, options.out_dtype)
    expect(scheme.block in BLOCKS, function, "block", f"one of {BLOCKS}", scheme.block)
    fits = not scheme.hadamard or is_rotatable(q.shape[-1])
    expect(fits, function, "q.shape[-1]", "a power of two with hadamard=True", q.shape[-1])
    capped = scheme.smooth_k and options.softcap > 0  # a cap sees what all keys have in common
    expect(not capped, function, "smooth_k", "False with softcap", scheme.smooth_k)
