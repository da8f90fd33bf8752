"""The folder of the results, and what draws them."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flashattn3.command_line import Refuse


def folder(text: str) -> Path:
    """The type of an option that is a folder."""
    if not text:
        raise argparse.ArgumentTypeError("a folder, got ''")
    return Path(text)


def make_folder(path: Path, files: Iterable[str], error: Refuse) -> None:
    """Make the folder, and call error(message) if one of the files cannot be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        for file in (path / name for name in files):
            if file.exists():
                file.open("ab").close()
    except OSError as failure:
        error(f"--output {path}: nothing can be written there: {failure.strerror}")


def require_extras(error: Refuse) -> None:
    """Calls error(message) if what draws and shows progress is not installed."""
    missing = [name for name in ("tqdm", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        error(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")
