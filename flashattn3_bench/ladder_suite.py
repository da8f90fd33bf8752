"""Two suites. The ladder: naive attention, FlashAttention-1 and -2 of examples/learn, our Triton
kernels, and the backend that the device picks, in one run. And FlashAttention-1 with block-sparse
masks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch

import flashattn3

from . import memory_traffic
from .inputs import normal_numbers
from .ladder import block_of, program
from .providers import LADDER_FA1, LADDER_FA2, NAIVE, OURS, TRITON
from .runner import ABSENT, FAILED, OK, Record, Settings, described, first_line, run_cell
from .suites import Cell
from .timing import interleave, make_clock

SUITE = "ladder"
RUNGS = (TRITON, LADDER_FA2, LADDER_FA1, NAIVE)  # below ours
SPARSE = "block-sparse"  # a suite


def run_rung(cell: Cell, settings: Settings) -> Iterator[Record]:
    """The records of a cell, in the forward with the bytes that each provider moves."""
    for record in run_cell(cell, settings):
        if record["status"] == OK and cell.direction == "fwd":
            record["bytes_moved"] = bytes_moved(record["provider"], cell, settings)
        yield record


def bytes_moved(provider: str, cell: Cell, settings: Settings) -> int | None:
    """Of a forward, all heads. None: the count of this provider is not known."""
    case, block = cell.case, block_of(settings.device)
    if provider == NAIVE:
        moved = memory_traffic.naive(case)
    elif provider == LADDER_FA1:
        moved = memory_traffic.flash_attention_1(case, block)
    elif provider == LADDER_FA2:
        moved = memory_traffic.flash_attention_2(case, 2 * block, block)
    elif provider in (OURS, TRITON) and (tile := _tile(provider, cell, settings)):
        moved = memory_traffic.flash_attention_2(case, *tile)
    else:
        return None
    return case.batch * case.num_heads_q * moved


def _tile(provider: str, cell: Cell, settings: Settings) -> tuple[int, int] | None:
    """Rows and keys of a tile, as explain gives them."""
    case, backend = cell.case, "triton" if provider == TRITON else None
    shape = (case.batch, case.seqlen_q, case.num_heads_q, case.head_dim)
    q = torch.empty(shape, dtype=settings.dtype, device="meta")
    options = {"causal": case.causal, "backend": backend, "device": settings.device}
    config = flashattn3.explain(q, q, q, **options).config
    found = re.match(r"(\d+) rows x (\d+) keys", str(config.get("tile", "")))
    return (int(found[1]), int(found[2])) if found else None


def sparse_work(directions: Iterable[str], quick: bool) -> list[tuple[str, str, dict[str, int]]]:
    """(direction, family of masks, its arguments), from the sparsest to the dense mask."""
    masks = [("sliding window", {"reach": n}) for n in ((0, 1) if quick else (0, 2, 7, 16))]
    masks += [("butterfly", {}), ("local and global", {}), ("dense", {})]
    return [(direction, *mask) for direction in directions for mask in masks]


def run_sparse(
    direction: str, family: str, arguments: dict[str, int], settings: Settings, quick: bool
) -> list[Record]:
    """One record: FlashAttention-1 under a block mask, checked against float64 on its last head.

    tflops counts the blocks that are computed.
    """
    block, device = block_of(settings.device), settings.device
    heads, seqlen, d = (2, 128, 32) if quick else (128, 4096, 64)
    num_blocks = seqlen // block
    row = " ".join([direction, SPARSE, family, *map(str, arguments.values())])
    place = {"column": str(seqlen), "direction": direction}
    record: Record = {
        **described("time", SPARSE, row, f"{SPARSE} {family}", **place),
        "dtype": settings.dtype_name,
        "batch": 1,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "num_heads_q": heads,
        "head_dim": d,
        "provider": LADDER_FA1,
    }
    try:
        masks = program("masks")
        attend = program("step4_flash_attention_1").FlashAttention1.apply
    except RuntimeError as error:
        return [{**record, "status": ABSENT, "reason": first_line(error)}]
    mask = torch.ones(num_blocks, num_blocks, dtype=torch.uint8)
    if family != "dense":
        mask = masks.FAMILIES[family](num_blocks, **arguments)
    record["density"] = masks.density(mask)
    how = mask.to(device), block, False
    normal = normal_numbers(device, settings.dtype)
    dout = normal(heads, seqlen, d)
    q, k, v = (normal(heads, seqlen, d).requires_grad_() for _ in range(3))
    out = attend(q, k, v, *how)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    last = [x.detach()[-1:] for x in (out, *backward())]
    error = masks.largest_error(last, masks.reference(*(x[-1:] for x in (q, k, v, dout)), *how))
    bound = 4 * torch.finfo(settings.dtype).eps
    if not error < bound:
        return [{**record, "status": FAILED, "reason": f"error {error:.1e}, bound {bound:.1e}"}]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(q, k, v, *how)

    clock = make_clock(device, 4 * q.numel() * q.element_size())
    calls = {LADDER_FA1: forward if direction == "fwd" else backward}
    timing = interleave(calls, clock, settings.rounds, settings.round_ms)[LADDER_FA1]
    flops = 4 * heads * seqlen * seqlen * d * record["density"]
    flops *= 2.5 if direction == "bwd" else 1
    return [{**record, "status": OK, **asdict(timing), "tflops": flops / timing.median_ms / 1e9}]
