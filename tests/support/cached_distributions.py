"""The data of distributions.py in a cache of 8 bits: the error of a call beside the error that
storing keys and values in 8 bits has in any case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import flashattn3
from flashattn3.call.eight_bits import LARGEST
from flashattn3_bench.checking.distributions import (
    HEADS,
    DistributionCase,
    Errors,
    attend_heads,
    compare,
)
from flashattn3_bench.checking.distributions import cases as every_case

PAGE_SIZE = 16
STORING_FACTOR = 1.3
LARGEST_BIAS = 0.005
ROUNDING = 2.0**-10  # of P and of out to 16 bits


class Stored(NamedTuple):
    """A case in a cache. arguments: of ``flash_attn_with_kvcache``. wanted: out and lse in float64
    of q, k and v as they are; of_codes: of the numbers that the cache holds."""

    arguments: dict[str, object]
    wanted: tuple[Tensor, Tensor]
    of_codes: tuple[Tensor, Tensor]


def cases(lengths: Iterable[int], head_dims: Iterable[int]) -> list[DistributionCase]:
    """Those of distributions.py that differ in q, k and v, not in descales."""
    found = every_case(lengths, head_dims)
    return [case for case in found if case.v_descale == "blocks"]


def store(
    case: DistributionCase,
    device: torch.device | str,
    dtype: torch.dtype,
    per: str,
    backend: str | None = None,
    seed: int = 0,
) -> Stored:
    """Append k and v, float16, to pages of 16 tokens in a random order. per: "tokens", whose
    descales the append computes, or "heads": of the whole cache, which fit its largest number."""
    q, k, v = (x.half() for x in case.tensors(device, seed))
    length, dim = case.seqlen_k, case.head_dim
    num_pages = -(-length // PAGE_SIZE)
    table = torch.randperm(num_pages, device=device).int()[None]
    shape = (num_pages, PAGE_SIZE, HEADS)
    caches = [torch.zeros(*shape, dim, device=device).to(dtype) for _ in range(2)]
    descales = [torch.zeros(shape, device=device) for _ in range(2)]
    if per == "heads":
        descales = [x.float().abs().amax((1, 3)) / LARGEST[dtype] for x in (k, v)]
    given = {"page_table": table, "k_descale": descales[0], "v_descale": descales[1]}
    flashattn3.append_kvcache(k, v, *caches, cache_seqlens=0, **given, backend=backend)
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": length}
    arguments |= {"causal": case.causal, "softmax_scale": dim**-0.5, **given}
    real = []
    for cache, descale in zip(caches, descales, strict=True):
        rows, by = cache.double()[table[0].long()], descale
        if per == "tokens":
            by = descale[table[0].long()]
        rows = rows * by.double().unsqueeze(-1)
        real.append(rows.flatten(0, 1)[None, :length])
    results = [
        attend_heads(
            ([x[0, :, head].double() for x in (q, *of)] for head in range(HEADS)),
            dim**-0.5,
            case.causal,
        )
        for of in ((k, v), real)
    ]
    return Stored(arguments, *results)


def misses(found: tuple[Tensor, Tensor], stored: Stored) -> list[str]:
    """A sentence for each bound that out breaks. Few keys share a row, or none: the bias of storing
    them, up to 0.04 at 256 keys and 0.013 at 8192 in float64, is theirs. What the call adds to it
    is held to the bound itself."""
    mine, storing = compare(found, stored.wanted), compare(stored.of_codes, stored.wanted)
    bounds = {
        "error": (mine.error, STORING_FACTOR * storing.error + ROUNDING),
        "bias": (mine.bias, max(LARGEST_BIAS, STORING_FACTOR * abs(storing.bias))),
        "added bias": (compare(found, stored.of_codes).bias, LARGEST_BIAS),
    }
    return [
        f"{name} {value:.3g} > {bound:.3g}"
        for name, (value, bound) in bounds.items()
        if not abs(value) <= bound
    ]


def needle(length: int, head_dim: int, place: int) -> DistributionCase:
    """Every query gives half of its weight to the key at one place of the cache."""
    name = "heavy-p0.5-first-noise-light0-v0.0"
    (case,) = (x for x in every_case((length,), (head_dim,)) if x.name == name)
    return replace(case, position=place)


def needle_error(found: tuple[Tensor, Tensor], stored: Stored) -> Errors:
    """Of the call alone: against the numbers that the cache holds."""
    return compare(found, stored.of_codes)
