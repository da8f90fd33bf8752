"""Keys that all sequences of a cached call have in front of their own: read once for all of them.

The rows of all sequences attend to the prefix as those of one sequence, without a mask; then each
sequence attends to its own keys, and both results are joined by their log-sum-exp (Hydragen, arXiv
2402.05099; cascade attention of FlashInfer). So every backend of cached calls takes such a call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.arguments import integer
from ..call.cache_descales import OF_KEYS, kind_of
from ..call.cached import DecodeOptions, DecodeTensors, Lengths
from ..call.tensor_checks import check_device
from ..errors import UnsupportedError, complaint, expect, shown, type_error, value_error
from .cached_operators import run_combine


class Prefix(NamedTuple):
    """page_table: (1, pages). length: int, or int32 (1,)."""

    page_table: Tensor
    length: int | Tensor


def prefix_of(function: str, page_table: object, length: object) -> Prefix | None:
    """The prefix of a call, whose two arguments belong together."""
    if page_table is length is None:
        return None
    for name, given, other in (
        ("prefix_page_table", page_table, "prefix_len"),
        ("prefix_len", length, "prefix_page_table"),
    ):
        if given is None:
            raise value_error(function, name, f"given with {other}", None)
    if not isinstance(page_table, Tensor):
        raise type_error(function, "prefix_page_table", "a torch.Tensor", shown(page_table))
    shape = tuple(page_table.shape)
    expect(shape[:1] == (1,) and len(shape) == 2, function, "prefix_page_table.shape",
           "(1, pages)", shape)  # fmt: skip
    dtype = page_table.dtype
    expect(dtype == torch.int32, function, "prefix_page_table.dtype", torch.int32, dtype)
    if isinstance(length, Tensor) and length.ndim == 1:
        found = tuple(length.shape), length.dtype
        wanted = (1,), torch.int32
        expect(found == wanted, function, "prefix_len", "an int or int32 of shape (1,)", found)
        return Prefix(page_table, length)
    length = integer(function, "prefix_len", length)
    expect(length >= 0, function, "prefix_len", ">= 0", length)
    return Prefix(page_table, length)


def check_prefix(
    prefix: Prefix, tensors: DecodeTensors, options: DecodeOptions, rotates: bool
) -> None:
    """Raise for a call that cannot have a prefix. rotates: whether it has tables of angles."""
    function, cache = options.function, tensors.k_cache
    wanted = "a tensor with prefix_page_table: k_cache has pages"
    expect(tensors.page_table is not None, function, "page_table", wanted, None)
    check_device(function, "prefix_page_table", prefix.page_table, tensors.q.device, "q")
    if isinstance(cache, Tensor) and cache.ndim == 4 and isinstance(prefix.length, int):
        most = prefix.page_table.shape[1] * cache.shape[1]
        wanted = f"at most {most}, the tokens of its pages"
        expect(prefix.length <= most, function, "prefix_len", wanted, prefix.length)
    wanted = "None with prefix_page_table: a row's keys have two parts, whatever their spans"
    expect(options.split_tokens is None, function, "split_tokens", wanted, options.split_tokens)
    refused = {
        "rotary_cos": (rotates, "None with prefix_page_table: rotate with append_kvcache"),
        "window_size": (options.window_left >= 0, "open to the left with prefix_page_table"),
        "q_descale": (tensors.q_descale is not None, "None with prefix_page_table"),
        "alibi_slopes": (tensors.alibi_slopes is not None, "None with prefix_page_table"),
    }
    for name, cache in (("k_descale", tensors.k_cache), ("v_descale", tensors.v_cache)):
        descale = getattr(tensors, name)
        of_sequences = descale is not None and kind_of(descale, cache) not in OF_KEYS
        refused[name] = of_sequences, "None or one for each page or token with prefix_page_table"
    for name, (given, wanted) in refused.items():
        if given:
            raise UnsupportedError(complaint(function, name, wanted, "given"))


def prefix_call(
    prefix: Prefix, tensors: DecodeTensors, lengths: Lengths, options: DecodeOptions
) -> tuple[DecodeTensors, Lengths, DecodeOptions]:
    """The call of the rows of all sequences over the prefix."""
    q, edges = tensors.q, tensors.cu_seqlens_q
    longest = None
    if edges is None:
        q = q.reshape(1, -1, *q.shape[2:])
    else:  # rows of no sequence stay out of it
        edges, longest = torch.stack((edges[0], edges[-1])), q.shape[0]
    given = isinstance(prefix.length, Tensor)
    of_prefix = DecodeTensors(
        q, tensors.k_cache, tensors.v_cache, prefix.length if given else None, prefix.page_table,
        cu_seqlens_q=edges, k_descale=tensors.k_descale, v_descale=tensors.v_descale,
    )  # fmt: skip
    options = options._replace(causal=False, window_right=-1, return_lse=True)
    return of_prefix, Lengths(None if given else prefix.length, 0, longest), options


def joined(
    of_prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    out: Tensor | None,
    options: DecodeOptions,
) -> Tensor | tuple[Tensor, Tensor]:
    """The result of a call, of those over the prefix and over each sequence's own keys."""
    (prefix_out, prefix_lse), (own_out, own_lse) = of_prefix, own
    if own_out.ndim == 4:
        batch, seqlen_q = own_out.shape[:2]
        prefix_out = prefix_out.view(own_out.shape)
        prefix_lse = prefix_lse[0].unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    out_parts = torch.stack((prefix_out, own_out))
    lse_parts = torch.stack((prefix_lse, own_lse)).transpose(-1, -2)
    out = torch.empty_like(own_out) if out is None else out
    lse = torch.empty_like(own_lse)
    backend, function = options.backend, options.function
    run_combine(out, lse.transpose(-1, -2), out_parts, lse_parts, backend, function)
    return (out, lse) if options.return_lse else out
