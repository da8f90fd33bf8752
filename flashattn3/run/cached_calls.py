"""How a cached call runs: as an earlier one did, or checked and planned; with new tokens they are
written first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import profiler

from ..call.arguments import boolean, integer, length
from ..call.cache_descales import of_append
from ..call.cached import (
    APPEND,
    DECODE,
    AppendOptions,
    AppendTensors,
    DecodeOptions,
    DecodeTensors,
    Lengths,
    dtype_of_out,
    new_out,
    one_q_position,
    query_sizes,
)
from ..call.cached_checks import check_combine, check_decode, check_out, check_tensors
from ..call.cached_value_checks import check_prefix_values
from ..call.metadata import metadata_of
from ..call.selection import backend_in_force
from ..call.value_checks import is_checked
from ..errors import expect, shown, value_error
from ..modes import has_autocast, is_watched, unseen_by_modes
from .cached_operators import (
    check_call,
    count_writes,
    decode_operator,
    run_append,
    run_combine,
)
from .cached_plans import (
    CheckedCall,
    check_values_before_append,
    checked_call,
    dense_rows,
    lse_dtype,
    result_shapes,
    run_checked,
)
from .launches import Further, NewTokens, attend_kept
from .operator_rules import as_cache_under_autocast
from .shared_prefix import Prefix, attend_after_prefix, check_prefix, prefix_of


def with_kvcache(
    options: DecodeOptions,
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    page_table,
    cu_seqlens_q,
    cu_seqlens_k_new,
    max_seqlen_q,
    rotary_seqlens,
    q_descale,
    k_descale,
    v_descale,
    rotary_interleaved,
    scheduler_metadata,
    sinks,
    alibi_slopes,
    tree_mask,
    prefix_page_table,
    prefix_len,
    out,
) -> Tensor | tuple[Tensor, Tensor]:
    function = options.function
    seqlen, cache_seqlens = seqlens_of(function, cache_seqlens)
    if k is v is None:
        cu_seqlens_k_new = None
    if rotary_cos is rotary_sin is None:
        rotary_seqlens = None
    if type(rotary_interleaved) is not bool:
        rotary_interleaved = boolean(function, "rotary_interleaved", rotary_interleaved)
    longest = None
    if not (cu_seqlens_q is max_seqlen_q is None):
        longest = _longest(function, cu_seqlens_q, max_seqlen_q)
    watched = is_watched(q, k_cache)
    prefix = None
    if not (prefix_page_table is prefix_len is None):
        prefix = prefix_of(function, prefix_page_table, prefix_len)
    new = None
    if not (k is v is rotary_cos is rotary_sin is None):
        new = NewTokens(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved)
    if (
        rotary_seqlens is q_descale is tree_mask is None
        and alibi_slopes is None
        and not watched
        and not profiler._is_profiler_enabled  # else the call says which kernel it runs
    ):
        further = None
        alone = out is longest is cache_batch_idx is cache_leftpad is cu_seqlens_q is None
        if not (alone and sinks is scheduler_metadata is k_descale is v_descale is None):
            most = -1 if longest is None else longest
            further = Further(
                out, most, cache_batch_idx, cache_leftpad, cu_seqlens_q, sinks, scheduler_metadata,
                k_descale, v_descale,
            )  # fmt: skip
        result = attend_kept(
            options, q, k_cache, v_cache, cache_seqlens, page_table, seqlen, further, new,
            () if prefix is None else prefix.arguments,
        )  # fmt: skip
        if result is not None:
            if new is not None:
                count_writes(k_cache, v_cache)
            if out is not None:
                count_writes(out)
            return result
    if has_autocast():
        q, k, v = as_cache_under_autocast(k_cache, q, k, v)
        new = new and new._replace(k=k, v=v)
    tensors = DecodeTensors(
        q, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, cache_leftpad,
        cu_seqlens_q, cu_seqlens_k_new, q_descale, k_descale, v_descale, sinks, scheduler_metadata,
        tree_mask, alibi_slopes,
    )  # fmt: skip
    lengths = Lengths(seqlen, 0, longest)
    if prefix is not None:
        check_tensors(function, 3, **tensors._asdict())
        check_decode(tuple(map(metadata_of, tensors)), options, lengths)
        check_prefix(prefix, tensors, options, new is not None and new.rotary_cos is not None)
    if new is None:
        return _attended(tensors, lengths, options, out, watched, prefix)
    return _appended(tensors, lengths, options, out, watched, prefix, new, rotary_seqlens)


def _appended(
    tensors: DecodeTensors,
    lengths: Lengths,
    options: DecodeOptions,
    out: Tensor | None,
    watched: bool,
    prefix: Prefix | None,
    new: NewTokens,
    rotary_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write the new tokens, then attend; all is checked before. watched: of ``is_watched``."""
    function, q = options.function, tensors.q
    k, v, edges_k, cos, sin, interleaved = new
    if watched or not type(k) is type(v) is Tensor:
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": rotary_seqlens}
        check_tensors(function, 3, **tensors._asdict(), k=k, v=v, **rotary)
        _check_new_tokens(function, k, v, cu_seqlens_k_new=edges_k, **rotary)
    dense = edges_k is None and k.ndim == 4
    lengths = lengths._replace(seqlen_new=k.shape[1] if dense else 0)
    rotated = to_rotate = edges = None
    if cos is not None:
        rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
        to_rotate, edges, tensors = q, tensors.cu_seqlens_q, tensors._replace(q=rotated)
    checked = check_call(tensors, lengths, options, watched)
    if not torch.compiler.is_compiling():  # which traces all checks before anything runs
        batch = query_sizes(tensors, lengths.max_seqlen_q)[0]
        if dense:
            expect(k.shape[0] == batch, function, "k.shape[0]", f"{batch} (q's batch)", k.shape[0])
        _check_given(out, q, result_shapes(q, tensors.v_cache)[0], options)
    appended = AppendTensors(
        k, v, *tensors[1:3], to_rotate, rotated, *tensors[3:6], edges, edges_k, cos, sin,
        rotary_seqlens, **_descales_of_append(tensors),
    )  # fmt: skip
    how = AppendOptions(interleaved, one_q_position(options), options.backend, function)
    if checked is not None:
        check_values_before_append(checked, tensors, lengths, options, appended, how)
        if prefix is not None and is_checked(q.device):
            with unseen_by_modes():
                check_prefix_values(function, *prefix, tensors.k_cache)
    run_append(appended, lengths, how)
    return _attended(tensors, lengths, options, out, watched, prefix, checked)


def _attended(
    tensors: DecodeTensors,
    lengths: Lengths,
    options: DecodeOptions,
    out: Tensor | None,
    watched: bool,
    prefix: Prefix | None,
    checked: CheckedCall | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the call. watched: of ``is_watched``. checked: None: neither it nor out was checked
    yet."""
    q, given = tensors.q, out
    if watched:
        check_tensors(options.function, 3, **tensors._asdict())
        if q.ndim not in (3, 4) or tensors.v_cache.ndim != 4:  # the check names the tensor
            check_decode(tuple(map(metadata_of, tensors)), options, lengths)
        out_shape, lse_shape = result_shapes(q, tensors.v_cache)
        _check_given(given, q, out_shape, options)
        out = q.new_empty(out_shape, dtype=dtype_of_out(q, options)) if given is None else given
        lse = q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))
        decode_operator(out, lse, tensors, lengths, options, prefix)
    else:
        if checked is None:
            checked = checked_call(tensors, lengths, options)
            _check_given(given, q, checked.out_shape, options)
        shape, dtype = checked.lse_shape, checked.lse_dtype
        lse = None if shape is None else q.new_empty(shape, dtype=dtype)
        if prefix is None:
            out = run_checked(checked, given, lse, tensors, lengths, options)
        else:
            out = new_out(tensors, dtype_of_out(q, options)) if given is None else given
            attend_after_prefix(out, lse, prefix, checked, tensors, lengths, options)
        if given is not None:
            count_writes(out)
    return (out, lse) if options.return_lse else out


def _check_given(
    out: Tensor | None, q: Tensor, shape: tuple[int, ...], options: DecodeOptions
) -> None:
    if out is not None:
        check_tensors(options.function, 0, out=out)
        dtype = dtype_of_out(q, options)
        check_out(options.function, "out", metadata_of(out), shape, dtype, q.device, "q")


def _descales_of_append(tensors: DecodeTensors | AppendTensors) -> dict[str, Tensor | None]:
    """Those by which new tokens are divided, and those that they get."""
    k_descale, k_descale_out = of_append(tensors.k_descale, tensors.k_cache)
    v_descale, v_descale_out = of_append(tensors.v_descale, tensors.v_cache)
    given = {"k_descale": k_descale, "v_descale": v_descale}
    return given | {"k_descale_out": k_descale_out, "v_descale_out": v_descale_out}


def seqlens_of(function: str, cache_seqlens: object) -> tuple[int | None, Tensor | None]:
    """(int, None) or (None, tensor)."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return None, cache_seqlens
    return integer(function, "cache_seqlens", cache_seqlens), None


def _longest(function: str, cu_seqlens_q: Tensor | None, max_seqlen_q: object) -> int | None:
    """Return the number of queries of the longest sequence; a call has one of the two arguments."""
    if cu_seqlens_q is None:
        raise value_error(
            function, "max_seqlen_q", "None without cu_seqlens_q", shown(max_seqlen_q)
        )
    expect(max_seqlen_q is not None, function, "max_seqlen_q", "an int with cu_seqlens_q", None)
    return length(function, "max_seqlen_q", max_seqlen_q)


def _check_new_tokens(
    function: str, k: Tensor | None, v: Tensor | None, **others: Tensor | None
) -> None:
    if k is not None and v is not None:
        return
    wanted = "a tensor: k and v are appended together"
    expect(k is None, function, "v", wanted, None)
    expect(v is None, function, "k", wanted, None)
    for name, given in others.items():
        if given is not None:
            raise value_error(function, name, "None without k and v", "a tensor")


def append(tensors: AppendTensors, given: dict[str, object]) -> Tensor | None:
    """``append_kvcache``. given: its options, as they were passed."""
    function = "append_kvcache"
    k, v, k_cache, _, q = tensors[:5]
    if has_autocast():
        q, k, v = as_cache_under_autocast(k_cache, q, k, v)
    seqlen, cache_seqlens = seqlens_of(function, tensors.cache_seqlens)
    tensors = tensors._replace(k=k, v=v, q=q, cache_seqlens=cache_seqlens)
    check_tensors(function, 4, **tensors._asdict())
    tensors = tensors._replace(**_descales_of_append(tensors))
    if q is not None:
        rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
        tensors = tensors._replace(q_out=rotated)
    seqlen_new = k.shape[1] if tensors.cu_seqlens_k_new is None and k.ndim == 4 else 0
    run_append(tensors, Lengths(seqlen, seqlen_new), APPEND.convert(function, given))
    return tensors.q_out


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """``flash_attn_combine``."""
    function = "flash_attn_combine"
    check_tensors(function, 2, out_partial=out_partial, lse_partial=lse_partial, out=out)
    dtype = DECODE.fields["out_dtype"].convert(function, "out_dtype", out_dtype)
    what, of_out = "out_dtype", dtype or out_partial.dtype
    if out is not None:
        what, of_out = "out.dtype", out.dtype
    parts = metadata_of(out_partial), metadata_of(lse_partial)
    check_combine(function, *parts, what, of_out)
    if out is None:
        out = out_partial.new_empty(out_partial.shape[1:], dtype=of_out)
    else:
        expect(dtype in (None, out.dtype), function, "out_dtype", f"{out.dtype} as out's", dtype)
        shape, device = out_partial.shape[1:], out_partial.device
        check_out(function, "out", metadata_of(out), shape, out.dtype, device, "out_partial")
    # Rows of a head lie side by side, as in the lse of a call.
    *lead, rows, heads = lse_partial.shape[1:]
    lse = lse_partial.new_empty((*lead, heads, rows)).transpose(-1, -2)
    backend = backend_in_force(function, "backend", None)
    run_combine(out, lse, dense_rows(out_partial), lse_partial, backend, function)
    return out, lse
