"""Checks the tools that Triton compiles with: reports each that is missing or does not fit."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

OLDEST = (3, 5)  # oldest version that the kernels are tested with
Version = tuple[int, ...]


def find_errors() -> list[str]:
    """One sentence for each part that is missing or does not fit, with its remedy."""
    fit = wanted_triton() or "triton>=3.5"
    if importlib.util.find_spec("triton") is None:
        return [f"Triton is not installed: pip install '{fit}'"]
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return [f"Triton does not import ({error}): pip install --force-reinstall '{fit}'"]
    found = (version_error(), ptxas_error(driver_cuda()), compiler_error(), header_error())
    return [error for error in found if error is not None]


def installed_version() -> str | None:
    """Its own word: the distribution of another name, or with a suffix, is as good. None if Triton
    does not import."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def wanted_triton() -> str | None:
    """The Triton that the installed torch requires, as 'triton==3.8.0'; None for CPU builds."""
    for line in metadata.requires("torch") or ():
        asked = re.match(r"triton\s*\(?==\s*([\w.]+)", line)
        if asked:
            return f"triton=={asked[1]}"
    return None


def version_error() -> str | None:
    found, wanted = installed_version(), wanted_triton()
    if wanted is not None and wanted != f"triton=={found}":
        return f"Triton {found} is installed, torch asks for another: pip install {wanted}"
    if _numbers(found) < OLDEST:
        return f"Triton {found} is older than 3.5: pip install a newer torch, which brings its own"
    return None


def ptxas_error(driver: Version | None) -> str | None:
    """driver: the newest CUDA version that the driver supports; None without a driver."""
    ptxas = ptxas_path()
    found = cuda_of(ptxas)
    variable = "TRITON_PTXAS_PATH"
    if found is None:
        return f"no ptxas runs at {ptxas}: export {variable}={fit_ptxas(driver)}"
    if driver is None or found[0] <= driver[0]:
        return None
    return (
        f"ptxas of CUDA {_dotted(found)} at {ptxas} is too new for the driver, which runs CUDA "
        f"{_dotted(driver)}: export {variable}={fit_ptxas(driver)}"
    )


def ptxas_path() -> Path:
    """The path in TRITON_PTXAS_PATH, else that of Triton's own ptxas."""
    if os.environ.get("TRITON_PTXAS_PATH"):
        return Path(os.environ["TRITON_PTXAS_PATH"])
    package = Path(importlib.util.find_spec("triton").origin).parent
    return package / "backends" / "nvidia" / "bin" / "ptxas"


def cuda_of(ptxas: Path) -> Version | None:
    """The CUDA version of a ptxas; None if it does not run."""
    try:
        done = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return _numbers(release[1]) if release else None


def fit_ptxas(driver: Version | None) -> str:
    """The path of a ptxas on this machine that fits the driver; if none, what to install."""
    for folder in (os.environ.get("PATH"), "/usr/local/cuda/bin"):
        found = shutil.which("ptxas", path=folder)
        version = cuda_of(Path(found)) if found else None
        if version is not None and (driver is None or version[0] <= driver[0]):
            return found
    which = "CUDA's toolkit" if driver is None else f"the toolkit of CUDA {_dotted(driver)}"
    return f"/usr/local/cuda/bin/ptxas (after installing {which})"


def driver_cuda() -> Version | None:
    """The newest CUDA version that the installed driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        error = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if error else (version.value // 1000, version.value % 1000 // 10)


def compiler_error() -> str | None:
    """Triton compiles its launchers with $CC, else gcc or clang."""
    asked = os.environ.get("CC")
    if any(map(shutil.which, [asked.split()[0]] if asked else ["gcc", "clang"])):
        return None
    return f"no C compiler ({f'CC={asked}' if asked else 'gcc or clang'}): apt install gcc"


def header_error() -> str | None:
    include = Path(sysconfig.get_path("include"))
    if (include / "Python.h").is_file():
        return None
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return f"no Python.h in {include}: apt install {python}-dev"


def _numbers(version: str) -> Version:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
