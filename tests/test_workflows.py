"""The workflows: actionlint finds no error, and every step is one command that runs anywhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
from helpers import ROOT

FOLDER = ROOT / ".github" / "workflows"
if not FOLDER.is_dir():
    pytest.skip("needs a source checkout", allow_module_level=True)
COMMANDS = (
    r"bash \.ci/run",
    r"python -m build_support\.(?P<module>\w+)( [\w.$\"{} -]+)?",
    r"python -m pip install [\w.\"\[\]/ -]+",
    r"python -m build --sdist",
    r"mkdocs build --strict",
    r"sudo apt-get install --yes [\w+-]+",
)


def test_actionlint_finds_nothing():
    scripts = sysconfig.get_path("scripts")
    program = shutil.which("actionlint", path=scripts) or shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed")
    found = subprocess.run([program, *FOLDER.glob("*.yml")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_step_is_one_command_of_the_repository():
    sys.path.insert(0, str(ROOT))
    steps = [
        step
        for path in sorted(FOLDER.glob("*.yml"))
        for step in re.findall(r"^ +(?:- )?run: *(.*)$", path.read_text(), re.MULTILINE)
    ]
    assert len(steps) >= 8
    for step in steps:
        found = next(filter(None, (re.fullmatch(command, step) for command in COMMANDS)), None)
        assert found, step
        if module := found.groupdict().get("module"):
            assert importlib.util.find_spec(f"build_support.{module}"), step
