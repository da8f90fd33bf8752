"""The benchmarks' own machinery: cells, gate, timing, memory, report; and the quick suites."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import replace

import pytest
import torch
from helpers import H100, described, library_double

from flashattn3 import BlockScaled, flash_attn_func
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.registry import TRITON
from flashattn3.call.operands import Tensors
from flashattn3.cli import main
from flashattn3.run.planner import choose
from flashattn3_bench import (
    few_queries_suite,
    gate,
    host_suite,
    mask_build_suite,
    mask_shapes,
    masks_suite,
    providers,
    quantize_suite,
    robot_suite,
    scores_suite,
    timing,
)
from flashattn3_bench.accuracy_suite import accuracy_cases
from flashattn3_bench.cached_suite import HOST_WORK
from flashattn3_bench.checking import Case
from flashattn3_bench.checking.distributions import cases as distribution_cases
from flashattn3_bench.command import ALL
from flashattn3_bench.figure import COLORS
from flashattn3_bench.inputs import make_inputs, prepare, quantized
from flashattn3_bench.memory import peak_bytes
from flashattn3_bench.precision import PRECISIONS, arguments_in, errors
from flashattn3_bench.providers import (
    BASELINES,
    EIGHT_BIT,
    FLEX,
    ON_FEW_SMS,
    OURS,
    PROVIDERS,
    QUANTIZED,
    naive,
    sdpa,
)
from flashattn3_bench.report import summary
from flashattn3_bench.runner import Settings
from flashattn3_bench.suites import CASES, DIRECTIONS, Cell, cells

CPU = torch.device("cpu")
SETTINGS = Settings(CPU, torch.float32, (), rounds=2, round_ms=0.1)
SMALL = Case("small", 2, 48, 80, 4, 2, 16, 24)
CAUSAL = Case("causal", 2, 48, 48, 4, 2, 16, 24, causal=True)


def test_cells_and_flops_are_those_of_the_papers():
    grid = cells("grid")
    assert len(grid) == 2 * 3 * 2 * 6
    for case in (cell.case for cell in grid):
        assert case.batch * case.seqlen_q == case.batch * case.seqlen_k == 16384
        assert case.num_heads_q * case.head_dim == 2048
    full, causal = cells("grid", ["fwd"], (64,), (1024,))
    assert full.flops == 4 * 16 * 32 * 1024**2 * 64
    assert causal.flops == full.flops / 2
    assert Cell("grid", full.case, "bwd").flops == 2.5 * full.flops
    for cell in cells("gqa", ["bwd"]):
        assert cell.case.num_heads_q / cell.case.num_heads_kv in (3, 4, 8)
        assert cell.with_all_heads.case.num_heads_kv == cell.case.num_heads_q
        assert cell.with_all_heads.flops == cell.flops


@pytest.mark.parametrize("suite", CASES)
def test_each_cell_has_a_place_of_its_own_and_a_quick_one_is_small(suite):
    places = [(cell.row, cell.column) for cell in cells(suite)]
    assert len(set(places)) == len(places)
    for cell in cells(suite, quick=True):
        assert cell.case.batch * cell.case.num_heads_q * cell.case.seqlen_k <= 4 * 128


def test_odd_head_dims_stand_beside_the_next_multiple_of_16():
    odd = [cell for cell in cells("odd-dims") if cell.case.head_dim % 16]
    assert {cell.case.head_dim for cell in odd} == {40, 56, 72, 88, 104, 120}
    others = {cell.row: cell.case for cell in cells("odd-dims")}
    for cell in odd:
        beside = others[cell.row.replace(f"d{cell.case.head_dim}", f"d{cell.case.head_dim + 8}")]
        assert beside.num_heads_q == cell.case.num_heads_q
        assert cell.case.layout == "bshd"


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_fp8_passes_the_gate_and_a_wrong_scale_does_not(name):
    case = Case("fp8", 1, 200, 200, 2, 2, 64, 64)
    cell, inputs = Cell("fp8", case, "fwd"), make_inputs(case, CPU, torch.bfloat16)
    given = quantized(inputs, QUANTIZED[name]) if name in QUANTIZED else inputs
    assert all(isinstance(x, BlockScaled) == (name in QUANTIZED) for x in given[:3])
    (out,) = prepare(PROVIDERS[name], cell, given)()
    checked = gate.Gate(cell, inputs)
    checked.check(name, (out,))
    with pytest.raises(AssertionError, match="bound"):
        checked.check(name, (out * 1.1,))
    with pytest.raises(AssertionError, match="error"):
        checked.check(OURS, (out,))  # 16 bits are held to their own rule


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_gate_finds_what_is_wrong_at_the_end_of_the_tensors(direction):
    cell = Cell("grid", CAUSAL, direction)
    inputs = make_inputs(CAUSAL, CPU, torch.float32)
    for index in range(len(gate.RESULTS[direction])):
        results = [x.clone() for x in prepare(naive, cell, inputs)()]
        results[index][-1, -1, -1, -1] += 1e-2
        with pytest.raises(AssertionError, match="error"):
            gate.Gate(cell, inputs).check("spoilt", tuple(results))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("case", [SMALL, CAUSAL])
def test_the_truth_does_not_depend_on_its_chunks(case, direction, monkeypatch):
    cell, inputs = Cell("grid", case, direction), make_inputs(case, CPU, torch.float64)
    whole = gate.Gate(cell, inputs).reference
    monkeypatch.setattr(gate, "_CHUNK_SCORES", 7 * case.seqlen_k)
    for got, wanted in zip(gate.Gate(cell, inputs).reference, whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_torch_attention_is_not_asked_for_another_alignment():
    inputs = make_inputs(SMALL, CPU, torch.float32)
    with pytest.raises(RuntimeError, match="top left"):
        sdpa(inputs.q, inputs.k, inputs.v, True)


class FakeClock:
    """Says what each call costs, and keeps the order of the calls."""

    def __init__(self, costs: dict) -> None:
        self.costs, self.order = costs, []

    def pace(self, call) -> timing.Pace:
        return timing.Pace(0.1, self.costs[call])

    def samples(self, call, repetitions: int, host_ms: float) -> list[float]:
        self.order.append((call, repetitions))
        return [self.costs[call]] * repetitions


def test_contenders_are_timed_in_turn_for_about_as_long():
    def quick():
        pass

    def slow():
        pass

    clock = FakeClock({quick: 1.0, slow: 25.0})
    found = timing.interleave({"quick": quick, "slow": slow}, clock, rounds=3, round_ms=10.0)
    there = [(quick, 10), (slow, 1)]
    assert clock.order == [*there, *reversed(there), *there]
    assert found["quick"] == timing.Timing(1.0, 1.0, 1.0, 30)


def test_timing_gives_median_and_quantiles():
    found = timing.Timing.of([float(i) for i in range(11)])
    assert (found.p20_ms, found.median_ms, found.p80_ms) == (2.0, 5.0, 8.0)


def test_peak_memory_counts_what_is_alive_at_once():
    def work():
        for _ in range(3):
            torch.ones(2**18)  # 1 MiB, freed again
        return torch.ones(2**18) + torch.ones(2**18)

    assert peak_bytes(work, CPU) == pytest.approx(3 * 2**20, rel=0.01)


def record(provider: str, ratios: dict, **rest) -> dict:
    of = {"record": "time", "suite": "fp8", "direction": "fwd", "row": "r", "column": "512"}
    of |= {"provider": provider, "status": "ok", "median_ms": 1.0, "tflops": 12.0, "head_dim": 64}
    return of | {"speed_ratio": ratios} | rest


def test_the_summary_has_ratios_means_and_red_gates():
    """Ours is compared with the baselines, and 8 bits with both."""
    times = {"fp8 int8": 1.0, OURS: 2.0, "fa2": 4.0}
    records = [
        record(name, {other: times[other] / t for other in times if other != name})
        for name, t in times.items()
    ]
    printed = summary([*records, record(OURS, {"fa2": 8.0}), record("math", {}, status="FAILED")])
    assert "12 / 12 / 12 / FAILED" in printed
    assert "2.00 / 4.00" in printed
    assert f"all cells: {OURS} 2.000 (1 cells), fa2 4.000 (1 cells)" in printed
    assert "all cells: fa2 4.000 (2 cells)" in printed


def test_every_precision_stands_for_the_same_attention():
    case = Case("precision", 2, 130, 130, 2, 2, 64, 64)
    q, k, v = make_inputs(case, CPU, torch.bfloat16)[:3]
    reference = naive(q.double(), k.double(), v.double(), False)
    found = {}
    for name in PRECISIONS:
        out = flash_attn_func(**arguments_in(name, q, k, v), backend="reference")
        found[name] = errors(out, reference)["relative_error"]
    assert found["fp16"] < found["bf16"] < 3e-3
    assert all(found[name] < 0.07 for name in PRECISIONS)
    assert found["fp8 block+hadamard, int8"] < 0.8 * found["fp8 block+hadamard, e4m3"]
    descales = [arguments_in(f"fp8 per {of}", q, k, v)["k_descale"] for of in ("tensor", "head")]
    assert [x.shape for x in descales] == [(2, 2)] * 2
    # One of them for all, or as many as there are largest elements.
    assert descales[0].unique().numel() == 1 and descales[1].unique().numel() > 1


def test_errors_are_those_of_the_definition():
    found = errors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0], dtype=torch.float64))
    wanted = {"rmse": math.sqrt(0.5), "relative_error": math.sqrt(0.5)}
    assert found == pytest.approx({**wanted, "largest_error": 1.0, "reference_rms": 1.0})


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs a quick suite on the CPU and returns the records it wrote and what it printed."""

    def run(suite: str, *options: str, status: int = 0) -> tuple[list[dict], str]:
        given = ("--quick", "--rounds", "2", "--output", str(tmp_path), "--device", "cpu")
        assert main(["bench", *given, "--suite", suite, *options]) == status
        header, *records = lines(tmp_path / f"{suite}.jsonl")
        assert {"device", "torch", "triton", "commit", "lowering", "flashattn3"} <= header.keys()
        assert (tmp_path / f"{suite}.png").read_bytes().startswith(b"\x89PNG")
        return records, capsys.readouterr().out

    return run


def holds_of_fp8(records):
    dtypes = [*["int8", "float8_e4m3fn"] * 3, "int8", "bfloat16", "bfloat16"]
    assert [r["qk_dtype"] for r in records] == dtypes * 2
    assert {r["dtype"] for r in records} == {"bfloat16"}


def holds_of_quantize(records):
    rotary = records.pop()
    assert (rotary["provider"], rotary["quantized_dtype"]) == (quantize_suite.ROTARY, "int8")
    for ours, copy in zip(records[::2], records[1::2], strict=True):
        tensors = 3 if ours["row"].startswith("q, k, v") else 1
        numbers, scales = tensors * 130 * 256, tensors * 2 * 256 // 64
        assert ours["num_bytes"] == 3 * numbers + 4 * scales
        assert copy["num_bytes"] == 4 * numbers


def holds_of_ladder(records):
    moved = {r["provider"]: r["bytes_moved"] for r in records if not r["causal"]}
    assert moved["triton"] <= moved["ladder fa2"] < moved["ladder fa1"]


REFERENCE = ("--backend", "reference")  # Triton's interpreter has no bfloat16 products
D64, FWD, BWD = ("--head-dim", "64"), ("--direction", "fwd"), ("--direction", "bwd")
D64_REFERENCE = (*D64, *REFERENCE)
MEMORY = ("--seqlen", "128", "--baselines", "naive")
COPIED = [*[OURS, "copy"] * 6, "rotary"]
RUNGS = [OURS, "triton", "ladder fa2", "ladder fa1", "naive"]
# Suite → options, providers of the records, and what else holds of the records.
QUICK = {
    "grid": (D64, [OURS, "math", "naive"] * 4),
    "memory": (MEMORY, [OURS, "naive"]),
    "gqa": ((*D64_REFERENCE, *BWD), [OURS, "mha", "math"] * 2),
    "deterministic": (D64_REFERENCE, ["deterministic", OURS] * 2),
    "captured": (D64_REFERENCE, ["captured", OURS] * 4),
    "fp8": (D64_REFERENCE, [*EIGHT_BIT, OURS, "math"] * 2, holds_of_fp8),
    "quantize": (D64, COPIED, holds_of_quantize),
    "rotary": (D64, [OURS, "8 bits"] * 4),
    "varlen": ((), [OURS, "dense"] * 24),
    "robot": (REFERENCE, [OURS, "math", "naive", ON_FEW_SMS] * 4),
    "ladder": ((*D64, *FWD), RUNGS * 2, holds_of_ladder),
    "block-sparse": (FWD, ["ladder fa1"] * 5),
}


@pytest.mark.parametrize("suite", QUICK)
def test_quick_suites(suite, bench):
    options, providers, *holds = QUICK[suite]
    records, _ = bench(suite, *options)
    assert [r["provider"] for r in records] == providers
    of_cells = [{}]
    for r in records:
        assert (r["status"] == "absent") == (r["provider"] == ON_FEW_SMS), r
        if r["provider"] in of_cells[-1]:
            of_cells.append({})
        of_cells[-1][r["provider"]] = r.get("tflops") or r.get("gb_per_s")
    for r, speeds in zip(records, [x for x in of_cells for _ in x], strict=True):
        timed = {name for name, speed in speeds.items() if speed}
        others = timed - {r["provider"]} if r["provider"] in timed else set()
        ratios = r.get("speed_ratio", {})
        assert ratios.keys() == others, r
        for other, ratio in ratios.items():
            assert ratio == pytest.approx(speeds[r["provider"]] / speeds[other])
    for of_suite in holds:
        of_suite(records)


@pytest.fixture
def few_samples(monkeypatch):
    monkeypatch.setattr(host_suite, "SAMPLES", 2)
    monkeypatch.setattr(host_suite, "WARM_UP_CALLS", 2)


def test_host_suite_on_a_cpu(bench, few_samples):
    records, _ = bench("host", *REFERENCE)
    providers = {OURS, "quantize+int8", "fa2"}
    assert {r["direction"] for r in records} == {"forward", *host_suite.WORK, *HOST_WORK}
    assert {r["provider"] for r in records if r["direction"] == "forward"} == providers
    assert all(r["status"] == "ok" and r["median_ms"] > 0 for r in records)
    median = {(r["direction"], r["provider"]): r["median_ms"] for r in records}
    assert median[host_suite.BOTH, OURS] > median["forward", OURS]


@pytest.mark.parametrize(
    ("run", "work", "other"),
    [
        (host_suite.run_rotary_host, "rotary embedding, forward with gradients", "8 bits"),
        (host_suite.run_option_host, "sinks, forward + backward", "sinks"),
        (host_suite.run_option_host, "mask, forward + backward", "mask"),
    ],
)
def test_host_time_with_an_option(run, work, other, few_samples):
    found = list(run(work, replace(SETTINGS, dtype=torch.float16)))
    assert [(r["provider"], r["status"]) for r in found] == [(OURS, "ok"), (other, "ok")]
    assert all(r["median_ms"] > 0 and r["provider"] in COLORS for r in found)


def test_a_wrong_call_has_no_host_time(bench, few_samples, monkeypatch):
    monkeypatch.setitem(PROVIDERS, OURS, lambda q, k, v, causal: 0 * (q + k + v))
    records, _ = bench("host", *REFERENCE, status=1)
    records = [r for r in records if r["direction"] not in HOST_WORK]
    assert {r["status"] for r in records if r["provider"] == OURS} == {"FAILED"}
    assert {r["status"] for r in records if r["provider"] != OURS} == {"ok"}


@pytest.mark.slow
def test_quick_accuracy_suites(bench, monkeypatch):
    records, _ = bench("fp8-accuracy", *REFERENCE)
    assert [r["provider"] for r in records] == list(PRECISIONS) * 11
    assert {r["data"] for r in records} == {"outlier", "shifted", "normal", "long"}
    assert all(r["status"] == "ok" and 0 < r["relative_error"] < 0.2 for r in records)
    assert any(r["rows_compared"] < r["seqlen_k"] for r in records)
    few = distribution_cases((128,), (64,))[::5]  # test_fp8_distributions.py has all
    monkeypatch.setattr("flashattn3_bench.distributions_suite.distribution_cases", lambda *_: few)
    records, _ = bench("fp8-distributions", "--seqlen", "128", *REFERENCE)
    names = [f"{who} {dtype}" for dtype in ("int8", "e4m3") for who in ("flashattn3", "honest")]
    assert [r["provider"] for r in records] == names * len(few)
    assert {(r["head_dim"], r["seqlen_k"], r["status"]) for r in records} == {(64, 128, "ok")}
    assert all(0.45 < r["heavy_probability"] < 0.55 for r in records if "heavy-p0.5" in r["case"])


def test_a_missed_bound_keeps_its_number_and_fails_the_run(bench, monkeypatch):
    def wrong(**arguments):
        out, lse = flash_attn_func(**arguments)
        return out * 1.1, lse

    monkeypatch.setattr("flashattn3.flash_attn_func", wrong)
    few = [case for case in distribution_cases((128,), (64,)) if case.name in ("ones", "mean-1")]
    monkeypatch.setattr("flashattn3_bench.distributions_suite.distribution_cases", lambda *_: few)
    records, _ = bench("fp8-distributions", "--seqlen", "128", *REFERENCE, status=1)
    ours = [r for r in records if r["provider"].startswith(OURS)]
    assert len(ours) == 4
    assert all(r["status"] == "MISSED" and 0.09 < r["error"] < 0.11 for r in ours)


def test_a_precision_that_gives_nan_fails_the_run(bench, monkeypatch):
    def spoilt(precision, q, k, v):
        return arguments_in(precision, q * (math.nan if "block" in precision else 1.0), k, v)

    monkeypatch.setattr("flashattn3_bench.accuracy_suite.arguments_in", spoilt)
    few = accuracy_cases(quick=True)[:2]
    monkeypatch.setattr("flashattn3_bench.accuracy_suite.accuracy_cases", lambda quick: few)
    records, _ = bench("fp8-accuracy", *REFERENCE, status=1)
    assert len(records) == 2 * len(PRECISIONS)
    assert all((r["status"] == "FAILED") == ("block" in r["provider"]) for r in records)


def test_wrong_quantization_has_no_number_and_fails_the_run(bench, monkeypatch):
    def spoil(name: str, place: int) -> None:
        """One of the tensors that the function quantizes is another."""
        right = getattr(quantize_suite, name)
        factors = [1.01 if i == place else 1.0 for i in range(5)]
        wrong = lambda *x, **how: right(*map(operator.mul, x, factors), **how)  # noqa: E731
        monkeypatch.setattr(quantize_suite, name, wrong)

    spoil("quantize_block_fp8", 0)
    spoil("quantize_qkv", 2)
    spoil("rotate_and_quantize", 0)
    records, _ = bench("quantize", "--head-dim", "128", status=1)
    ours = [r for r in records if r["provider"] == OURS]
    assert len(ours) == 6 and all("gb_per_s" not in r for r in ours)


def test_quantized_tensors_are_taken_in_turn():
    ring, seen = [(torch.zeros(1), torch.ones(1)) for _ in range(3)], []
    call = quantize_suite._in_turn(lambda *group: seen.append(group), ring)
    for _ in range(4):
        call()
    for group, wanted in zip(seen, [*ring, ring[0]], strict=True):
        assert all(x is y for x, y in zip(group, wanted, strict=True))


def test_few_queries_are_compared_with_the_cached_call():
    cell, *_ = cells("few-queries", ["fwd"], quick=True)
    settings = replace(SETTINGS, own=few_queries_suite.OWN, baselines=("math",))
    for time in robot_suite.TIMES:
        records = few_queries_suite.run_few_queries(cell, time, settings)
        assert [r["provider"] for r in records] == [*few_queries_suite.OWN, "math"]
        assert all((r["status"], r["column"]) == ("ok", time) for r in records)


def test_options_that_change_scores_are_compared_with_the_call_without():
    quick = cells("scores", quick=True)
    chosen = [x for x in quick if x.case.bias or x.case.num_heads_q > x.case.num_heads_kv]
    assert {cell.direction for cell in chosen} == set(DIRECTIONS)
    for cell in chosen:
        records = scores_suite.run_scores(cell, SETTINGS)
        assert [r["provider"] for r in records] == list(scores_suite.providers_of(cell))
        assert all(r["status"] == "ok" for r in records), records
        assert all(OURS in r["speed_ratio"] for r in records[1:])


def test_a_wrong_result_of_an_option_is_not_timed(monkeypatch):
    func = scores_suite.flashattn3.flash_attn_func
    without = lambda q, k, v, sinks=None, **options: func(q, k, v, **options)  # noqa: E731
    monkeypatch.setattr(scores_suite.flashattn3, "flash_attn_func", without)
    cell = cells("scores", ["fwd"], quick=True)[0]
    records = scores_suite.run_scores(cell, SETTINGS)
    not_ok = {r["provider"]: r["status"] for r in records if r["status"] != "ok"}
    assert not_ok == {"sinks": "FAILED"}


def mask_cell(direction, mask):
    found = masks_suite.mask_cells((direction,), None, None, True)
    return next(cell for cell in found if cell.mask == mask)


@pytest.mark.slow
def test_masks_are_compared_with_flexattention():
    settings = replace(SETTINGS, baselines=(FLEX,))
    for direction, mask in (("fwd", "documents"), ("bwd", "tree")):
        ours, flex, *others = masks_suite.run_masks(mask_cell(direction, mask), settings)
        assert (ours["provider"], ours["status"]) == (OURS, "ok")
        assert flex["status"] == ("ok" if direction == "fwd" else "absent")  # on a CPU
        assert [r["status"] for r in others] == ["ok"]  # without a mask, or deterministic
        assert 0 < ours["visible"] < 1


def test_a_wrong_mask_is_neither_timed_nor_built(monkeypatch):
    shape = mask_shapes.SHAPES["prefix"](256, CPU)
    wrong = shape._replace(build=lambda: mask_shapes.masks.prefix_lm([65], 256))
    records = mask_build_suite.run_build("prefix", 256, "host", SETTINGS)
    assert [(r["provider"], r["status"]) for r in records] == [(OURS, "ok"), ("flex", "ok")]
    monkeypatch.setitem(mask_shapes.SHAPES, "prefix", lambda n, device: wrong)
    (record,) = mask_build_suite.run_build("prefix", 256, "host", SETTINGS)
    assert record["status"] == "FAILED" and "scores differ" in record["reason"]
    func = masks_suite.flashattn3.flash_attn_func
    without = lambda q, k, v, mask=None: func(q, k, v)  # noqa: E731
    monkeypatch.setattr(masks_suite.flashattn3, "flash_attn_func", without)
    ours, *_ = masks_suite.run_masks(mask_cell("fwd", "tree"), SETTINGS)
    assert ours["status"] == "FAILED"


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_few_sms_are_timed_where_the_backend_leaves_sms_free(backend, monkeypatch):
    hopper = HopperBackend(library=library_double, only_measured=False)
    named = hopper if backend == "hopper" else TRITON
    margins = []

    def explain(*tensors, causal, sm_margin):
        margins.append(sm_margin)
        return choose(described(Tensors(*tensors), sm_margin=sm_margin), H100, (named,))

    def empty(case, device, dtype):
        q, k = (torch.empty(1, n, case.num_heads_q, 64, device="meta", dtype=dtype) for n in (8, 9))
        return q, k, k, q

    monkeypatch.setattr(robot_suite, "num_sms", lambda device: 132)
    monkeypatch.setattr(robot_suite, "make_inputs", empty)
    monkeypatch.setattr(robot_suite.flashattn3, "explain", explain)
    settings = replace(SETTINGS, device=torch.device("cuda"), dtype=torch.bfloat16)
    reason = robot_suite.whole_device_reason(cells("robot", ["fwd"])[0], settings)
    assert margins == [132 - 16]
    assert reason is None if backend == "hopper" else "one program per tile" in reason


def test_few_sms_are_asked_for_by_the_margin(monkeypatch):
    given = {}
    monkeypatch.setattr(providers, "num_sms", lambda device: 132)
    monkeypatch.setattr(
        "flashattn3.flash_attn_func", lambda q, k, v, **options: given.update(options)
    )
    PROVIDERS[ON_FEW_SMS](torch.ones(1), None, None, True)
    assert given == {"causal": True, "sm_margin": 132 - 16}


def test_the_whole_time_ends_when_the_work_is_done():
    clock, order = timing.WallClock(CPU), []
    clock.wait = lambda: order.append("wait")
    assert len(clock.samples(lambda: order.append("call"), 2, 0.0)) == 2
    assert order == ["wait", "call", "wait", "call", "wait"]


def test_the_named_backend_is_the_one_that_is_timed(bench):
    _, printed = bench("grid", *D64, *FWD, "--backend", "hopper", status=1)
    assert "needs an NVIDIA GPU" in printed


def test_a_wrong_result_has_no_number_and_fails_the_run(bench, monkeypatch):
    wrong = lambda q, k, v, causal: naive(q, k, v, causal) * 1.01  # noqa: E731
    monkeypatch.setattr("flashattn3_bench.runner.PROVIDERS", PROVIDERS | {OURS: wrong})
    records, _ = bench("shapes", *FWD, "--head-dim", "40", status=1)
    ours = [r for r in records if r["provider"] == OURS]
    assert ours and all(r["status"] == "FAILED" and "median_ms" not in r for r in ours)


def test_a_baseline_that_refuses_is_absent(bench):
    records, _ = bench("grid", *D64, *FWD, "--baselines", "cudnn")
    absent = [r for r in records if r["provider"] == "cudnn"]
    assert absent and all(r["status"] == "absent" and r["reason"] for r in absent)


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ALL)
def test_quick_suites_on_a_gpu(suite, tmp_path):
    options = ["--quick", "--rounds", "2", "--suite", suite, "--output", str(tmp_path)]
    assert main(["bench", *options]) == 0
    header, *records = lines(tmp_path / f"{suite}.jsonl")
    assert header["matmul_tflops"] > 0
    assert all(r["status"] == "ok" for r in records if r["provider"] not in BASELINES)


@pytest.mark.gpu
def test_gpu_times_do_not_hold_the_launch(device):
    x = torch.ones(1, device=device)
    clock = timing.make_clock(device, num_input_bytes=4)

    def tiny():
        for _ in range(10):
            x.add_(1.0)

    samples = clock.samples(tiny, 20, clock.pace(tiny).host_ms)
    assert timing.Timing.of(samples).median_ms < clock.pace(tiny).done_ms
