"""clang-format on all C++ and CUDA sources, ruff on all Python: no file is excluded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

SOURCES = [
    path
    for folder in ("csrc", "tests/device")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".cuh", ".cu", ".cpp")
]


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
