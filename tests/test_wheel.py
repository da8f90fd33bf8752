"""The wheels: what the library may take from others, what they hold, and what an import says."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

if not (ROOT / "build_support").is_dir():
    pytest.skip("needs a source checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT))  # an installed package does not bring the build along

from build_support import cuda12, hub, release, wheel
from build_support.portable import Portable, symbols, write_empty_library, write_stubs
from flashattn3.backends.hopper.kernel_configs import configs_hash
from flashattn3.backends.hopper.library import OPS_LIBRARY, PACKAGE, find_library
from third_party import cutlass

LIBRARY = PACKAGE / OPS_LIBRARY
NEEDS_LIBRARY = pytest.mark.skipif(not LIBRARY.is_file(), reason="no compiled kernels here")
NEEDS_GCC = pytest.mark.skipif(
    shutil.which("x86_64-linux-gnu-g++") is None, reason="needs Debian's g++"
)


def taken(library: Path) -> set[str]:
    """The symbols, without versions, that a library takes from others."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


@NEEDS_LIBRARY
def test_the_library_takes_known_symbols_alone():
    """A build from source takes those of C from this machine's glibc and CUDA runtime."""
    known = {
        name for versions in symbols("x86_64").values() for x in versions.values() for name in x
    }
    in_glibc_2_28_cpp = ("__libc_single_threaded", "__throw_bad_array_new_length", "basic_string")
    new = {
        name
        for name in taken(LIBRARY) - known
        if name.startswith(("_Z", "aoti", "torch"))
        and not any(x in name for x in in_glibc_2_28_cpp)
    }
    assert not new


@NEEDS_GCC
@pytest.mark.parametrize(("function", "error"), [("getpid", None), ("gettid", "gettid")])
def test_a_symbol_that_is_not_listed_does_not_link(function, error, tmp_path):
    """gettid is glibc 2.30's."""
    portable = Portable("x86_64", tmp_path, tmp_path / "stubs")
    write_stubs(portable)
    source = tmp_path / "x.cpp"
    source.write_text(f'extern "C" int {function}();\nint called() {{ return {function}(); }}\n')
    flags = [flag for flag in portable.link_flags if flag != "-lcudart_static"]
    command = [portable.compiler, "-fPIC", source, "-o", tmp_path / "x.so", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == (error is None), done.stderr
    assert error is None or f"undefined reference to `{error}'" in done.stderr
    if error is None:
        read = subprocess.run(["readelf", "-V", tmp_path / "x.so"], capture_output=True, text=True)
        assert set(re.findall(r"GLIBC_[\d.]+", read.stdout)) <= {"GLIBC_2.2.5"}


@NEEDS_GCC
def test_an_empty_library_says_that_there_is_no_gpu(tmp_path):
    """In the place of CUDA's libraries: what torch makes of another answer, it would crash with."""
    write_empty_library(tmp_path / "libx.so", {"": ["cuInit"], "X_1": ["_Z3abcv"]}, "g++")
    library = ctypes.CDLL(tmp_path / "libx.so")
    assert (library.cuInit(0), library["_Z3abcv"]()) == (100, 100)


def test_the_notices_name_what_the_wheel_holds():
    notices = (ROOT / "THIRD_PARTY_NOTICES").read_text()
    name, version = cutlass.PINNED.split("==")
    assert name == "nvidia-cutlass"
    assert f"NVIDIA CUTLASS {version.removesuffix('.0')}," in notices
    assert cuda12.RUNTIME.startswith("nvidia-cuda-runtime")
    assert "NVIDIA CUDA Runtime library (cudart, linked statically)" in notices
    assert len(re.findall(r"(?m)^\S.*(, https?://\S+|statically\))$", notices)) == 2


@NEEDS_LIBRARY
def test_the_library_holds_what_the_notices_name():
    data = LIBRARY.read_bytes()
    assert b"cudart.shm" in data and b"pybind11" not in data and b"libpython" not in data


IMPORTED = """
import flashattn3
from flashattn3.backends.hopper.library import find_library
mapped = "flashattn3_ops" in open("/proc/self/maps").read()
print(mapped, find_library().error, sep="\\n")
"""


def imported(**environment: str) -> list[str]:
    """Whether an import loads the library, and what it says when it is asked for."""
    variables = os.environ | {"PYTHONPATH": str(PACKAGE.parent)} | environment
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=variables, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout.splitlines()


def test_an_import_without_a_gpu_is_silent_and_loads_no_library():
    assert imported() == ["False", str(find_library().error)]


@NEEDS_LIBRARY
@NEEDS_GCC
def test_an_old_driver_is_a_sentence(tmp_path):
    """A libcuda.so.1 that says it is of CUDA 11.8."""
    source = tmp_path / "libcuda.cpp"
    source.write_text(
        'extern "C" int cuDriverGetVersion(int* version) { *version = 11080; return 0; }\n'
        'extern "C" int cuInit(unsigned) { return 0; }\n'
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    loaded, error = imported(LD_LIBRARY_PATH=str(tmp_path))
    assert loaded == "False"
    assert re.fullmatch(
        r"the Hopper kernels were built with CUDA 1\d\.\d, and this driver runs CUDA 11\.8 at most",
        error,
    )


def package_without_library(folder: Path) -> Path:
    """Copy the package into a folder; return where its library belongs."""
    package = folder / "flashattn3"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    (package / "_lib").mkdir()
    return package / OPS_LIBRARY


@NEEDS_GCC
@pytest.mark.parametrize(
    ("hash_of_library", "built_from"),
    [("another", "other kernel configs"), (configs_hash(), "other sources")],
)
def test_the_library_of_another_release_is_a_sentence(hash_of_library, built_from, tmp_path):
    """One that another wheel left behind: of other kernel configs, or without our operators."""
    source = tmp_path / "left.cpp"
    source.write_text(
        'extern "C" const char* flashattn3_driver_error() { return ""; }\n'
        f'extern "C" const char* flashattn3_configs_hash() {{ return "{hash_of_library}"; }}\n'
    )
    library = package_without_library(tmp_path)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    said = f"the Hopper kernels were built from {built_from}"
    assert imported(PYTHONPATH=str(tmp_path)) == ["False", said]


@NEEDS_LIBRARY
@NEEDS_GCC
def test_a_torch_without_the_stable_interface_is_a_sentence(tmp_path):
    """torch 2.8 lacks functions of the library; here one has a name that no torch knows."""
    data = LIBRARY.read_bytes().replace(b"\0aoti_torch_copy_\0", b"\0aoti_torch_c0py_\0")
    package_without_library(tmp_path).write_bytes(data)
    loaded, error = imported(PYTHONPATH=str(tmp_path))
    assert loaded == "False"
    assert error.startswith("the Hopper kernels do not load (")
    assert "undefined symbol: aoti_torch_c0py_" in error


@pytest.mark.slow
def test_wheels_of_one_library(tmp_path, monkeypatch):
    """Names, tags and files of the wheels, and the same bytes twice, with an empty library."""
    if wheel.other_tools():
        pytest.skip("build_support/wheel.txt is not installed")
    library = tmp_path / "libflashattn3_ops.so"
    write_empty_library(library, {"": ["flashattn3_configs_hash"]}, "g++")
    monkeypatch.setattr(wheel, "compile_library", lambda machine: library)
    files = {}
    for out in ("first", "second"):
        for kind in ("x86_64", "pure"):
            path = wheel.write_wheel(kind, tmp_path / out)
            files.setdefault(path.name, []).append(path.read_bytes())
    first, second = files
    assert first.endswith("-cp310-abi3-manylinux_2_28_x86_64.whl")
    assert second.endswith("-py3-none-any.whl")
    assert all(once == again for once, again in files.values())
    binary, pure = (
        set(zipfile.ZipFile(tmp_path / "first" / name).namelist()) for name in (first, second)
    )
    added = {name for name in binary - pure if not name.endswith("/")}
    assert added == {f"flashattn3/{OPS_LIBRARY}"} and pure <= binary
    assert any(name.endswith("/THIRD_PARTY_NOTICES") for name in pure)
    assert {"flashattn3", "flashattn3_bench"} <= {name.split("/")[0] for name in pure}
    venv.create(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", f"--python={tmp_path}/environment/bin/python", "install"]
    # Where one wheel is, pip leaves it alone, as docs/install.md says, and replaces it if forced.
    for name, options, found in (
        (second, (), 0),
        (first, (), 0),
        (first, ("--force-reinstall",), 1),
        (second, (), 1),
        (second, ("--force-reinstall",), 0),
    ):
        given = "--quiet", "--no-deps", "--no-index", *options, tmp_path / "first" / name
        subprocess.run([*pip, *given], check=True)
        assert len([*(tmp_path / "environment").rglob(OPS_LIBRARY.name)]) == found


def test_the_hub_takes_the_libraries_of_wheels(tmp_path):
    path = tmp_path / "flashattn3-1.2.3-cp310-abi3-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"flashattn3/{OPS_LIBRARY}", b"aarch64\0flashattn3_hopper\0")
    compiled = [folder for folder in hub.write(tmp_path, [path]) if "stable" in folder.name]
    assert [folder.name for folder in compiled] == [
        f"torch-stable-abi29-cu{cuda}-aarch64-linux" for cuda in (126, 130)
    ]
    assert all((folder / OPS_LIBRARY).read_bytes().startswith(b"aarch64") for folder in compiled)


def test_version_changelog_and_citation_move_together(tmp_path):
    for place in ("flashattn3/__init__.py", "CHANGELOG.md", "CITATION.cff"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    assert release.disagreement("v7.8.9", tmp_path).startswith("flashattn3/__init__.py has version")
    release.move("7.8.9", "2031-02-03", tmp_path)
    assert release.disagreement("v7.8.9", tmp_path) is None
    assert "## 7.8.9 (2031-02-03)" in (tmp_path / "CHANGELOG.md").read_text()
    with pytest.raises(ValueError, match="must begin with a version that is not released yet"):
        release.move("7.9.0", "2031-02-04", tmp_path)
    (tmp_path / "CITATION.cff").write_text((ROOT / "CITATION.cff").read_text())
    assert "CITATION.cff has version" in release.disagreement("v7.8.9", tmp_path)
