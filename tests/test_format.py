"""clang-format on all C++ and CUDA sources, ruff on all Python: no file is excluded."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

if not (ROOT / "build_support").is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from build_support import reading

SOURCES = [
    path
    for folder in ("csrc", "tests/device")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".cuh", ".cu", ".cpp")
]
DEVICE_FUNCTION = re.compile(
    r" *(template <.*> )?(static )?(inline )?(__host__ )?__(device|global)__ "
)


def test_every_source_is_formatted():
    beside = Path(sys.executable).with_name("clang-format")
    clang_format = str(beside) if beside.is_file() else shutil.which("clang-format")
    if clang_format is None:
        pytest.skip("clang-format is not installed")
    command = [clang_format, "--dry-run", "--Werror", *SOURCES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ruff_excludes_nothing():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    keys = {*settings, *settings["lint"], *settings.get("format", ())}
    assert not keys & {"exclude", "extend-exclude", "per-file-ignores", "extend-per-file-ignores"}


def function_lengths(text: str) -> dict[int, int]:
    """Of each device function of a formatted source: its first line and its number of lines."""
    lines, lengths = text.splitlines(), {}
    for first, line in enumerate(lines):
        if not DEVICE_FUNCTION.match(line):
            continue
        closing = line[: len(line) - len(line.lstrip())] + "}"
        for last in range(first, len(lines)):
            if lines[last] == closing or (lines[last].endswith((";", " }")) and last == first):
                lengths[first + 1] = last - first + 1
                break
    return lengths


def test_sources_have_the_sizes_that_the_readme_promises():
    promise = (
        r"Files stay under (\d+) lines in (.*?) and (\d+) elsewhere, device functions under (\d+)"
    )
    readme = " ".join((ROOT / "csrc" / "README.md").read_text().split())
    small, folders, large, function = re.search(promise, readme).groups()
    low = re.split(r",? and |, ", folders)
    assert set(low) <= {path.name for path in (ROOT / "csrc").iterdir()}
    too_long, functions = [], 0
    for path in SOURCES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        bound = int(small) if path.parent.name in low else int(large)
        if name.startswith("csrc/") and text.count("\n") >= bound:
            too_long.append(f"{name}: {text.count(chr(10))} lines")
        lengths = function_lengths(text)
        functions += len(lengths)
        too_long += [f"{name}:{at}: {n} lines" for at, n in lengths.items() if n >= int(function)]
    assert functions > 300
    assert too_long == []


def test_the_forward_is_read_in_the_sizes_that_the_readme_promises():
    readme = " ".join((ROOT / "csrc" / "README.md").read_text().split())
    sizes = r"at most (\d+) files and ([\d,]+) lines"
    promised = re.search(
        rf"the main loop for 16-bit inputs is read in {sizes}, the whole 16-bit forward in {sizes}",
        readme,
    ).groups()
    most = [int(number.replace(",", "")) for number in promised]
    loop, whole = reading.main_loop(), reading.whole_forward()
    assert "tile/gemm.cuh" in loop and loop.keys() < whole.keys()
    found = [len(loop), sum(loop.values()), len(whole), sum(whole.values())]
    assert all(n <= bound for n, bound in zip(found, most, strict=True)), (found, most)


def test_q_crosses_the_files_that_the_readme_lists():
    """Each file of the path names q, and the table has them in order."""
    table = re.findall(r"^\| `(\S+)` \| .*$", (ROOT / "csrc" / "README.md").read_text(), re.M)
    listed = [name for name in table if "." in name]
    assert tuple(listed) == reading.PATH_IN_CSRC
    for name in reading.PATH_IN_CSRC[:-1]:
        assert re.search(r"\b\w*[._]?q(_desc)?\b", (ROOT / "csrc" / name).read_text()), name
    assert len(reading.PATH_IN_PYTHON) + len(reading.PATH_IN_CSRC) <= 12
