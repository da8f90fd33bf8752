"""How long masks take to build, on the host and on the GPU, beside FlexAttention's block masks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from flashattn3 import masks

from .mask_shapes import SHAPES, block_mask_of, lengths_of
from .providers import FLEX, OURS
from .read_kernel import prepare_read
from .runner import FAILED, OK, Record, Settings, described, times_of
from .timing import CpuClock, interleave, make_clock

SUITE = "masks-build"
HOST_TIME, DEVICE_TIME = "host", "device"
MOST_MIB = 64  # of a mask of 128k documents
READ, COPY = "read", "copy"  # of as many bytes as the bool tensor has, and a read and a write of it
FLEX_TOKENS = 8192  # FlexAttention builds masks by a look at each score
BUILDS = (
    *(("documents", n) for n in (8192, 131072)),
    *((name, 8192) for name in ("prefix", "tree", "blocks of 128", "bits")),
    ("from_block_mask", 8192),
)
QUICK_TOKENS = 256
Call = Callable[[], object]


def build_work(seqlens: tuple[int, ...] | None, quick: bool) -> list[tuple[str, int, str]]:
    """Name of the build, tokens, and which time."""
    builds = dict.fromkeys((name, QUICK_TOKENS if quick else n) for name, n in BUILDS)
    chosen = [build for build in builds if seqlens is None or build[1] in seqlens]
    return [(*build, time) for build, time in product(chosen, (HOST_TIME, DEVICE_TIME))]


class HostClock(CpuClock):
    """Time until a call returns, with nothing queued before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def samples(self, call: Call, repetitions: int, host_ms: float) -> list[float]:
        found = []
        for _ in range(repetitions):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            found += super().samples(call, 1, host_ms)
        return found


def run_build(name: str, n: int, time: str, settings: Settings) -> list[Record]:
    """A record for our builder, FlexAttention's and, of bools, a read and a copy of as many bytes.

    Other builders read little, so that L2 need not be cold for them.
    """
    device, num_read = settings.device, 2**40
    shape = SHAPES["documents" if name == "from_block_mask" else name](n, device)
    calls: dict[str, Call] = {OURS: shape.build}
    if n <= FLEX_TOKENS:
        calls[FLEX] = lambda: block_mask_of(shape, n, device)
    if name == "from_block_mask":
        block_mask = block_mask_of(shape, n, device)
        calls[OURS] = lambda: masks.from_block_mask(block_mask)
    if name == "bits":
        seen = shape.build().to_bool()
        num_read = seen.numel()
        calls |= {READ: prepare_read(num_read, device), COPY: seen.clone}
    fault = _fault(name, n, calls[OURS](), shape.mask_mod, device)
    about = described("build", SUITE, f"{name} {n}", f"{name}-{n}", column=time, dtype="")
    if fault is not None:
        return [{**about, "provider": OURS, "status": FAILED, "reason": fault}]
    clock = HostClock(device) if time == HOST_TIME else make_clock(device, num_read)
    timings = interleave(calls, clock, settings.rounds, settings.round_ms)
    return [{**about, "provider": of, "status": OK, **times_of(of, timings)} for of in calls]


def _fault(
    name: str, n: int, mask: masks.Mask, mask_mod: Callable[..., Tensor], device: torch.device
) -> str | None:
    """What is wrong with a mask: its scores, or beyond FLEX_TOKENS their number, and its memory."""
    if n <= FLEX_TOKENS:
        token = torch.arange(n, device=device)
        wanted = mask_mod(None, None, token[:, None], token)
        wrong = int((mask.to_bool()[0, 0] != wanted).sum())
        return f"{wrong} of {n * n} scores differ from the function's" if wrong else None
    wanted = sum(x * (x + 1) // 2 for x in lengths_of(n)) / n**2
    if abs(float(mask.density) - wanted) > 1e-6 * wanted:
        return f"its density is {float(mask.density)}, not {wanted}"
    mib = mask.nbytes / 2**20
    return f"it takes {mib:.1f} MiB, more than {MOST_MIB}" if mib > MOST_MIB else None
