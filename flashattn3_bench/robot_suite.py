"""Small calls of a robot's policy at batch 1: the GPU's time and the whole call's, the host
included, on all SMs and on as many as a Jetson Orin has."""

from __future__ import annotations

from dataclasses import replace

import flashattn3

from .inputs import make_inputs
from .providers import FEW, ON_FEW_SMS, OURS, num_sms
from .runner import ABSENT, Record, Settings, description, run_cell
from .suites import Cell
from .timing import WallClock

SUITE = "robot"
GPU_TIME, WHOLE_TIME = "GPU", "host + GPU"
TIMES = (GPU_TIME, WHOLE_TIME)


def run_robot(cell: Cell, time: str, settings: Settings) -> list[Record]:
    """A record per provider for one of TIMES.

    ON_FEW_SMS is absent, with the reason, where the backend cannot leave SMs free: its time would
    be that of all SMs.
    """
    reason = whole_device_reason(cell, settings)
    own = (OURS,) if reason else (OURS, ON_FEW_SMS)
    clock = WallClock(settings.device) if time == WHOLE_TIME else None
    records = run_cell(cell, replace(settings, own=own), clock)
    if reason:
        absent = {"status": ABSENT, "reason": reason}
        records.append({**description(cell, ON_FEW_SMS, settings), **absent})
    direction = f"{cell.direction}, {time}"
    return [{**record, "column": time, "direction": direction} for record in records]


def whole_device_reason(cell: Cell, settings: Settings) -> str | None:
    """Why ours cannot be restricted to FEW SMs here, or None."""
    if settings.device.type != "cuda":
        return "a CPU has no SMs"
    margin = num_sms(settings.device) - FEW
    if margin < 0:
        return f"the GPU has fewer than {FEW} SMs"
    q, k, v, _ = make_inputs(cell.case, settings.device, settings.dtype)
    unused = flashattn3.explain(q, k, v, causal=cell.case.causal, sm_margin=margin).unused_hints
    return unused.get("sm_margin")
