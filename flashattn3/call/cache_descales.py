"""The descales of a cached call: their shapes, and the errors of wrong ones.

A stored key or value times its descale is the real one, whatever the cache's dtype. A descale is
float32, one for each head of a sequence, of a page or of a token:

    heads: (batch, num_heads_kv), or one number for all, a tensor with no or one axis.
    pages: (num_pages, 1, num_heads_kv), of a dense cache (num_caches, 1, num_heads_kv).
    tokens: (num_pages, page_size, num_heads_kv), of a dense cache (num_caches, capacity,
        num_heads_kv). An append computes these and writes them; it divides by the others.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import UnsupportedError, complaint, expect
from .dtypes import EIGHT_BIT, INT8
from .metadata import Metadata
from .tensor_checks import check_equal, check_float32

HEADS, PAGES, TOKENS = "heads", "pages", "tokens"
OF_KEYS = (PAGES, TOKENS)  # descales that may differ from key to key of a sequence


def is_one_number(descale: Metadata | Tensor) -> bool:
    return tuple(descale.shape) in ((), (1,))


def is_of_sequences(descale: Metadata | Tensor | None, cache: Metadata | Tensor) -> bool:
    """Return whether each sequence has descales of its own."""
    return kind_of(descale, cache) == HEADS and not is_one_number(descale)


def kind_of(descale: Metadata | Tensor | None, cache: Metadata | Tensor) -> str | None:
    """One of the three kinds; None without a descale. Where a page, or a dense cache, holds a
    single token, its descale is that of the token."""
    if descale is None:
        return None
    if len(descale.shape) != 3:
        return HEADS
    return TOKENS if descale.shape[1:2] == cache.shape[1:2] else PAGES


def of_append(descale: Tensor | None, cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The descale by which new tokens are divided, and that which they get; one of them is None."""
    return (None, descale) if kind_of(descale, cache) == TOKENS else (descale, None)


def check_descales(function: str, tensors: tuple, batch: int, of: str) -> None:
    """Those of both caches of a call or an append. of: name of the tensor on whose device all
    others are."""
    for side in "kv":
        cache, descale = (getattr(tensors, f"{side}_{x}") for x in ("cache", "descale"))
        name = f"{side}_descale"
        if descale is None:
            wanted = f"a float32 tensor where {side}_cache is {INT8}"
            has_own = getattr(tensors, f"{name}_out", None) is not None
            expect(cache.dtype != INT8 or has_own, function, name, wanted, None)
            continue
        heads, shape = cache.shape[2], tuple(descale.shape)
        tokens = cache.shape[1]
        lead = "num_caches" if tensors.page_table is None else "num_pages"
        per = f"{cache.shape[0], tokens, heads} or {cache.shape[0], 1, heads} ({lead}, tokens or 1"
        wanted = f"{batch, heads} (batch, num_heads_kv), or {per}, num_heads_kv)"
        legal = (batch, heads), (cache.shape[0], tokens, heads), (cache.shape[0], 1, heads)
        expect(is_one_number(descale) or shape in legal, function, f"{name}.shape", wanted, shape)
        check_float32(function, name, descale, cache.device, of)


def check_q_descale(function: str, descale: Metadata | None, wanted: tuple, device) -> None:
    """(batch, num_heads_kv), or one number: query heads that share a KV head share it."""
    if descale is None:
        return
    shape, name = tuple(descale.shape), "q_descale"
    said = f"{wanted} (batch, num_heads_kv)"
    expect(is_one_number(descale) or shape == wanted, function, f"{name}.shape", said, shape)
    check_float32(function, name, descale, device, "q")


def check_written_descales(function: str, tensors: tuple) -> None:
    """Descales that an append computes: one for each token of a cache of 8 bits."""
    for side in "kv":
        name, cache = f"{side}_descale", getattr(tensors, f"{side}_cache")
        descale = getattr(tensors, f"{name}_out")
        if descale is None:
            continue
        given = getattr(tensors, name)
        expect(given is None, function, name, f"None beside {name}_out", "a tensor")
        if cache.dtype not in EIGHT_BIT:
            wanted = f"(batch, num_heads_kv) where new tokens are written to {cache.dtype}"
            sentence = complaint(function, f"{name}.shape", wanted, tuple(descale.shape))
            raise UnsupportedError(f"{sentence}: caches of 8 bits have descales of tokens")
        sizes = tuple(descale.shape), tuple(cache.shape[:3])
        check_equal(function, f"{name}.shape", *sizes, f"{side}_cache")
        check_float32(function, name, descale, cache.device, "k")
        axes = zip(descale.shape, descale.stride, strict=True)
        own = all(size <= 1 or step for size, step in axes)
        wanted = "without a stride of 0: descales of new tokens are written to it"
        expect(own, function, f"{name}.stride", wanted, tuple(descale.stride))
