"""Peak memory of a piece of work, measured and never estimated."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors alive at the peak of ``work()``, beyond those alive when it starts.

    On a GPU: torch.cuda.max_memory_allocated. On a CPU: the sum of the allocations and frees that
    torch's profiler records, so what operators allocate inside themselves counts as well.
    """
    return _cuda_peak(work, device) if device.type == "cuda" else _cpu_peak(work)


def _cuda_peak(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(work: Callable[[], object]) -> int:
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Some builds of torch's profiler write a line to stderr, from C++, whenever it starts."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
