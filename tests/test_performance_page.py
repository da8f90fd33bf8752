"""Every number in the tables of docs/performance.md, and every speed in README, is in
benchmarks/results."""

from __future__ import annotations

import json
import re
import statistics

import pytest
from helpers import ROOT

RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
if not (RESULTS.is_dir() and PAGE.is_file()):
    pytest.skip("needs a source checkout", allow_module_level=True)
SHOWN = {
    "flashattn3 bf16": "flashattn3",
    "FlashAttention-2": "fa2",
    "cuDNN": "cudnn",
    "cuDNN bf16": "cudnn",
    "torch copy": "copy",
    "FP8 int8": "fp8 int8",
    "FP8 e4m3": "fp8 e4m3",
    "quantize + int8": "quantize+int8",
    "quantize + e4m3": "quantize+e4m3",
}  # others: as in the results


def records(path: str) -> list[dict]:
    lines = (RESULTS / path).read_text().splitlines()
    found = [json.loads(line) for line in lines[1:]]
    # "contender" is the older name.
    return [{"provider": record.get("contender"), **record} for record in found]


def tables() -> dict[str, list[list[list[str]]]]:
    """Heading → its tables, each a list of rows of cells without the line below the first."""
    found, last = {}, None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = found.setdefault(line[3:], [])
        if not line.startswith("|"):
            last = None
            continue
        if last is None:
            section.append(last := [])
        if not re.fullmatch(r"[|\s-]+", line):
            last.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


TABLES = tables()


def numbers(path: str, value: str, direction: str = "") -> dict[tuple[str, str, str], float]:
    return {
        (r["row"].removeprefix(f"{direction} "), r["provider"], r["column"]): r[value]
        for r in records(path)
        if value in r and r["direction"] == direction
    }


def speed_ratios(
    path: str, provider: str, baseline: str, direction: str
) -> dict[tuple[str, str], float]:
    return {
        (r["row"][4:], r["column"]): r["speed_ratio"][baseline]
        for r in records(path)
        if r["provider"] == provider and baseline in r.get("speed_ratio", {})
        if r["direction"] == direction
    }


@pytest.mark.parametrize(
    ("section", "path", "value", "direction"),
    [
        ("Hopper forward", "h100/grid.jsonl", "tflops", "fwd"),
        ("Hopper backward", "h100-backward/grid.jsonl", "tflops", "bwd"),
        ("FP8 forward", "h200/fp8.jsonl", "tflops", "fwd"),
        ("Quantization", "h100/quantize.jsonl", "gb_per_s", ""),
    ],
)
def test_a_table_of_providers(section, path, value, direction):
    head, *rows = TABLES[section][0]
    found, case = numbers(path, value, direction), ""
    assert len(rows) * len(head[2:]) > 20
    for name, provider, *cells in rows:
        case = name or case
        for column, cell in zip(head[2:], cells, strict=True):
            measured = found[QUANTIZED.get(case, case), SHOWN.get(provider, provider), column]
            assert int(cell) == round(measured), (section, case, provider, column, measured)


QUANTIZED = {
    "q, k rotated, to int8": "q, k rotated, int8",
    "q, k, v at once, as `flash_attn_fp8_func`": "q, k, v at once",
}


@pytest.mark.parametrize(
    ("direction", "index", "path", "provider", "baseline"),
    [
        ("fwd", 1, "h100/dims.jsonl", "flashattn3", "cudnn"),
        ("bwd", 1, "h100-backward/dims.jsonl", "flashattn3", "cudnn"),
        ("bwd", 2, "h100-backward/deterministic.jsonl", "deterministic", "flashattn3"),
        ("bwd", 3, "h100-backward/gqa.jsonl", "flashattn3", "cudnn"),
        ("bwd", 4, "h100-backward/gqa.jsonl", "flashattn3", "mha"),
    ],
)
def test_a_table_of_ratios(direction, index, path, provider, baseline):
    section = {"fwd": "Hopper forward", "bwd": "Hopper backward"}[direction]
    head, *rows = TABLES[section][index]
    measured = speed_ratios(path, provider, baseline, direction)
    shown = {
        (case, column): cell
        for case, *cells in rows
        for column, cell in zip(head[1:], cells, strict=True)
        if cell
    }
    assert shown == {place: f"{ratio:.2f}" for place, ratio in measured.items()}


def test_the_table_of_shapes_of_models():
    _, *rows = TABLES["Shapes of models"][0]
    columns = [(direction, other) for direction in ("fwd", "bwd") for other in ("cudnn", "fa2")]
    found = {
        (r["case"], r["direction"]): r["speed_ratio"]
        for r in records("h100/shapes.jsonl")
        if r["provider"] == "flashattn3"
    }
    assert len(rows) * 2 == len(found)
    for case, _, *cells in rows:
        for (direction, other), cell in zip(columns, cells, strict=True):
            ratio = found[case, direction].get(other)
            assert cell == ("" if ratio is None else f"{ratio:.2f}"), (case, direction, other)


def test_the_tables_of_varlen_batches():
    """One table has all heads, the other grouped queries, also where kernels divide no work."""
    found, undivided = (
        speed_ratios(f"h100-backward/{name}.jsonl", "flashattn3", "dense", "bwd")
        for name in ("varlen", "varlen-undivided")
    )
    (_, *columns), *rows = TABLES["Hopper backward"][5]
    for case, *cells in rows:
        assert cells == [f"{found[f'{case} {column}', '']:.2f}" for column in columns]
    _, *rows = TABLES["Hopper backward"][6]
    assert [case for case, *_ in rows] == [case for case, _ in found if "heads" in case]
    for case, *cells in rows:
        assert cells == [f"{ratios[case, '']:.2f}" for ratios in (found, undivided)]


def test_the_table_of_cached_calls():
    (_, *providers), *rows = TABLES["Cached calls on Hopper"][0]
    found = numbers("h100/decode.jsonl", "median_ms")
    for case, *cells in rows:
        for provider, cell in zip(providers, cells, strict=True):
            measured = found.get((case, SHOWN.get(provider, provider), ""))
            assert bool(cell) == (measured is not None), (case, provider)
            if cell:
                assert cell == f"{1000 * measured:.{1 if '.' in cell else 0}f}", (case, provider)
                assert ("." in cell) == (1000 * measured < 99.95), (case, provider)


def fa2_ratios(folder: str, row: str, column: str) -> list[str]:
    """flashattn3's speed over FlashAttention-2 in the cells of one column whose row begins so."""
    return [
        f"{r['speed_ratio']['fa2']:.2f}"
        for suite in ("odd-dims", "dims")
        for r in records(f"{folder}/{suite}.jsonl")
        if r["provider"] == "flashattn3" and r["column"] == column and r["row"].startswith(row)
    ]


@pytest.mark.parametrize(
    ("table", "folder", "direction"),
    [
        (1, "h100-sm80", "fwd"),
        (2, "h100-sm80-backward", "bwd"),
        (3, "h100-triton", "fwd"),
        (4, "h100-triton", "bwd"),
    ],
)
def test_the_tables_of_head_dims_of_triton(table, folder, direction):
    (_, *columns), *rows = TABLES["Triton"][table]
    assert rows
    for head_dim, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            both = [
                fa2_ratios(folder, f"{direction} d{head_dim} {mask}", column)
                for mask in ("full", "causal")
            ]
            assert bool(cell) == all(both), (head_dim, column)
            if cell:
                shown = cell.split(" / ")
                assert all(x in found for x, found in zip(shown, both, strict=True)), (
                    head_dim,
                    column,
                    both,
                )


SUMMARY = {
    "Hopper forward": ("h100", "fwd"),
    "Hopper backward": ("h100-backward", "bwd"),
    "Hopper forward, float16": ("h100-fp16", "fwd"),
    "Hopper backward, float16": ("h100-backward-fp16", "bwd"),
    "Triton forward": ("h100-triton", "fwd"),
    "Triton backward": ("h100-triton", "bwd"),
    "Triton forward, compiled for sm_80": ("h100-sm80", "fwd"),
    "Triton backward, compiled for sm_80": ("h100-sm80-backward", "bwd"),
}


@pytest.mark.parametrize("row", TABLES["Summary"][0][1:], ids=lambda row: row[0])
def test_the_summary_has_the_geometric_means(row):
    kernel, _, *cells = row
    folder, direction = SUMMARY[kernel]
    for baseline, cell in zip(("cudnn", "fa2"), cells, strict=True):
        if cell:
            decimals = len(cell.partition(".")[2])
            measured = mean_of_grid(folder, direction, baseline)
            assert cell == f"{measured:.{decimals}f}", (kernel, baseline)


def mean_of_grid(folder: str, direction: str, baseline: str) -> float:
    ratios = speed_ratios(f"{folder}/grid.jsonl", "flashattn3", baseline, direction)
    return statistics.geometric_mean(ratios.values())


def test_the_speeds_of_the_readme():
    text = " ".join((ROOT / "README.md").read_text().split())
    speed = r"forward runs at ([\d.]+) times the speed of cuDNN and ([\d.]+) times that of "
    speed += r"FlashAttention-2, the backward at ([\d.]+) and ([\d.]+) times"
    triton = r"reach ([\d.]+) of FlashAttention-2 forward and ([\d.]+) backward"
    claimed = [float(x) for pattern in (speed, triton) for x in re.search(pattern, text).groups()]
    measured = [
        mean_of_grid("h100", "fwd", "cudnn"),
        mean_of_grid("h100", "fwd", "fa2"),
        mean_of_grid("h100-backward", "bwd", "cudnn"),
        mean_of_grid("h100-backward", "bwd", "fa2"),
        mean_of_grid("h100-sm80", "fwd", "fa2"),
        mean_of_grid("h100-sm80-backward", "bwd", "fa2"),
    ]
    assert claimed == [round(x, 2) for x in measured]


LADDER = {
    "naive": "naive",
    "FlashAttention-1 (ladder)": "ladder fa1",
    "FlashAttention-2 (ladder)": "ladder fa2",
    "FlashAttention-2 (package, Triton)": "triton",
    "FlashAttention-3 (package, Hopper)": "flashattn3",
}


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_tables_of_the_ladder(direction):
    page = (ROOT / "docs" / "learn" / "index.md").read_text().splitlines()
    found = numbers("h100/ladder.jsonl", "tflops", direction)
    cases = [(case, str(n)) for case in ("d64 causal", "d128 full") for n in (1024, 4096, 16384)]
    for shown, provider in LADDER.items():
        line = [line for line in page if line.startswith(f"| {shown} |")][direction == "bwd"]
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        assert cells == [str(round(found[case, provider, n])) for case, n in cases], shown
