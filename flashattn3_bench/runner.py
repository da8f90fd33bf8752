"""One cell: inputs, gate, timing, and a record (a dict, one JSON line) for every provider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import flashattn3

from .cuda_graph import captured
from .gate import Gate
from .inputs import Call, Inputs, make_inputs, prepare, quantized, with_all_heads
from .providers import BASELINES, CAPTURED, EIGHT_BIT, MHA, OURS, PROVIDERS, QUANTIZED
from .suites import Cell
from .timing import Clock, Timing, interleave, make_clock, speed_ratios

Record = dict[str, Any]
# MISSED: a number over its bound.
OK, FAILED, MISSED, ABSENT = "ok", "FAILED", "MISSED", "absent"


@dataclass(frozen=True)
class Settings:
    """What is alike for all cells of a suite. own, baselines: names of PROVIDERS."""

    device: torch.device
    dtype: torch.dtype
    baselines: tuple[str, ...]
    rounds: int
    round_ms: float
    own: tuple[str, ...] = (OURS,)

    @property
    def providers(self) -> tuple[str, ...]:
        return (*self.own, *self.baselines)

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)


def run_cell(cell: Cell, settings: Settings, clock: Clock | None = None) -> list[Record]:
    """A record per provider: status "ok" with its times, "FAILED" or "absent" with the reason.

    absent: the provider refused the problem or ran out of memory. Our own refusal is FAILED.
    clock: None for the device's own.
    """
    inputs = make_inputs(cell.case, settings.device, settings.dtype)
    gate = Gate(cell, inputs)
    if MHA in settings.own:
        all_heads = with_all_heads(inputs)
        gate_of_all_heads = Gate(cell.with_all_heads, all_heads)

    def checked(name: str) -> tuple[Call, Record]:
        given, gate_of_given = inputs, gate
        if name in QUANTIZED:
            given = quantized(inputs, QUANTIZED[name])
        elif name == MHA:
            given, gate_of_given = all_heads, gate_of_all_heads
        prepared = partial(prepare, PROVIDERS[name], cell, given)
        call = captured(prepared, settings.device) if name == CAPTURED else prepared()
        gate_of_given.check(name, call())
        return call, _plan(cell, given) if name in (*QUANTIZED, OURS) else {}

    # FP8 reads half of these bytes and is timed as the others are, whose inputs are not in L2.
    clock = clock or make_clock(settings.device, inputs.num_bytes)
    return run_providers(cell, settings.providers, checked, settings, clock)


def run_providers(
    cell: Cell,
    providers: tuple[str, ...],
    checked: Callable[[str], tuple[Call, Record]],
    settings: Settings,
    clock: Clock,
) -> list[Record]:
    """A record per provider, as ``run_cell`` describes it.

    checked: gives the work of a provider, whose result met the rule, and what else its record has.
    """
    calls: dict[str, Call] = {}
    more: dict[str, Record] = {}
    refused: dict[str, Record] = {}
    for name in providers:
        try:
            calls[name], more[name] = checked(name)
        except Exception as error:  # whatever it is, the other providers and cells go on
            refused[name] = refusal(name, error)
    timings = interleave(calls, clock, settings.rounds, settings.round_ms)
    return [
        {
            **description(cell, name, settings),
            **_outcome(cell, name, timings, refused),
            **more.get(name, {}),
        }
        for name in providers
    ]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def times_of(name: str, timings: dict[str, Timing]) -> Record:
    """The times of a provider, and those of the others in its units."""
    return {**asdict(timings[name]), "speed_ratio": speed_ratios(name, timings)}


def refusal(name: str, error: Exception) -> Record:
    """Status and reason of a provider whose result breaks the rule, or which raised an error."""
    if isinstance(error, AssertionError):
        return {"status": FAILED, "reason": str(error)}
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": ABSENT, "reason": "out of memory"}
    return {"status": ABSENT if name in BASELINES else FAILED, "reason": first_line(error)}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def described(kind: str, suite: str, row: str, case: str, **more: object) -> Record:
    """Return the fields that every record begins with: its kind, its place in the tables and its
    case. more: its other fields, and the column and the direction where it has one."""
    place = {"suite": suite, "row": row, "column": "", "direction": ""}
    return {"record": kind, **place, "case": case, **more}


def description(cell: Cell, name: str, settings: Settings) -> Record:
    case, place = cell.case, {"column": cell.column, "direction": cell.direction}
    return {
        **described("time", cell.suite, cell.row, case.name, **place),
        "dtype": settings.dtype_name,
        "qk_dtype": name_of(EIGHT_BIT.get(name, settings.dtype)),
        "batch": case.batch,
        "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k,
        "num_heads_q": case.num_heads_q,
        "num_heads_kv": case.num_heads_kv,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "causal": case.causal,
        "provider": name,
    }


def _plan(cell: Cell, inputs: Inputs) -> Record:
    explained = flashattn3.explain(inputs.q, inputs.k, inputs.v, causal=cell.case.causal)
    return {"backend": explained.backend, "config": explained.config}


def _outcome(
    cell: Cell, name: str, timings: dict[str, Timing], refused: dict[str, Record]
) -> Record:
    if name in refused:
        return refused[name]
    timing = timings[name]
    return {
        "status": OK,
        **asdict(timing),
        "tflops": cell.flops / timing.median_ms / 1e9,
        "speed_ratio": speed_ratios(name, timings),
    }
