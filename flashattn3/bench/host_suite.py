"""Host time of one small forward call without gradients, until the launch returns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from ..testing import Case
from .contenders import OURS, SDPA_BACKENDS, ours
from .inputs import Inputs, make_inputs
from .runner import OK, Record, Settings
from .timing import Timing

CASE = Case("host-1x128x8x128", 1, 128, 128, 8, 8, 128, 128)
WARM_UP_CALLS, CALLS_PER_SAMPLE = 50, 20


def run_host(settings: Settings) -> Iterator[Record]:
    """A record per contender; "naive" is left out, as it is no single launch."""
    inputs = make_inputs(CASE, settings.device, settings.dtype)
    contenders = [name for name in settings.contenders if name == OURS or name in SDPA_BACKENDS]
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(settings.rounds):
        for name in contenders:
            with _selected(name):
                samples[name] += _host_ms(_call(name, inputs))
    for name, found in samples.items():
        yield {
            "record": "time",
            "suite": "host",
            "row": "host time of a forward call",
            "column": "",
            "direction": "fwd",
            "dtype": settings.dtype_name,
            "case": CASE.name,
            "contender": name,
            "status": OK,
            **asdict(Timing.of(found)),
        }


def _selected(name: str) -> contextlib.AbstractContextManager:
    # Entered once and not per call: the peers are timed without what the selection itself costs.
    return sdpa_kernel(SDPA_BACKENDS[name]) if name in SDPA_BACKENDS else contextlib.nullcontext()


def _call(name: str, inputs: Inputs) -> Callable[[], torch.Tensor]:
    q, k, v, _ = inputs
    if name == OURS:
        return lambda: ours(q, k, v, False)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v)


def _host_ms(call: Callable[[], object], num_samples: int = 50) -> list[float]:
    """Milliseconds per call; a sample is over so few calls that the launch queue never fills."""
    with torch.no_grad():
        for _ in range(WARM_UP_CALLS):
            call()
        found = []
        for _ in range(num_samples):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS_PER_SAMPLE):
                call()
            found.append((time.perf_counter() - start) * 1e3 / CALLS_PER_SAMPLE)
    return found
