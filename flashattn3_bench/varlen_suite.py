"""Sequences of unequal lengths in one call, against as much work in sequences of one length."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

import flashattn3

from .checking import Case
from .checking.shapes import LENGTHS
from .gate import Gate
from .inputs import Inputs, normal_numbers, prepare
from .providers import OURS, ours
from .runner import OK, Record, Settings, described
from .suites import Cell
from .timing import interleave, make_clock

QUICK_LENGTHS = (7, 30, 19)
DENSE = "dense"


def run_varlen(
    direction: str,
    head_dim: int,
    causal: bool,
    qhead_per_kvhead: int,
    settings: Settings,
    quick: bool,
) -> list[Record]:
    """A record for the varlen call and one for the dense one.

    qhead_per_kvhead: at most the number of query heads, which is small if quick.
    The dense call has nearly as many tokens in sequences of the length that makes the visible
    scores as many too. speed_ratio: of the TFLOP/s, each of the work that it really has.
    """
    lengths = QUICK_LENGTHS if quick else LENGTHS
    tokens = sum(lengths)
    dense_length = round(sum(n * n for n in lengths) / tokens)
    batch = max(1, round(tokens / dense_length))
    heads = (4 if quick else 32) * 64 // head_dim
    heads_kv = heads // min(qhead_per_kvhead, heads)
    scores = {OURS: sum(n * n for n in lengths), DENSE: batch * dense_length**2}
    draw = normal_numbers(settings.device, settings.dtype)

    def normal(*shape: int) -> Inputs:
        return Inputs(*(draw(*shape, n, head_dim) for n in (heads, heads_kv, heads_kv, heads)))

    varlen, dense = normal(tokens), normal(batch, dense_length)
    edges = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    edges = edges.to(settings.device)

    def attend_varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        longest = max(lengths), max(lengths)
        return flashattn3.flash_attn_varlen_func(q, k, v, edges, edges, *longest, causal=causal)

    name = f"ragged-d{head_dim}-{'causal' if causal else 'full'}"
    name += f"-gqa{heads // heads_kv}" * (heads_kv < heads)
    # As in every cell, the last sequence is compared.
    length = lengths[-1]
    shape = (1, length, length, heads, heads_kv, head_dim, head_dim)
    cell = Cell("varlen", Case(name, *shape, causal=causal), direction)
    calls = {OURS: prepare(attend_varlen, cell, varlen), DENSE: prepare(ours, cell, dense)}
    last = (x[None, -length:] for x in calls[OURS]())
    Gate(cell, Inputs(*(x[None, -length:] for x in varlen))).check(OURS, tuple(last))
    clock = make_clock(settings.device, varlen.num_bytes)
    timings = interleave(calls, clock, settings.rounds, settings.round_ms)
    of_score = 4 * heads * head_dim * (2.5 if direction == "bwd" else 1) / (2 if causal else 1)
    flops = {n: of_score * scores[n] for n in calls}
    tflops = {n: flops[n] / timings[n].median_ms / 1e9 for n in calls}
    names = {OURS: name, DENSE: f"{batch}x{dense_length}"}
    return [
        {
            **described("time", cell.suite, cell.row, names[n], direction=direction),
            "dtype": settings.dtype_name,
            "head_dim": head_dim,
            "causal": causal,
            "provider": n,
            "status": OK,
            **asdict(timings[n]),
            "tflops": tflops[n],
            "speed_ratio": {other: tflops[n] / tflops[other] for other in calls if other != n},
        }
        for n in calls
    ]
