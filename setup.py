"""Adds the types of public functions, and the compiled Hopper kernels where they are wanted; all
else is in pyproject.toml.

FLASHATTN3_BUILD=cuda builds them (no GPU needed), =python does not. Unset: they are built where
nvcc 12.4 or newer is installed and a Hopper GPU is visible.
"""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

from build_support.build import build
from build_support.ninja_file import OPS_LIBRARY
from build_support.toolchain import BuildError, kernels_are_wanted
from build_support.type_stubs import write_type_stubs

# Where the project is: docs/release.md says when to set it.
PROJECT_URL = ""
PAGES = {"Homepage": "", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}


class BuildTypes(build_py):
    """An editable install has them in the checkout, which type checkers read."""

    def run(self) -> None:
        super().run()
        write_type_stubs(Path("" if self.editable_mode else self.build_lib, "flashattn3"))


class BuildKernels(build_ext):
    """ninja in the place of setuptools' compiler."""

    def package_folder(self) -> Path:
        return Path("" if self.inplace else self.build_lib, "flashattn3")

    def run(self) -> None:
        built = os.environ.get("FLASHATTN3_LIBRARY")  # build_support/wheel.py compiled it
        if not built:
            build(self.package_folder())
            return
        library = self.package_folder() / OPS_LIBRARY
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, library)

    def get_outputs(self) -> list[str]:
        return [str(self.package_folder() / OPS_LIBRARY)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable install has the library in the package's own folder


def setup_arguments() -> dict[str, object]:
    urls = {name: PROJECT_URL + page for name, page in PAGES.items()} if PROJECT_URL else {}
    plain = {"project_urls": urls, "cmdclass": {"build_py": BuildTypes}}
    if not kernels_are_wanted():
        return plain
    return {
        **plain,
        # It makes the wheel one of this platform. The library holds nothing of Python.
        "ext_modules": [Extension("flashattn3._lib", sources=[], py_limited_api=True)],
        "cmdclass": {"build_ext": BuildKernels, "build_py": BuildTypes},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


try:
    setup(**setup_arguments())
except BuildError as error:
    raise SystemExit(str(error)) from None
