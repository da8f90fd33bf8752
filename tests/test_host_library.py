"""Eager calls with gradients, and appends, over the compiled operators, without a GPU:
tests/host_checks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from flashattn3.backends.hopper.library import find_library

if not (ROOT / "build_support").is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)
if not (ROOT / "build" / "hopper" / "build.ninja").is_file() or find_library().error is not None:
    pytest.skip("the Hopper kernels are not built in this checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from build_support.ninja_file import HOST_LIBRARY


def run(*command: object) -> subprocess.CompletedProcess:
    # ninja is a program of this Python's packages
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_calls_reach_the_driver():
    built = run("-m", "build_support", HOST_LIBRARY).stdout.splitlines()[-1]
    done = run(ROOT / "tests" / "host_checks.py", built)
    assert done.stdout.count("check_") == 57
