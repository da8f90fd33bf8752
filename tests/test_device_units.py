"""The unit tests of csrc/tile and csrc/attention: tests/device/unit_check.cu.

Each header has a file of tests. The program compiles without a GPU, and its tests of block ranges,
tile order, shares of work, lengths, descales and register coordinates run on the host.

And kernels on the CPU: tests/device/append_emulation.cpp, decode_emulation.cpp,
forward_emulation.cpp (of cached calls) and backward_emulation.cpp.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

if not (ROOT / "build_support").is_dir():
    pytest.skip("needs a source checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from build_support.toolchain import BuildError, find_toolchain

DEVICE_TESTS = ROOT / "tests" / "device"
FOLDERS = ("tile", "attention")
HEADERS = [
    path.relative_to(ROOT / "csrc")
    for folder in FOLDERS
    for path in sorted((ROOT / "csrc" / folder).iterdir())
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
    """A copy of the checkout to build in."""
    try:
        find_toolchain()
    except BuildError as error:
        pytest.skip(str(error).replace("\n", " "))
    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_lib")
    for name in ("flashattn3", "build_support", "third_party", "csrc", "tests/device"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


def build(checkout: Path, program: str) -> Path:
    command = [sys.executable, "-m", "build_support", program]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout / "build" / "hopper" / program


@pytest.fixture(scope="module")
def unit_check(checkout) -> Path:
    """One unit, 15 s of a CPU."""
    return build(checkout, "unit_check")


def run(program: Path, *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of a run."""
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=400)
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


@pytest.fixture(scope="module")
def decode_emulation(checkout) -> Path:
    """One unit, 20 s of a CPU."""
    return build(checkout, "decode_emulation")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--random", "15")], ids=["named", "random"])
def test_decode_on_the_cpu(decode_emulation, options):
    """40 s of one."""
    code, lines = run(decode_emulation, *options)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    cases = int(re.fullmatch(r"(\d+) cases, 0 failed", lines[-1])[1])
    assert cases == 15 if options else cases > 40


@pytest.mark.slow
def test_appends_on_the_cpu(checkout):
    """Random problems, ten seconds of them and of the compiler."""
    code, lines = run(build(checkout, "append_emulation"), "1000")
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert lines[-1] == "1000 cases, 0 failed"
    assert int(re.fullmatch(r"(\d+) with vectors of K", lines[-2])[1]) > 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--only", "lost"), ("--random", "12"), pytest.param((), marks=pytest.mark.sweep)],
    ids=["lost", "random", "named"],
)
def test_cached_forward_on_the_cpu(checkout, options):
    """20 s of a CPU, and minutes for the sweep. The program leaves out random problems that would
    take longer."""
    code, lines = run(build(checkout, "forward_emulation"), *options)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert int(re.fullmatch(r"(\d+) cases, 0 failed", lines[-1])[1]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--steps", "16"), ("--only", "d192", "--steps", "100")], ids=["all", "d192"]
)
def test_backward_on_the_cpu(checkout, options):
    """Short problems of every kernel config, and longer ones of 192 columns."""
    code, lines = run(build(checkout, "backward_emulation"), *options)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert int(re.fullmatch(r"(\d+) cases, 0 failed", lines[-1])[1]) > 5


@pytest.mark.slow
def test_partial_sums_of_query_heads_may_leave_float16_on_the_cpu(checkout):
    options = ("--only", "heads of opposite signs", "--steps", "1000")
    code, lines = run(build(checkout, "backward_emulation"), *options)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert lines[-1] == "4 cases, 0 failed"
    assert sum("in 4 parts;" in line for line in lines) >= 4 * 2


@pytest.mark.slow
def test_backward_ends_with_overlapping_sequences_on_the_cpu(checkout):
    """Those of clusters, which have one work tile each: CTAs of others draw tiles to the last."""
    code, lines = run(build(checkout, "backward_emulation"), "--overlapping")
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert int(re.fullmatch(r"(\d+) cases, 0 failed", lines[-1])[1]) >= 8


@pytest.mark.slow
def test_query_heads_divided_in_varlen_batches_on_the_cpu(checkout):
    """Head dims 64 to 256: gaps, used lengths, sequences without keys or queries, wrong tables;
    deterministic too. 20 s of a CPU."""
    options = ("--only", "varlen in parts", "--steps", "1000")
    code, lines = run(build(checkout, "backward_emulation"), *options)
    assert code == 0, "\n".join(line for line in lines if not line.startswith("PASS"))
    assert lines[-1] == "12 cases, 0 failed"
    on_all_sms = [line for line in lines[:-1] if "3 SMs" not in line]
    assert len(on_all_sms) == 12 * 2
    assert all(re.search(r"in [234] parts;", line) for line in on_all_sms)
    for head_dim in (64, 128, 192, 256):
        assert any(f"_d{head_dim}_" in line for line in on_all_sms)
