"""FlashAttention-2's packed forms, which FlashAttention-3 does not have: its names, order and
defaults. (``flash_attn_qkvpacked_func``, which both have, is FlashAttention-3's, in api.py.)"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .api import attended, options_of
from .call.arguments import expect_strided, real
from .call.problem import Tensors, refuse
from .errors import expect, shown, type_error


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_func`` for keys and values in one tensor, viewed and never copied.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        kv: (batch, seqlen_k, 2, num_heads_kv, head_dim).
        dropout_p, alibi_slopes: at FlashAttention-2's places; nothing but 0 and None is supported.
        All other arguments, the result and the errors are those of ``flash_attn_func``.
    """
    function = "flash_attn_kvpacked_func"
    k, v = _parts(function, "kv", kv, "(batch, seqlen_k, 2, num_heads_kv, head_dim)")
    _refuse_extras(function, dropout_p, alibi_slopes)
    options = options_of(
        function,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return attended(Tensors(q, k, v), options, False, return_lse, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_varlen_func`` for queries, keys and values in one tensor, never copied.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens, max_seqlen: of queries and keys, as for ``flash_attn_varlen_func``.
        dropout_p, alibi_slopes: at FlashAttention-2's places; nothing but 0 and None is supported.
        All other arguments, the result and the errors are those of ``flash_attn_varlen_func``.
    """
    function = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _parts(function, "qkv", qkv, "(total, 3, heads, head_dim)")
    _refuse_extras(function, dropout_p, alibi_slopes)
    options = options_of(
        function,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    tensors = Tensors(q, k, v, cu_seqlens, _tensor(function, "cu_seqlens", cu_seqlens))
    return attended(tensors, options, True, return_lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_varlen_func`` for keys and values in one tensor, viewed and never copied.

    Args:
        q: (total_q, num_heads_q, head_dim).
        kv: (total_k, 2, num_heads_kv, head_dim).
        dropout_p, alibi_slopes: at FlashAttention-2's places; nothing but 0 and None is supported.
        All other arguments, the result and the errors are those of ``flash_attn_varlen_func``.
    """
    function = "flash_attn_varlen_kvpacked_func"
    k, v = _parts(function, "kv", kv, "(total_k, 2, num_heads_kv, head_dim)")
    _refuse_extras(function, dropout_p, alibi_slopes)
    options = options_of(
        function,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    edges = (
        _tensor(function, name, x)
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    )
    return attended(Tensors(q, k, v, *edges), options, True, return_lse, return_attn_probs)


def _parts(function: str, name: str, packed: Tensor, axes: str) -> tuple[Tensor, ...]:
    """The views of q, k and v, or of k and v, along the third axis from behind.

    axes: those wanted, in words.
    """
    packed, words = _tensor(function, name, packed), axes.split(", ")
    fits = packed.ndim == len(words) and str(packed.shape[-3]) == words[-3]
    expect(fits, function, f"{name}.shape", axes, tuple(packed.shape))
    return packed.unbind(-3)


def _tensor(function: str, name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise type_error(function, name, "a torch.Tensor", shown(value))
    expect_strided(function, name, value)
    return value


def _refuse_extras(function: str, dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if real(function, "dropout_p", dropout_p) != 0:
        refuse(function, "dropout_p", 0, dropout_p)
    if alibi_slopes is not None:
        refuse(function, "alibi_slopes", None, alibi_slopes)
