"""Keys that all sequences of a cached call have in front of their own: read once for all of them.

The rows of all sequences attend to the prefix as those of one sequence, without a mask, each
sequence attends to its own keys, and both results are joined by their log-sum-exp (Hydragen, arXiv
2402.05099; cascade attention of FlashInfer). Every backend of cached calls takes such a call, as
two calls and a combination where it has no launch for all of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..call.arguments import expect_strided, integer
from ..call.cache_descales import is_of_sequences, is_one_number
from ..call.cached import DecodeOptions, DecodeTensors, Lengths, lse_shape
from ..call.cached_checks import check_tensors
from ..call.cached_value_checks import check_prefix_values
from ..call.metadata import metadata_of
from ..call.tensor_checks import check_dense, check_device
from ..call.value_checks import is_checked
from ..errors import UnsupportedError, complaint, expect, value_error
from .cached_plans import checked_call, combine_of, lse_dtype, run_checked

if TYPE_CHECKING:
    from ..backends.base import CachedLaunch
    from .cached_plans import CheckedCall


class Prefix(NamedTuple):
    """page_table: (1, pages). length: int, or int32 (1,)."""

    page_table: Tensor
    length: int | Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor | None, int]:
        """The page table, the length as a tensor or None, and as an int or 0."""
        if isinstance(self.length, Tensor):
            return self.page_table, self.length, 0
        return self.page_table, None, self.length


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
    expect_strided(function, "prefix_page_table", page_table)
    shape = tuple(page_table.shape)
    expect(shape[:1] == (1,) and len(shape) == 2, function, "prefix_page_table.shape",
           "(1, pages)", shape)  # fmt: skip
    dtype = page_table.dtype
    expect(dtype == torch.int32, function, "prefix_page_table.dtype", torch.int32, dtype)
    if isinstance(length, Tensor) and length.ndim == 0 and length.dtype == torch.int32:
        length = length.reshape(1)  # it is not read on the host
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
    check_tensors(function, 0, prefix_page_table=prefix.page_table, prefix_len=prefix.arguments[1])
    device, pages = tensors.q.device, prefix.page_table
    check_device(function, "prefix_page_table", pages, device, "q")
    if isinstance(prefix.length, Tensor):
        check_device(function, "prefix_len", prefix.length, device, "q")
    check_dense(function, "prefix_page_table", metadata_of(pages))
    if isinstance(cache, Tensor) and cache.ndim == 4 and isinstance(prefix.length, int):
        most = prefix.page_table.shape[1] * cache.shape[1]
        wanted = f"at most {most}, the tokens of its pages"
        expect(prefix.length <= most, function, "prefix_len", wanted, prefix.length)
    wanted = "None with prefix_page_table: a row's keys have two parts, whatever their spans"
    expect(options.split_tokens is None, function, "split_tokens", wanted, options.split_tokens)
    refused = {
        "rotary_cos": (rotates, "None with prefix_page_table: rotate with append_kvcache"),
        "window_size": (options.window_left >= 0, "open to the left with prefix_page_table"),
        "alibi_slopes": (tensors.alibi_slopes is not None, "None with prefix_page_table"),
    }
    wanted = "None or one number with prefix_page_table"
    of_q = tensors.q_descale is not None and not is_one_number(tensors.q_descale)
    refused["q_descale"] = of_q, wanted
    wanted = "None, one number or one for each page or token with prefix_page_table"
    refused["k_descale"] = is_of_sequences(tensors.k_descale, tensors.k_cache), wanted
    refused["v_descale"] = is_of_sequences(tensors.v_descale, tensors.v_cache), wanted
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
        cu_seqlens_q=edges, q_descale=tensors.q_descale, k_descale=tensors.k_descale,
        v_descale=tensors.v_descale,
    )  # fmt: skip
    options = options._replace(causal=False, window_right=-1, return_lse=True)
    return of_prefix, Lengths(None if given else prefix.length, 0, longest), options


def is_one_launch(launch: CachedLaunch, tensors: DecodeTensors) -> bool:
    """Return whether a call has rows and the launch of its own keys reads a prefix too."""
    q = tensors.q
    rows = math.prod(q.shape[:-1]) // tensors.k_cache.shape[2]
    return 0 < rows <= launch.rows_after_prefix


def attend_after_prefix(
    out: Tensor,
    lse: Tensor | None,
    prefix: Prefix,
    checked: CheckedCall,
    tensors: DecodeTensors,
    lengths: Lengths,
    options: DecodeOptions,
) -> None:
    """Write out and lse of a call that ``check_prefix`` accepted: in one launch where the backend
    of the sequences' own keys has one. checked: of ``checked_call``."""
    if is_checked(tensors.q.device):
        check_prefix_values(options.function, *prefix, tensors.k_cache)
    if is_one_launch(checked.plan.launch, tensors):
        run_checked(checked, out, lse, tensors, lengths, options, prefix.arguments)
    else:
        of_prefix = prefix_call(prefix, tensors, lengths, options)
        _attend_to_both(out, lse, of_prefix, (tensors, lengths, options))


def _attend_to_both(out: Tensor, lse: Tensor | None, of_prefix: tuple, own: tuple) -> None:
    """Attend to the prefix, then to each sequence's own keys, and join both results, which lie
    where the join reads them."""
    q, options = own[0].q, own[2]._replace(return_lse=True)
    *batch, heads, rows = lse_shape(q)
    outs = out.new_empty((2, *out.shape))
    lses = q.new_empty((2, heads, *batch, rows), dtype=lse_dtype(q.dtype))
    out_of_prefix, lse_of_prefix = outs[0], lses[0]
    if batch:
        out_of_prefix, lse_of_prefix = outs[0].flatten(0, 1)[None], lses[0].flatten(1)[None]
    run_checked(checked_call(*of_prefix), out_of_prefix, lse_of_prefix, *of_prefix)
    own = *own[:2], options
    run_checked(checked_call(*own), outs[1], lses[1].movedim(0, -2), *own)
    if lse is None:
        lse = torch.empty_like(lses[1]).movedim(0, -2)
    combine_of(
        out, lse.transpose(-1, -2), outs, lses.movedim(1, -1), options.backend, options.function
    )
