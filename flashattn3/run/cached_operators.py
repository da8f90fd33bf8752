"""The torch operators of cached calls: ``flashattn3::decode``, ``decode_after_prefix``, ``append``
and ``combine``.

Each writes to tensors that its schema declares as mutated: out and lse, the caches, the rotated q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.batch_invariance import span_of_all_calls
from ..call.cached import (
    APPEND,
    DECODE,
    AppendOptions,
    AppendTensors,
    DecodeOptions,
    DecodeTensors,
    Lengths,
    dtype_of_out,
)
from ..call.cached_checks import check_append, check_combine, check_decode, check_out
from ..call.metadata import metadata_of
from ..call.selection import ANY, named_backend
from ..call.tensor_fields import (
    APPEND_TENSORS,
    CACHED_SLOPES,
    DECODE_TENSORS,
    WRITTEN_DESCALES,
    schema,
)
from ..modes import is_watched, unseen_by_modes
from .cached_plans import (
    CheckedCall,
    append_of,
    checked_call,
    combine_of,
    lse_dtype,
    result_shapes,
    run_checked,
)
from .operator_rules import register_fake
from .shared_prefix import Prefix, attend_after_prefix, check_prefix

_LENGTHS = "SymInt? seqlen, SymInt seqlen_new, SymInt? max_seqlen_q"
_NUM_DECODE, _NUM_APPEND = len(DecodeTensors._fields), len(AppendTensors._fields)


_OF_DECODE = f"{schema((*DECODE_TENSORS, CACHED_SLOPES))}, {_LENGTHS}, {DECODE.schema}"
torch.library.define("flashattn3::decode", f"(Tensor(a!) out, Tensor(b!) lse, {_OF_DECODE}) -> ()")
torch.library.define(
    "flashattn3::decode_after_prefix",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor prefix_page_table, Tensor? prefix_seqlen, "
    f"SymInt prefix_len, {_OF_DECODE}) -> ()",
)
torch.library.define(
    "flashattn3::append",
    f"({schema((*APPEND_TENSORS, *WRITTEN_DESCALES))}, {_LENGTHS}, {APPEND.schema}) -> ()",
)
torch.library.define(
    "flashattn3::combine",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor out_partial, Tensor lse_partial, str? backend, "
    "str function) -> ()",
)


def decode_operator(
    out: Tensor,
    lse: Tensor,
    tensors: DecodeTensors,
    lengths: Lengths,
    options: DecodeOptions,
    prefix: Prefix | None = None,
) -> None:
    operators = torch.ops.flashattn3
    if prefix is None:
        operators.decode.default(out, lse, *tensors, *lengths, *options)
    else:
        given = prefix.arguments
        operators.decode_after_prefix.default(out, lse, *given, *tensors, *lengths, *options)


def run_append(tensors: AppendTensors, lengths: Lengths, options: AppendOptions) -> None:
    if is_watched(tensors.k, tensors.k_cache):
        torch.ops.flashattn3.append.default(*tensors, *lengths, *options)
    else:
        append_of(tensors, lengths, options)
        count_writes(*tensors[2:4], *tensors[-2:])


def run_combine(
    out: Tensor, lse: Tensor, out_partial: Tensor, lse_partial: Tensor, backend, function: str
) -> None:
    if is_watched(out_partial, out):
        torch.ops.flashattn3.combine.default(out, lse, out_partial, lse_partial, backend, function)
    else:
        combine_of(out, lse, out_partial, lse_partial, backend, function)
        count_writes(out)


def count_writes(*written: Tensor | None) -> None:
    """What autograd saved of these tensors is stale; the dispatcher would count the write."""
    for x in written:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def check_call(
    tensors: DecodeTensors, lengths: Lengths, options: DecodeOptions, watched: bool
) -> CheckedCall | None:
    """Raise what the attention would, before an append writes the caches; the compiler traces both
    operators before it runs one. Returns the checked call if at most a mode watches it. watched: of
    ``is_watched``."""
    if not watched:
        return checked_call(tensors, lengths, options)
    if torch.compiler.is_compiling():
        return None
    with unseen_by_modes():
        if not is_watched(tensors.q, tensors.k_cache):
            return checked_call(tensors, lengths, options)
    check_decode(tuple(map(metadata_of, tensors)), options, lengths)
    return None


def _check_results(
    out: Tensor, lse: Tensor, tensors: DecodeTensors, options: DecodeOptions
) -> None:
    """The public function allocates them; a caller of the operator may pass anything."""
    q, function = tensors.q, options.function
    shapes, dtype = result_shapes(q, tensors.v_cache), dtype_of_out(q, options)
    check_out(function, "out", metadata_of(out), shapes[0], dtype, q.device, "q")
    check_out(function, "lse", metadata_of(lse), shapes[1], lse_dtype(q.dtype), q.device, "q")


def _in_force(backend: str | None) -> str:
    """The backend of a compiled call that names none is known only when it runs."""
    return (named_backend.get() or ANY) if backend is None else backend


def unpacked_decode(arguments: tuple) -> tuple[DecodeTensors, Lengths, DecodeOptions]:
    end = _NUM_DECODE + len(Lengths._fields)
    tensors = DecodeTensors(*arguments[:_NUM_DECODE])
    return tensors, Lengths(*arguments[_NUM_DECODE:end]), DecodeOptions(*arguments[end:])


def unpacked_append(arguments: tuple) -> tuple[AppendTensors, Lengths, AppendOptions]:
    end = _NUM_APPEND + len(Lengths._fields)
    tensors = AppendTensors(*arguments[:_NUM_APPEND])
    return tensors, Lengths(*arguments[_NUM_APPEND:end]), AppendOptions(*arguments[end:])


def unpacked_prefix(
    page_table: Tensor, seqlen: Tensor | None, length: int, *arguments: object
) -> tuple[Prefix, DecodeTensors, Lengths, DecodeOptions]:
    prefix = Prefix(page_table, length if seqlen is None else seqlen)
    return prefix, *unpacked_decode(arguments)


def _options_in_force(options: DecodeOptions) -> DecodeOptions:
    options = options._replace(backend=_in_force(options.backend))
    if options.split_tokens is None:
        options = options._replace(split_tokens=span_of_all_calls.get())
    return options


@torch.library.impl("flashattn3::decode", "CompositeExplicitAutograd")
def _decode(out, lse, *arguments):
    tensors, lengths, options = unpacked_decode(arguments)
    options = _options_in_force(options)
    _check_results(out, lse, tensors, options)
    checked = checked_call(tensors, lengths, options)
    run_checked(checked, out, lse, tensors, lengths, options)


@torch.library.impl("flashattn3::decode_after_prefix", "CompositeExplicitAutograd")
def _decode_after_prefix(out, lse, *arguments):
    prefix, tensors, lengths, options = unpacked_prefix(*arguments)
    options = _options_in_force(options)
    check_prefix(prefix, tensors, options, rotates=False)
    _check_results(out, lse, tensors, options)
    checked = checked_call(tensors, lengths, options)
    attend_after_prefix(out, lse, prefix, checked, tensors, lengths, options)


@torch.library.impl("flashattn3::append", "CompositeExplicitAutograd")
def _append(*arguments):
    tensors, lengths, options = unpacked_append(arguments)
    append_of(tensors, lengths, options._replace(backend=_in_force(options.backend)))


@torch.library.impl("flashattn3::combine", "CompositeExplicitAutograd")
def _combine(out, lse, out_partial, lse_partial, backend, function):
    combine_of(out, lse, out_partial, lse_partial, _in_force(backend), function)


def _decode_fake(out, lse, *arguments):
    tensors, lengths, options = unpacked_decode(arguments)
    check_decode(tuple(map(metadata_of, tensors)), options, lengths)


def _decode_after_prefix_fake(out, lse, *arguments):
    prefix, tensors, lengths, options = unpacked_prefix(*arguments)
    check_decode(tuple(map(metadata_of, tensors)), options, lengths)
    check_prefix(prefix, tensors, options, rotates=False)


def _append_fake(*arguments):
    tensors, lengths, options = unpacked_append(arguments)
    check_append(tuple(map(metadata_of, tensors)), options, lengths)


def _combine_fake(out, lse, out_partial, lse_partial, backend, function):
    parts = metadata_of(out_partial), metadata_of(lse_partial)
    check_combine(function, *parts, "out.dtype", out.dtype)


register_fake(["flashattn3::decode"], _decode_fake)
register_fake(["flashattn3::decode_after_prefix"], _decode_after_prefix_fake)
register_fake(["flashattn3::append"], _append_fake)
register_fake(["flashattn3::combine"], _combine_fake)
