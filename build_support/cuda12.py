"""``python -m build_support.cuda12`` installs the compiler of the wheels and prints its CUDA_HOME.

A wheel must run on the drivers of CUDA 12, so its machine code is of the assembler of CUDA 12.9 and
its CUDA runtime is 12.9's. pip has no front end of 12.9 (nvcc, cudafe++, cicc), so the front end is
that of 13.0: its PTX says version 9.0, which is lowered to 8.8, the newest that 12.9 assembles. The
assembler reads every instruction, so one that 8.8 lacks is an error of the build.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .toolchain import BuildError
from .units import ROOT

FOLDER = ROOT / "build" / "cuda-12.9"
FRONT_END = ("nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-crt==13.0.88")
ASSEMBLER = "nvidia-cuda-nvcc-cu12==12.9.86"
HEADERS = "nvidia-cuda-cccl-cu12==12.9.27"
RUNTIME = "nvidia-cuda-runtime-cu12==12.9.79"
MACHINES = ("x86_64", "aarch64")
PTX = {"written": "9.0", "assembled": "8.8"}

# nvcc reads it beside its program. CUTLASS asks for the version of the front end where it means
# that of the headers.
PROFILE = 'INCLUDES += "-include" "$(TOP)/include/cuda_12_9.h" $(_SPACE_)\n'
VERSION_HEADER = """#undef __CUDACC_VER_MAJOR__
#undef __CUDACC_VER_MINOR__
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
"""
# The cubin of a PTX is kept, so that the host code of another machine gets the same one.
PTXAS = """#!/usr/bin/env bash
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
for ((i = 1; i <= $#; i++)); do
  [ "${!i}" != -o ] || { next=$((i + 1)); cubin=${!next}; }
  [[ "${!i}" != *.ptx ]] || ptx=${!i}
done
[ -n "${ptx:-}" ] || exec "$home/bin/ptxas-12.9" "$@"
sed -i 's/^\\.version %(written)s$/.version %(assembled)s/' "$ptx"
options=${*//"$ptx"/}
kept="$home/cubins/$( (cat "$ptx"; echo "${options//"$cubin"/}") | sha256sum | cut -c1-64)"
if [ ! -f "$kept" ]; then
  mkdir -p "$home/cubins"
  "$home/bin/ptxas-12.9" "$@" 2>"$kept.log.$$" || { cat "$kept.log.$$" >&2; exit 1; }
  cp "$cubin" "$kept.$$" && mv "$kept.log.$$" "$kept.log" && mv "$kept.$$" "$kept"
fi
cp "$kept" "$cubin"
cat "$kept.log" >&2
"""


def install(folder: Path = FOLDER) -> Path:
    """Install the compiler into the folder, unless it is there already; return its CUDA_HOME."""
    home = folder / "packages" / "nvidia" / "cu13"
    ready = home / "bin" / "ptxas-12.9"
    if ready.is_file():
        return home
    packages = folder / "packages"
    _pip_install(packages, "x86_64", *FRONT_END, ASSEMBLER, HEADERS)
    for machine in MACHINES:
        _pip_install(folder / machine, machine, RUNTIME)
        (home / "lib" / machine).symlink_to(_of("cuda_runtime", folder / machine) / "lib")
    for header in sorted((_of("cuda_runtime", folder / "x86_64") / "include").iterdir()):
        (home / "include" / header.name).symlink_to(header)
    (home / "include" / "cccl").symlink_to(_of("cuda_cccl", packages) / "include")
    (home / "include" / "cuda_12_9.h").write_text(VERSION_HEADER)
    with open(home / "bin" / "nvcc.profile", "a") as profile:
        profile.write(PROFILE)
    ptxas = home / "bin" / "ptxas"
    ptxas.write_text(PTXAS % PTX)
    ready.symlink_to(_of("cuda_nvcc", packages) / "bin" / "ptxas")
    for program in (*(home / "bin").iterdir(), home / "nvvm" / "bin" / "cicc"):
        program.resolve().chmod(0o755)
    return home


def _of(package: str, folder: Path) -> Path:
    return folder / "nvidia" / package


def _pip_install(target: Path, machine: str, *packages: str) -> None:
    """Unpack wheels of a machine, which need not be this one, into the target folder."""
    platforms = (f"--platform=manylinux_2_{minor}_{machine}" for minor in (12, 17))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    command += [*platforms, "--only-binary=:all:", "--no-compile", *packages]
    if subprocess.run(command, env=os.environ | {"PIP_USER": "0"}).returncode != 0:
        raise BuildError("The compiler of the wheels is not installed; pip's words are above.")


if __name__ == "__main__":
    print(install())
