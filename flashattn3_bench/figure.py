"""The results as one picture per suite."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from .report import measures
from .runner import MISSED, OK, Record

# Color → providers.
PROVIDERS_IN = {
    "tab:gray": (
        *("dense", "copy", "apart", "read", "16 bits", "mha", "one part", "without a mask object"),
        *("sdpa", "honest int8", "bf16"),
    ),
    "tab:olive": (
        *("fp8 int8", "8 bits", "split_tokens=1024", "tree_mask", "deterministic", "cached"),
        *("on 16 SMs", "slopes", "triton", "flashattn3 e4m3", "fp8 block+hadamard, e4m3"),
    ),
    "tab:green": ("flashattn3", "flashattn3 int8", "fp8 block+hadamard, int8"),
    "tab:blue": ("fa2", "ladder fa2", "fp8 block"),
    "tab:orange": ("rotary", "cudnn", "max logit", "flex", "fp8 per head", "two calls"),
    "tab:purple": ("math", "bias", "fa3 package", "ladder fa1"),
    "tab:cyan": ("quantize+int8", "captured", "sinks", "mask", "fp8 block+hadamard+smooth_k, int8"),
    "tab:red": ("quantize+int8+smooth_k", "naive", "fp8 per tensor"),
    "tab:pink": ("quantize+e4m3",),
    "tab:brown": ("fp8 e4m3",),
    "gold": ("fp8 int8 fast accum",),
    "sandybrown": ("fp8 e4m3 fast accum",),
    "black": ("honest e4m3", "fp16"),
}
COLORS = {name: color for color, names in PROVIDERS_IN.items() for name in names}
MAX_PANELS_PER_LINE = 3  # read at the width of a page
# Others: as in the code.
NAMES = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "sdpa": "torch SDPA", "flex": "FlexAttention"}
MAX_LABELS = 12  # of groups of bars in a panel


def pyplot() -> ModuleType:
    """Imported late: slow to import, and Agg must be set before anything could open a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(records: list[Record], header: Record, path: Path) -> None:
    """Write a PNG: panels of bars, one per row of the table; for the memory suite one of curves."""
    plt = pyplot()
    rows = list(dict.fromkeys(_place(record)[0] for record in records))
    per_line = min(len(rows), MAX_PANELS_PER_LINE)
    lines = -(-len(rows) // per_line)
    figure, grid = plt.subplots(
        lines, per_line, figsize=(3.6 * per_line, 2.6 * lines + 0.6), squeeze=False
    )
    panels = list(grid.flat)
    for panel, row in zip(panels, rows, strict=False):
        chosen = [record for record in records if _place(record)[0] == row]
        (curves if chosen[0]["record"] == "memory" else _bars)(panel, _series(chosen))
        if chosen[0]["record"] in ("error", "distribution"):
            panel.set_yscale("log")
        panel.set_title(row, fontsize=11)
        panel.tick_params(labelsize=9)
    for panel in panels[len(rows) :]:
        panel.set_visible(False)
    panels[0].set_ylabel(measures(records[0])[0].unit)
    panels[0].legend(fontsize=8)
    lowering = f", lowering sm_{header['lowering']}" if header["lowering"] else ""
    figure.suptitle(f"{header['device']}{lowering}, torch {header['torch']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _place(record: Record) -> tuple[str, str]:
    """Panel and group of bars: row and column of the table, whose lines would be too long for the
    errors of all shapes, and too many for those of all distributions."""
    if record["record"] == "error":
        return record["data"], record["case"]
    if record["record"] == "distribution":
        return f"d{record['head_dim']}, {record['column']} keys", record["row"]
    return record["row"], record["column"]


def _series(records: list[Record]) -> dict[str, dict[str, float]]:
    """Contender → column → value, leaving out what has none."""
    series: dict[str, dict[str, float]] = {}
    for record in records:
        if record["status"] in (OK, MISSED):
            found = measures(record)[0].of(record)
            series.setdefault(record["provider"], {})[_place(record)[1]] = found
    return series


def _bars(panel, series: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(column for values in series.values() for column in values))
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [columns.index(column) + (index + 0.5) * width - 0.4 for column in values]
        panel.bar(
            places, list(values.values()), width, label=NAMES.get(name, name), color=COLORS[name]
        )
    if len(columns) > MAX_LABELS:
        panel.set_xlabel("cases in the order of the table")
    else:
        panel.set_xticks(range(len(columns)), columns)


def curves(panel, series: dict[str, dict[str, float]]) -> None:
    """Both axes in powers of two, where linear growth is a straight line of slope 1."""
    for name, values in series.items():
        lengths = [int(column) for column in values]
        panel.plot(
            lengths, list(values.values()), "o-", label=NAMES.get(name, name), color=COLORS[name]
        )
    for axis, scale in ((panel.xaxis, panel.set_xscale), (panel.yaxis, panel.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    panel.set_xlabel("sequence length")
