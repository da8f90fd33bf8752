"""The command line as a user meets it: what it prints, the files it leaves, its exit status."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from helpers import GPU, ROOT

import flashattn3
from flashattn3.cli import main
from flashattn3_bench import command as bench
from flashattn3_bench.demo import command as demo


def refusal(capsys, *options: str) -> str:
    """The sentence with which options are refused, with exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_module_runs_as_a_program():
    command = [sys.executable, "-m", "flashattn3", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, flashattn3.__version__)


def test_explain_prints_what_the_function_says(capsys):
    options = ("--seqlen-q", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "64")
    more = ("--head-dim-v", "32", "--dtype", "float32", "--causal", "--window", "5", "0")
    assert main(["explain", "--device", "cpu", *options, *more, "--softcap", "3"]) == 0
    q, k, v = (torch.empty(1, 96, heads, dim) for heads, dim in ((4, 64), (2, 64), (2, 32)))
    wanted = flashattn3.explain(q, k, v, causal=True, window_size=(5, 0), softcap=3.0)
    assert capsys.readouterr().out.strip() == str(wanted).strip()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("explain", "--heads", "3", "--kv-heads", "2"), "multiple of k's 2 heads"),
        (
            ("explain", "--seqlen-q", "-3"),
            "--seqlen-q: an integer of at least 0, got '-3'",
        ),
        (
            ("explain", "--heads", "1" + "0" * 21),
            "argument --heads: an integer of at least 1 and at most 9223372036854775807, got",
        ),
        (("explain", "--seqlen-q", "9" * 18), "have no address"),
        (("explain", "--window", "left", "0"), "argument --window"),
        (("explain", "--no-such-option"), "unrecognized arguments: --no-such-option"),
        (("explain", "--backend", "no-such"), "backend must be one of"),
        (("explain", "--dtype", "int8"), "invalid choice"),
        (("explain", "--device", "cuda:99"), "CUDA devices"),
        (("demo", "--steps", "0"), "an integer of at least 1, got '0'"),
        (
            ("demo", "--seed", "1" + "0" * 23),
            "an integer of at least 0 and at most 9223372036854775807, got '1000",
        ),
        (("demo", "--output", ""), "a folder, got ''"),
        (("demo", "--seqlen", "9999999"), "seqlen must be below"),
        (("demo", "--attention-backend", "no-such"), "backend must be one of"),
        (("bench", "--rounds", "1"), "at least 2"),
        (("bench", "--baselines", "fa2,no-such"), "some of"),
        (("bench", "--quick", "--suite", "masks", "--baselines", "fa2"), "can be none alone"),
        (("bench", "--head-dim", "wide"), "integers separated by commas"),
        (("bench", "--device", "toaster"), "must be cuda, cuda:N or cpu"),
        (("bench", "--quick", "--head-dim", "33"), "no case has"),
        (("bench", "--only", "d128 ("), "a regular expression, got 'd128 ('"),
        (("bench", "--quick", "--only", "d7 "), "no case has"),
        (("bench", "--quick", "--suite", "memory", "--only", "1024"), "says nothing to"),
        (("bench", "--quick", "--suite", "memory", "--direction", "fwd"), "says nothing to"),
        (("bench", "--quick", "--suite", "fp8", "--direction", "bwd"), "says nothing to"),
        (("bench", "--quick", "--suite", "fp8", "--dtype", "float32"), "must have 16 bits"),
        (("bench", "--quick", "--suite", "fp8-accuracy", "--seqlen", "64"), "says nothing to"),
        (("bench", "--quick", "--suite", "quantize", "--head-dim", "96"), "no case has"),
        ((), "command"),
    ],
)
def test_bad_options_are_refused_with_one_line(options, said, capsys):
    line = refusal(capsys, *options)
    assert said in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("options", [("demo",), ("bench", "--suite", "grid", "--quick")])
def test_a_copy_without_the_benchmarks_says_so(options, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    line = refusal(capsys, *options)
    assert line.startswith(f"flashattn3 {options[0]}: error: needs the package flashattn3_bench")
    assert line.count("\n") == 1


@pytest.mark.parametrize("options", [("doctor",), ("explain", "--device", "cpu"), ("--help",)])
def test_a_reader_that_ends_early_ends_the_command(options, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(options) == 1
        pipe.flush()


def test_a_command_without_standard_output_ends_well(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # Python's, where a service or `>&-` closed it
    assert main(["explain", "--device", "cpu"]) == 0


@pytest.mark.parametrize("command", ["demo", "bench"])
@pytest.mark.parametrize("case", ["file", "below a file", "no folder can be made", "taken name"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    command, case, tmp_path, capsys, monkeypatch
):
    def work(*_):
        raise AssertionError("worked before the output was looked at")

    monkeypatch.setattr(demo, "_train_both", work)
    monkeypatch.setattr(bench, "_run_suite", work)
    (tmp_path / "file").touch()
    (tmp_path / "varlen.png").mkdir()
    (tmp_path / "demo.png").mkdir()
    folders = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "below",
        "no folder can be made": "/proc/flashattn3",
        "taken name": tmp_path,
    }
    options = ("--quick", "--suite", "varlen") if command == "bench" else ()
    given = ("--device", "cpu", "--output", str(folders[case]))
    line = refusal(capsys, command, *options, *given)
    assert f"--output {folders[case]}: nothing can be written there" in line


def test_lengths_that_a_suite_lacks_are_refused_before_another_suite_runs(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ALL", ("memory", "grid"))
    monkeypatch.setattr(bench, "_run_suite", lambda *_: pytest.fail("ran the memory suite"))
    line = refusal(capsys, "bench", "--device", "cpu", "--quick", "--suite", "all", "--seqlen=256")
    assert "--suite grid: no case has the asked head dims, lengths and rows" in line


@pytest.mark.parametrize(
    ("suite", "only", "rows"),
    [
        ("masks", "bwd d16 (full|bits) 1 x 256", ["bwd d16 full", "bwd d16 bits"]),
        ("grid", "d64 full", ["fwd d64 full", "bwd d64 full"]),
        ("ragged", "page 128", ["quick 2 x 40, d128, 1 queries, page 128"]),
        ("masks-build", "bits .* device", ["bits"]),
        ("robot", "d256.* host", ["fwd quick-d256-full-128x128-h2"]),
    ],
)
def test_only_some_rows_are_measured(suite, only, rows, monkeypatch, tmp_path):
    chosen = []
    monkeypatch.setattr(bench, "_run_suite", lambda _, steps, *of: chosen.extend(steps) or True)
    options = "--device", "cpu", "--quick", "--suite", suite, "--output", str(tmp_path)
    assert main(["bench", *options, "--only", only]) == 0
    assert [getattr(step.args[0], "row", step.args[0]) for step in chosen] == rows


@pytest.mark.skipif(GPU, reason="says what a machine without GPU sees")
def test_bench_refuses_the_full_suites_on_a_cpu(capsys):
    assert "only --quick" in refusal(capsys, "bench")


@pytest.fixture
def short_demo(tmp_path, monkeypatch):
    """Two steps on a few bytes; the loss tolerance stays that of the demo."""
    monkeypatch.setattr(demo, "CPU_LENGTHS", (32, 64))
    options = ("--device", "cpu", "--steps", "2", "--seqlen", "32", "--output", str(tmp_path))
    return lambda *more: main(["demo", *options, *more])


def test_demo_reports_both_losses_and_draws(short_demo, tmp_path, capsys):
    assert short_demo("--attention-backend", "reference") == 0
    printed = capsys.readouterr().out
    names = ("flashattn3 (reference)", "torch SDPA", "MiB", "the losses agree")
    for wanted in (*names, demo.CPU_NOTE):
        assert wanted in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [0.0, float("nan")], ids=["zero", "nan"])
def test_demo_fails_if_attention_is_wrong(wrong, short_demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_flash", lambda backend: lambda q, k, v: v * wrong)
    assert short_demo() == 1
    assert "DO NOT AGREE" in capsys.readouterr().out
