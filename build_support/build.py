"""Compiles the kernel configs into the two libraries of the package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .ninja_file import INFO_MODULE, OPS_LIBRARY, ninja_text
from .toolchain import BuildError, find_toolchain
from .units import ROOT, write_units

BUILD_FOLDER = ROOT / "build" / "hopper"
UNITS_FOLDER = BUILD_FOLDER / "units"
OUTPUTS = (OPS_LIBRARY, INFO_MODULE)
GIB_PER_COMPILER = 1  # a forward kernel config takes under half of it
# Two checkouts with the same sources and tools share what ccache holds: tests build in a copy.
CCACHE = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}


def build(package: Path, targets: Sequence[str] = ()) -> list[Path]:
    """Compile what has changed into the libraries of a package folder; return their paths.

    targets: targets of the build folder to build instead.
    FLASHATTN3_KERNELS, a glob over kernel config names, builds a subset. MAX_JOBS limits the
    number of compilers.
    """
    tools = find_toolchain()
    pattern = os.environ.get("FLASHATTN3_KERNELS") or "*"
    try:
        units = write_units(UNITS_FOLDER, pattern)
    except ValueError as error:
        raise BuildError(f"FLASHATTN3_KERNELS: {error}") from None
    text = ninja_text(tools, units, package.resolve())
    (BUILD_FOLDER / "build.ninja").write_text(text)
    command = [tools.ninja, "-C", BUILD_FOLDER, f"-j{num_jobs()}", *targets]
    if subprocess.run(command, env=CCACHE | os.environ).returncode != 0:
        raise BuildError("The build of the Hopper kernels failed; the compiler's words are above.")
    if targets:
        return [BUILD_FOLDER / target for target in targets]
    return [package / output for output in OUTPUTS]


def num_jobs() -> int:
    """MAX_JOBS, else one per CPU and per GIB_PER_COMPILER GiB of memory, whichever is less."""
    asked = os.environ.get("MAX_JOBS")
    if asked:
        return max(1, int(asked))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_COMPILER)))
