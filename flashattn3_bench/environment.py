"""What stands beside every number: the first record of a results file."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

import flashattn3
from flashattn3 import triton_toolchain
from flashattn3.backends.device import describe_device

from .runner import Record

MATMUL_SIZE = 8192
LOAD_SECONDS = 1.5


def header(device: torch.device) -> Record:
    info = describe_device(device)
    record = {
        "record": "header",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "flashattn3": flashattn3.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_toolchain.installed_version(),
        "device": info.name,
        "capability": info.capability,
        "lowering": info.lowering,
        "override_arch": os.environ.get("TRITON_OVERRIDE_ARCH"),
        "shared_memory_bytes": info.shared_memory_bytes,
    }
    if device.type != "cuda":
        return {**record, "device": platform.processor() or platform.machine()}
    return {
        **record,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **_under_load(device),
    }


def _under_load(device: torch.device) -> Record:
    """Driver, clock and power while the GPU multiplies large bfloat16 matrices, and its speed.

    Under a power limit both change from run to run, so figures of two runs do not compare.
    """
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)
    )

    def multiply(calls: int) -> None:
        for _ in range(calls):
            torch.matmul(a, b)

    multiply(1)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    multiply(3)
    torch.cuda.synchronize(device)
    # Long enough for nvidia-smi to look, and few enough for the launch queue.
    calls = min(1000, round(LOAD_SECONDS / (time.perf_counter() - start) * 3) + 1)
    start = time.perf_counter()
    multiply(calls)
    queried = _nvidia_smi(device, "driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    tflops = 2 * MATMUL_SIZE**3 * calls / seconds / 1e12
    return {"matmul_tflops": tflops, **queried}


def _nvidia_smi(device: torch.device, *fields: str) -> Record:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [
        "nvidia-smi",
        f"--id={uuid}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
    ]
    values = (_output(command) or "").split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _commit() -> str | None:
    """The commit, with "+changes" if files differ from it; None outside a checkout."""
    root = Path(flashattn3.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return None
    described = _output(["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty"])
    return described.strip().replace("-dirty", "+changes") if described else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
