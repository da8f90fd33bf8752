"""``python -m build_support.hub OUT [WHEEL ...]`` writes flashattn3 as Hugging Face's ``kernels``
loads it: OUT/build/torch-cpu and OUT/build/torch-cuda, each the package with metadata.json.

    LOCAL_KERNELS=flashattn3=OUT python -c "import kernels; kernels.get_kernel('flashattn3', ...)"

They have the Triton kernels and the reference backend. Where this checkout has a usable Hopper
library, OUT/build/torch-stable-abi29-cu130-x86_64-linux (or of another CUDA and machine) has that
too, and the loader prefers it where torch's CUDA is as new. With binary wheels it is their
libraries instead, for the machine of each: they bring their own CUDA runtime, so each is there for
torch's CUDA 12 and 13.

The operators of a copy have namespaces of their own, since torch knows one operator of a name in a
process: a copy loads beside an installed flashattn3 and beside a copy that was written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .ninja_file import OPS_LIBRARY
from .toolchain import OLDEST_TORCH_ABI, BuildError
from .units import ROOT

PACKAGE = ROOT / "flashattn3"
BACKENDS = ("cpu", "cuda")
OLDEST_CUDA = ("12.6", "13.0")  # that torch 2.9 or newer was built with, of each major version
HOPPER = b"flashattn3_hopper"  # the namespace of the Hopper library
# Modules that need the package under its own name, or are no part of attention.
LEFT_OUT = (
    "__main__.py",
    "cli.py",
    "command_line.py",
    "doctor.py",
    "integrations",
)


def write(out: Path, wheels: Sequence[Path] = ()) -> list[Path]:
    """Write the variants into out and return their folders. Files that are there already are
    replaced."""
    sources = _sources()
    variants = {f"torch-{backend}": (backend, {}) for backend in BACKENDS}
    for variant, library in _libraries(wheels).items():
        variants[variant] = ("cuda", {OPS_LIBRARY.as_posix(): library})
    folders = []
    for variant, (backend, compiled) in variants.items():
        files = sources | compiled
        identity = str(out.resolve() / variant).encode() + b"".join(files.values())
        digest = hashlib.sha256(identity).hexdigest()[:12]
        folder = out / "build" / variant
        shutil.rmtree(folder, ignore_errors=True)
        for path, data in _renamed(files, digest).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        metadata = _metadata(backend, f"_flashattn3_{backend}_{digest}")
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        folders.append(folder)
    return folders


def _libraries(wheels: Sequence[Path]) -> dict[str, bytes]:
    """The Hopper libraries of the wheels, or else that of the checkout, by their variants."""
    if wheels:
        libraries = {}
        for wheel in wheels:
            library = zipfile.ZipFile(wheel).read(f"flashattn3/{OPS_LIBRARY.as_posix()}")
            machine = re.search(r"manylinux_\d+_\d+_(\w+)\.whl$", wheel.name)[1]
            libraries |= {_compiled_variant(cuda, machine): library for cuda in OLDEST_CUDA}
        return libraries
    if not (PACKAGE / OPS_LIBRARY).is_file():
        return {}
    return {_compiled_variant(_cuda_version()): (PACKAGE / OPS_LIBRARY).read_bytes()}


def _cuda_version() -> str:
    """CUDA version of the Hopper library. A library that the package refuses raises its reason."""
    code = (
        "from flashattn3.backends.hopper.library import find_library; x = find_library(); "
        "print(x.cuda_version if x.error is None else exit(x.error))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        raise BuildError(f"{PACKAGE / OPS_LIBRARY}: {found.stderr.strip()}")
    return found.stdout.strip()


def _compiled_variant(cuda_version: str, machine: str = platform.machine()) -> str:
    """The folder that the loader takes where torch has at least this version of its stable ABI,
    and CUDA the same major version and at least this minor one."""
    abi = f"{int(OLDEST_TORCH_ABI[2:4], 16)}{int(OLDEST_TORCH_ABI[4:6], 16)}"
    cuda = cuda_version.replace(".", "")
    return f"torch-stable-abi{abi}-cu{cuda}-{machine}-linux"


def _sources() -> dict[str, bytes]:
    paths = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    kept = (path for path in paths if path.parts[0] not in LEFT_OUT)
    return {path.as_posix(): (PACKAGE / path).read_bytes() for path in kept}


def _renamed(files: Mapping[str, bytes], digest: str) -> dict[str, bytes]:
    """The files with the operators' namespaces replaced. Nothing else names the package: imports
    are relative.

    The library registers its operators under a string constant, whose length must stay.
    """
    own, hopper = f"flashattn3_{digest}".encode(), f"flashattn3_{digest[:6]}".encode()
    assert len(hopper) == len(HOPPER)
    renamed = {}
    for path, data in files.items():
        if path.endswith(".so"):
            constant = b"\0%s\0"
            found = data.count(constant % HOPPER)
            if found != 1:
                raise ValueError(f"{path}: {HOPPER.decode()} must be there once, got {found}")
            renamed[path] = data.replace(constant % HOPPER, constant % hopper)
        else:
            data = data.replace(b"torch.ops." + HOPPER, b"torch.ops." + hopper)
            renamed[path] = re.sub(
                rb"\bflashattn3::|(?<=torch\.ops\.)flashattn3\b", _with(own), data
            )
    return renamed


def _with(namespace: bytes):
    return lambda found: namespace + found.group().removeprefix(b"flashattn3")


def _metadata(backend: str, identity: str) -> dict:
    version = re.search(r'__version__ = "(\d+)', (PACKAGE / "__init__.py").read_text())
    return {
        "name": "flashattn3",
        "id": identity,
        "version": int(version.group(1)),
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m build_support.hub OUT [WHEEL ...]")
    out, *wheels = map(Path, sys.argv[1:])
    print(*write(out, wheels), sep="\n")
