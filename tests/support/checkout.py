"""A copy of the checkout to compile kernels in, so that the checkout stays as it is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT))  # an installed package does not bring the build along

from build_support.toolchain import BuildError, find_toolchain

# Folders and files of a checkout that git does not track.
UNTRACKED = (".git", ".venv*", "build", "dist", "out", "site", "*.egg-info", "*.so", "_lib")
UNTRACKED += ("__pycache__", ".*cache*", "*.pyi")
SOURCES = ("flashattn3", "build_support", "third_party", "csrc")


def checkout_to_build_in(factory: pytest.TempPathFactory, *more: str) -> Path:
    """more: folders beside the sources. Skips where the compiler is missing."""
    try:
        find_toolchain()
    except BuildError as error:
        pytest.skip(str(error).replace("\n", " "))
    copy = factory.mktemp("checkout")
    for name in (*SOURCES, *more):
        copy_tracked(ROOT / name, copy / name)
    return copy


def copy_tracked(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*UNTRACKED))
