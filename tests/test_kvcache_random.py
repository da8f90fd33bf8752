"""Random cached calls against float64, with all options mixed: layouts, pages, 8 bits, descales,
masks, padding, parts.

FLASHATTN3_RANDOM_EXAMPLES: how many for each backend and chunk, 8 unless said; Triton's interpreter
runs a fourth of them. With 63, 32 chunks have over 2,000.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import pytest
import torch
from helpers import CACHE_BACKENDS, GPU, TRITON_DTYPES
from support.kvcache import CacheCase, CacheInputs, call_cached, check_cached, make_cache_inputs

from flashattn3 import UnsupportedError, explain_with_kvcache

EXAMPLES = int(os.environ.get("FLASHATTN3_RANDOM_EXAMPLES", "8"))
CHUNKS = 32
STORED = (None, torch.float8_e4m3fn, torch.int8)


class Sizes(NamedTuple):
    """queries: of each sequence; ragged: where they differ."""

    dims: tuple[int, ...] = (16, 32, 40, 64)
    queries: tuple[int, ...] = (1, 1, 1, 2, 5, 33)
    ragged: tuple[int, ...] = (0, 1, 1, 3, 20)


# A Hopper kernel is for head dims up to 64, 128 or 256, and for up to 192 packed rows or for more.
SIZES = {"hopper": Sizes((40, 64, 128, 256), (1, 1, 2, 5, 33, 200), (0, 1, 1, 3, 20, 200))}


def random_case(draw: random.Random, sizes: Sizes) -> CacheCase:
    page = draw.choice((0, 0, 1, 3, 8, 16, 16, 64))
    lengths = tuple(
        draw.choice((0, 1, 15, 16, 17, 40, 130, 200)) for _ in range(draw.randint(1, 4))
    )
    queries = draw.choice(sizes.queries)
    if draw.random() < 0.3:
        queries = tuple(draw.choice(sizes.ragged) for _ in lengths)
    group, heads_kv = draw.choice((1, 1, 2, 5, 8)), draw.choice((1, 2))
    dim = draw.choice(sizes.dims)
    options: dict[str, object] = {"causal": draw.random() < 0.6}
    if draw.random() < 0.3:
        options["window_size"] = draw.choice(((0, 0), (16, 0), (50, 3), (9, -1)))
    if draw.random() < 0.2:
        options["softcap"] = draw.choice((2.0, 30.0))
    if draw.random() < 0.2:
        options["softmax_scale"] = draw.choice((0.05, -0.3))
    options |= draw.choice(({}, {}, {"num_splits": 1}, {"num_splits": 3}, {"split_tokens": 128}))
    stored = draw.choice(STORED)
    kinds = ("heads", "pages", "tokens") + (() if stored == torch.int8 else ("", ""))
    leftpad = tuple(draw.randint(0, n) for n in lengths) if draw.random() < 0.2 else None
    return CacheCase(
        "random",
        lengths,
        queries,
        num_heads_q=group * heads_kv,
        num_heads_kv=heads_kv,
        head_dim=dim,
        head_dim_v=draw.choice((dim, dim, 23, 24)),
        page_size=page,
        capacity=max(lengths) + draw.choice((0, 1, 70)),
        layout=draw.choice(("nhd", "hnd", "one")),
        leftpad=leftpad,
        others=draw.choice((0, 0, 2)),
        sinks=draw.random() < 0.2,
        slopes=draw.choice(("", "", "", "heads", "batch heads")),
        stored=stored,
        descales=draw.choice(kinds),
        options=options,
    )


def is_taken(inputs: CacheInputs, backend: str) -> bool:
    """Whether a backend takes a call. Hopper refuses some; where no backend is named,
    another one then takes them."""
    given = {**inputs.arguments, "return_lse": True}
    try:
        return explain_with_kvcache(**given, backend=backend).backend == backend
    except UnsupportedError:
        assert backend == "hopper" and explain_with_kvcache(**given).backend != backend
        return False


@pytest.mark.interpreted(
    quick=lambda chunk, backend: chunk == 0, sweep=lambda chunk, backend: chunk >= 12
)
@pytest.mark.parametrize("backend", CACHE_BACKENDS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cached_calls(chunk, backend, device):
    draw = random.Random(f"{chunk} {backend}")
    wanted = EXAMPLES if GPU or backend == "reference" else -(-EXAMPLES // 4)
    while wanted:
        case = random_case(draw, SIZES.get(backend, Sizes()))
        dtype = draw.choice(TRITON_DTYPES)
        inputs = make_cache_inputs(case, device, dtype, draw.randrange(2**31))
        if is_taken(inputs, backend):
            check_cached(case, inputs, *call_cached(inputs, backend=backend), case)
            wanted -= 1
