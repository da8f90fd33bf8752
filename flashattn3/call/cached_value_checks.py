"""Checks of the values in the index tensors of a cached call. They read on the host, so they wait
for a device: on a CPU they always run, elsewhere in a process started with FLASHATTN3_CHECK=1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import expect, value_error
from .cached import AppendTensors, DecodeOptions, DecodeTensors, Lengths
from .scheduler_metadata import HEADER, MAGIC, PER_SEQUENCE, differences
from .value_checks import check_edges, check_longest


def check_decode_values(
    tensors: DecodeTensors, options: DecodeOptions, lengths: Lengths, options_hash: int
) -> None:
    """Raise for lengths, page numbers, indices or metadata that do not fit the call's tensors."""
    function, q = options.function, tensors.q
    batch, seqlens_q = q.shape[0], None
    if tensors.cu_seqlens_q is not None:
        seqlens_q = check_edges(function, "cu_seqlens_q", tensors.cu_seqlens_q, q.shape[0])
        check_longest(function, "max_seqlen_q", lengths.max_seqlen_q, seqlens_q)
        batch = len(seqlens_q)
    seqlens_q = seqlens_q or [q.shape[1] if q.ndim == 4 else 0] * batch
    leftpad = [0] * batch
    if tensors.cache_leftpad is not None:
        leftpad = tensors.cache_leftpad.tolist()
    columns = zip(seqlens_q, leftpad, strict=True)
    seen = [(queries, padding, options.window_left) for queries, padding in columns]
    cached, new = check_lengths(function, tensors, lengths, batch, seen)
    _check_within(function, "cache_leftpad", leftpad, cached)
    if tensors.scheduler_metadata is not None:
        columns = list(zip(cached, new, seqlens_q, leftpad, strict=True))
        _check_metadata_values(function, tensors.scheduler_metadata, options_hash, columns)


def check_append_values(tensors: AppendTensors, function: str, lengths: Lengths) -> None:
    """Raise for lengths, pages and indices that do not fit, and for tokens without a place."""
    edges, rows = tensors.cu_seqlens_k_new, tensors.k.shape[0]
    batch = rows if edges is None else edges.shape[0] - 1
    if edges is not None:
        check_edges(function, "cu_seqlens_k_new", edges, rows)
    if tensors.cu_seqlens_q is not None:
        check_edges(function, "cu_seqlens_q", tensors.cu_seqlens_q, tensors.q.shape[0])
    check_lengths(function, tensors, lengths, batch)
    index = tensors.cache_batch_idx
    if index is not None:
        found = index.tolist()
        wanted = "without duplicates: two sequences would write to one place"
        expect(len(set(found)) == len(found), function, "cache_batch_idx", wanted, found)


def check_lengths(
    function: str,
    tensors: DecodeTensors | AppendTensors,
    lengths: Lengths,
    batch: int,
    seen: list[tuple[int, int, int]] | None = None,
) -> tuple[list[int], list[int]]:
    """Cached and new tokens of every sequence, all of which fit; their pages and rows exist.

    seen: of each sequence queries, left padding and window_left: pages before need not exist. None:
        only the new tokens' pages must.
    """
    table, cache = tensors.page_table, tensors.k_cache
    num_caches, capacity = capacity_of(cache, table)
    cached = [capacity if lengths.seqlen is None else lengths.seqlen] * batch
    if tensors.cache_seqlens is not None:
        cached = tensors.cache_seqlens.tolist()
    new = [lengths.seqlen_new] * batch
    if tensors.cu_seqlens_k_new is not None:
        new = tensors.cu_seqlens_k_new.diff().tolist()
    totals = [a + b for a, b in zip(cached, new, strict=True)]
    for index, (length, total) in enumerate(zip(cached, totals, strict=True)):
        if not 0 <= length <= capacity:
            wanted = f"between 0 and the capacity, {capacity}"
            raise value_error(function, f"cache_seqlens[{index}]", wanted, length)
        wanted = f"at most {capacity}, the capacity, with the new tokens"
        expect(total <= capacity, function, f"cache_seqlens[{index}]", wanted, total)
    rows = list(range(batch))
    if tensors.cache_batch_idx is not None:
        rows = tensors.cache_batch_idx.tolist()
        _check_within(function, "cache_batch_idx", rows, [num_caches - 1] * batch)
    if table is not None and batch:
        begins = cached
        if seen is not None:
            begins = [
                max(leftpad, 0 if window < 0 else total - queries - window)
                for (queries, leftpad, window), total in zip(seen, totals, strict=True)
            ]
        chosen = table[torch.tensor(rows, device=table.device)]
        _check_pages(function, "page_table", chosen, begins, totals, cache)
    return cached, new


def capacity_of(cache: Tensor, page_table: Tensor | None) -> tuple[int, int]:
    """Number of caches and tokens of each."""
    if page_table is None:
        return cache.shape[0], cache.shape[1]
    return page_table.shape[0], page_table.shape[1] * cache.shape[1]


def check_prefix_values(
    function: str, page_table: Tensor, length: int | Tensor, cache: Tensor
) -> None:
    """Raise for a length or pages of a prefix that do not fit the cache."""
    most, length = page_table.shape[1] * cache.shape[1], int(length)
    wanted = f"between 0 and {most}, the tokens of its pages"
    expect(0 <= length <= most, function, "prefix_len", wanted, length)
    _check_pages(function, "prefix_page_table", page_table, [0], [length], cache)


def _check_pages(
    function: str, name: str, table: Tensor, begins: list[int], totals: list[int], cache: Tensor
) -> None:
    """Raise for a page of the tokens from begins to totals that the cache does not have. name: of
    the table."""
    num_pages, page_size = cache.shape[:2]
    # A sequence of which no token is used needs no page.
    edges = zip(begins, totals, strict=True)
    ends = [-(-total // page_size) * (begin < total) for begin, total in edges]
    ends = torch.tensor(ends, device=table.device)
    begins = torch.tensor([begin // page_size for begin in begins], device=table.device)
    column = torch.arange(table.shape[1], device=table.device)
    used = (column >= begins.unsqueeze(1)) & (column < ends.unsqueeze(1))
    wrong = table[used & ((table < 0) | (table >= num_pages))].tolist()
    wanted = f"between 0 and {num_pages - 1} up to each sequence's length"
    expect(not wrong, function, name, wanted, wrong[:4])


def _check_within(function: str, name: str, values: list[int], largest: list[int]) -> None:
    for index, (value, bound) in enumerate(zip(values, largest, strict=True)):
        expect(0 <= value <= bound, function, f"{name}[{index}]", f"0 to {bound}", value)


def _check_metadata_values(
    function: str, metadata: Tensor, options_hash: int, columns: list[tuple[int, ...]]
) -> None:
    values, name = metadata.tolist(), "scheduler_metadata"
    expect(values[0] == MAGIC, function, name, "from get_scheduler_metadata", "other numbers")
    if values[1] != options_hash:
        raise value_error(function, name, *differences(options_hash, values[1]))
    for index, numbers in enumerate(columns):
        begin = HEADER + PER_SEQUENCE * index
        found = tuple(values[begin : begin + PER_SEQUENCE])
        if numbers[1] == 0:  # without new tokens
            found = found[0], 0, *found[2:]
        wanted = f"{numbers} (cached, new, queries, left padding), as the call's"
        expect(found == numbers, function, f"{name} of sequence {index}", wanted, found)
