"""Few queries of many keys at the defaults: our call, the cached call on the same tensors, and ours
in one part, by the GPU's time and by the whole call's, the host included."""

from __future__ import annotations

from .providers import CACHED, ONE_PART, OURS
from .robot_suite import WHOLE_TIME
from .runner import Record, Settings, run_cell
from .suites import Cell
from .timing import WallClock

SUITE = "few-queries"
OWN = (OURS, CACHED, ONE_PART)


def run_few_queries(cell: Cell, time: str, settings: Settings) -> list[Record]:
    """A record per provider for one of the times of robot_suite.py."""
    clock = WallClock(settings.device) if time == WHOLE_TIME else None
    named = {"column": time, "direction": f"{cell.direction}, {time}"}
    return [record | named for record in run_cell(cell, settings, clock)]
