"""What an installation gets: the wheel's contents and metadata, and what the build says."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT

import flashattn3
import flashattn3_bench
from flashattn3.backends.hopper import library as hopper_library

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("needs a source checkout", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77", reason="builds the wheel without isolation")
sys.path.insert(0, str(ROOT))  # an installed package does not bring the build along

from support.checkout import copy_tracked

from third_party import cutlass as cutlass_headers


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The archive, made from a copy of the checkout, so that nothing is left behind there."""
    copy, target = tmp_path_factory.mktemp("checkout") / "copy", tmp_path_factory.mktemp("sdist")
    copy_tracked(ROOT, copy)
    done = build(copy, target, "build_sdist")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def source(sdist, tmp_path_factory) -> Path:
    """The unpacked archive: a wheel is built from it, as pip does."""
    folder = tmp_path_factory.mktemp("source")
    shutil.unpack_archive(sdist, folder)
    return folder / sdist.name.removesuffix(".tar.gz")


def build(
    source: Path, target: Path, hook: str = "build_wheel", **environment: str
) -> subprocess.CompletedProcess:
    # -I and then the folder: what backend-path in pyproject.toml puts on the path, and no more.
    code = (
        "import sys; sys.path.insert(0, '.'); from build_support import backend; "
        f"print(backend.get_requires_for_{hook}()); backend.{hook}({str(target)!r})"
    )
    variables = os.environ | {"FLASHATTN3_BUILD": "python"} | environment
    return run([sys.executable, "-I", "-c", code], cwd=source, env=variables)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=500, **options)


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
    packages = ("flashattn3", "flashattn3_bench")
    modules = {str(p.relative_to(ROOT)) for name in packages for p in (ROOT / name).rglob("*.py")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    types = {"py.typed", "api.pyi", "kvcache_api.pyi", "quantization/rotary_quantization.pyi"}
    assert packed == modules | {f"flashattn3/{name}" for name in types}


def test_the_sdist_holds_every_file_that_is_no_result(source):
    def files(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    packed = files(source)
    for name in ("tests", "docs", "examples", "csrc", "build_support", "third_party", ".ci"):
        wanted = {path for path in files(ROOT) if path.startswith(f"{name}/")}
        assert {path for path in wanted if "cache" not in path} <= packed
    beside = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "LICENSE", "benchmarks/README.md")
    beside += (".clang-format", "benchmarks/tune.py")
    assert packed >= set(beside)


@pytest.mark.slow
def test_the_tests_of_the_sdist_are_found_and_run(source):
    pytest_in = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    paths = (path.relative_to(source) for path in source.glob("tests/test_*.py"))
    of_checkout = [str(path) for path in paths if "ROOT" in (source / path).read_text()]
    assert len(of_checkout) > 15
    found = run([*pytest_in, "--collect-only", "-m", "", *of_checkout], cwd=source)
    assert found.returncode == 0, found.stdout
    done = run([*pytest_in, "tests/test_hopper_build.py"], cwd=source)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_advised_command_takes_no_wheel_that_pip_kept(sdist, tmp_path, monkeypatch):
    """A pure wheel of the same archive is in pip's cache, which knows nothing of the variable."""
    variables = os.environ | {"PIP_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    variables |= {"PIP_FIND_LINKS": str(sdist.parent), "CUDA_HOME": str(tmp_path)}
    monkeypatch.setattr(hopper_library, "PROJECT", tmp_path)
    monkeypatch.setattr(hopper_library.metadata, "distribution", FromAnIndex)
    command = hopper_library.mended_by.__wrapped__().removeprefix("FLASHATTN3_BUILD=cuda pip ")
    here = ["--no-build-isolation", "--no-deps", "--target", str(tmp_path / "installed")]
    pip = [sys.executable, "-m", "pip"]

    def install(options: list[str], build: str) -> subprocess.CompletedProcess:
        return run([*pip, *options, *here], env=variables | {"FLASHATTN3_BUILD": build})

    assert install(["install", "flashattn3"], "python").returncode == 0
    kept = install(["install", "--upgrade", "flashattn3"], "cuda")
    assert kept.returncode == 0  # without nvcc: pip took the wheel that it kept
    fresh = install(command.split(), "cuda")
    assert "The Hopper kernels cannot be built" in fresh.stdout + fresh.stderr


class FromAnIndex:
    """An installed distribution that pip found by its name."""

    def __init__(self, name: str, direct_url: str | None = None) -> None:
        self.direct_url = direct_url

    def read_text(self, name: str) -> str | None:
        return self.direct_url


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [(None, "flashattn3"), ('{"url": "file:///src/flashattn3"}', "file:///src/flashattn3")],
)
def test_an_installed_user_is_told_what_to_type(direct_url, source, tmp_path, monkeypatch):
    monkeypatch.setattr(hopper_library, "PROJECT", tmp_path)
    installed = partial(FromAnIndex, direct_url=direct_url)
    monkeypatch.setattr(hopper_library.metadata, "distribution", installed)
    assert hopper_library.mended_by.__wrapped__() == (
        "FLASHATTN3_BUILD=cuda pip install --no-cache-dir --force-reinstall --no-deps " + source
    )


def test_metadata(wheel):
    fields = Parser().parsestr(metadata(wheel))
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "BSD-3-Clause"
    required = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=2.8"]  # a Triton beside it might not fit it
    extras = {"demo", "diffusers", "docs", "kernels", "test", "transformers", "triton"}
    assert set(fields.get_all("Provides-Extra")) == extras
    assert "flashattn3 = flashattn3.cli:main" in metadata(wheel, "entry_points.txt")


def test_the_pure_build_asks_for_small_tools_alone():
    requires = re.search(r"^requires = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert json.loads(requires[1]) == ["setuptools>=77"]


@pytest.mark.parametrize(
    ("path", "setuptools"),
    [
        ("docs/backends.md", "'setuptools>=77'"),
        ("CONTRIBUTING.md", "'setuptools>=77'"),
        ("build_support/wheel.txt", "setuptools=="),  # which .ci/run installs
    ],
)
def test_every_list_of_build_tools_names_the_same_versions(path, setuptools):
    text = (ROOT / path).read_text()
    for wanted in (setuptools, "ninja", cutlass_headers.PINNED):
        assert wanted in text
    assert "-r build_support/wheel.txt" in (ROOT / ".ci" / "run").read_text()


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
    return run(command, env=variables)


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


def test_every_module_imports():
    """The benchmarks and the tuner too, which no other test runs on a CPU."""
    packages = (flashattn3, flashattn3_bench)
    names = [m.name for x in packages for m in pkgutil.walk_packages(x.__path__, f"{x.__name__}.")]
    assert "flashattn3_bench.command" in names
    for name in names:
        if name.rpartition(".")[2] != "__main__":
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert error.name == "triton", name
    runpy.run_path(str(ROOT / "benchmarks" / "tune.py"))
