"""Compiles the kernel configs into the operator library of the package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .ninja_file import OPS_LIBRARY, ninja_text
from .toolchain import BuildError, Toolchain, find_toolchain
from .units import ROOT, write_units

BUILD_FOLDER = ROOT / "build" / "hopper"
UNITS_FOLDER = BUILD_FOLDER / "units"
GIB_PER_COMPILER = 1  # a forward kernel config takes under half of it
# Two checkouts with the same sources and tools share what ccache holds: tests build in a copy.
CCACHE = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}


def build(
    package: Path,
    targets: Sequence[str] = (),
    tools: Toolchain | None = None,
    folder: Path = BUILD_FOLDER,
) -> list[Path]:
    """Compile what has changed into the library of a package folder; return its path.

    targets: targets of the build folder to build instead.
    tools, folder: another compiler and its build folder, instead of this machine's.
    FLASHATTN3_KERNELS, a glob over kernel config names, builds a subset. MAX_JOBS limits the
    number of compilers.
    """
    tools = tools or find_toolchain()
    pattern = os.environ.get("FLASHATTN3_KERNELS") or "*"
    try:
        units = write_units(folder / "units", pattern)
    except ValueError as error:
        raise BuildError(f"FLASHATTN3_KERNELS: {error}") from None
    text = ninja_text(tools, units, package.resolve())
    if tools.portable:  # names in the machine code depend on the source's path as it is given
        text = text.replace(f"{folder}/", "").replace(str(ROOT), os.path.relpath(ROOT, folder))
    (folder / "build.ninja").write_text(text)
    command = [tools.ninja, "-C", folder, f"-j{num_jobs()}", *targets]
    if subprocess.run(command, env=CCACHE | os.environ).returncode != 0:
        raise BuildError("The build of the Hopper kernels failed; the compiler's words are above.")
    if targets:
        return [folder / target for target in targets]
    return [package / OPS_LIBRARY]


def num_jobs() -> int:
    """MAX_JOBS, else one per CPU and per GIB_PER_COMPILER GiB of memory, whichever is less."""
    asked = os.environ.get("MAX_JOBS")
    if asked:
        try:
            return max(1, int(asked))
        except ValueError:
            raise BuildError(f"MAX_JOBS must be an integer, got {asked!r}") from None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_COMPILER)))
