"""How fast blocks are quantized, beside a copy on the device: both are bound by memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from flashattn3.call.block_scaled import BlockScaled
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.quantization import (
    KINDS,
    quantize_block_fp8,
    quantize_qkv,
    rotate_and_quantize,
    torch_operations,
)
from flashattn3.quantization.dispatch import on_hopper
from flashattn3.quantization.embedding import Embedding, embedded
from flashattn3.quantization.embedding_dispatch import rotated
from flashattn3.quantization.smoothing import sample_mean

from .inputs import normal_numbers
from .providers import OURS
from .rotary_suite import tables
from .runner import FAILED, OK, Record, Settings, described, name_of
from .timing import interleave, make_clock

SUITE = "quantize"
HEAD_DIMS = (64, 128, 256)
SIZES, QUICK_SIZES = (4, 4096, 2048), (1, 130, 256)  # batch, tokens, heads x head dim
BLOCK = 128
COPY = "copy"
ROTARY_ROW, ROTARY = "q, k, v with rotary", "rotary"  # the pass over q and k alone, in 16 bits
# Tensors that are worked on in turn: what is read and written has left the L2 cache since.
RING = 4


@dataclass(frozen=True)
class Work:
    """Quantization of tensors of these kinds, in one call; its place in the table."""

    row: str
    kinds: tuple[str, ...]
    hadamard: bool
    dtype: torch.dtype
    smooth_k: bool
    head_dim: int

    @property
    def rotates(self) -> bool:
        """Whether q and k are rotated by their positions first, as rotate_and_quantize does."""
        return self.row == ROTARY_ROW

    def __call__(self, *tensors: Tensor) -> tuple[BlockScaled, ...]:
        if self.rotates:
            how = {"hadamard": self.hadamard, "qk_dtype": self.dtype, "block": BLOCK}
            return rotate_and_quantize(*tensors, *_tables(tensors[0]), **how)
        if len(self.kinds) == 3:
            how = {"hadamard": self.hadamard, "qk_dtype": self.dtype, "smooth_k": self.smooth_k}
            return quantize_qkv(*tensors, block=BLOCK, **how)
        (x,), (kind,) = tensors, self.kinds
        how = {"hadamard": self.hadamard, "dtype": self.dtype}
        return (quantize_block_fp8(x, block=BLOCK, kind=kind, **how),)


def quantize_work(head_dims: tuple[int, ...] | None) -> list[Work]:
    return [
        Work(row, kinds, hadamard, dtype, smooth_k, head_dim)
        for row, kinds, hadamard, dtype, smooth_k in (
            ("q, k", ("k",), False, FP8, False),
            ("q, k rotated, int8", ("k",), True, INT8, False),
            ("v", ("v",), False, FP8, False),
            ("q, k, v at once", KINDS, True, INT8, False),  # as flash_attn_fp8_func quantizes
            ("q, k, v at once, smooth_k", KINDS, True, INT8, True),
            (ROTARY_ROW, KINDS, True, INT8, False),
        )
        for head_dim in HEAD_DIMS
        if head_dims is None or head_dim in head_dims
    ]


def run_quantize(work: Work, settings: Settings, quick: bool) -> list[Record]:
    """A record for our quantization and one for torch's copy, each with the bytes that it moves.

    speed_ratio: of the GB/s; above 1 this provider is the faster one.
    """
    ring = _ring(work, settings, quick)
    tensors, results = ring[0], work(*ring[0])
    error = _fault(work, tensors, results)
    calls = {} if error else {OURS: _in_turn(work, ring)}
    calls[COPY] = _in_turn(_copy, ring)
    if work.rotates:
        calls[ROTARY] = _in_turn(_rotate, ring)
    clock = make_clock(settings.device, _num_bytes(*itertools.chain(*ring)))
    timings = interleave(calls, clock, settings.rounds, settings.round_ms)
    stored = [x for scaled in results for x in (scaled.data, scaled.descale)]
    num_bytes = {OURS: _num_bytes(*tensors, *stored), COPY: 2 * _num_bytes(*tensors)}
    num_bytes[ROTARY] = 2 * _num_bytes(*tensors[:2])
    speed = {name: num_bytes[name] / timings[name].median_ms / 1e6 for name in calls}
    description = _description(work, tensors, results, settings)
    refused = {**description, "provider": OURS, "status": FAILED, "reason": error}
    records = [
        {
            **description,
            "provider": name,
            "status": OK,
            **asdict(timings[name]),
            "num_bytes": num_bytes[name],
            "gb_per_s": speed[name],
            "speed_ratio": {other: speed[name] / speed[other] for other in calls if other != name},
        }
        for name in calls
    ]
    return [refused, *records] if error else records


def _ring(work: Work, settings: Settings, quick: bool) -> list[tuple[Tensor, ...]]:
    """RING times a normal (batch, seqlen, heads, head_dim) for each kind."""
    batch, seqlen, width = QUICK_SIZES if quick else SIZES
    shape = (batch, seqlen, width // work.head_dim, work.head_dim)
    normal = normal_numbers(settings.device, settings.dtype)
    return [tuple(normal(shape) for _ in work.kinds) for _ in range(RING)]


def _description(
    work: Work, tensors: tuple[Tensor, ...], results: tuple[BlockScaled, ...], settings: Settings
) -> Record:
    case, column = "x".join(map(str, tensors[0].shape)), f"d{work.head_dim}"
    return {
        **described("bandwidth", SUITE, work.row, case, column=column),
        "dtype": settings.dtype_name,
        "head_dim": work.head_dim,
        "hadamard": work.hadamard,
        "smooth_k": work.smooth_k,
        "quantized_dtype": name_of(work.dtype),
        "layout": ", ".join(scaled.layout for scaled in results),
        "hopper_kernel": on_hopper(tensors[0]),
    }


def _tables(x: Tensor) -> tuple[Tensor, Tensor]:
    return tables(x.shape[1], x.shape[-1], x.device)


def _embedding(x: Tensor) -> Embedding:
    return Embedding(None, None, *_tables(x), None, False, 0.0)


def _rotate(q: Tensor, k: Tensor, _v: Tensor) -> list[Tensor]:
    embedding = _embedding(q)
    return [*rotated(q, k, embedding)]


def _copy(*tensors: Tensor) -> list[Tensor]:
    return [torch.clone(x) for x in tensors]


def _in_turn(work: Callable[..., object], ring: list[tuple[Tensor, ...]]) -> Callable[[], None]:
    """Works on one group of tensors after the other and keeps as many results, each in memory of
    its own."""
    sources, kept = itertools.cycle(ring), deque(maxlen=len(ring))
    return lambda: kept.append(work(*next(sources)))


def _num_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _fault(work: Work, tensors: tuple[Tensor, ...], results: tuple[BlockScaled, ...]) -> str | None:
    """The gate: bit for bit what torch operations give."""
    for x, kind, scaled in zip(tensors, work.kinds, results, strict=True):
        of_v = kind == "v"
        hadamard, dtype = work.hadamard and not of_v, FP8 if of_v else work.dtype
        if work.rotates and not of_v:
            x = embedded(x, None, _embedding(x), None)
        mean = sample_mean(x, None, None) if work.smooth_k and kind == "k" else None
        data, descale = torch_operations.quantize(x, BLOCK, hadamard, None, None, dtype, mean)
        found = scaled.in_rows().data
        wrong = int((found.view(torch.uint8) != data.view(torch.uint8)).sum())
        wrong_scales = int((scaled.descale != descale).sum())
        if wrong or wrong_scales:
            return (
                f"{wrong} of {data.numel()} numbers and {wrong_scales} scales of {kind} differ "
                "from torch's"
            )
    return None
