"""How fast blocks are quantized, beside a copy on the device: both are bound by memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..quantization import BlockScaled, quantize_block_fp8, torch_operations
from ..quantization.dispatch import on_hopper
from ..scales import FP8, INT8
from .contenders import OURS
from .runner import FAILED, OK, Record, Settings, name_of
from .timing import interleave, make_clock

SUITE = "quantize"
HEAD_DIMS = (64, 128, 256)
BATCH, SEQLEN, WIDTH = 4, 4096, 2048  # the grid's 16384 tokens; heads x head dim
QUICK_BATCH, QUICK_SEQLEN, QUICK_WIDTH = 1, 130, 256
BLOCK = 128
COPY = "copy"
# Tensors that are worked on in turn: what is read and written has left the L2 cache since.
RING = 4


@dataclass(frozen=True)
class Work:
    """Quantization of one kind of tensor; its place in the table."""

    row: str
    kind: str
    hadamard: bool
    dtype: torch.dtype
    head_dim: int

    def __call__(self, x: Tensor) -> BlockScaled:
        options = {"hadamard": self.hadamard, "kind": self.kind, "dtype": self.dtype}
        return quantize_block_fp8(x, block=BLOCK, **options)


def quantize_work(head_dims: tuple[int, ...] | None) -> list[Work]:
    return [
        Work(row, kind, hadamard, dtype, head_dim)
        for row, kind, hadamard, dtype in (  # as flash_attn_fp8_func quantizes
            ("q, k", "k", False, FP8),
            ("q, k rotated, int8", "k", True, INT8),
            ("v", "v", False, FP8),
        )
        for head_dim in HEAD_DIMS
        if head_dims is None or head_dim in head_dims
    ]


def run_quantize(work: Work, settings: Settings, quick: bool) -> list[Record]:
    """A record for our quantization and one for torch's copy, each with the bytes that it moves.

    speed_ratio: of the GB/s; above 1 this contender is the faster one.
    """
    ring = _ring(work.head_dim, settings, quick)
    x, scaled = ring[0], work(ring[0])
    fault = _fault(work, x, scaled)
    calls = {} if fault else {OURS: _in_turn(work, ring)}
    calls[COPY] = _in_turn(torch.clone, ring)
    clock = make_clock(settings.device, _num_bytes(*ring))
    timings = interleave(calls, clock, settings.rounds, settings.round_ms)
    num_bytes = {OURS: _num_bytes(x, scaled.data, scaled.descale), COPY: _num_bytes(x, x)}
    speed = {name: num_bytes[name] / timings[name].median_ms / 1e6 for name in calls}
    description = _description(work, x, scaled, settings)
    refused = {**description, "contender": OURS, "status": FAILED, "reason": fault}
    records = [
        {
            **description,
            "contender": name,
            "status": OK,
            **asdict(timings[name]),
            "num_bytes": num_bytes[name],
            "gb_per_s": speed[name],
            "speed_ratio": {other: speed[name] / speed[other] for other in calls if other != name},
        }
        for name in calls
    ]
    return [refused, *records] if fault else records


def _ring(head_dim: int, settings: Settings, quick: bool) -> list[Tensor]:
    """Normal (batch, seqlen, heads, head_dim), RING of them."""
    sizes = (QUICK_BATCH, QUICK_SEQLEN, QUICK_WIDTH) if quick else (BATCH, SEQLEN, WIDTH)
    batch, seqlen, width = sizes
    shape = (batch, seqlen, width // head_dim, head_dim)
    generator = torch.Generator(settings.device).manual_seed(0)
    of = {"generator": generator, "device": settings.device, "dtype": settings.dtype}
    return [torch.randn(shape, **of) for _ in range(RING)]


def _description(work: Work, x: Tensor, scaled: BlockScaled, settings: Settings) -> Record:
    return {
        "record": "bandwidth",
        "suite": SUITE,
        "row": work.row,
        "column": f"d{work.head_dim}",
        "direction": "",
        "dtype": settings.dtype_name,
        "case": "x".join(map(str, x.shape)),
        "head_dim": work.head_dim,
        "hadamard": work.hadamard,
        "quantized_dtype": name_of(work.dtype),
        "layout": scaled.layout,
        "hopper_kernel": on_hopper(x),
    }


def _in_turn(work: Callable[[Tensor], object], ring: list[Tensor]) -> Callable[[], None]:
    """Works on one tensor after the other and keeps as many results, each in memory of its own."""
    sources, kept = itertools.cycle(ring), deque(maxlen=len(ring))
    return lambda: kept.append(work(next(sources)))


def _num_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _fault(work: Work, x: Tensor, scaled: BlockScaled) -> str | None:
    """The gate: bit for bit what torch operations give."""
    data, descale = torch_operations.quantize(x, BLOCK, work.hadamard, None, None, work.dtype)
    found = scaled.in_rows().data
    wrong = int((found.view(torch.uint8) != data.view(torch.uint8)).sum())
    wrong_scales = int((scaled.descale != descale).sum())
    if wrong or wrong_scales:
        return f"{wrong} of {data.numel()} numbers and {wrong_scales} scales differ from torch's"
    return None
