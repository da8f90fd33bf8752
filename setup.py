"""Decides whether compiled kernels are wanted; all else about the build is in pyproject.toml.

FLASHATTN3_BUILD unset or ``python``: a pure Python wheel, on every machine.
FLASHATTN3_BUILD=cuda: the Hopper extension, which this release does not have yet, so it is refused
rather than silently left out.
"""

import os

from setuptools import setup

CHOICES = ("python", "cuda")


def check_wanted_build(choice: str) -> None:
    if choice not in CHOICES:
        raise SystemExit(f"FLASHATTN3_BUILD must be one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "cuda":
        raise SystemExit(
            "FLASHATTN3_BUILD=cuda: the Hopper kernels are not in this release yet. "
            "Unset FLASHATTN3_BUILD to install the pure Python package, "
            "which runs on Hopper GPUs through Triton."
        )


check_wanted_build(os.environ.get("FLASHATTN3_BUILD") or "python")
setup()
