"""The unit tests of csrc/tile and csrc/attention: tests/device/unit_check.cu.

Each header has a file of tests, or an emulation that runs every line of it. The program compiles
without a GPU, and its tests of block ranges, tile order, shares of work, descales and register
coordinates run on the host.

And kernels on the CPU: tests/device/append_emulation.cpp, decode_emulation.cpp,
forward_emulation.cpp (of cached calls and listed masks), widen_emulation.cpp and
backward_emulation.cpp.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import ROOT

if not (ROOT / "build_support").is_dir():
    pytest.skip("needs a source checkout", allow_module_level=True)

from support.checkout import checkout_to_build_in, find_toolchain

# The test that builds a program waits for the compiler: minutes of a slow CPU.
pytestmark = pytest.mark.timeout(2700)
DEVICE_TESTS = ROOT / "tests" / "device"
FOLDERS = ("tile", "attention")
# Emulations find mistakes in these.
EMULATED = {
    "attention/cached_keys.cuh": "widen",
    "attention/rotary_angles.cuh": "append",
    "attention/row_stats.cuh": "decode",
    "attention/span_softmax.cuh": "forward",
}
HEADERS = [
    path.relative_to(ROOT / "csrc")
    for folder in FOLDERS
    for path in sorted((ROOT / "csrc" / folder).iterdir())
    if path.name not in ("score_term.h", "list_sizes.h")  # two enumerations, and sizes
    and str(path.relative_to(ROOT / "csrc")) not in EMULATED
]
HEADERS.append(Path("decode/work_share.cuh"))  # the header of a kernel folder that has tests


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_every_header_has_a_unit_test(header):
    test = Path("unit", header.parent, f"{header.stem}_test.cuh")
    assert (DEVICE_TESTS / test).is_file(), f"csrc/{header} has no test in tests/device/{test}"
    text = (DEVICE_TESTS / test).read_text()
    assert f'#include "{header}"' in text
    assert f"namespace unit::{header.stem} {{" in text
    names = re.findall(r'\{\s*"([^"]+)", Where::', text)
    assert names, "it adds no test to unit_check"
    assert all(name.startswith(f"{header.parent}/{header.stem}: ") for name in names), names
    assert f'#include "{test}"' in (DEVICE_TESTS / "unit_check.cu").read_text()


def test_every_unit_test_has_a_header():
    tested = {
        path.relative_to(DEVICE_TESTS / "unit")
        for path in (DEVICE_TESTS / "unit").rglob("*_test.cuh")
    }
    assert tested == {header.with_name(f"{header.stem}_test.cuh") for header in HEADERS}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return checkout_to_build_in(tmp_path_factory, "tests/device")


@cache
def build(checkout: Path, program: str) -> Path:
    command = [sys.executable, "-m", "build_support", program]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout / "build" / "hopper" / program


@pytest.fixture(scope="module")
def unit_check(checkout) -> Path:
    """One unit, 15 s of a CPU."""
    return build(checkout, "unit_check")


def run(program: Path, *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of a run."""
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=900)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout.splitlines()


def names_of(where: str) -> set[str]:
    """Names of the tests that the sources list for "kHost" or "kGpu"."""
    pattern = rf'\{{\s*"([^"]+)", Where::{where}'
    files = (DEVICE_TESTS / "unit").rglob("*_test.cuh")
    return {name for path in files for name in re.findall(pattern, path.read_text())}


@pytest.mark.slow
def test_the_host_part_passes(unit_check):
    code, lines = run(unit_check, "--host")
    assert code == 0
    passed = {line[4:].strip().rsplit(maxsplit=2)[0].strip() for line in lines[:-1]}
    assert all(line.startswith("PASS  ") for line in lines[:-1])
    assert passed == names_of("kHost")
    assert lines[-1] == f"{len(passed)} tests, 0 failed"
    assert run(unit_check, "--only", "no such test")[0] == 1


@pytest.mark.gpu
def test_all_pass_on_a_hopper_gpu(unit_check):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    code, lines = run(unit_check)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert lines[-1] == f"{len(names_of('kHost') | names_of('kGpu'))} tests, 0 failed"


def has_vectors_of_k(lines: list[str]) -> None:
    assert int(re.fullmatch(r"(\d+) with vectors of K", lines[-2])[1]) > 120


def has_four_parts(lines: list[str]) -> None:
    assert sum("in 4 parts;" in line for line in lines) >= 4 * 2


def has_parts_of_every_head_dim(lines: list[str]) -> None:
    on_all_sms = [line for line in lines[:-1] if "3 SMs" not in line]
    assert len(on_all_sms) == 12 * 2
    assert all(re.search(r"in [234] parts;", line) for line in on_all_sms)
    for head_dim in (64, 128, 192, 256):
        assert any(f"_d{head_dim}_" in line for line in on_all_sms)


# Program, options, the fewest and the most cases, and what else its lines must have. Each takes
# seconds of a CPU, and 10 to 20 s of the compiler; programs leave out longer problems.
LONG = ("--steps", "1000")
EMULATIONS = {
    "decode": ("decode", (), 41, 150, None),
    "random decode": ("decode", ("--random", "15"), 15, 15, None),
    "appends": ("append", ("400",), 400, 400, has_vectors_of_k),
    "widened caches": ("widen", ("60",), 50, 150, None),
    "cached forward, lost pages": ("forward", ("--only", "lost"), 2, 99, None),
    "random cached forward": ("forward", ("--random", "12"), 2, 12, None),
    "random spans of keys": ("forward", ("--spans", "--random", "32"), 6, 32, None),
    "forward, masks as lists": ("forward", ("--only", "lists"), 12, 12, None),
    "backward, masks as lists": ("backward", ("--only", "lists", "--steps", "150"), 17, 17, None),
    # Short problems of every kernel config, and longer ones of 192 columns.
    "backward": ("backward", ("--steps", "16"), 6, 999, None),
    "backward d192": ("backward", ("--only", "d192", "--steps", "100"), 6, 999, None),
    "partial sums of query heads leave float16": (
        *("backward", ("--only", "heads of opposite signs", *LONG), 4, 4, has_four_parts),
    ),
    # Those of clusters, which have one work tile each: CTAs of others draw tiles to the last.
    "backward ends with overlapping sequences": ("backward", ("--overlapping",), 8, 999, None),
    # Gaps, used lengths, sequences without keys or queries, wrong tables; deterministic too.
    "query heads divided in varlen batches": (
        *("backward", ("--only", "varlen in parts", *LONG), 12, 12, has_parts_of_every_head_dim),
    ),
}


def passed_on_the_cpu(checkout: Path, name: str, *options: str) -> tuple[int, list[str]]:
    """The number of cases and the lines of an emulation."""
    code, lines = run(build(checkout, f"{name}_emulation"), *options)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    return int(re.fullmatch(r"(\d+) cases, 0 failed", lines[-1])[1]), lines


@pytest.mark.slow
@pytest.mark.parametrize("name", EMULATIONS)
def test_kernels_on_the_cpu(checkout, name):
    program, options, fewest, most, check = EMULATIONS[name]
    cases, lines = passed_on_the_cpu(checkout, program, *options)
    assert fewest <= cases <= most
    if check is not None:
        check(lines)


@pytest.mark.slow
@pytest.mark.parametrize("header", EMULATED)
def test_a_header_without_unit_tests_is_emulated(checkout, header):
    """A header of tests/device/emulation could take its place."""
    program = build(checkout, f"{EMULATED[header]}_emulation")
    command = find_toolchain().ninja, "-C", program.parent, "-t", "deps"
    target = f"device/{program.name}.cpp.o"
    deps = subprocess.run([*command, target], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"csrc/{header}$", deps, re.MULTILINE), deps


@pytest.mark.sweep
def test_every_forward_on_the_cpu(checkout):
    assert passed_on_the_cpu(checkout, "forward")[0] > 20
