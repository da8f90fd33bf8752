"""Cases of cached calls, their inputs with NaN around them, and their attention in any precision.

Pages that no sequence has, table entries past a length, tokens past a length and those that no
query sees are NaN or no page at all, so whatever a backend reads beyond a sequence shows in its
result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flashattn3
from flashattn3.call.cache_descales import OF_KEYS
from flashattn3.call.eight_bits import rounded
from flashattn3.call.operands import Tensors
from flashattn3_bench.checking import FORWARD_FACTOR, attention, check

from .tolerance import check_lse

UNUSED_PAGE = -1
GARBAGE = 99.0  # in memory of int8 that nothing reads


@dataclass(frozen=True)
class CacheCase:
    """seqlens: cached tokens, of which the queries are the last. seqlens_q: one number for dense q,
    a tuple for ragged q. page_size: 0 for a dense cache. layout: of the caches: "nhd", "hnd" (heads
    before tokens), or "one" (K and V in one tensor). others: rows of the cache that no sequence
    has, which makes cache_batch_idx a permutation. slopes: axes of alibi_slopes, "heads" or
    "batch heads". stored: dtype of the caches, if not q's. descales: the kind of those of K and
    V."""

    name: str
    seqlens: tuple[int, ...]
    seqlens_q: int | tuple[int, ...] = 1
    num_heads_q: int = 4
    num_heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    page_size: int = 0
    capacity: int = 0
    layout: str = "nhd"
    leftpad: tuple[int, ...] | None = None
    others: int = 0
    sinks: bool = False
    tree: bool = False
    slopes: str = ""
    stored: torch.dtype | None = None
    descales: str = ""
    options: dict = field(default_factory=dict, hash=False)

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def queries(self) -> tuple[int, ...]:
        return (self.seqlens_q,) * self.batch if isinstance(self.seqlens_q, int) else self.seqlens_q

    @property
    def ragged(self) -> bool:
        return not isinstance(self.seqlens_q, int)


@dataclass
class CacheInputs:
    """arguments: of ``flash_attn_with_kvcache``. k, v: of each sequence, (length, heads, ·), times
    those descales that are not of the sequence."""

    arguments: dict[str, object]
    k: list[Tensor]
    v: list[Tensor]


def make_cache_inputs(
    case: CacheCase, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> CacheInputs:
    """Drawn on the CPU from the case and the seed alone. dtype: of q, and of caches of 16 bits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, dims = case.num_heads_kv, (case.head_dim, case.head_dim_v)
    k, v = ([normal(n, heads, dim) for n in case.seqlens] for dim in dims)
    if case.stored:
        k, v = ([x.double() for x in of] for of in (k, v))
    factors_of = [[_factors(case, x.shape[0], generator) for x in k] for _ in dims]
    if case.stored:
        codes = zip((k, v), factors_of, strict=True)
        k, v = ([_codes(x, by, case.stored) for x, by in zip(*of, strict=True)] for of in codes)
    stored = [
        [_without_hidden(case, i, x) for i, x in enumerate(of)]
        for of in (k, v, *(factors_of if case.descales == "tokens" else ()))
    ]
    stored += () if case.descales == "tokens" else factors_of
    capacity = case.capacity or max(case.seqlens, default=0) + 3
    rows = torch.randperm(case.batch + case.others, generator=generator)[: case.batch]
    arguments: dict[str, object] = dict(case.options)
    if case.others:
        arguments["cache_batch_idx"] = rows.to(device, torch.int32)
    else:
        rows = torch.arange(case.batch)
    num_caches = case.batch + case.others
    held = normal(0, heads, 1).to(case.stored or dtype)
    if case.page_size:
        table, caches, by = _paged(case, *stored, rows, num_caches, capacity, held, generator)
        arguments["page_table"] = table.to(device)
    else:
        caches = _stored(case, num_caches, capacity, held)
        by = _descales(case, num_caches, capacity)
        for row, *of in zip(rows.tolist(), *stored, strict=True):
            for cache, x in zip(caches, of[:2], strict=True):
                _put(cache[row], x)
            for descale, x in zip(by, of[2:], strict=False):
                descale[row, : x.shape[0]] = x[: descale.shape[1]]
    if case.descales in OF_KEYS:
        for of, own in zip((k, v), factors_of, strict=True):
            of[:] = [x.double() * y.double().unsqueeze(-1) for x, y in zip(of, own, strict=True)]
        arguments |= {"k_descale": by[0].to(device), "v_descale": by[1].to(device)}
    shape = (sum(case.queries),) if case.ragged else (case.batch, case.seqlens_q)
    q = normal(*shape, case.num_heads_q, case.head_dim)
    if case.ragged:
        edges = torch.tensor([0, *itertools.accumulate(case.queries)], dtype=torch.int32)
        arguments["cu_seqlens_q"] = edges.to(device)
        arguments["max_seqlen_q"] = max(case.queries, default=0)
    if case.leftpad:
        arguments["cache_leftpad"] = torch.tensor(case.leftpad, dtype=torch.int32, device=device)
    if case.tree:
        seen = torch.rand(*shape, max(case.queries), generator=generator) < 0.5
        seen[..., 0] = True
        arguments["tree_mask"] = words_of(seen).to(device)
    if case.sinks:
        arguments["sinks"] = torch.randn(case.num_heads_q, generator=generator).to(device)
    if case.slopes:
        sizes = {"batch": case.batch, "heads": case.num_heads_q}
        shape = [sizes[axis] for axis in case.slopes.split()]
        arguments["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if case.descales:
        factors = 0.5 + torch.rand(case.batch, heads, generator=generator)
        arguments["q_descale"] = factors.to(device)
    if case.descales == "heads":
        like = torch.zeros(0, heads)
        for name, of in zip(("k_descale", "v_descale"), factors_of, strict=True):
            arguments[name] = torch.stack([x[0] for x in of]).to(device) if of else like
    seqlens = torch.tensor(case.seqlens, dtype=torch.int32, device=device)
    given = {"q": q.to(device), "k_cache": caches[0].to(device), "v_cache": caches[1].to(device)}
    return CacheInputs({**given, "cache_seqlens": seqlens, **arguments}, k, v)


def _factors(case: CacheCase, length: int, generator) -> Tensor:
    """The descale of each token and head of a sequence, (length or 1, heads)."""
    size = {"pages": case.page_size or length, "tokens": 1}.get(case.descales, length)
    if not case.descales:
        return torch.ones(max(1, length), case.num_heads_kv)
    own = 0.5 + torch.rand(max(1, length), case.num_heads_kv, generator=generator)
    if case.stored:
        own = own / 16
    first = torch.arange(max(1, length)) // max(1, size) * max(1, size)
    return own[first]


def _codes(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it is stored, in float64."""
    return rounded(x / factors[: x.shape[0]].double().unsqueeze(-1), dtype).double()


def _put(cache: Tensor, x: Tensor) -> None:
    """Write the first tokens of a page or a dense cache. int8 has no NaN."""
    x = x.nan_to_num(GARBAGE) if cache.dtype == torch.int8 else x
    cache[: x.shape[0]] = x.to(cache.dtype)


def _descales(case: CacheCase, lead: int, tokens: int) -> list[Tensor]:
    """Those of K and V, if they are of pages or tokens, NaN."""
    size = 1 if case.descales == "pages" else tokens
    shape = lead, size, case.num_heads_kv
    return [torch.full(shape, math.nan) for _ in range(2 * (case.descales in OF_KEYS))]


def words_of(seen: Tensor) -> Tensor:
    """A ``tree_mask`` of bools (..., new tokens)."""
    seen = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (seen.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def bits_of(tree_mask: Tensor) -> Tensor:
    return ((tree_mask.long().unsqueeze(-1) >> torch.arange(32)) & 1).bool().flatten(-2)


def _without_hidden(case: CacheCase, index: int, x: Tensor) -> Tensor:
    """The tokens of a sequence, NaN before the first that a query sees."""
    lowest = case.leftpad[index] if case.leftpad else 0
    left = case.options.get("window_size", (-1, -1))[0]
    if left >= 0:
        lowest = max(lowest, case.seqlens[index] - case.queries[index] - left)
    x = x.clone()
    x[:lowest] = math.nan
    return x


def _stored(case: CacheCase, lead: int, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """K and V caches (lead, tokens, heads, ·) of NaN in the case's layout."""
    heads, dims = case.num_heads_kv, (case.head_dim, case.head_dim_v)
    nothing = GARBAGE if like.dtype == torch.int8 else math.nan

    def new(*shape: int) -> Tensor:
        return torch.full(shape, nothing, dtype=torch.float32).to(like.dtype)

    if case.layout == "one":
        return new(lead, tokens, heads, sum(dims)).split(dims, -1)
    if case.layout == "hnd":
        return tuple(new(lead, heads, tokens, dim).transpose(1, 2) for dim in dims)
    return tuple(new(lead, tokens, heads, dim) for dim in dims)


def _paged(
    case, k, v, k_factors, v_factors, rows, num_caches: int, capacity: int, like, generator
) -> tuple[Tensor, tuple, list]:
    """Pages in a random order; the table is a slice of a wider one. Table, caches, descales."""
    size = case.page_size
    width = -(-capacity // size)
    needed = [-(-n // size) for n in case.seqlens]
    num_pages = sum(needed) + 3
    pages = torch.randperm(num_pages, generator=generator).tolist()
    caches = _stored(case, num_pages, size, like)
    descales = _descales(case, num_pages, size)
    table = torch.full((num_caches, width + 5), UNUSED_PAGE, dtype=torch.int32)[:, :width]
    for row, count, *of in zip(rows.tolist(), needed, k, v, k_factors, v_factors, strict=True):
        for index in range(count):
            page = pages.pop()
            # A page without a visible token was given back.
            if not of[0][index * size : (index + 1) * size].isnan().all():
                table[row, index] = page
            part = slice(index * size, (index + 1) * size)
            for cache, x in zip(caches, of[:2], strict=True):
                _put(cache[page], x[part])
            for descale, own in zip(descales, of[2:], strict=False):
                own = own[part][: descale.shape[1]]
                descale[page, : own.shape[0]] = own
    return table, caches, descales


def cache_attention(
    case: CacheCase, inputs: CacheInputs, dtype: torch.dtype = torch.float64, of_magnitudes=False
) -> tuple[Tensor, Tensor]:
    """out and lse, computed in ``dtype``; in float64 what is right.

    of_magnitudes: attention of |v|, the sum of P |v|.
    """
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.arguments.items()}
    q = given["q"].flatten(0, -3)
    out = q.new_zeros((*q.shape[:2], case.head_dim_v), dtype=dtype)
    lse = torch.zeros(q.shape[:2], dtype=torch.promote_types(dtype, torch.float32))
    group, ends = case.num_heads_q // case.num_heads_kv, itertools.accumulate(case.queries)
    for index, (seqlen_q, end) in enumerate(zip(case.queries, ends, strict=True)):
        rows = slice(end - seqlen_q, end)
        bias = torch.zeros(1, 1, seqlen_q, case.seqlens[index])
        bias.masked_fill_(_hidden(case, given, index, rows), -math.inf)
        for head in range(case.num_heads_kv):
            heads = slice(head * group, (head + 1) * group)
            k, v = (x[index][None, :, head : head + 1] for x in (inputs.k, inputs.v))
            tensors = Tensors(q[None, rows, heads], k, v.abs() if of_magnitudes else v, bias=bias)
            if case.sinks:
                tensors = tensors._replace(sinks=given["sinks"][heads])
            if case.slopes:
                slopes = given["alibi_slopes"].expand(case.batch, -1)[index, heads]
                tensors = tensors._replace(alibi_slopes=slopes)
            descales = (given.get(f"{side}_descale") for side in "qkv")
            by = [1.0 if x is None or x.ndim > 2 else float(x[index, head]) for x in descales]
            scale = case.options.get("softmax_scale", case.head_dim**-0.5) * by[0] * by[1]
            options = {"softmax_scale": scale, "softcap": case.options.get("softcap", 0.0)}
            found, of_lse = attention(tensors, dtype=dtype, wide_scores=True, **options)
            out[rows, heads], lse[rows, heads] = found[0] * by[2], of_lse[0].T
    out = out.view(*given["q"].shape[:-1], case.head_dim_v)
    lse = lse if case.ragged else lse.view(*given["q"].shape[:-1])
    return out, lse.transpose(-1, -2)


def _hidden(case: CacheCase, given: dict, index: int, rows: slice) -> Tensor:
    """Which keys of a sequence its queries, these rows of all, do not see."""
    length, seqlen_q = case.seqlens[index], case.queries[index]
    keys, position = torch.arange(length), torch.arange(length - seqlen_q, length).unsqueeze(1)
    left, right = case.options.get("window_size", (-1, -1))
    if case.options.get("causal"):
        right = -1 if case.tree else 0  # a tree's bits say it
    hidden = (keys < position - left) & (left >= 0) | (keys > position + right) & (right >= 0)
    if case.leftpad:
        hidden |= keys < case.leftpad[index]
    if case.tree:
        first = max(0, seqlen_q - length)  # new tokens that no key is left of
        tree = bits_of(given["tree_mask"].flatten(0, -2)[rows])
        hidden[:, length - (seqlen_q - first) :] |= ~tree[:, first:seqlen_q]
    return hidden


def check_cached(
    case: CacheCase, inputs: CacheInputs, out: Tensor, lse: Tensor, plan: object = ""
) -> None:
    """Hold the results of a case to the tolerance rule."""
    reference, reference_lse = cache_attention(case, inputs)
    baseline, _ = cache_attention(case, inputs, out.dtype)

    def rounding() -> Tensor:
        """P and out are each rounded once; P below 2**-14 by as much as at it."""
        unit = torch.finfo(out.dtype).eps / 2
        weights, _ = cache_attention(case, inputs, of_magnitudes=True)
        largest = max((float(x.abs().max()) for x in inputs.v if x.numel()), default=0.0)
        rows = max(case.seqlens, default=0)
        return unit * (weights + reference.abs()) * 1.01 + rows * largest * 2.0**-25

    args = case.name, plan
    check("out", out, reference, baseline, FORWARD_FACTOR, *args, rounding=rounding)
    check_lse(lse, reference_lse, *args)


def call_cached(inputs: CacheInputs, **options) -> tuple[Tensor, Tensor]:
    function: Callable = flashattn3.flash_attn_with_kvcache
    return function(**inputs.arguments, return_lse=True, **options)
