"""The correctness gate: nothing is timed before its result on these very inputs met the rule.

FP8 is held to the attention of the 16-bit inputs, so its bounds allow for their quantization too.

The fp64 reference of a whole cell would cost more than the benchmark, so one sequence and one
key-value head with its query heads are compared: the last ones, where a wrong offset would show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from flashattn3.call.operands import Tensors

from .checking import (
    FORWARD_FACTOR,
    FP8_OF_16_BIT,
    GRADIENT_FACTOR,
    attention,
    check,
    check_fp8,
    gradients,
)
from .inputs import RESULTS, Inputs
from .providers import EIGHT_BIT, IN_8_BITS
from .suites import Cell

# Scores alive at once in float64: 0.5 GB.
_CHUNK_SCORES = 2**26


class Gate:
    """The fp64 reference and plain PyTorch's result for one cell; both are computed once."""

    def __init__(self, cell: Cell, inputs: Inputs) -> None:
        self.cell = cell
        self.reference = sample_results(cell, inputs, torch.float64)
        self.baseline = sample_results(cell, inputs, inputs.q.dtype)

    def check(self, provider: str, results: tuple[Tensor, ...]) -> None:
        """AssertionError, with case, place and values, if a result breaks the tolerance rule."""
        names = RESULTS[self.cell.direction]
        found = [
            got[sample_of(self.cell, name in ("out", "dq"))]
            for name, got in zip(names, results, strict=True)
        ]
        check_results(self.cell, provider, found, self.reference, self.baseline)


def check_results(
    cell: Cell,
    provider: str,
    results: Iterable[Tensor],
    reference: Iterable[Tensor],
    baseline: Iterable[Tensor],
) -> None:
    """AssertionError, with case, place and values, if a result breaks the tolerance rule. Gradients
    of ``IN_8_BITS`` are held to the rule of 16 bits, all other results of 8 bits to their own."""
    factor = FORWARD_FACTOR if cell.direction == "fwd" else GRADIENT_FACTOR
    compared = zip(RESULTS[cell.direction], results, reference, baseline, strict=True)
    for name, got, *expected in compared:
        if provider in EIGHT_BIT or (provider == IN_8_BITS and name == "out"):
            check_fp8(name, got, expected[0], cell.case.name, provider, FP8_OF_16_BIT)
        else:
            check(name, got, *expected, factor, cell.case.name, provider)


def expected_results(
    cell: Cell, tensors: Tensors, dout: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """out, or dq, dk and dv, in ``dtype``."""
    options = {**cell.case.reference_options(), "dtype": dtype}
    if cell.direction == "bwd":
        return gradients(tensors, dout, **options)[:3]
    with torch.no_grad():
        return attention(tensors, **options)[:1]


def sample_of(cell: Cell, is_query_side: bool) -> tuple[slice, slice, slice]:
    qhead_per_kvhead = cell.case.num_heads_q // cell.case.num_heads_kv if is_query_side else 1
    return slice(-1, None), slice(None), slice(-qhead_per_kvhead, None)


def sample_results(
    cell: Cell, inputs: Inputs, dtype: torch.dtype, seen: Tensor | None = None
) -> tuple[Tensor, ...]:
    """out, or dq, dk and dv, of the sample, in ``dtype``, a chunk of query rows at a time. seen:
    bool (seqlen_q, seqlen_k), which scores count; None: all that the case shows."""
    queries, keys = sample_of(cell, True), sample_of(cell, False)
    q, k, v, dout = inputs.q[queries], inputs.k[keys], inputs.v[keys], inputs.dout[queries]

    def of_chunk(rows: slice, cols: slice) -> tuple[Tensor, ...]:
        tensors = Tensors(q[:, rows], k[:, cols], v[:, cols])
        if seen is not None:
            hidden = ~seen[rows, cols]
            bias = dout.new_zeros(hidden.shape).masked_fill(hidden, -math.inf)
            tensors = tensors._replace(bias=bias[None, None])
        return expected_results(cell, tensors, dout[:, rows], dtype)

    if cell.direction == "fwd":
        return (torch.cat([of_chunk(*chunk)[0] for chunk in _chunks(cell)], dim=1),)
    wide = torch.promote_types(dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows, cols in _chunks(cell):
        part = of_chunk(rows, cols)
        dq[:, rows] += part[0]
        dk[:, cols] += part[1]
        dv[:, cols] += part[2]
    return dq, dk, dv


def _chunks(cell: Cell) -> Iterator[tuple[slice, slice]]:
    """Query rows and the keys they need. Cutting causal keys after the last one that the rows see
    leaves the diagonal, which is aligned to the bottom right, where it was."""
    case = cell.case
    num_rows = max(1, _CHUNK_SCORES // case.seqlen_k)
    for start in range(0, case.seqlen_q, num_rows):
        stop = min(start + num_rows, case.seqlen_q)
        last = case.seqlen_k - case.seqlen_q + stop if case.causal else case.seqlen_k
        yield slice(start, stop), slice(0, last)
