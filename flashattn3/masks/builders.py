"""The masks whose structure is known: documents, prefixes, windows, spans, blocks and trees.

Sizes and types are checked always; values, which are on the device, on a CPU, and elsewhere in a
process with FLASHATTN3_CHECK=1. Without the check, values out of bounds are clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..call.arguments import boolean, integer
from ..errors import shown, value_error
from . import trees, triton_lists
from .arguments import (
    check_bounds,
    checked_length,
    checked_lengths,
    checked_tensor,
    expect_alike,
    without_copies,
)
from .block_lists import BLOCK_COLUMNS, BLOCK_ROWS, Grid
from .construction import MOST_SCORES, of_block_predicate, of_predicate, of_source
from .mask import Mask


def documents(
    lengths: Sequence[int] | Tensor | None = None,
    *,
    ids: Tensor | None = None,
    seqlen: int | None = None,
    causal: bool = False,
    device: torch.device | str | None = None,
) -> Mask:
    """Rows of packed documents: a token sees the tokens of its own document.

    Args:
        lengths: tokens of each document, in the order of the row: ints, or an integer tensor
            (documents,) or (batch, documents). Tokens behind the last document are padding, which
            sees nothing and is not seen.
        ids: in place of lengths, an integer tensor (batch, seqlen) with a number for each token. A
            run of equal numbers is a document, one of negative numbers padding.
        seqlen: tokens of a row; needed where lengths is a tensor. None: the sum of the ints.
        causal: whether a token sees no later one.
        device: where the mask is built from ints; a tensor's mask is built on its device.

    The mask takes 8 bytes for each block of 128 x 64 tokens, and at most 8 KB for each 64 tokens.

    Raises: TypeError, ValueError: lengths that are negative or longer than seqlen, where values are
        checked; both or none of lengths and ids.
    """
    function = "masks.documents"
    causal = boolean(function, "causal", causal)
    if (lengths is None) == (ids is None):
        wanted = "None beside ids, and given without"
        raise value_error(function, "lengths", wanted, shown(lengths))
    if ids is not None:
        if seqlen is not None:
            raise value_error(function, "seqlen", "None beside ids", shown(seqlen))
        ids = checked_tensor(function, "ids", ids, "(batch, seqlen)", 2)
        seqlen = ids.shape[1]
    else:
        if not isinstance(lengths, Tensor):
            lengths = checked_lengths(function, "lengths", lengths)
            seqlen = sum(lengths) if seqlen is None else seqlen
            lengths = _on_device(lengths, device)
        if seqlen is None:
            raise value_error(function, "seqlen", "an int where lengths is a tensor", None)
        seqlen = checked_length(function, "seqlen", seqlen)
        lengths = checked_tensor(function, "lengths", lengths, "(batch, documents)", 1, 2)
        check_bounds(function, "lengths", lengths, 0, seqlen)
        check_bounds(function, "lengths.sum(-1)", lengths, 0, seqlen, of=lambda x: x.sum(-1))
    given = lengths if ids is None else ids
    batch = given.shape[0] if given.ndim == 2 else 1
    # Of a document that ends inside a block of rows, all blocks are partial there; where it begins
    # too. Other blocks are partial at its two ends and, if causal, at the diagonal.
    most = batch * 4 * (-(-seqlen // BLOCK_COLUMNS) + 1)
    kind = "lengths" if ids is None else "ids"
    source = triton_lists.Source(kind, given, causal=causal, n=given.shape[-1])
    spans = partial(_spans_of_documents, lengths, ids, seqlen, causal)
    return of_source(Grid(batch, 1, seqlen, seqlen), source, spans, given.device, (most, most))


def _spans_of_documents(
    lengths: Tensor | None, ids: Tensor | None, seqlen: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The keys of each token, spans [start, end): int64 (batch, 1, seqlen, 1)."""
    if ids is not None:
        begins, ends = _runs(ids)
        seen = ids >= 0
    else:
        begins, ends, seen = _spans_of_lengths(torch.atleast_2d(lengths), seqlen)
    begins, ends = (torch.where(seen, x, 0)[:, None, :, None] for x in (begins, ends))
    if causal:
        later = torch.arange(seqlen, device=begins.device).add(1).unsqueeze(-1)
        ends = torch.minimum(ends, later)
    return begins, ends


def _on_device(numbers: list[int], device: torch.device | str | None) -> Tensor:
    """int64, without waiting for the device."""
    if device is None:
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the run of equal numbers around each token begins and ends, int64 (batch, seqlen)."""
    batch, seqlen = ids.shape
    token = torch.arange(seqlen, device=ids.device)
    differs = ids[:, 1:] != ids[:, :-1]
    edge = differs.new_ones((batch, min(1, seqlen)))
    first, last = torch.cat([edge, differs], -1), torch.cat([differs, edge], -1)
    begins = torch.where(first, token, 0).cummax(-1).values if seqlen else token.expand(batch, 0)
    ends = torch.where(last, token + 1, seqlen).flip(-1)
    return begins, ends.cummin(-1).values.flip(-1) if seqlen else begins


def _spans_of_lengths(lengths: Tensor, seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first token of each token's document, the one past its last, and whether it has one."""
    edges = lengths.long().clamp(min=0).cumsum(-1).clamp(max=seqlen)
    edges = torch.nn.functional.pad(edges, (1, 1), value=0)
    edges[:, -1] = seqlen
    token = torch.arange(seqlen, device=lengths.device).expand(edges.shape[0], -1).contiguous()
    document = torch.searchsorted(edges, token, right=True).clamp(1, edges.shape[-1] - 1)
    begins, ends = edges.gather(-1, document - 1), edges.gather(-1, document)
    return begins, ends, document < edges.shape[-1] - 1


def prefix_lm(
    prefix_lengths: Sequence[int] | Tensor,
    seqlen: int,
    *,
    device: torch.device | str | None = None,
) -> Mask:
    """All tokens see the prefix, each one behind it the tokens before itself too.

    Args:
        prefix_lengths: tokens of each row's prefix, ints or an integer tensor (batch,).
        seqlen: tokens of a row.
        device: where the mask is built from ints.

    Raises: TypeError, ValueError: lengths outside 0 to seqlen, where values are checked.
    """
    function = "masks.prefix_lm"
    seqlen = checked_length(function, "seqlen", seqlen)
    if not isinstance(prefix_lengths, Tensor):
        prefix_lengths = checked_lengths(function, "prefix_lengths", prefix_lengths)
        prefix_lengths = _on_device(prefix_lengths, device)
    prefix = checked_tensor(function, "prefix_lengths", prefix_lengths, "(batch,)", 1)
    check_bounds(function, "prefix_lengths", prefix, 0, seqlen)
    grid = Grid(prefix.shape[0], 1, seqlen, seqlen)

    def spans() -> tuple[Tensor, Tensor]:
        later = torch.arange(1, seqlen + 1, device=prefix.device).view(1, 1, -1, 1)
        ends = torch.maximum(prefix.long().clamp(0, seqlen).view(-1, 1, 1, 1), later)
        return torch.zeros_like(ends), ends

    # A block of rows has one end or 128 neighbours; where the prefix ends, a block of keys is
    # partial for all queries before it.
    most = grid.batch * 4 * (-(-seqlen // BLOCK_COLUMNS) + 1)
    source = triton_lists.Source("prefix", prefix)
    return of_source(grid, source, spans, prefix.device, (most, most))


def window(
    seqlen: int,
    left: int,
    right: int = 0,
    *,
    sinks: int = 0,
    seqlen_k: int | None = None,
    device: torch.device | str | None = None,
) -> Mask:
    """A sliding window whose first keys stay visible.

    Args:
        seqlen: queries, and keys where seqlen_k is None. The last query is aligned with the last
            key, as everywhere in flashattn3.
        left, right: keys before and behind a query's own that it sees; -1: all.
        sinks: keys at the beginning that no query loses on the left.
        device: where the mask is built.
    """
    function = "masks.window"
    queries = checked_length(function, "seqlen", seqlen)
    keys = queries if seqlen_k is None else checked_length(function, "seqlen_k", seqlen_k)
    left, right = integer(function, "left", left), integer(function, "right", right)
    sinks = checked_length(function, "sinks", sinks)
    left, right, sinks = (
        queries + keys if x < 0 else min(x, queries + keys) for x in (left, right, sinks)
    )
    device = torch.empty(0, device=device).device  # torch.compile traces no default device

    def spans() -> tuple[Tensor, Tensor]:
        own = torch.arange(queries, device=device).view(1, 1, -1) + (keys - queries)
        end = (own + right + 1).clamp(0, keys)
        start = (own - left).clamp(min=0).minimum(end)
        last_sink = end.clamp(max=sinks)
        starts = torch.stack([torch.zeros_like(own), torch.maximum(start, last_sink)], -1)
        return starts, torch.stack([last_sink, end], -1)

    # Both ends of a window and that of the sinks are in at most 3 blocks of a block of rows; where
    # the sinks end, a block of keys is partial for all queries.
    grid = Grid(1, 1, queries, keys)
    most = tuple(12 * of.shape[2] + of.shape[3] for of in (grid, grid.transposed))
    source = triton_lists.Source("window", reach=(left, right, sinks))
    return of_source(grid, source, spans, device, most)


def intervals(starts: Tensor, ends: Tensor, seqlen_k: int | None = None) -> Mask:
    """Each query sees the union of some spans of keys.

    Args:
        starts, ends: integer tensors (batch | 1, heads | 1, seqlen_q, n): spans [start, end), in
            any order, also empty or overlapping.
        seqlen_k: keys; None: seqlen_q.

    Any block may be partial, so the mask has room for seqlen_q * seqlen_k / 4 bytes of bits for
    each batch_idx and head that the tensors have.

    Raises: TypeError, ValueError: spans outside 0 to seqlen_k, where values are checked.
    """
    function = "masks.intervals"
    axes = "(batch | 1, heads | 1, seqlen_q, n)"
    starts = checked_tensor(function, "starts", starts, axes, 4)
    ends = checked_tensor(function, "ends", ends, axes, 4)
    expect_alike(function, "ends", ends, starts, "starts")
    keys = starts.shape[2] if seqlen_k is None else checked_length(function, "seqlen_k", seqlen_k)
    for name, x in (("starts", starts), ("ends", ends)):
        check_bounds(function, name, x, 0, keys)
    grid, n = Grid(*starts.shape[:3], keys), starts.shape[3]
    starts, ends = _apart(starts.long().clamp(0, keys), ends.long().clamp(0, keys))
    source = triton_lists.Source("intervals", starts, ends, n=n)
    return of_source(grid, source, lambda: (starts, ends), starts.device)


def _apart(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Spans that cover the same keys and do not overlap."""
    if starts.shape[-1] == 0:
        return starts, ends
    starts, order = starts.sort(-1)
    ends = ends.gather(-1, order)
    reached = torch.maximum(starts, ends).cummax(-1).values
    before = torch.nn.functional.pad(reached[..., :-1], (1, 0), value=0)
    starts = torch.maximum(starts, before)
    return starts, torch.maximum(starts, ends)


def blocks(
    selected: Tensor,
    block_q: int = 128,
    block_k: int = 64,
    *,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
) -> Mask:
    """The scores of selected blocks.

    Args:
        selected: bool (batch | 1, heads | 1, blocks of queries, blocks of keys).
        block_q, block_k: sizes of a block in tokens. Where both are multiples of 128, no block is
            partial, unless it goes past the end; others take up to seqlen_q * seqlen_k / 8 bytes of
            bits for each batch_idx and head, in the forward's lists, in the backward's, or in both.
        seqlen_q, seqlen_k: lengths; None: those of whole blocks.
    """
    function = "masks.blocks"
    axes = "(batch | 1, heads | 1, blocks of queries, blocks of keys)"
    selected = checked_tensor(function, "selected", selected, axes, 4, boolean=True)
    selected = without_copies(selected)
    batch, heads, blocks_q, blocks_k = selected.shape
    block_q, queries = _sizes_of_blocks(function, "q", blocks_q, block_q, seqlen_q)
    block_k, keys = _sizes_of_blocks(function, "k", blocks_k, block_k, seqlen_k)
    grid = Grid(batch, heads, queries, keys)

    def visible(batch_idx: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return selected[batch_idx, head, query // block_q, key // block_k]

    # Of whole blocks the last one of each list may be partial, which goes past the end.
    most_q = most_k = None
    if block_q % BLOCK_ROWS == block_k % BLOCK_COLUMNS == 0:
        most_q = batch * heads * -(-queries // BLOCK_ROWS)
    if block_k % BLOCK_ROWS == block_q % BLOCK_COLUMNS == 0:
        most_k = batch * heads * -(-keys // BLOCK_ROWS)
    most = most_q, most_k
    if block_k % 8 == 0 and grid.num_scores and triton_lists.serve(selected.device):
        of_selected = triton_lists.Blocks(selected.contiguous(), block_q, block_k, full=1)
        lists = triton_lists.of_bools(grid, None, most, of_selected)
        return Mask(*lists, grid.rows, grid.columns)
    return of_block_predicate(grid, visible, selected, selected, block_q, block_k, most)


def _sizes_of_blocks(
    function: str, side: str, number: int, size: object, length: object
) -> tuple[int, int]:
    """The checked size of a block and the length of a side, "q" or "k", which has so many."""
    size = integer(function, f"block_{side}", size)
    if size < 1:
        raise value_error(function, f"block_{side}", "at least 1", size)
    if length is None:
        return size, number * size
    length = checked_length(function, f"seqlen_{side}", length)
    wanted = -(-length // size)
    if number != wanted:
        axis, wanted = 2 if side == "q" else 3, f"{wanted} blocks of {size} tokens"
        raise value_error(function, f"selected.shape[{axis}]", wanted, number)
    return size, length


def tree(parents: Tensor) -> Mask:
    """Each token sees itself and its ancestors: many continuations of a prefix in one row.

    Args:
        parents: integer tensor (seqlen,) or (batch, seqlen), the parent of each token, which comes
            before it; -1: none.

    Any block may be partial: the mask has room for seqlen**2 / 4 bytes of bits for each row.

    Raises: TypeError, ValueError: a parent that does not come before its token, where values are
        checked.
    """
    function = "masks.tree"
    parents = checked_tensor(function, "parents", parents, "(batch, seqlen)", 1, 2)
    seqlen = parents.shape[-1]
    check_bounds(function, "parents", parents, -1, seqlen - 1)
    name = "each token minus its parent"
    check_bounds(function, name, parents, 1, seqlen, of=_distances)
    grid = Grid(parents.shape[0] if parents.ndim == 2 else 1, 1, seqlen, seqlen)
    if 0 < grid.num_scores <= MOST_SCORES and triton_lists.serve(parents.device):
        return Mask(*triton_lists.of_tree(grid, parents), seqlen, seqlen)
    first, last = trees.visits(torch.atleast_2d(parents))

    def visible(batch_idx: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visit = first[batch_idx, query]
        return (first[batch_idx, key] <= visit) & (visit < last[batch_idx, key])

    return of_predicate(grid, visible, parents)


def _distances(parents: Tensor) -> Tensor:
    """From each token to its parent."""
    return torch.arange(parents.shape[-1], device=parents.device) - parents.long()
