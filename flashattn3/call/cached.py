"""The problems of the cached calls: their arguments, normalised, without tensor data.

A problem has no size that grows while a model generates: neither batch, nor capacity, nor the width
of the page table, nor a length. So a plan made for it serves every later step. ``checks.py`` raises
the errors; it reads the sizes too.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, make_dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import boolean, real
from .cache_descales import kind_of
from .dtypes import EIGHT_BIT, out_dtype
from .fields import CALL, Description, Field, as_given, or_none
from .metadata import Metadata
from .problem import AttentionProblem, CallProblem, attention_fields
from .tensor_fields import (
    APPEND_TENSORS,
    CACHED_SLOPES,
    DECODE_TENSORS,
    WRITTEN_DESCALES,
    TensorField,
)

MAX_HEAD_DIM = 256
# Packed query rows (token-major, qhead_per_kvhead rows for a token) that plans distinguish.
PLANNED_ROWS = (16, 32, 64, 128, 192, 256)


def _tensors_of(name: str, fields: tuple[TensorField, ...]) -> type[tuple]:
    optional = [field for field in fields if field.is_optional]
    defaults = (None,) * len(optional)
    return namedtuple(name, [field.name for field in fields], defaults=defaults, module=__name__)


# The tensors of one cached call, as the backends receive them. Their last stride is 1.
#   q: (batch, seqlen_q, num_heads_q, head_dim), or (total_q, ...) with cu_seqlens_q.
#   k_cache, v_cache: (num_caches, capacity, num_heads_kv, ·), or (num_pages, page_size, ...) with
#       page_table, int32 (num_caches, max_pages).
#   cache_seqlens, cache_batch_idx, cache_leftpad: int32 (batch,).
#   cu_seqlens_q, cu_seqlens_k_new: int32 (batch + 1,). The new tokens are in the cache already.
#   q_descale: float32 (batch, num_heads_kv). k_descale, v_descale: see cache_descales.py.
#   sinks: (num_heads_q,).
#   scheduler_metadata: see scheduler_metadata.py.
#   tree_mask: int32 (batch, seqlen_q, words), or (total_q, words) with cu_seqlens_q.
#   alibi_slopes: float32 (num_heads_q,) or (batch, num_heads_q).
DecodeTensors = _tensors_of("DecodeTensors", (*DECODE_TENSORS, CACHED_SLOPES))


def new_out(tensors: DecodeTensors, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for out. dtype: None: q's, of 16 or more bits."""
    q = tensors.q
    return q.new_empty((*q.shape[:-1], tensors.v_cache.shape[-1]), dtype=dtype or q.dtype)


def query_sizes(tensors: DecodeTensors, max_seqlen_q: int | None) -> tuple[int, int, int]:
    """batch, number of rows, and a bound on the queries of a sequence."""
    q, edges = tensors.q, tensors.cu_seqlens_q
    if edges is None:
        return q.shape[0], q.shape[1], q.shape[1]
    total_q = q.shape[0]
    longest = total_q if max_seqlen_q is None else min(max_seqlen_q, total_q)
    return edges.shape[0] - 1, total_q, longest


# Where the options of a cached call differ from those of other calls, or are its own.
_OWN = (
    CALL.fields["softmax_scale"]._replace(convert=or_none(real)),
    CALL.fields["causal"]._replace(convert=boolean),
    CALL.fields["qv"]._replace(convert=as_given),
    Field("return_softmax_lse", "", False, boolean, parts=("return_lse",)),
)
_FIELDS = {name: field for name, field in CALL.fields.items() if field.of_cached_calls}
_FIELDS |= {field.name: field for field in _OWN}
DECODE = Description("DecodeOptions", tuple(_FIELDS.values()), "flash_attn_with_kvcache")
DecodeOptions = DECODE.Options


def dtype_of_out(q: Tensor | Metadata, options: DecodeOptions) -> torch.dtype:
    return out_dtype(q.dtype, options.out_dtype)


def one_q_position(options: DecodeOptions) -> bool:
    """``AppendOptions.one_q_position`` of the append of a call."""
    return not (options.causal or options.window_left >= 0 or options.window_right >= 0)


def lse_shape(q: Tensor | Metadata) -> tuple[int, ...]:
    """(batch, heads, seqlen), or with cu_seqlens_q (heads, rows)."""
    sizes = q.shape
    return (*sizes[:-3], sizes[-2], sizes[-3])


class Lengths(NamedTuple):
    """Lengths of a call that change from step to step, so that no problem has them.

    seqlen: cached tokens of every sequence where cache_seqlens is None; None: the capacity.
    seqlen_new: new tokens of every sequence where cu_seqlens_k_new is None.
    max_seqlen_q: with cu_seqlens_q; None: the number of rows is the bound.
    """

    seqlen: int | None = None
    seqlen_new: int = 0
    max_seqlen_q: int | None = None


# The tensors of one append. k, v (batch, seqlen_new, num_heads_kv, ·), or (total_new, ...) with
# cu_seqlens_k_new; q, which is rotated into q_out, as in DecodeTensors; rotary_cos and rotary_sin
# (positions, rotary_dim / 2); k_descale_out and v_descale_out of each token of the cache, written
# for the new ones; the rest as in DecodeTensors.
AppendTensors = _tensors_of("AppendTensors", (*APPEND_TENSORS, *WRITTEN_DESCALES))


# The arguments of an append that are not tensors. one_q_position: every query of a sequence has the
# position of the first new token, as without causal and window in FlashAttention-3; else query i is
# i tokens behind it.
_OF_APPENDS = (
    Field("rotary_interleaved", "bool", True, boolean),
    Field("one_q_position", "bool", False, boolean),
    CALL.fields["backend"],
)
APPEND = Description("AppendOptions", _OF_APPENDS, "append_kvcache")
AppendOptions = APPEND.Options


# The options that backends read, by their names in ``DecodeOptions``.
_Asked = make_dataclass("_Asked", DECODE.to_backend, frozen=True, init=False, repr=False, eq=False)


@dataclass(frozen=True)
class DecodeProblem(_Asked, AttentionProblem):
    """One cached call, normalised, with the options that a field passes on to the backends.

    page_size: 0 for a dense cache.
    cache_dtype: of k_cache and v_cache.
    k_descale, v_descale: their kinds, of cache_descales.py; None without them.
    rows: packed query rows, qhead_per_kvhead * seqlen_q, rounded up to one of PLANNED_ROWS; the
        last of them stands for all larger numbers.
    cached_tokens: that the caches of all sequences hold, rounded up to a power of 2, where so many
        rows attend to 8 bits; else 0.
    given: names of the optional tensors of the call.
    tree_words: of 32 bits in a row of tree_mask; 0 without one.
    sinks_dtype: None without sinks.
    misaligned: names of those of q, k_cache and v_cache of which a row may begin elsewhere than at
        a multiple of 16 bytes.
    expanded: names of those of q, k_cache and v_cache with a stride of 0 between rows.
    window_left, window_right: as in ``Problem``; causal is window_right = 0, and one query, which
        is the last position, has no right side.
    """

    page_size: int
    cache_dtype: torch.dtype
    k_descale: str | None
    v_descale: str | None
    rows: int
    cached_tokens: int
    given: frozenset[str]
    tree_words: int
    sinks_dtype: torch.dtype | None
    misaligned: frozenset[str]
    expanded: frozenset[str]

    @property
    def rows_of_one_query(self) -> int:
        return packed_rows(self.qhead_per_kvhead)

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.given


@dataclass(frozen=True)
class AppendProblem(CallProblem):
    """One append, normalised. num_heads_q: 0 without q. rotary_dim: 0, and rotary_dtype None,
    without tables. dtype: of k and v. k_descale, v_descale: kinds of those given or written."""

    num_heads_q: int
    num_heads_kv: int
    page_size: int
    cache_dtype: torch.dtype
    k_descale: str | None
    v_descale: str | None
    rotary_dim: int
    rotary_dtype: torch.dtype | None
    rotary_interleaved: bool
    one_q_position: bool
    given: frozenset[str]


@dataclass(frozen=True)
class CombineProblem(CallProblem):
    """One combination of partial results: out_dtype from parts in dtype."""


CacheProblem = DecodeProblem | AppendProblem | CombineProblem


def describe_decode(
    found: tuple[Metadata | None, ...], options: DecodeOptions, max_seqlen_q: int | None
) -> DecodeProblem:
    """Normalise a call that ``checks.check_decode`` accepted."""
    tensors = DecodeTensors(*found)
    q, k, v = tensors[:3]
    seqlen_q = q.shape[-3] if max_seqlen_q is None else min(max_seqlen_q, q.shape[-3])
    read = "q", "k_cache", "v_cache"
    alike = attention_fields(DECODE, options, q, k, v)
    tree = tensors.tree_mask
    if tree is not None:  # its bits say all about new tokens
        alike["window_right"] = -1
    if seqlen_q <= 1 and options.split_tokens is None:  # with it a chunk's kernel decodes too
        alike["window_right"] = -1
    rows = packed_rows(seqlen_q * (q.shape[-2] // k.shape[-2]))
    return DecodeProblem(
        **alike,
        page_size=0 if tensors.page_table is None else k.shape[1],
        cache_dtype=k.dtype,
        k_descale=kind_of(tensors.k_descale, k),
        v_descale=kind_of(tensors.v_descale, v),
        rows=rows,
        cached_tokens=_cached_tokens(tensors, rows),
        given=_given(tensors, 3),
        tree_words=0 if tree is None else tree.shape[-1],
        sinks_dtype=None if tensors.sinks is None else tensors.sinks.dtype,
        misaligned=frozenset(name for name in read if not getattr(tensors, name).rows_are_aligned),
        expanded=frozenset(name for name in read if getattr(tensors, name).is_expanded),
    )


def _cached_tokens(tensors: DecodeTensors, rows: int) -> int:
    """``DecodeProblem.cached_tokens``."""
    k, table = tensors.k_cache, tensors.page_table
    if k.dtype not in EIGHT_BIT or rows < PLANNED_ROWS[-1]:
        return 0
    capacity = k.shape[1] if table is None else k.shape[1] * table.shape[1]
    tokens = query_sizes(tensors, None)[0] * capacity
    return 1 << max(tokens - 1, 0).bit_length()


def packed_rows(rows: int) -> int:
    """Rows rounded up to one of PLANNED_ROWS, or the last of them."""
    return next((planned for planned in PLANNED_ROWS if rows <= planned), PLANNED_ROWS[-1])


def _given(tensors: tuple, required: int) -> frozenset[str]:
    names = zip(tensors._fields, tensors, strict=True)
    return frozenset(name for name, x in list(names)[required:] if x is not None)


def describe_append(found: tuple[Metadata | None, ...], options: AppendOptions) -> AppendProblem:
    """Normalise an append that ``checks.check_append`` accepted."""
    tensors = AppendTensors(*found)
    k, v, k_cache, v_cache = tensors[:4]
    cos = tensors.rotary_cos
    return AppendProblem(
        function=options.function,
        dtype=k.dtype,
        out_dtype=k.dtype,
        device=k.device,
        num_heads_q=0 if tensors.q is None else tensors.q.shape[-2],
        num_heads_kv=k.shape[-2],
        head_dim=k.shape[-1],
        head_dim_v=v.shape[-1],
        page_size=0 if tensors.page_table is None else k_cache.shape[1],
        cache_dtype=k_cache.dtype,
        k_descale=kind_of(tensors.k_descale or tensors.k_descale_out, k_cache),
        v_descale=kind_of(tensors.v_descale or tensors.v_descale_out, v_cache),
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        rotary_dtype=None if cos is None else cos.dtype,
        rotary_interleaved=options.rotary_interleaved,
        one_q_position=options.one_q_position,
        given=_given(tensors, 4),
        backend=options.backend or None,
    )
