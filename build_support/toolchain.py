"""Decides whether to build the Hopper kernels, and finds the tools."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from third_party import cutlass

from .portable import Portable

OLDEST_NVCC = (12, 4)  # the first that compiles C++20 with class types as template arguments
OLDEST_TORCH_ABI = "0x0209000000000000"  # 2.9, as pyproject.toml has it
CHOICES = ("cuda", "python")
BUILD_REQUIREMENTS = ("ninja", "torch>=2.9", cutlass.PINNED)  # besides pyproject.toml's
INSTALL_HINT = f"pip install ninja 'torch>=2.9' && pip install --no-deps {cutlass.PINNED}"


class BuildError(RuntimeError):
    """The kernels cannot be built; the message names the missing part and the remedy."""


@dataclass(frozen=True)
class Toolchain:
    """Programs and folders of headers and libraries. ccache is None if not installed.

    portable: how a library for other machines is linked (portable.py).
    """

    nvcc: Path
    ninja: Path
    ccache: Path | None
    cutlass_include: Path
    torch_include: Path
    torch_lib: Path
    portable: Portable | None = None


def kernels_are_wanted() -> bool:
    """FLASHATTN3_BUILD=cuda: yes; =python: no; unset: if nvcc fits and a Hopper GPU is visible."""
    choice = os.environ.get("FLASHATTN3_BUILD") or None
    if choice not in (None, *CHOICES):
        raise BuildError(f"FLASHATTN3_BUILD must be one of {', '.join(CHOICES)}, got {choice!r}")
    if choice is not None:
        return choice == "cuda"
    nvcc = find_nvcc()
    return nvcc is not None and nvcc_version(nvcc) >= OLDEST_NVCC and hopper_is_visible()


def find_toolchain() -> Toolchain:
    """All tools of the build; raises one BuildError that lists every missing part."""
    finders = {
        "nvcc": _fit_nvcc,
        "ninja": _ninja,
        "cutlass_include": _cutlass_include,
        "torch_include": _torch_include,
    }
    found, missing = {}, []
    for name, find in finders.items():
        try:
            found[name] = find()
        except BuildError as error:
            missing.append(str(error))
    if missing:
        raise BuildError(
            "The Hopper kernels cannot be built:\n  "
            + "\n  ".join(missing)
            + f"\nFor what pip has: {INSTALL_HINT}"
            + "\nFLASHATTN3_BUILD=python installs without them; Triton then runs on Hopper GPUs."
        )
    ccache = shutil.which("ccache")
    torch_lib = found["torch_include"].parent / "lib"
    return Toolchain(ccache=Path(ccache) if ccache else None, torch_lib=torch_lib, **found)


def find_nvcc() -> Path | None:
    """nvcc in CUDA_HOME or CUDA_PATH, else on PATH, else in /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            nvcc = Path(os.environ[variable], "bin", "nvcc")
            return nvcc if nvcc.is_file() else None
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found) if found else None


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """(0, 0) if it does not run."""
    try:
        printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return 0, 0
    release = re.search(r"release (\d+)\.(\d+)", printed)
    return (int(release[1]), int(release[2])) if release else (0, 0)


def hopper_is_visible() -> bool:
    """Whether the driver shows a GPU of compute capability 9.0 (CUDA_VISIBLE_DEVICES counts)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return any(_capability(driver, ordinal) == (9, 0) for ordinal in range(count.value))


def _capability(driver: ctypes.CDLL, ordinal: int) -> tuple[int, ...]:
    device, value = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    parts = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return tuple(parts)


def _fit_nvcc() -> Path:
    oldest = ".".join(map(str, OLDEST_NVCC))
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(f"nvcc {oldest} or newer: not in CUDA_HOME, CUDA_PATH or PATH")
    version = nvcc_version(nvcc)
    if version < OLDEST_NVCC:
        found = f"is {'.'.join(map(str, version))}" if any(version) else "prints no version"
        raise BuildError(f"nvcc {oldest} or newer: {nvcc} {found}")
    return nvcc


def _ninja() -> Path:
    """The wheel installs ninja beside the interpreter, which need not be on PATH."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("ninja", path=scripts) or shutil.which("ninja")
    if found is None:
        raise BuildError("ninja: not on PATH and not installed for this Python")
    return Path(found)


def _cutlass_include() -> Path:
    try:
        return cutlass.include_dir()
    except cutlass.CutlassNotFoundError as error:
        raise BuildError(f"CUTLASS headers: {error}") from None


def _torch_include() -> Path:
    """Find torch without importing it, which takes seconds. Any build will do, CPU too."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch 2.9 or newer: not installed where the build runs")
    include = Path(next(iter(spec.submodule_search_locations)), "include")
    if not (include / "torch" / "csrc" / "stable" / "tensor_struct.h").is_file():
        raise BuildError(f"torch 2.9 or newer: {include} has no headers of its stable interface")
    return include
