"""Two processes on one machine, with gloo: ring attention over the provider, DTensor and FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

available = torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [
    pytest.mark.skipif(not available, reason="this torch has no gloo"),
    pytest.mark.slow,  # two processes and their launcher import torch
]


@pytest.mark.parametrize("check", ["ring", "dtensor", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes(check):
    if check == "ring" and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.11 has the first registry of providers that restores")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(ROOT / "tests" / "distributed_checks.py"), check],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
