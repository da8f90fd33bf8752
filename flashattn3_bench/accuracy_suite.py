"""What each precision costs: the error of out against float64, on normal data, with outliers, where
keys and values have a mean, and at length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import flashattn3
from flashattn3.call.operands import Tensors

from .checking import Case, attention
from .checking.inputs import values
from .precision import PRECISIONS, arguments_in, errors
from .runner import FAILED, OK, Record, Settings, described, first_line, name_of

SUITE = "fp8-accuracy"
SEED = 0
# (batch, seqlen, heads, head_dim)
SHAPES = ((2, 2048, 16, 64), (2, 2048, 16, 128), (1, 8192, 8, 256))
QUICK_SHAPES = ((1, 256, 2, 64), (1, 256, 2, 128), (1, 256, 1, 256))
LONG_SHAPES = ((1, 4096, 4, 128), (1, 65536, 4, 128))
QUICK_LONG_SHAPES = ((1, 128, 2, 128), (1, 1024, 2, 128))
# Rows of each sequence, drawn once: the reference of all would take float64 minutes at 64k tokens.
LONG_ROWS = 512
BEST, LIKE_FA3 = "fp8 block+hadamard, int8", "fp8 per head"
FINE = ("fp8 block", "fp8 block+hadamard, e4m3", BEST)
SMOOTH = "fp8 block+hadamard+smooth_k, int8"


def accuracy_cases(quick: bool) -> list[tuple[str, Case, int | None]]:
    """(row of the table without its shape, case, query rows to compare or None for all)."""
    shapes = QUICK_SHAPES if quick else SHAPES
    kinds = ("outlier", "shifted", "normal")
    cases = [(data, _case(data, shape), None) for data in kinds for shape in shapes]
    longs = QUICK_LONG_SHAPES if quick else LONG_SHAPES
    return [*cases, *(("long", _case("normal", shape), LONG_ROWS) for shape in longs)]


def _case(distribution: str, shape: tuple[int, int, int, int]) -> Case:
    batch, seqlen, heads, dim = shape
    name = "x".join(map(str, shape))
    return Case(name, batch, *(seqlen,) * 2, *(heads,) * 2, *(dim,) * 2, distribution=distribution)


def run_accuracy(data: str, case: Case, num_rows: int | None, settings: Settings) -> list[Record]:
    """A record for each precision, all on the same bfloat16 inputs: those of the tests, by SEED."""
    drawn = values(case, torch.Generator().manual_seed(SEED))
    q, k, v = (x.to(torch.bfloat16).to(settings.device) for x in drawn)
    rows = _sampled_rows(case.seqlen_q, num_rows).to(settings.device)
    reference, _ = attention(Tensors(q[:, rows], k, v), **case.reference_options())
    return [
        {
            **described("error", SUITE, f"{data} {case.name}", case.name, direction="fwd"),
            "dtype": "bfloat16",
            "data": data,
            "batch": case.batch,
            "seqlen_k": case.seqlen_k,
            "num_heads_q": case.num_heads_q,
            "head_dim": case.head_dim,
            "seed": SEED,
            "rows_compared": rows.numel(),
            "provider": precision,
            **_outcome(precision, (q, k, v), rows, reference),
        }
        for precision in PRECISIONS
    ]


def _sampled_rows(seqlen: int, num_rows: int | None) -> torch.Tensor:
    """At random, so that they lie at different places of the kernel's tiles."""
    if num_rows is None or num_rows >= seqlen:
        return torch.arange(seqlen)
    return torch.randperm(seqlen, generator=torch.Generator().manual_seed(SEED))[:num_rows]


def _outcome(precision: str, qkv: tuple, rows: torch.Tensor, reference: torch.Tensor) -> Record:
    try:
        arguments = arguments_in(precision, *qkv)
        qk_dtype = name_of(arguments["q"].data.dtype)  # a Tensor and a BlockScaled have data
        out = flashattn3.flash_attn_func(**arguments)[:, rows]
    except Exception as error:  # whatever it is, the other precisions go on
        return {"status": FAILED, "reason": first_line(error)}
    found = errors(out, reference)
    if not math.isfinite(found["rmse"]):
        return {"status": FAILED, "reason": "out holds inf or NaN"}
    backend = flashattn3.explain(**arguments).backend
    return {"status": OK, **found, "qk_dtype": qk_dtype, "backend": backend}


def findings(records: list[Record]) -> Iterator[str]:
    """The lines below the tables: what blocks, the rotation, int8 and smoothing bring;
    what length costs."""
    found = {(r["row"], r["provider"]): r for r in records if r["status"] == OK}
    for row in dict.fromkeys(r["row"] for r in records if r["data"] == "outlier"):
        coarse = found.get((row, LIKE_FA3))
        for name in FINE:
            if coarse and (fine := found.get((row, name))):
                yield f"RMSE, {row}: {name} over {LIKE_FA3} {fine['rmse'] / coarse['rmse']:.3f}"
    for row in dict.fromkeys(r["row"] for r in records if r["data"] == "shifted"):
        if (plain := found.get((row, BEST))) and (smooth := found.get((row, SMOOTH))):
            yield f"RMSE, {row}: {SMOOTH} over {BEST} {smooth['rmse'] / plain['rmse']:.3f}"
    longs = [r for r in found.values() if r["data"] == "long" and r["provider"] == BEST]
    if len(longs) == 2:
        short, long = sorted(longs, key=lambda record: record["seqlen_k"])
        growth = long["relative_error"] / short["relative_error"]
        lengths = f"{long['seqlen_k']} over {short['seqlen_k']} tokens"
        yield f"RMSE / RMS of the fp64 reference, {BEST}: {lengths} {growth:.3f}"
