"""Imports a library that an integration needs, and compares its version with the tested range."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from ..errors import UnsupportedError

TRANSFORMERS = "transformers", "4.57", "5.24"  # and the releases that the tests cover


def import_library(
    function: str, name: str, oldest: str, newest: str, install: str | None = None
) -> ModuleType:
    """Import a library. An untested version gives one warning.

    Args:
        function: the public function that needs the library, for messages.
        oldest, newest: first and last minor release that the tests cover, such as "4.57".
        install: what pip installs; None: our extra of this name.

    Raises:
        UnsupportedError: the library is not installed.
    """
    try:
        library = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        wanted = f"pip install '{install or f'flashattn3[{name}]'}'"
        raise UnsupportedError(f"{function}: {name} is not installed; {wanted}") from None
    if not release(oldest) <= release(library.__version__) <= release(newest):
        warnings.warn(
            f"{function}: {name} must be {oldest} to {newest}, got {library.__version__}: "
            "this version was not tested",
            stacklevel=3,
        )
    return library


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))
