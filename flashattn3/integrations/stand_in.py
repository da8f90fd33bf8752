"""Modules under the names of another package, in this process only."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..errors import UnsupportedError


class StandIn(ModuleType):
    """A module that ``install`` made."""

    def __init__(self, name: str, contents: dict[str, object], is_package: bool):
        super().__init__(name, "flashattn3 under the names of another package.")
        self.__spec__ = ModuleSpec(name, None, origin="flashattn3", is_package=is_package)
        if is_package:
            self.__path__ = []
        self.__dict__.update(contents)


def install(function: str, modules: dict[str, dict[str, object]]) -> None:
    """Make the modules importable. Calling again has no effect.

    Args:
        function: the public function that installs them, for messages.
        modules: the contents of each by its full name, a package before what is in it.

    Raises:
        UnsupportedError: a package of one of these names is installed or imported.
    """
    if all(isinstance(sys.modules.get(name), StandIn) for name in modules):
        return
    for name in modules:
        if "." not in name and (name in sys.modules or importlib.util.find_spec(name) is not None):
            raise UnsupportedError(
                f"{function}: {name} must not be installed, got {_origin(name)}: "
                "this process would have two packages of one name"
            )
    for name, contents in modules.items():
        is_package = any(other.startswith(f"{name}.") for other in modules)
        sys.modules[name] = StandIn(name, contents, is_package)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])


def _origin(name: str) -> str:
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded else importlib.util.find_spec(name)
    return f"{name} at {spec.origin}" if spec and spec.origin else name
