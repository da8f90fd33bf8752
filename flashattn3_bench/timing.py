"""Times providers in turn, round after round, so that a drifting clock meets all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

MAX_REPETITIONS = 100
# torch.cuda._sleep counts GPU cycles; no GPU runs faster than this, so it never sleeps too short.
_CYCLES_PER_MS = 2_500_000
_MAX_HEAD_START_MS = 20.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, over all repetitions of all rounds."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    num_samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        p20, *_, p80 = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), p20, p80, len(samples))


def speed_ratios(name: str, timings: dict[str, Timing]) -> dict[str, float]:
    """How many times faster a provider is than each of the others."""
    own = timings[name].median_ms
    return {other: x.median_ms / own for other, x in timings.items() if other != name}


class Pace(NamedTuple):
    """Milliseconds of one call: until it returns on the host, and until its work is done."""

    host_ms: float
    done_ms: float


class CpuClock:
    def pace(self, call: Callable[[], object]) -> Pace:
        (took,) = self.samples(call, 1, 0.0)
        return Pace(took, took)

    def samples(self, call: Callable[[], object], repetitions: int, host_ms: float) -> list[float]:
        found = []
        for _ in range(repetitions):
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e3)
        return found


class CudaClock:
    """GPU time between two events around each call; what the host needs to launch it is not in it.

    cold: before each call a buffer of twice the L2 cache is written. Needed where the inputs fit in
    L2: a caller with other work in between would not find them there.
    """

    def __init__(self, device: torch.device, cold: bool) -> None:
        self.device = device
        num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(num_bytes, dtype=torch.int8, device=device) if cold else None

    def pace(self, call: Callable[[], object]) -> Pace:
        calls = 3
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        done = time.perf_counter() - start
        return Pace(host * 1e3 / calls, done * 1e3 / calls)

    def samples(self, call: Callable[[], object], repetitions: int, host_ms: float) -> list[float]:
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)
        ]
        torch.cuda.synchronize(self.device)
        # The GPU sleeps while the host queues the calls, so no call waits for its own launch.
        head_start_ms = min(host_ms * repetitions, _MAX_HEAD_START_MS)
        torch.cuda._sleep(int(head_start_ms * _CYCLES_PER_MS))
        for start, end in events:
            if self.flush is not None:
                self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]


class WallClock(CpuClock):
    """Time from the call on the host until its work is done; no call overlaps the one before."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.wait = partial(torch.cuda.synchronize, device) if on_gpu else lambda: None

    def samples(self, call: Callable[[], object], repetitions: int, host_ms: float) -> list[float]:
        def finished() -> None:
            call()
            self.wait()

        self.wait()
        return super().samples(finished, repetitions, host_ms)


Clock = CpuClock | CudaClock


def make_clock(device: torch.device, num_input_bytes: int) -> Clock:
    if device.type != "cuda":
        return CpuClock()
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return CudaClock(device, cold=num_input_bytes <= 2 * l2_bytes)


def interleave(
    calls: dict[str, Callable[[], object]],
    clock: Clock,
    rounds: int,
    round_ms: float,
) -> dict[str, Timing]:
    """Every provider once per round, repeated so often that it takes about ``round_ms``.

    The order turns round from round to round: at its power limit a GPU runs faster behind a
    provider that needs less power.
    """
    paces, repetitions = {}, {}
    for name, call in calls.items():
        call()
        paces[name] = clock.pace(call)
        wanted = math.ceil(round_ms / max(paces[name].done_ms, 1e-3))
        repetitions[name] = min(wanted, MAX_REPETITIONS)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in list(calls.items())[:: 1 if number % 2 == 0 else -1]:
            samples[name] += clock.samples(call, repetitions[name], paces[name].host_ms)
    return {name: Timing.of(found) for name, found in samples.items()}
