"""What an installation gets: the wheel's contents and metadata, and what the build says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from helpers import ROOT

import flashattn3

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("needs a source checkout", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77", reason="builds the wheel without isolation")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what the build reads, so that it leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "THIRD_PARTY_NOTICES"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_lib")
    for name in ("flashattn3", "build_support", "third_party", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


def build(source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess:
    # -I and then the folder: what backend-path in pyproject.toml puts on the path, and no more.
    code = (
        "import sys; sys.path.insert(0, '.'); from build_support import backend; "
        f"print(backend.get_requires_for_build_wheel()); backend.build_wheel({str(target)!r})"
    )
    variables = os.environ | {"FLASHATTN3_BUILD": "python"} | environment
    return subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=source,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    done = build(source, target)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob("*.whl")
    assert path.name == f"flashattn3-{flashattn3.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str = "METADATA") -> str:
    return wheel.read(f"flashattn3-{flashattn3.__version__}.dist-info/{name}").decode()


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "flashattn3").rglob("*.py")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == modules


def test_metadata(wheel):
    fields = Parser().parsestr(metadata(wheel))
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "BSD-3-Clause"
    required = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=2.8"]  # a Triton beside it might not fit it
    assert set(fields.get_all("Provides-Extra")) == {"demo", "test", "triton"}
    assert "flashattn3 = flashattn3.cli:main" in metadata(wheel, "entry_points.txt")


def test_the_pure_build_asks_for_nothing_but_setuptools():
    requires = re.search(r"^requires = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires[1] == '["setuptools>=77"]'


def test_a_build_that_is_not_known_is_refused(source, tmp_path):
    done = build(source, tmp_path, FLASHATTN3_BUILD="rocm")
    assert done.returncode != 0
    assert "FLASHATTN3_BUILD must be one of cuda, python, got 'rocm'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_build_of_the_kernels_without_tools_names_each_that_is_missing(source, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    environment = {"CUDA_HOME": nowhere, "CUTLASS_PATH": nowhere, "PATH": nowhere}
    done = build(source, tmp_path, FLASHATTN3_BUILD="cuda", **environment)
    assert done.returncode != 0
    for wanted in ("'ninja'", "'torch>=2.9'", "'nvidia-cutlass=="):
        assert wanted in done.stdout
    for missing in ("nvcc 12.4 or newer: not in", "CUTLASS_PATH has no", "FLASHATTN3_BUILD=python"):
        assert missing in done.stderr


def cutlass(**environment: str) -> subprocess.CompletedProcess:
    variables = {k: v for k, v in os.environ.items() if k != "CUTLASS_PATH"} | environment
    script = str(ROOT / "third_party" / "cutlass.py")
    # -S leaves out installed packages, and so the nvidia-cutlass wheel; -E leaves out PYTHONPATH.
    command = [sys.executable, "-S", "-E", script]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def test_cutlass_is_found_where_the_variable_says(tmp_path):
    header = tmp_path / "include" / "cute" / "tensor.hpp"
    header.parent.mkdir(parents=True)
    header.touch()
    assert cutlass(CUTLASS_PATH=str(tmp_path)).stdout.strip() == str(tmp_path / "include")


def test_missing_cutlass_is_said_with_what_mends_it(tmp_path):
    assert "CUTLASS_PATH has no" in cutlass(CUTLASS_PATH=str(tmp_path)).stderr
    done = cutlass()
    assert done.returncode != 0
    assert "pip install nvidia-cutlass==" in done.stderr
