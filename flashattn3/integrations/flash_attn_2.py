"""Code written for FlashAttention-2 finds flashattn3 under that package's module names.

The functions have the names, the order of arguments, the defaults and the results of its release
``VERSION``. Dropout is refused. ``_flash_attn_forward`` and its like, which code for ring attention
and context parallelism calls, are ``flash_attn_forward`` and ``flash_attn_backward``: S_dmask is
None, and so is the softmax_d that the backward returns. Called with window_size, as releases up to
2.6 had it, the forward returns their eight values.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature

import torch
from torch import Tensor

from .. import api
from .. import kvcache_api as cached
from ..errors import expect, shown
from . import bert_padding, rotary
from .one_pass import one_pass, write_gradients
from .paged import attend_to_pages, renamed
from .stand_in import install

VERSION = "2.8.3"


def install_as_flash_attn_2() -> None:
    """Make ``import flash_attn`` find flashattn3 in this process, with flash_attn_interface,
    bert_padding, layers.rotary and ops.triton.rotary.

    No file is written, and no installed distribution is claimed: code that asks
    ``importlib.metadata`` for flash-attn does not find it. Calling again has no effect.

    Raises:
        UnsupportedError: the real package is installed or imported.
    """
    padding = dict(bert_padding.NAMES)
    if importlib.util.find_spec("einops"):  # code imports these from bert_padding too
        from einops import rearrange, repeat

        padding |= {"rearrange": rearrange, "repeat": repeat}
    modules = {
        "flash_attn": {"__version__": VERSION, **FUNCTIONS},
        "flash_attn.flash_attn_interface": {**FUNCTIONS, **PASSES},
        "flash_attn.bert_padding": padding,
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": rotary.NAMES,
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
    }
    install("install_as_flash_attn_2", modules)


def _with_three_values(function: Callable) -> Callable:
    """With return_attn_probs: out, lse and None in place of the probabilities."""

    @wraps(function)
    def call(*arguments, **options):
        result = function(*arguments, **options)
        return (*result, None) if isinstance(result, tuple) else result

    call.__signature__ = signature(function)  # inspect.getfullargspec reads it
    return call


@_with_three_values
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"deterministic": deterministic, "return_lse": return_attn_probs}
    return api.flash_attn_func(q, k, v, **options)


@_with_three_values
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"deterministic": deterministic, "return_lse": return_attn_probs}
    return api.flash_attn_qkvpacked_func(qkv, **options)


@_with_three_values
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
):
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options["return_lse"] = return_attn_probs
    if block_table is not None:  # has no gradient, so deterministic means nothing
        edges = cu_seqlens_q, max_seqlen_q, cu_seqlens_k, None
        return attend_to_pages("flash_attn_varlen_func", q, k, v, block_table, *edges, **options)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return api.flash_attn_varlen_func(q, k, v, *lengths, deterministic=deterministic, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
):
    try:
        return cached.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            page_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            num_splits=num_splits,
            return_softmax_lse=return_softmax_lse,
            alibi_slopes=alibi_slopes,
        )
    except (TypeError, ValueError) as error:
        names = {"page_table": "block_table"}
        raise renamed(error, "flash_attn_with_kvcache", names) from None


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Returns out, lse, None for S_dmask, and a state of dropout that nothing reads."""
    window = window_size_left, window_size_right
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    out, lse = api.flash_attn_forward(q, k, v, **options)
    return out, lse, None, _random_state(q)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Rows of no sequence are 0 with or without zero_tensors."""
    function = "_flash_attn_varlen_forward"
    window = window_size_left, window_size_right
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    if block_table is not None:
        edges = cu_seqlens_q, max_seqlen_q, cu_seqlens_k, seqused_k
        options |= {"cache_leftpad": leftpad_k, "return_lse": True}
        out, lse = attend_to_pages(function, q, k, v, block_table, *edges, **options)
    else:
        wanted = "None without block_table"
        expect(leftpad_k is None, function, "leftpad_k", wanted, shown(leftpad_k))
        lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = api.flash_attn_forward(q, k, v, seqused_k=seqused_k, **lengths, **options)
    return out, lse, None, _random_state(q)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Overwrites dq, dk and dv."""
    window = window_size_left, window_size_right
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    tensors = dout, q, k, v, out, softmax_lse
    gradients = api.flash_attn_backward(*tensors, deterministic=deterministic, **options)
    write_gradients("_flash_attn_backward", (dq, dk, dv), gradients)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """Overwrites dq, dk and dv; rows of no sequence get 0."""
    window = window_size_left, window_size_right
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tensors = dout, q, k, v, out, softmax_lse
    gradients = api.flash_attn_backward(*tensors, deterministic=deterministic, **options)
    write_gradients("_flash_attn_varlen_backward", (dq, dk, dv), gradients)


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes) -> dict:
    """By flashattn3's names; its functions refuse dropout."""
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> dict:
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }


def _eight_values(q, k, v, out, lse, s_dmask, rng_state) -> tuple:
    """Of releases up to 2.6, whose q, k, v and second out were padded."""
    return out, q, k, v, out, lse, s_dmask, rng_state


def _random_state(q: Tensor) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=q.device)


FUNCTIONS = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
    **{
        name: _with_three_values(getattr(api, name))
        for name in (
            "flash_attn_kvpacked_func",
            "flash_attn_varlen_qkvpacked_func",
            "flash_attn_varlen_kvpacked_func",
        )
    },
}
PASSES = {
    f"{prefix}{function.__name__}": one_pass(function, older)
    for prefix in ("", "_wrapped")
    for function, older in (
        (_flash_attn_forward, _eight_values),
        (_flash_attn_backward, None),
        (_flash_attn_varlen_forward, _eight_values),
        (_flash_attn_varlen_backward, None),
    )
}
