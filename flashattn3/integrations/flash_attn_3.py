"""Code written for FlashAttention-3 finds flashattn3 under that package's module names.

The public functions are flashattn3's own, but for what their docstrings here say.
``_flash_attn_forward`` and ``_flash_attn_backward``, which code for ring attention and context
parallelism calls, have FlashAttention-3's arguments. Its releases differ in some: window_size or
window_size_left and window_size_right, out or out_, causal or is_causal. Both are taken here, out
and causal by keyword. num_splits is chosen by default, as everywhere in flashattn3.
"""

from __future__ import annotations

from functools import wraps
from inspect import Parameter, signature

import torch
from torch import Tensor

from .. import api
from .. import kvcache_api as cached
from ..call.foreign import under_one_name
from ..errors import UnsupportedError, complaint, shown
from .fork_keywords import without_fork_keywords
from .one_pass import one_pass, write_gradients, written_to
from .paged import attend_to_pages, renamed
from .stand_in import install

_VARLEN = signature(api.flash_attn_varlen_func)
# Arguments of varlen calls without a meaning where keys are in pages: a bound, gradients, a hint.
_NOT_IN_PAGES = ("max_seqlen_k", "deterministic", "use_fast_accum")
# Names of ``_flash_attn_forward`` by those of the cached call.
_OF_ONE_PASS = {
    "k": "k_new", "v": "v_new", "k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k",
    "rotary_seqlens": "seqlens_rotary",
}  # fmt: skip


def install_as_flash_attn_3() -> None:
    """Make ``import flash_attn_interface`` and ``import flash_attn_3.flash_attn_interface`` find
    flashattn3 in this process.

    No file is written, and no installed distribution is claimed: code that asks
    ``importlib.metadata`` for flash-attn-3 does not find it. Calling again has no effect.

    Raises:
        UnsupportedError: the real package is installed or imported.
    """
    modules = {
        "flash_attn_interface": FUNCTIONS,
        "flash_attn_3": {},
        "flash_attn_3.flash_attn_interface": FUNCTIONS,
    }
    install("install_as_flash_attn_3", modules)


@wraps(api.flash_attn_varlen_func)
def flash_attn_varlen_func(
    *arguments, page_table=None, block_table=None, out=None, scheduler_metadata=None, **options
):
    """``flashattn3.flash_attn_varlen_func``; with page_table, or block_table, another name of it, k
    and v are pages (num_pages, page_size, num_heads_kv, ·), without gradients. The keywords of the
    forks in vLLM and SGLang are taken as ``without_fork_keywords`` says."""
    function = "flash_attn_varlen_func"
    options = without_fork_keywords(function, options)
    table = under_one_name(function, "block_table", block_table, "page_table", page_table)
    if table is None:
        _refuse_others(function, scheduler_metadata=scheduler_metadata)
        result = api.flash_attn_varlen_func(*arguments, **options)
        if isinstance(result, tuple):
            return (written_to(function, out, result[0]), *result[1:])
        return written_to(function, out, result)
    others = {name: options.pop(name) for name in options.keys() - _VARLEN.parameters.keys()}
    given = _VARLEN.bind_partial(*arguments, **options).arguments | others
    _refuse_others(function, seqused_q=given.pop("seqused_q", None))
    tensors = [given.pop(name, None) for name in ("q", "k", "v")]
    edges = [given.pop(name, None) for name in ("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k")]
    flags = [given.pop(name, False) for name in ("return_attn_probs", "return_lse")]
    used = given.pop("seqused_k", None)
    options = {name: value for name, value in given.items() if name not in _NOT_IN_PAGES}
    options |= {"return_lse": any(flags), "out": out, "scheduler_metadata": scheduler_metadata}
    name = "block_table" if page_table is None else "page_table"
    return attend_to_pages(function, *tensors, table, *edges, used, table=name, **options)


flash_attn_varlen_func.__signature__ = _VARLEN.replace(
    parameters=(
        *_VARLEN.parameters.values(),
        *(
            Parameter(x, Parameter.KEYWORD_ONLY, default=None)
            for x in ("page_table", "block_table", "out", "scheduler_metadata")
        ),
    )
)


@wraps(cached.flash_attn_with_kvcache)
def flash_attn_with_kvcache(*arguments, **options):
    """``flashattn3.flash_attn_with_kvcache``, with four values for return_softmax_lse, of which the
    last two, FlashAttention-3's parts of a split, are empty. The keywords of the forks in vLLM and
    SGLang are taken as ``without_fork_keywords`` says."""
    options = without_fork_keywords("flash_attn_with_kvcache", options)
    options.pop("max_seqlen_k", None)  # SGLang's bound of lengths that the device has
    result = cached.flash_attn_with_kvcache(*arguments, **options)
    return (*result, *_no_parts(result[0])) if isinstance(result, tuple) else result


flash_attn_with_kvcache.__signature__ = signature(cached.flash_attn_with_kvcache)


@one_pass
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out, lse, and two empty tensors for the parts of a split.

    A call with pages, new keys, kv_batch_idx, leftpad_k or a scheduler's metadata, or with
    seqused_k for dense keys, is one of ``flash_attn_with_kvcache``.
    """
    options = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (window_size_left, window_size_right),
        "softcap": softcap,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
    }
    of_cache = {
        "k": k_new,
        "v": v_new,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_batch_idx": kv_batch_idx,
        "cache_leftpad": leftpad_k,
        "page_table": page_table,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "rotary_seqlens": seqlens_rotary,
        "scheduler_metadata": scheduler_metadata,
    }
    _refuse_others("_flash_attn_forward", qv=qv, attention_chunk=attention_chunk or None)
    given = under_one_name("_flash_attn_forward", "out_", out_, "out", out)
    if any(x is not None for x in of_cache.values()) or (seqused_k is not None and k.ndim == 4):
        _refuse_others("_flash_attn_forward", seqused_q=seqused_q, cu_seqlens_k=cu_seqlens_k)
        longest = None if cu_seqlens_q is None else max_seqlen_q
        options |= {"rotary_interleaved": rotary_interleaved, "return_lse": True, "out": given}
        of_q = {"cache_seqlens": seqused_k, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": longest}
        try:
            result = cached.flash_attn_with_kvcache(q, k, v, **of_cache, **of_q, **options)
        except (TypeError, ValueError) as error:
            raise renamed(error, "_flash_attn_forward", _OF_ONE_PASS) from None
        return (*result, *_no_parts(result[0]))
    lengths = {} if cu_seqlens_q is None else _bounds(max_seqlen_q, max_seqlen_k)
    edges = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    result, lse = api.flash_attn_forward(q, k, v, **edges, **lengths, **used, **options)
    result = written_to("_flash_attn_forward", given, result)
    return (result, lse, *_no_parts(result))


@one_pass
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool = False,
) -> None:
    """Overwrites dq, dk and dv."""
    gradients = api.flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **({} if cu_seqlens_q is None else _bounds(max_seqlen_q, max_seqlen_k)),
        seqused_q=sequed_q,
        seqused_k=sequed_k,
        softmax_scale=softmax_scale,
        causal=is_causal or causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
    )
    write_gradients("_flash_attn_backward", (dq, dk, dv), gradients)


def _bounds(max_seqlen_q: int | None, max_seqlen_k: int | None) -> dict[str, int | None]:
    return {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}


def _refuse_others(function: str, **arguments: object) -> None:
    """Raise for the first argument that is given."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(complaint(function, name, None, shown(value)))


def _no_parts(out: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


FUNCTIONS = {
    "flash_attn_func": api.flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn_qkvpacked_func": api.flash_attn_qkvpacked_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
    "flash_attn_combine": cached.flash_attn_combine,
    "get_scheduler_metadata": cached.get_scheduler_metadata,
    "_flash_attn_forward": _flash_attn_forward,
    "_flash_attn_backward": _flash_attn_backward,
}
