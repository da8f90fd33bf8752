"""Which sequences the reference backend computes together, and the tiles in which it does so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...call.operands import Tensors, lengths_of_k, lengths_of_q
from .padded_layout import PaddedLayout, padded

if TYPE_CHECKING:
    from ...call.problem import Problem

_SMALLEST_BLOCK_M = 16
# Scores per tile over all heads, and the largest block_m. A CPU tile has to stay in the caches
# (8 MB of float32; measured at batch x heads 8 and 48, seqlen 256 to 2048), a GPU needs few
# launches.
CPU_BUDGET, GPU_BUDGET = (2**21, 128), (2**26, 1024)


class ReferenceConfig(NamedTuple):
    """Tile sizes: at most block_m queries times block_n keys, over all heads and all sequences that
    are computed together.

    max_scores: limit for the scores of a tile over all of these; block_m stays at least 16.
    one_tile: the whole problem is one tile without a mask.
    """

    block_m: int
    block_n: int
    max_scores: int = CPU_BUDGET[0]
    one_tile: bool = False

    def describe(self) -> dict[str, object]:
        return {"block_m": self.block_m, "block_n": self.block_n}

    def queries(self, heads: int) -> int:
        """block_m for this number of heads, summed over all sequences."""
        fitting = max(self.max_scores // max(1, heads * self.block_n), _SMALLEST_BLOCK_M)
        return min(self.block_m, 1 << (fitting.bit_length() - 1))

    def sequences(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of sequences of these lengths that fill the tile of one long sequence."""
        tile = min(self.block_m, seqlen_q) * min(self.block_n, max(1, seqlen_k))
        return self.block_m * self.block_n // tile


class Bucket(NamedTuple):
    """Sequences that are computed together, as one dense problem."""

    queries: PaddedLayout
    keys: PaddedLayout


def buckets(problem: Problem, config: ReferenceConfig, tensors: Tensors) -> Iterator[Bucket]:
    """Yield the sequences of a call: all at once, or, for varlen, those of equal lengths together.

    Sequences without queries are skipped, and without sinks those without keys: out and lse already
    hold 0 and -inf.
    """
    if problem.varlen and not is_capturing(problem.device):
        yield from _buckets_by_length(problem, config, tensors)
    elif problem.batch and problem.seqlen_q and (problem.seqlen_k or problem.sinks_dtype):
        if problem.varlen:
            queries = padded(problem.seqlen_q, problem.total_q, *lengths_of_q(tensors))
            keys = padded(problem.seqlen_k, problem.total_k, *lengths_of_k(tensors))
        else:
            queries = PaddedLayout(problem.batch, problem.seqlen_q)
            keys = PaddedLayout(problem.batch, problem.seqlen_k)
        yield Bucket(queries, keys)


def _buckets_by_length(
    problem: Problem, config: ReferenceConfig, tensors: Tensors
) -> Iterator[Bucket]:
    begins_q, lengths_q = _spans(*lengths_of_q(tensors), problem.total_q)
    begins_k, lengths_k = _spans(*lengths_of_k(tensors), problem.total_k)
    batch_indices_of = defaultdict(list)
    for batch_idx, lengths in enumerate(zip(lengths_q, lengths_k, strict=True)):
        batch_indices_of[lengths].append(batch_idx)
    for (seqlen_q, seqlen_k), batch_indices in batch_indices_of.items():
        if seqlen_q == 0 or (seqlen_k == 0 and problem.sinks_dtype is None):
            continue
        size = config.sequences(seqlen_q, seqlen_k)
        for some in (batch_indices[i : i + size] for i in range(0, len(batch_indices), size)):
            queries = _together(some, begins_q, seqlen_q, problem.device)
            yield Bucket(queries, _together(some, begins_k, seqlen_k, problem.device))


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured; reading a tensor on the host would end it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _spans(cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> tuple[list[int], list[int]]:
    """First token and length of each sequence, clamped to the tensor for any cu_seqlens."""
    edges = [min(max(edge, 0), total) for edge in cu_seqlens.tolist()]
    lengths = [max(end - begin, 0) for begin, end in pairwise(edges)]
    if seqused is not None:
        lengths = [max(0, min(pair)) for pair in zip(lengths, seqused.tolist(), strict=True)]
    return edges[:-1], lengths


def _together(
    batch_indices: list[int], begins: list[int], seqlen: int, device: torch.device
) -> PaddedLayout:
    """Layout of sequences of one length: a view of the packed tensors if they are contiguous."""
    starts = [begins[batch_idx] for batch_idx in batch_indices]
    batch, first = len(starts), starts[0]
    if starts == [first + index * seqlen for index in range(batch)] or seqlen == 0:
        rows = slice(first, first + batch * seqlen)
    else:
        rows = torch.tensor(starts, device=device).unsqueeze(1)
        rows = (rows + torch.arange(seqlen, device=device)).flatten()
    return PaddedLayout(batch, seqlen, rows, batch_indices=batch_indices)
