"""Finds the CUTLASS headers for the build; downloads nothing, and says what is missing.

``python third_party/cutlass.py`` prints the include folder, or exits with the reason.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PINNED = "nvidia-cutlass==4.2.0.0"
HEADER = Path("cute", "tensor.hpp")
# Folders of the wheel (package cutlass_library) and of a checkout that hold the headers.
WHEEL_INCLUDE = Path("source", "include")
CHECKOUT_INCLUDE = Path("include")


class CutlassNotFoundError(RuntimeError):
    """No CUTLASS headers where they were looked for."""


def include_dir() -> Path:
    """The folder to give to nvcc with -I. CUTLASS_PATH, when set, is the only place looked at."""
    checkout = os.environ.get("CUTLASS_PATH")
    if checkout:
        return _with_headers(Path(checkout) / CHECKOUT_INCLUDE, "CUTLASS_PATH")
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        raise CutlassNotFoundError(
            "The Hopper kernels need the CUTLASS headers: set CUTLASS_PATH to a CUTLASS checkout, "
            f"or run: pip install {PINNED}"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    return _with_headers(package / WHEEL_INCLUDE, "the nvidia-cutlass wheel")


def _with_headers(folder: Path, source: str) -> Path:
    if not (folder / HEADER).is_file():
        raise CutlassNotFoundError(f"{source} has no {HEADER} in {folder}")
    return folder


if __name__ == "__main__":
    try:
        print(include_dir())
    except CutlassNotFoundError as error:
        raise SystemExit(str(error)) from None
