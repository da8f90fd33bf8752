"""The staircase: speed and bytes moved of each rung over the length; time over density."""

from __future__ import annotations

from pathlib import Path

from .figure import COLORS, pyplot
from .ladder_suite import SPARSE
from .runner import OK, Record

BYTES = "GB moved"


def draw_ladder(records: list[Record], header: Record, path: Path) -> None:
    """Write a PNG: a panel for the speed of each case, then for its bytes; or, of the block-sparse
    suite, for the time by the density of the mask."""
    plt = pyplot()
    found = [record for record in records if record["status"] == OK]
    rows = list(dict.fromkeys(r["row"] for r in found if SPARSE not in r["row"]))
    panels = [(row, "tflops", "TFLOP/s") for row in rows]
    panels += [(row, "bytes_moved", BYTES) for row in rows if row.startswith("fwd")]
    sparse = dict.fromkeys(r["direction"] for r in found if SPARSE in r["row"])
    panels += [(f"{direction} {SPARSE}", "median_ms", "ms") for direction in sparse]
    per_line = min(4, len(panels))
    lines = -(-len(panels) // per_line)
    size = (3.6 * per_line, 3.0 * lines)
    figure, grid = plt.subplots(lines, per_line, figsize=size, squeeze=False, layout="constrained")
    for panel, (row, field, unit) in zip(grid.flat, panels, strict=False):
        chosen = [r for r in found if r["row"].startswith(row) and r.get(field) is not None]
        (_over_density if SPARSE in row else _over_length)(panel, chosen, field)
        panel.set_title(row, fontsize=9)
        panel.set_ylabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
    for panel in list(grid.flat)[len(panels) :]:
        panel.set_visible(False)
    grid[0][0].legend(fontsize=7)
    figure.suptitle(f"{header['device']}, torch {header['torch']}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _over_length(panel, records: list[Record], field: str) -> None:
    """Both axes logarithmic: a step of the staircase is a factor."""
    unit = 1e9 if field == "bytes_moved" else 1
    for name in dict.fromkeys(record["provider"] for record in records):
        chosen = [record for record in records if record["provider"] == name]
        lengths = [record["seqlen_k"] for record in chosen]
        panel.plot(lengths, [r[field] / unit for r in chosen], "o-", label=name, color=COLORS[name])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("sequence length", fontsize=8)


def _over_density(panel, records: list[Record], field: str) -> None:
    for record in records:
        family = record["row"].split(SPARSE)[1].strip()
        panel.plot(record["density"], record[field], "o", label=family)
    panel.set(xlim=(0, None), ylim=(0, None))
    panel.set_xlabel("density of the block mask", fontsize=8)
