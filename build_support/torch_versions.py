"""``python -m build_support.torch_versions WHEEL [VERSION ...]`` loads a wheel under each torch.

WHEEL may be a folder that holds the one for this machine. VERSION may be a wheel of torch.
``python -m build_support.torch_versions --environment FOLDER VERSION`` makes an environment with
that torch and its Triton over the current one: there FOLDER/bin/python -m pytest runs the tests.

For every version, and by default for every one from 2.8 on that pip offers, it makes an environment
with that torch and the wheel, without dependencies of either beyond torch's pure Python ones, and
prints a line: the seconds of the installation, what the import of flashattn3 adds to torch's own,
whether the library loads, and whether torch has the operator of the autograd node as the node knows
it. Exit status 1 if a library does not load under 2.9 or newer.

The CUDA libraries that a torch built with CUDA requires are 2 to 4 GB. Empty libraries replace
them; what torch asks of them, without a GPU, is whether there is one.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import defaultdict
from pathlib import Path

from .portable import write_empty_library

PURE_PYTHON = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
CUDA_NAME = "(__)?(cu|nv|nccl|Nv)"  # symbols of libraries without versions
OF_C = "GLIBC|CXXABI|GCC|GOMP|OMP"  # versions of libraries that are there
OF_THE_SYSTEM = ("ld-linux", "libc.", "libm.", "libdl.", "librt.", "libpthread.", "libutil.")
OF_THE_SYSTEM += ("libstdc++.", "libgcc_s.", "libgomp.")
ALONE = ("--quiet", "--no-deps", "--no-compile")
OLDEST, OLDEST_OF_LIBRARY = (2, 8), (2, 9)
# Run in the environment. The import is timed before the library is asked for.
QUESTIONS = """
import json, time, torch
start = time.perf_counter()
import flashattn3
seconds = time.perf_counter() - start
mapped = {line.split()[-1].rsplit("/", 1)[-1] for line in open("/proc/self/maps") if ".so" in line}
from flashattn3.run.aten_node import NODES, unusable_reason
from flashattn3.backends.hopper.library import find_library, kernel_info
library = find_library()
print(json.dumps({
    "torch": torch.__version__, "import": seconds, "error": library.error,
    "loaded unasked": sorted(name for name in mapped if "flashattn3" in name),
    "kernels": 0 if library.error else len(kernel_info()),
    "nodes": [unusable_reason(node) for node in NODES],
}))
"""


def offered() -> list[str]:
    """The torch versions that pip offers, oldest first, the newest patch of each."""
    listed = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Available versions: (.*)", text)[1].split(", ")
    newest = {}
    for version in found:  # newest first
        key = tuple(map(int, version.split(".")[:2]))
        if key >= OLDEST and "+" not in version:
            newest.setdefault(key, version)
    return [newest[key] for key in sorted(newest)]


def try_under(version: str, wheel: Path, torch_source: str) -> dict:
    """Report whether the wheel loads under a torch. torch_source: an argument of pip install."""
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder), torch_source)
        install = [python, "-m", "pip", "install", "--quiet"]
        _checked([*install, *PURE_PYTHON])
        start = time.perf_counter()
        _checked([*install, "--no-deps", "--no-index", wheel.resolve()])
        seconds = time.perf_counter() - start
        writes_pyc_files = "import torch, flashattn3"
        _checked([python, "-I", "-c", writes_pyc_files], cwd=folder)
        answer = json.loads(_checked([python, "-I", "-c", QUESTIONS], cwd=folder).splitlines()[-1])
    return answer | {"install": seconds}


def make_environment(folder: Path, torch_source: str) -> Path:
    """Make an environment with torch alone, and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _checked([python, "-m", "pip", "install", *ALONE, torch_source])
    write_empty_cuda(_packages(folder) / "torch" / "lib")
    return python


def make_environment_for_tests(folder: Path, version: str) -> None:
    """The same with the Triton that this torch requires, over the current environment."""
    python = make_environment(folder, f"torch=={version}")
    packages = _packages(folder)
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    triton = re.search(r"(?m)^Requires-Dist: (triton[^;\n]*)", metadata.read_text())
    if triton:
        _checked([python, "-m", "pip", "install", *ALONE, triton[1].strip()])
    (packages / "current.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _packages(folder: Path) -> Path:
    (packages,) = folder.glob("lib/python*/site-packages")
    return packages


def write_empty_cuda(folder: Path) -> None:
    """Beside torch's libraries, empty ones in the place of those of CUDA that are not there.

    Each defines every symbol that torch takes from libraries that are missing.
    """
    needed, defined, versions = set(), set(), defaultdict(set)
    for library in folder.glob("*.so*"):
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _checked(["readelf", "-dW", library])))
        for line in _checked(["nm", "-D", library]).splitlines():
            *_, kind, name = line.split()
            name, _, version = name.partition("@")
            if kind != "U":
                defined.add(name)
            elif re.match(CUDA_NAME, name) if not version else not re.match(OF_C, version):
                versions[version].add(name)
    empty = {version: sorted(names - defined) for version, names in versions.items()}
    for name in needed - {path.name for path in folder.iterdir()}:
        if not name.startswith(OF_THE_SYSTEM):
            write_empty_library(folder / name, empty, "gcc")


def _checked(command: list, cwd: str | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(wheel: Path, versions: list[str]) -> int:
    if wheel.is_dir():
        (wheel,) = wheel.glob(f"flashattn3-*_{platform.machine()}.whl")
    failed = False
    for version in versions or offered():
        source = version if version.endswith(".whl") else f"torch=={version}"
        found = try_under(version, wheel, source)
        nodes = [f"in Python: {reason}" if reason else "in C++" for reason in found["nodes"]]
        said = found["error"] or f"{found['kernels']} kernels, nodes {', '.join(nodes)}"
        print(
            f"torch {found['torch']:<14} installed in {found['install']:.1f} s, import "
            f"{1000 * found['import']:.0f} ms, {said}",
            flush=True,
        )
        new_enough = tuple(map(int, found["torch"].split(".")[:2])) >= OLDEST_OF_LIBRARY
        failed |= bool(found["loaded unasked"]) or (new_enough and found["error"] is not None)
    return int(failed)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--environment", folder, version]:
            make_environment_for_tests(Path(folder), version)
        case [first, *others] if not first.startswith("-"):
            sys.exit(main(Path(first), others))
        case _:
            sys.exit("usage: python -m build_support.torch_versions WHEEL [VERSION ...]")
