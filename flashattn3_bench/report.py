"""What people read: the JSON lines, the table, the geometric means."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .providers import (
    BASELINES,
    CAPTURED,
    DETERMINISTIC,
    EIGHT_BIT,
    IN_8_BITS,
    OURS,
    WHOLE_INT8,
    WHOLE_SMOOTH,
)
from .runner import FAILED, MISSED, OK, Record


class Results:
    """Writes each record as one JSON line as soon as it is there; keeps it for the summary."""

    def __init__(self, path: Path, header: Record) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[Record] = []
        self.header = header
        self.file = path.open("w", encoding="utf-8")
        self._write(header)

    def add(self, records: list[Record]) -> None:
        for record in records:
            self.records.append(record)
            self._write(record)

    def _write(self, record: Record) -> None:
        self.file.write(json.dumps(record, default=str) + "\n")
        self.file.flush()

    @property
    def failures(self) -> list[Record]:
        return [record for record in self.records if record["status"] in (FAILED, MISSED)]

    @property
    def passed(self) -> bool:
        """False if a result of ours was refused by the gate or misses a bound. A red baseline only
        has no number."""
        return all(record["provider"] in BASELINES for record in self.failures)


class Measure(NamedTuple):
    """What people read from a record with status ok."""

    unit: str
    of: Callable[[Record], float]


TFLOPS = Measure("TFLOP/s", lambda record: record["tflops"])
MICROSECONDS = Measure("us", lambda record: record["median_ms"] * 1e3)
# By suite, else by kind of record: a table for each, the first also as a picture.
MEASURES = {
    **dict.fromkeys(("time", "chunk"), (TFLOPS,)),
    **dict.fromkeys(("robot", "few-queries", "rotary", "build"), (MICROSECONDS,)),
    "scores": (
        MICROSECONDS,
        Measure("time in % of the call without", lambda r: 100 / r["speed_ratio"].get(OURS, 1)),
    ),
    "host": (MICROSECONDS._replace(unit="host time (us)"),),
    "memory": (Measure("peak memory (MiB)", lambda record: record["peak_bytes"] / 2**20),),
    "latency": (
        MICROSECONDS,
        Measure("GB/s of the visible keys", lambda record: record["gb_per_s"]),
    ),
    "tokens": (Measure("tokens/s", lambda record: record["tokens_per_second"]),),
    "waits": (Measure("waits for the GPU in a forward pass", lambda record: record["waits"]),),
    "bandwidth": (Measure("GB/s", lambda record: record["gb_per_s"]),),
    "error": (
        Measure("RMSE / RMS of the fp64 reference", lambda record: record["relative_error"]),
        Measure("RMSE", lambda record: record["rmse"]),
    ),
    # A number with ! is over its bound, or another number of this cell is.
    "distribution": (
        Measure("RMSE / RMS of the fp64 reference", lambda record: record["error"]),
        Measure("bias / mean magnitude of the fp64 reference", lambda record: record["bias"]),
        Measure("largest error of the log-sum-exp", lambda record: record["lse"]),
    ),
}
# Suites whose ratios are shown for each cell, and of whom.
RATIOS_OF = {
    "fp8": tuple(EIGHT_BIT),
    "deterministic": (DETERMINISTIC,),
    "captured": (CAPTURED,),
    "rotary": (IN_8_BITS,),
    **dict.fromkeys(("gqa", "quantize", "robot", "few-queries", "decode", "latency"), (OURS,)),
    **dict.fromkeys(("paged", "ragged", "chunk", "mixed", "invariant", "tree"), (OURS,)),
    **dict.fromkeys(("masks", "masks-build"), (OURS,)),
}
# Suites in which one provider is another with something added, whose cost is shown.
COST_OF = {"fp8": (WHOLE_SMOOTH, WHOLE_INT8)}
# Each is compared with what comes after it and with all others.
OWN = (*EIGHT_BIT, IN_8_BITS, DETERMINISTIC, CAPTURED, OURS)


def measures(record: Record) -> tuple[Measure, ...]:
    return MEASURES.get(record["suite"]) or MEASURES[record["record"]]


def summary(records: list[Record]) -> str:
    """The tables of each suite and the geometric means of our speed against the others'."""
    parts = []
    for suite in dict.fromkeys(record["suite"] for record in records):
        group = [record for record in records if record["suite"] == suite]
        parts += [table(group, measure) for measure in measures(group[0])]
        parts += [ratios(group, subject) for subject in RATIOS_OF.get(suite, ())]
        if suite in COST_OF:
            parts.append(cost(group, *COST_OF[suite]))
    return "\n\n".join(part for part in [*parts, geometric_means(records)] if part)


def table(records: list[Record], measure: Measure) -> str:
    """Rows and columns as the records name them; in a cell the providers' values, in one order."""
    providers = list(dict.fromkeys(record["provider"] for record in records))
    cells: Cells = {}
    for record in records:
        place = cells.setdefault((record["row"], record["column"]), {})
        place[record["provider"]] = _text(record, measure)
    return _grid(f"{measure.unit}: {' / '.join(providers)}", cells, providers)


def ratios(records: list[Record], subject: str) -> str:
    """The table of how many times faster the subject is than each provider after it."""
    chosen = [record for record in records if record["provider"] == subject]
    others = _compared(chosen, subject)
    cells: Cells = {}
    for record in chosen:
        found = record.get("speed_ratio", {})
        place = cells.setdefault((record["row"], record["column"]), {})
        place.update({name: f"{found[name]:.2f}" for name in others if name in found})
    return _grid(f"speed of {subject} over {' / '.join(others)}", cells, others)


def cost(records: list[Record], subject: str, base: str) -> str:
    """The table of how much longer the subject takes than the base, where both have a time."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if record["status"] == OK:
            place = times.setdefault((record["row"], record["column"]), {})
            place[record["provider"]] = record["median_ms"]
    cells: Cells = {}
    for place, found in times.items():
        if subject in found and base in found:
            more = found[subject] - found[base]
            cells[place] = {subject: f"{more * 1e3:.1f} ({more / found[base] * 100:.1f} %)"}
    return _grid(f"cost of {subject} over {base}: us (per cent)", cells, [subject]) if cells else ""


def _compared(records: list[Record], subject: str) -> list[str]:
    """Whom the subject, whose records these are, is compared with."""
    names = dict.fromkeys(name for record in records for name in record.get("speed_ratio", {}))
    return [name for name in names if name not in OWN[: OWN.index(subject)]]


Cells = dict[tuple[str, str], dict[str, str]]  # (row, column) → provider → text


def _grid(head: str, cells: Cells, providers: list[str]) -> str:
    rows, columns = (list(dict.fromkeys(place[axis] for place in cells)) for axis in (0, 1))
    lines = [["", *columns]]
    for row in rows:
        found = [cells.get((row, column), {}) for column in columns]
        texts = (" / ".join(cell.get(name, "-") for name in providers) for cell in found)
        lines.append([row, *texts])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    body = ("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([head, *(line.rstrip() for line in body)])


def _text(record: Record, measure: Measure) -> str:
    if record["status"] not in (OK, MISSED):
        return record["status"] if record["status"] == FAILED else "-"
    found = measure.of(record)
    text = f"{found:.0f}" if found >= 10 else f"{found:.2g}"
    return text if record["status"] == OK else f"{text}!"


def geometric_means(records: list[Record]) -> str:
    """The speed of each of ours over that of those after it, for cells where both have a number."""
    parts = []
    for subject in OWN:
        chosen = [r for r in records if r["provider"] == subject and "speed_ratio" in r]
        lines = _means_of(chosen, _compared(chosen, subject))
        if lines:
            head = f"speed of {subject} over each of the others, geometric mean"
            parts.append("\n".join([head, *lines]))
    return "\n\n".join(parts)


def _means_of(records: list[Record], others: list[str]) -> list[str]:
    """A line for each direction, suite and selection of its cells."""
    lines = []
    for direction in dict.fromkeys(record["direction"] for record in records):
        for suite in dict.fromkeys(record["suite"] for record in records):
            group = [r for r in records if (r["suite"], r["direction"]) == (suite, direction)]
            selections = {"all cells": group}
            if suite == "grid":
                selections["d 64 and 128"] = [r for r in group if r["head_dim"] in (64, 128)]
            for label, chosen in selections.items():
                means = [mean for name in others if (mean := _mean(chosen, name))]
                if means:
                    where = f"{suite} {direction}".rstrip()
                    lines.append(f"{where}, {label}: " + ", ".join(means))
    return lines


def _mean(records: list[Record], baseline: str) -> str:
    ratios = [r["speed_ratio"][baseline] for r in records if baseline in r["speed_ratio"]]
    if not ratios:
        return ""
    return f"{baseline} {statistics.geometric_mean(ratios):.3f} ({len(ratios)} cells)"
