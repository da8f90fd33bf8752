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


def test_two_processes():
    checks = ["dtensor", "fsdp"]
    if hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # since torch 2.11
        checks.append("ring")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        (*launcher, "--nproc-per-node", "2", "tests/distributed_checks.py", *checks),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if "ring" not in checks:
        pytest.skip("DTensor and FSDP2 passed; ring attention needs torch 2.11")
