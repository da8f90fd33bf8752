"""The suites of cached calls on a CPU: they run, check first, and say what they measured."""

from __future__ import annotations

import json

import pytest
import torch

from flashattn3.cli import main
from flashattn3_bench import cached_eight_bits as eight_bits
from flashattn3_bench import cached_suite
from flashattn3_bench.cached_cells import SUITES, CachedCell, cached_cells
from flashattn3_bench.cached_suite import run_cached, run_cached_host
from flashattn3_bench.providers import OURS
from flashattn3_bench.runner import ABSENT, FAILED, OK, Settings

CPU = Settings(torch.device("cpu"), torch.float32, ("math",), rounds=2, round_ms=0.1)


@pytest.mark.parametrize("suite", SUITES)
def test_the_cells_of_a_suite(suite):
    cells = cached_cells(suite)
    assert len({cell.row for cell in cells}) == len(cells)
    for cell in cached_cells(suite, quick=True)[:2]:
        records = run_cached(cell, CPU)
        providers = {record["provider"] for record in records}
        assert providers > {OURS}
        for record in records:
            if record["provider"] == cached_suite.TRITON:
                assert record["status"] == ABSENT and "not torch.float32" in record["reason"]
                continue
            assert record["status"] == OK, record
            assert record["median_ms"] > 0 and record["num_bytes"] == cell.num_bytes(4)


@pytest.mark.parametrize("kind", ["append", "of tokens"])
def test_caches_of_8_bits_have_those_of_16_beside_them(kind, monkeypatch):
    (cell, *_) = (x for x in cached_cells("kv8", quick=True) if kind in x.row)
    records = run_cached(cell, CPU)
    assert {record["provider"] for record in records} >= {OURS, "16 bits"}
    assert all(record["status"] == OK for record in records)
    right = eight_bits.with_descale
    monkeypatch.setattr(eight_bits, "with_descale", lambda *of: (right(*of)[0], right(*of)[1] * 2))
    wrong = {record["provider"]: record["status"] for record in run_cached(cell, CPU)}
    assert wrong[OURS] == (FAILED if kind == "append" else OK)


def test_a_wrong_result_has_no_number(monkeypatch):
    cell = cached_cells("decode", quick=True)[0]
    right = cached_suite._calls

    def wrong(*arguments):
        calls = right(*arguments)
        return {**calls, OURS: lambda: calls[OURS]() * 1.01}

    monkeypatch.setattr(cached_suite, "_calls", wrong)
    (record,) = (r for r in run_cached(cell, CPU) if r["provider"] == OURS)
    assert record["status"] == FAILED and "error" in record["reason"]


def test_bytes_of_a_window_are_those_of_its_keys():
    cell = CachedCell("decode", "", (1000, 50), window=99, seqlen_q=1)
    assert cell.visible == 100 + 50
    assert cell.num_bytes(2) == 2 * 150 * 8 * 128 * 2


@pytest.mark.parametrize("work", cached_suite.HOST_WORK)
def test_host_time_of_a_cached_call(work, monkeypatch):
    from flashattn3_bench import host_suite

    for name, number in (("SAMPLES", 2), ("WARM_UP_CALLS", 1), ("CALLS_PER_SAMPLE", 2)):
        monkeypatch.setattr(host_suite, name, number)
    records = list(run_cached_host(work, CPU))
    assert records[0]["provider"] == OURS and all(r["status"] == OK for r in records)


def test_the_command_line(tmp_path):
    command = ["bench", "--quick", "--rounds", "2", "--suite", "ragged", "--output", str(tmp_path)]
    assert main(command) == 0
    header, *records = map(json.loads, (tmp_path / "ragged.jsonl").read_text().splitlines())
    assert header["torch"] and {r["suite"] for r in records} == {"ragged"}
    assert (tmp_path / "ragged.png").stat().st_size > 1000
