"""What people read: the JSON lines, the table, the geometric means."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from .contenders import OURS
from .runner import FAILED, OK, Record


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
        return [record for record in self.records if record["status"] == FAILED]

    @property
    def passed(self) -> bool:
        """False if a result of ours was refused by the gate. A red baseline only has no number."""
        return all(record["contender"] != OURS for record in self.failures)


def summary(records: list[Record]) -> str:
    """One table per suite and the geometric means of our speed against each baseline."""
    suites = dict.fromkeys(record["suite"] for record in records)
    parts = [table([record for record in records if record["suite"] == suite]) for suite in suites]
    return "\n\n".join(part for part in [*parts, geometric_means(records)] if part)


def table(records: list[Record]) -> str:
    """Rows and columns as the records name them; in a cell the contenders' values, in one order."""
    contenders = list(dict.fromkeys(record["contender"] for record in records))
    rows = dict.fromkeys(record["row"] for record in records)
    columns = list(dict.fromkeys(record["column"] for record in records))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        place = cells.setdefault((record["row"], record["column"]), {})
        place[record["contender"]] = _value(record)
    head = f"{unit(records[0])}: {' / '.join(contenders)}"
    lines = [["", *columns]]
    for row in rows:
        found = [cells.get((row, column), {}) for column in columns]
        texts = (" / ".join(cell.get(name, "") for name in contenders) for cell in found)
        lines.append([row, *texts])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    body = ("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([head, *(line.rstrip() for line in body)])


def unit(record: Record) -> str:
    if record["record"] == "memory":
        return "peak memory (MiB)"
    return "host time (us)" if record["suite"] == "host" else "TFLOP/s"


def value(record: Record) -> float:
    """The figure of a record with status ok, in the unit of its suite."""
    if record["record"] == "memory":
        return record["peak_bytes"] / 2**20
    return record["median_ms"] * 1e3 if record["suite"] == "host" else record["tflops"]


def _value(record: Record) -> str:
    if record["status"] != OK:
        return record["status"] if record["status"] == FAILED else "-"
    found = value(record)
    return f"{found:.0f}" if found >= 10 else f"{found:.2g}"


def geometric_means(records: list[Record]) -> str:
    """Our speed over each baseline's, for the cells where both have a number."""
    ours = [r for r in records if r["contender"] == OURS and "speed_ratio" in r]
    baselines = dict.fromkeys(name for record in ours for name in record["speed_ratio"])
    lines = []
    for direction in dict.fromkeys(record["direction"] for record in ours):
        for suite in dict.fromkeys(record["suite"] for record in ours):
            group = [r for r in ours if (r["suite"], r["direction"]) == (suite, direction)]
            selections = {"all cells": group}
            if suite == "grid":
                selections["d 64 and 128"] = [r for r in group if r["head_dim"] in (64, 128)]
            for label, chosen in selections.items():
                means = [_mean(chosen, name) for name in baselines]
                lines.append(f"{suite} {direction}, {label}: " + ", ".join(m for m in means if m))
    if not lines:
        return ""
    return "\n".join(["speed of flashattn3 over each baseline, geometric mean", *lines])


def _mean(records: list[Record], baseline: str) -> str:
    ratios = [r["speed_ratio"][baseline] for r in records if baseline in r["speed_ratio"]]
    if not ratios:
        return ""
    return f"{baseline} {statistics.geometric_mean(ratios):.3f} ({len(ratios)} cells)"
