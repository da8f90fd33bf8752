"""The public functions of inference: attention to a cache of keys and values, and its upkeep.

Names, order and defaults follow the FlashAttention-3 interface; what is ours is keyword-only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .call.arguments import boolean
from .call.cached import DECODE, AppendTensors
from .call.public import public
from .run.cached_calls import append, combine, with_kvcache
from .run.scheduler_metadata import scheduler_metadata


@public(with_kvcache, DECODE)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int | None = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_page_table: Tensor | None = None,
    prefix_len: int | Tensor | None = None,
    split_tokens: int | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with a KV cache: a few queries of each sequence (decode) or chunks of a prompt
    (prefill). If k and v are given, they are first written into the cache.

    The queries of a sequence are its last positions. Nothing waits for the device, and nothing on
    the host depends on a length, so a CUDA graph of a call serves other lengths and page tables.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), or (total_q, num_heads_q, head_dim) with
            cu_seqlens_q; float16 or bfloat16, on the reference backend also float32 and float64,
            with caches in it float8_e4m3fn, which is widened exactly.
        k_cache, v_cache: (num_caches, capacity, num_heads_kv, ·), or, with page_table, (num_pages,
            page_size, num_heads_kv, ·), both in q's dtype or, under q of 16 bits, in float8_e4m3fn
            or int8. Any strides but the last, which is 1, so heads may come first and both caches
            may lie in one tensor. Head dims are at most 256.
        k, v: new tokens (batch, seqlen_new, num_heads_kv, ·), or (total_new, ...) with
            cu_seqlens_k_new: written behind the cached ones, then attended to. On a GPU tokens that
            do not fit are dropped. In the caches' dtype, of 16 bits where these have 8.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or in q's dtype: k and q are
            rotated, k from the position that it is written to. Without causal and window all
            queries of a sequence have the position of the first new token. A position outside the
            tables gives NaN.
        cache_seqlens: cached tokens, before k: an int or int32 (batch,); None: the capacity, which
            with k and v is an error. Cut to the capacity; keys and page numbers past it are never
            read.
        cache_batch_idx: int32 (batch,), the row of the caches, or of page_table, of each sequence.
        cache_leftpad: int32 (batch,); keys before it are hidden, positions count them.
        page_table: int32 (batch, max_pages), any row stride: the pages of each sequence in order.
            block_table, FlashAttention-2's keyword, is another name of it.
        cu_seqlens_q, cu_seqlens_k_new: int32 (batch + 1,), as in ``flash_attn_varlen_func``; the
            second has no effect without k and v.
        max_seqlen_q: required with cu_seqlens_q, else None: at least the longest sequence, an int
            or a 0-d integer tensor; one on a GPU is not read, and total_q stands in. An int with
            tree_mask in code that torch.compile traces.
        rotary_seqlens: int32 (batch,), positions of the first new tokens, instead of cache_seqlens.
            Without tables it has no effect.
        q_descale: float32 (batch, num_heads_kv), any strides, or one number: a stored value times
            its descale is the real one, whatever its dtype.
        k_descale, v_descale: the same; also (num_pages, 1 or page_size, num_heads_kv), of dense
            caches (num_caches, 1 or capacity, num_heads_kv): of each page or each token. int8 needs
            both. New k and v are divided by theirs and saturate. Of caches of 8 bits with descales
            of tokens, new tokens get ones that fit their own largest magnitude, written here.
        softmax_scale: None stands for head_dim ** -0.5.
        causal, window_size, softcap: as in ``flash_attn_func``; the window counts from the queries'
            positions, and only its part of the cache is read.
        rotary_interleaved: rotated pairs are columns (2i, 2i + 1); else (i, i + rotary_dim / 2).
        scheduler_metadata: from ``get_scheduler_metadata`` for the same lengths and options; rows
            of a sequence with other ones become NaN.
        num_splits: 0 or None: the keys of the whole batch are cut into equal parts, which depend on
            the lengths in the batch; 1: no sequence is cut, and a row's bits do not depend on the
            other lengths; n up to 256: n equal parts of each sequence, fewer where it has fewer
            tiles.
        pack_gqa: None or True: query heads that share a KV head share a tile. False is not
            supported yet.
        sm_margin: number of streaming multiprocessors to leave free: Hopper's kernels leave them,
            Triton's cut the batch into parts for the others alone. A hint.
        return_softmax_lse: FlashAttention-3's name for return_lse.
        sinks: (num_heads_q,), float32 or q's dtype, beside q of 8 bits any of 16: one more logit
            for each row, which takes weight and has no value (gpt-oss). lse includes it. Pass it to
            only one of the calls whose results ``flash_attn_combine`` joins.
        alibi_slopes: as in ``flash_attn_func``, of the queries' positions; not with tree_mask or
            prefix_page_table.
        out: where the result is written, of the shape and dtype below.
        out_dtype: None or q's; for q of 8 bits bfloat16 (None), float16 or float32.
        return_lse: also return the log-sum-exp.
        backend: as in ``flash_attn_func``.
        split_tokens: as in ``flash_attn_func``: the bits of a token's row also depend neither on
            pages, their size and the capacity, nor on how a prompt was cut into calls.
        tree_mask: int32 (batch, seqlen_q, ceil(seqlen_q / 32)), or (total_q, ...) of max_seqlen_q:
            bit j % 32 of word j // 32 says whether a query sees new token j, the j-th of the
            sequence's last seqlen_q positions; it sees all older keys (speculative decoding). Only
            with causal, which the bits replace, and up to 64 queries. window_size counts positions.
        prefix_page_table, prefix_len: int32 (1, pages), and an int or int32 (1,): pages of keys
            that all sequences have in front of their own, and the number of these keys. They are
            read once for all sequences. page_table, cache_seqlens and the positions of queries then
            count a sequence's own keys. Not with a window to the left, rotary tables, split_tokens,
            or descales of each sequence.
        qv, attention_chunk: not supported yet, an error if given.

    Returns:
        out in q's shape with v_cache's head dim, in out_dtype; with return_lse also lse (batch,
        num_heads_q, seqlen_q) or (num_heads_q, total_q), float32 (float64 for float64 inputs). Two
        values, where FlashAttention-3 returns four. A row without keys has out 0 and lse -inf (its
        sink's value, if there is one), and so has a row of no sequence.

    Raises:
        TypeError, ValueError: an argument is invalid; all are checked from metadata, before
            anything runs. With FLASHATTN3_CHECK=1 and on a CPU, values too: lengths, page numbers,
            tokens that do not fit, cache_batch_idx and scheduler_metadata. Unchecked, such values
            give wrong or NaN rows, but nothing is read or written outside the tensors.
        UnsupportedError: no backend takes the call, or a gradient would be needed.

    Source: Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (arXiv 2309.06180).
    """


def append_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: int | Tensor,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | None:
    """Write new keys and values into a cache, in place, rotated on the way where tables are given.

    Args:
        k, v, k_cache, v_cache and all others: as in ``flash_attn_with_kvcache``. Token i of a
            sequence is written to position cache_seqlens + i; on a GPU a token that has no place
            in the cache, or whose page does not exist, is dropped, on a CPU it is an error.
        q: queries to rotate, only if rotary_cos and rotary_sin are given; query i has position
            cache_seqlens + i (or rotary_seqlens + i); (batch, seqlen_q, num_heads_q, head_dim), or
            (total_q, ...) with cu_seqlens_q.

    Returns:
        the rotated q, contiguous, or None without q.

    Raises: as ``flash_attn_with_kvcache``.
    """
    tensors = AppendTensors(
        k, v, k_cache, v_cache, q, None, cache_seqlens, page_table, cache_batch_idx, cu_seqlens_q,
        cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, k_descale, v_descale,
    )  # fmt: skip
    return append(tensors, {"rotary_interleaved": rotary_interleaved, "backend": backend})


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int | None = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return the lengths and options of a ``flash_attn_with_kvcache`` call, for its argument
    scheduler_metadata.

    No call needs it: schedules are computed from the lengths on the device. Code that was written
    for FlashAttention-3 may copy it into a buffer of a CUDA graph. A call with other lengths or
    options returns NaN rows and never plausible numbers; a call without new tokens takes metadata
    for new ones.

    Args: those of the call; batch_size, head counts, headdim and headdim_v (None: headdim) of its
        tensors. max_seqlen_q: queries of each sequence where cu_seqlens_q is None. max_seqlen_k:
        required as in FlashAttention-3, checked, and otherwise unused. page_size: None for a dense
        cache. max_seqlen_k_new: new tokens of each sequence where cu_seqlens_k_new is None.
        has_softcap: whether softcap is positive.

    Returns:
        int32, one-dimensional, on cache_seqlens' device; its size depends on batch_size alone.

    Raises: TypeError, ValueError: an argument is invalid.
    """
    options = {
        "causal": causal,
        "window_size": window_size,
        "attention_chunk": attention_chunk,
        "softcap": float(boolean("get_scheduler_metadata", "has_softcap", has_softcap)),
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
    }
    tensors = {"cache_seqlens": cache_seqlens, "cu_seqlens_q": cu_seqlens_q}
    tensors |= {"cu_seqlens_k_new": cu_seqlens_k_new, "cache_leftpad": cache_leftpad}
    lengths = {"max_seqlen_k": max_seqlen_k, "max_seqlen_k_new": max_seqlen_k_new}
    lengths |= {"max_seqlen_q": max_seqlen_q}
    sizes = {"num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "headdim": headdim}
    sizes |= {"headdim_v": headdim if headdim_v is None else headdim_v}
    return scheduler_metadata(options, tensors, batch_size, qkv_dtype, lengths, sizes, page_size)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Join the results of calls over disjoint parts of the keys, exactly.

    Args:
        out_partial: (parts, batch, seqlen_q, num_heads_q, head_dim_v) or (parts, total_q,
            num_heads_q, head_dim_v), float32, float16 or bfloat16 (float64 on the reference
            backend); any strides, if the last is not 1 it is copied.
        lse_partial: (parts, batch, seqlen_q, num_heads_q) or (parts, total_q, num_heads_q),
            float32, with float64 out_partial float64; any strides:
            ``torch.stack(lses).transpose(-1, -2)`` of what calls return.
        out: where the result is written; out_dtype: its dtype; None: out_partial's.

    Returns:
        out, and lse (batch, seqlen_q, num_heads_q) or (total_q, num_heads_q): heads last, where
        attention calls return them first. A row without keys in every part has out 0 and lse -inf.

    Raises: TypeError, ValueError: an argument is invalid.
    """
    return combine(out_partial, lse_partial, out, out_dtype)
