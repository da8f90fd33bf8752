"""``python -m build_support.hub OUT`` writes flashattn3 as Hugging Face's ``kernels`` loads it:
OUT/build/torch-cpu and OUT/build/torch-cuda, each the package with metadata.json.

    LOCAL_KERNELS=flashattn3=OUT python -c "import kernels; kernels.get_kernel('flashattn3', ...)"

The copy has the Triton kernels and the reference backend; the Hopper library is not in it. Its
operators have a namespace of their own, since torch knows one operator of a name in a process: a
copy loads beside an installed flashattn3 and beside a copy that was written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from .units import ROOT

PACKAGE = ROOT / "flashattn3"
BACKENDS = ("cpu", "cuda")
# What needs the package under its own name, or is no part of attention.
LEFT_OUT = (
    "__main__.py",
    "_lib",
    "bench",
    "cli.py",
    "command_line.py",
    "demo",
    "doctor.py",
    "integrations",
    "testing",
)


def write(out: Path) -> list[Path]:
    """Write both variants into out and return their folders. Files that are there already are
    replaced."""
    sources = _sources()
    identity = json.dumps([sources, str(out.resolve())], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    namespace = f"flashattn3_{digest}"
    folders = []
    for backend in BACKENDS:
        folder = out / "build" / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in sources.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_renamed(text, namespace))
        metadata = _metadata(backend, f"_flashattn3_{backend}_{digest}")
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        folders.append(folder)
    return folders


def _sources() -> dict[str, str]:
    paths = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    kept = (path for path in paths if path.parts[0] not in LEFT_OUT)
    return {path.as_posix(): (PACKAGE / path).read_text() for path in kept}


def _renamed(text: str, namespace: str) -> str:
    """The source with the operators' namespace replaced. Nothing else names the package: imports
    are relative."""
    return re.sub(r"\bflashattn3::|(?<=torch\.ops\.)flashattn3\b", _with(namespace), text)


def _with(namespace: str):
    return lambda found: namespace + found.group().removeprefix("flashattn3")


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
    if len(sys.argv) != 2:
        sys.exit("usage: python -m build_support.hub OUT")
    print(*write(Path(sys.argv[1])), sep="\n")
