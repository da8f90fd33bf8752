"""A mask from spans of keys or from a predicate: by kernels where Triton runs, else by torch
operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import block_kinds, triton_lists
from .block_lists import PARTIAL, Grid, assembled, words_of_predicate, words_of_spans
from .known_code import known_code_of
from .mask import Mask


def of_source(
    grid: Grid,
    source: triton_lists.Source,
    spans: Callable[[], tuple[Tensor, Tensor]],
    device: torch.device,
    most_partial: tuple[int | None, int | None] = (None, None),
) -> Mask:
    """The mask of a source. spans: computes the same as ``block_kinds.of_spans`` takes them.
    most_partial: bounds on the partial blocks of queries and of keys."""
    if grid.num_scores and triton_lists.serve(device):
        lists = triton_lists.of_source(grid, source, device, most_partial)
        return Mask(*lists, grid.rows, grid.columns)
    starts, ends = spans()
    of_queries, of_keys = block_kinds.of_spans(grid, starts, ends)

    def kinds(_, keys: bool):  # torch 2.11 traces no bool as an index
        return of_keys if keys else of_queries

    words = partial(words_of_spans, starts=starts, ends=ends)
    return _of_sides(grid, kinds, words, most_partial, exact=True)


def _of_sides(grid: Grid, kinds, words, most_partial, exact: bool = False) -> Mask:
    """kinds, words: compute those of queries, or of keys, from the grid of that side, as
    ``assembled`` takes them. most_partial: of either side."""
    sides = (grid, False), (grid.transposed, True)
    lists = [
        assembled(of, kinds(of, of_keys), words(of, of_keys), most, exact)
        for (of, of_keys), most in zip(sides, most_partial, strict=True)
    ]
    return Mask(*lists, grid.rows, grid.columns)


# Scores of a mask for which the kernels may keep the bits of all blocks beside the lists: 256 MB.
MOST_SCORES = 2**30


def of_predicate(grid: Grid, visible, like: Tensor) -> Mask:
    """The mask of ``visible(batch_idx, head, query, key)``, which is computed for every score, by
    torch operations. like: a tensor on the device."""

    def kinds(of: Grid, _: bool) -> Tensor:
        return torch.full(of.shape, PARTIAL, dtype=torch.int8, device=like.device)

    return _of_sides(grid, kinds, partial(words_of_predicate, visible=visible), (None, None))


def of_block_predicate(
    grid: Grid, visible, seen: Tensor, full: Tensor, block_q: int, block_k: int, most_partial
) -> Mask:
    """The same, computed where blocks of block_q x block_k are seen and not full, or by a kernel
    for every score."""
    if 0 < grid.num_scores <= MOST_SCORES and triton_lists.serve(seen.device):
        code = known_code_of(visible, seen.device)
        if code is not None:
            lists = triton_lists.of_code(grid, code, None, most_partial)
            return Mask(*lists, grid.rows, grid.columns)

    def kinds(of: Grid, transposed: bool) -> Tensor:
        return block_kinds.of_blocks(of, seen, full, block_q, block_k, transposed)

    return _of_sides(grid, kinds, partial(words_of_predicate, visible=visible), most_partial)
