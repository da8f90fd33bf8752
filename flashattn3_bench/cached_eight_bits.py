"""Suite kv8: caches of 8 bits beside those of 16, and appends to them.

A call's providers are the 8-bit call, the same call with a 16-bit cache of the same numbers, and
torch's attention with 16 bits; an append's are both appends and a copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import flashattn3
from flashattn3.call.dtypes import FP8, INT8, SIXTEEN_BIT
from flashattn3.call.eight_bits import LARGEST, rounded, with_descale

from .cached_cells import CachedCell
from .inputs import normal_numbers
from .providers import OURS
from .runner import Settings

WIDE, COPY = "16 bits", "copy"
DTYPES = {"e4m3": FP8, "int8": INT8}
Arguments = dict[str, Tensor]


def store(cell: CachedCell, caches: tuple[Tensor, Tensor]) -> Arguments:
    """Caches (batch or pages, tokens, heads, dim) in 8 bits, with the cell's kind of descales."""
    dtype, stored = DTYPES[cell.stored], {}
    for name, cache in zip("kv", caches, strict=True):
        if cell.descales == "tokens":
            codes, descale = with_descale(cache.float(), dtype)
        else:
            descale = cache.abs().amax().float().reshape(1) / LARGEST[dtype]
            codes = cache.float() / descale
        stored |= {f"{name}_cache": rounded(codes, dtype), f"{name}_descale": descale}
    return stored


def values(stored: Arguments, name: str) -> Tensor:
    """The real numbers of a cache, float32."""
    descale = stored[f"{name}_descale"]
    by = descale if descale.ndim == 1 else descale.unsqueeze(-1)
    return stored[f"{name}_cache"].float() * by


def query(q: Tensor) -> Tensor:
    """q of 16 bits, which a cache of 8 needs."""
    return q if q.dtype in SIXTEEN_BIT else q.half()


def append_calls(
    cell: CachedCell, settings: Settings
) -> tuple[dict[str, Callable[[], object]], Callable[[object, str], None]]:
    """Providers, and a check of (anything, a provider) that raises AssertionError: what the append
    stored is what the same quantization in torch stores, but for a code in ten thousand that rounds
    to its neighbour."""
    normal = normal_numbers(settings.device)
    batch, (heads, dim) = len(cell.lengths), (cell.heads_kv, cell.head_dim)
    k, v = (query(normal(batch, cell.seqlen_q, heads, dim)) for _ in range(2))
    dtype = settings.dtype if settings.dtype in SIXTEEN_BIT else torch.float16
    k, v = k.to(dtype), v.to(dtype)
    capacity = max(cell.lengths)
    start = torch.tensor(cell.lengths, dtype=torch.int32, device=settings.device) - cell.seqlen_q
    wide = [torch.zeros(batch, capacity, heads, dim, dtype=dtype, device=k.device) for _ in "kv"]
    small = [torch.zeros_like(x, dtype=DTYPES[cell.stored]) for x in wide]
    descales = [torch.zeros(batch, capacity, heads, device=k.device) for _ in "kv"]
    given = {"k_descale": descales[0], "v_descale": descales[1]}
    append = partial(flashattn3.append_kvcache, k, v, cache_seqlens=start)
    targets = [torch.empty_like(x) for x in (k, v)]

    def copy() -> None:
        for target, x in zip(targets, (k, v), strict=True):
            target.copy_(x)

    calls = {OURS: partial(append, *small, **given), WIDE: partial(append, *wide), COPY: copy}

    def check(_: object, name: str) -> None:
        if name != OURS:
            return
        for x, cache, descale in zip((k, v), small, descales, strict=True):
            codes, own = with_descale(x.float(), cache.dtype)
            for index, begin in enumerate(start.tolist()):
                places = slice(begin, begin + cell.seqlen_q)
                assert torch.equal(descale[index, places], own[index]), "descales"
                found, wanted = cache[index, places], rounded(codes[index], cache.dtype)
                other = found.view(torch.uint8) != wanted.view(torch.uint8)
                assert other.float().mean() < 1e-4, "codes"

    return calls, check
