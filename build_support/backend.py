"""The build backend in pyproject.toml: setuptools with the requirements of the kernels added.

Only with kernels does an isolated build install torch and the CUTLASS headers; a pure Python wheel
needs neither.
"""

from __future__ import annotations

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from build_support.toolchain import BUILD_REQUIREMENTS, kernels_are_wanted


def _requirements(of_setuptools: list[str]) -> list[str]:
    return [*of_setuptools, *(BUILD_REQUIREMENTS if kernels_are_wanted() else ())]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return _requirements(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return _requirements(build_meta.get_requires_for_build_editable(config_settings))
