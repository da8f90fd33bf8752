"""Code written for FlashAttention-3 finds flashattn3 under that package's module names."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from .. import api
from ..errors import UnsupportedError
from ..kvcache import api as cached

NAMES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
FUNCTIONS = {
    name: getattr(module, name)
    for module, names in (
        (api, ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func")),
        (cached, ("flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata")),
    )
    for name in names
}


def install_as_flash_attn_3() -> None:
    """Make ``import flash_attn_interface`` and ``import flash_attn_3.flash_attn_interface`` find
    flashattn3 in this process.

    The modules have ``FUNCTIONS``, which are all public functions of FlashAttention-3; those that
    begin with an underscore are missing, so importing one fails. No file is written, and no
    installed distribution is claimed: code that asks ``importlib.metadata`` for flash-attn-3 does
    not find it. Calling again has no effect.

    Raises:
        UnsupportedError: the real package is installed or imported.
    """
    if all(isinstance(sys.modules.get(name), _Interface) for name in NAMES):
        return
    for name in ("flash_attn_interface", "flash_attn_3"):
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise UnsupportedError(
                f"install_as_flash_attn_3: {name} must not be installed, got {_origin(name)}: "
                "this process would have two packages of one name"
            )
    parent = _Interface("flash_attn_3")
    parent.__path__ = []  # a package
    parent.flash_attn_interface = interface = _Interface(NAMES[1])
    top = _Interface(NAMES[0])
    for module in (interface, top):
        for name, function in FUNCTIONS.items():
            setattr(module, name, function)
    for module in (parent, interface, top):
        sys.modules[module.__name__] = module


class _Interface(ModuleType):
    def __init__(self, name: str):
        super().__init__(name, "flashattn3 under the names of FlashAttention-3.")
        self.__spec__ = ModuleSpec(
            name, None, origin="flashattn3", is_package=name == "flash_attn_3"
        )


def _origin(name: str) -> str:
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded else importlib.util.find_spec(name)
    return f"{name} at {spec.origin}" if spec and spec.origin else name
