"""split_tokens: a token's out and lse have the bits of its query, its keys and split_tokens alone.

Every case has whole sequences whose rows ``flash_attn_func`` computes at once. Random calls compute
some of these rows again: in batches with other sequences, in pages of any size, in a cache of any
capacity, as a chunk or as one token.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch
from helpers import GPU, TRITON_DTYPES, needs_hopper, same_bits
from torch import Tensor

import flashattn3
from flashattn3 import (
    explain,
    explain_with_kvcache,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

SPAN = 128
FEW = 140, 31  # tokens of whole sequences
MANY = (5000, 1290, 140, 31) if GPU else (290, 140, 31)
BACKENDS = [
    *(("reference", dtype) for dtype in (torch.float16, torch.float32)),
    *(("triton", dtype) for dtype in TRITON_DTYPES),
]
HOPPER = (None, torch.float16), (None, torch.bfloat16)  # by the dispatch


def name_of(parameter) -> str:
    return "default" if parameter is None else str(parameter).removeprefix("torch.")


by_backend = pytest.mark.parametrize(
    ("backend", "dtype"),
    [*BACKENDS, *(pytest.param(*of, marks=needs_hopper) for of in HOPPER)],
    ids=name_of,
)


class Case(NamedTuple):
    """heads: of queries and of keys. dims: of keys and of values. options: of a call. stored: the
    dtype of the cache, if it is not q's."""

    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (32, 32)
    options: dict | None = None
    sinks: bool = False
    stored: torch.dtype | None = None


CASES = {
    "causal": Case(),
    "group-5": Case(heads=(10, 2) if GPU else (5, 1)),  # Triton's interpreter takes a minute of 10
    "window": Case(heads=(2, 1) if GPU else (2, 2), options={"window_size": (150, 0)}),
    "softcap-sinks": Case(options={"softcap": 3.0}, sinks=True),
    "e4m3": Case(stored=torch.float8_e4m3fn),
    "dims": Case(dims=(40, 24), options={"softmax_scale": -0.3}),
    "d128": Case(heads=(8, 2) if GPU else (4, 1), dims=(128, 128)),
}


class Sequences(NamedTuple):
    """Rows of each sequence, (length, heads, ·): q, k, v and, of flash_attn_func, out and lse."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    out: list[Tensor]
    lse: list[Tensor]
    options: dict


@functools.cache
def sequences_of(name: str, lengths: tuple, device, backend: str, dtype, span=SPAN) -> Sequences:
    case = CASES[name]
    generator = torch.Generator().manual_seed(1)
    (heads, heads_kv), (dim, dim_v) = case.heads, case.dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    options = {"causal": True, **(case.options or {}), "split_tokens": span}
    options |= {"backend": backend, "return_lse": True}
    if case.sinks:
        options["sinks"] = torch.randn(heads, generator=generator).to(device)
    found = Sequences([], [], [], [], [], options)
    for length in lengths:
        q, k = normal(length, heads, dim), normal(length, heads_kv, dim)
        v = normal(length, heads_kv, dim_v)
        whole = flash_attn_func
        if case.stored and dtype.itemsize == 2:  # under wider q no cache has 8 bits
            k, v = k.to(case.stored), v.to(case.stored)
            whole = flash_attn_with_kvcache
        out, lse = whole(q[None], k[None], v[None], **options)
        for kept, x in zip(found, (q, k, v, out[0], lse[0].T), strict=False):
            kept.append(x)
    return found


def random_call(of: Sequences, draw: random.Random) -> tuple[dict, list[tuple]]:
    """Arguments of a cached call, and of each of its sequences which one it is, its first row and
    its end."""
    batch, seqlen_q = draw.randint(1, 4), draw.choice((0, 0, 1, 1, 2, 7, 30))  # 0: ragged
    rows = []
    for _ in range(batch):
        index, queries = draw.randrange(len(of.q)), seqlen_q or draw.randint(1, 31)
        length = draw.randint(31, len(of.q[index]))
        rows.append((index, length - queries, length))
    queries = [of.q[index][first:end] for index, first, end in rows]
    q, device = torch.cat(queries), of.q[0].device
    arguments: dict = {"q": q if seqlen_q == 0 else q.unflatten(0, (batch, seqlen_q))}
    lengths = torch.tensor([end for *_, end in rows], dtype=torch.int32)
    arguments["cache_seqlens"] = lengths.to(device)
    if seqlen_q == 0:
        edges = [0, *itertools.accumulate(map(len, queries))]
        arguments["cu_seqlens_q"] = torch.tensor(edges, dtype=torch.int32, device=device)
        arguments["max_seqlen_q"] = max(map(len, queries)) + draw.choice((0, 9))
    page = draw.choice((0, 0, 1, 8, 16, 24, 128))  # 0: a dense cache
    width = -(-(int(lengths.max()) + draw.choice((0, 1, 100))) // max(1, page))
    num_pages, table = batch, torch.arange(batch).unsqueeze(1)
    if page:
        order = torch.Generator().manual_seed(page)
        num_pages = batch * width + 3
        table = torch.randperm(num_pages, generator=order)[:-3].view(batch, width).int()
        arguments["page_table"] = table.to(device)
    first = draw.choice((0, 0, 0, 1))  # element of memory: 1 is no multiple of 16 bytes
    for name, x in (("k_cache", of.k), ("v_cache", of.v)):
        keys = [x[index][:end] for index, _, end in rows]
        arguments[name] = _stored(keys, table, num_pages, page or width, first)
    return arguments, rows


def shifted(shape: tuple[int, ...], first: int, like: Tensor) -> Tensor:
    """NaN of that shape, dense in memory from element first on."""
    return like.new_full((first + math.prod(shape),), torch.nan)[first:].view(shape)


def _stored(keys: list[Tensor], table: Tensor, num_pages: int, page_size: int, first: int):
    """The keys of each sequence in the pages of its row of the table; all else is NaN."""
    cache = shifted((num_pages, page_size, *keys[0].shape[1:]), first, keys[0])
    for pages, x in zip(table.tolist(), keys, strict=True):
        for page, some in zip(pages, x.split(page_size), strict=False):
            cache[page, : len(some)] = some
    return cache


def differing(of: Sequences, arguments: dict, rows: list[tuple]) -> list[tuple]:
    """Which rows of a call have other bits than those of the whole sequences."""
    out, lse = flash_attn_with_kvcache(**arguments, **of.options)
    out, lse = out.flatten(0, -3), lse.transpose(-1, -2).flatten(0, -2)
    wrong, begin = [], 0
    for index, first, end in rows:
        here = slice(begin, begin + end - first)
        begin += end - first
        wanted = of.out[index][first:end], of.lse[index][first:end]
        if not (same_bits(out[here], wanted[0]) and same_bits(lse[here], wanted[1])):
            wrong.append((index, first, end))
    return wrong


@pytest.fixture
def parts(request, monkeypatch):
    """Whether a program computes each span, or one all spans of its rows."""
    if request.param == "joined":
        from flashattn3.backends.triton import cache_tiles

        monkeypatch.setattr(cache_tiles, "SPREAD_BYTES", 0)


def check_random_calls(number: int, *of_sequences) -> None:
    of, draw = sequences_of(*of_sequences), random.Random(number)
    for step in range(number):
        arguments, rows = random_call(of, draw)
        assert not differing(of, arguments, rows), f"call {step}"


by_parts = pytest.mark.parametrize(
    ("backend", "dtype", "parts"),
    [
        *((*of, "") for of in BACKENDS if of[0] == "reference"),
        *((*of, way) for of in BACKENDS if of[0] == "triton" for way in ("spread", "joined")),
        *(pytest.param(*of, "", marks=needs_hopper) for of in HOPPER),
    ],
    indirect=["parts"],
    ids=name_of,
)


@by_parts
def test_a_row_has_the_bits_of_its_sequence_alone(backend, dtype, parts, device):
    number = 200 if GPU else 10 if backend == "reference" else 2
    check_random_calls(number, "causal", FEW, device, backend, dtype)


# Triton's interpreter computes all spans of a row in one program where others are not alike.
@pytest.mark.slow
@pytest.mark.interpreted(
    sweep=lambda name, parts, **_: parts == "joined" and name not in ("window", "e4m3")
)
@by_parts
@pytest.mark.parametrize("name", CASES)
def test_rows_of_many_random_calls(name, backend, dtype, parts, device):
    number = 100 if GPU else 40 if backend == "reference" else 3
    check_random_calls(number, name, MANY, device, backend, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*BACKENDS[-len(TRITON_DTYPES) :], *(pytest.param(*of, marks=needs_hopper) for of in HOPPER)],
    ids=name_of,
)
def test_a_graph_has_the_bits_of_eager_calls(name, backend, dtype, sms_left_free):
    """Captured with one length, replayed with others, on fewer SMs, beside other sequences."""
    of = sequences_of(name, MANY, torch.device("cuda"), backend, dtype)
    keys = [torch.stack([x[0]] * 3) for x in (of.k, of.v)]
    lengths = torch.ones(3, dtype=torch.int32, device="cuda")
    q = torch.stack([of.q[0][:4]] * 3)

    def attend():
        options = {**of.options, "sm_margin": sms_left_free}
        return flash_attn_with_kvcache(q, *keys, cache_seqlens=lengths, **options)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    for seed in range(20):
        draw = random.Random(seed)
        ends = [draw.randint(4, MANY[0]) for _ in range(3)]
        lengths.copy_(torch.tensor(ends, dtype=torch.int32))
        for row, end in zip(q, ends, strict=True):
            row.copy_(of.q[0][end - 4 : end])
        graph.replay()
        for index, end in enumerate(ends):
            rows = slice(end - 4, end)
            assert same_bits(out[index], of.out[0][rows])
            assert same_bits(lse[index].T, of.lse[0][rows])


@pytest.fixture(params=[0, 100], ids=["every-SM", "few-SMs"])
def sms_left_free(request):
    return request.param


@by_backend
def test_the_bits_are_those_of_spans(backend, dtype, device):
    """They change with split_tokens from the first key behind a span on, so several parts ran."""
    given = device, backend, dtype
    lse = sequences_of("causal", MANY, *given).lse[0]
    other = sequences_of("causal", MANY[:1], *given, 2 * SPAN).lse[0]
    assert same_bits(lse[:SPAN], other[:SPAN])
    assert not same_bits(lse[SPAN:], other[SPAN:])


def test_the_spans_of_a_tile_have_programs_or_one(device, monkeypatch):
    pytest.importorskip("triton")
    from flashattn3.backends.triton import cache_tiles

    q, cache = (torch.empty(2, n, 2, 32, dtype=torch.float16, device="meta") for n in (1, 1024))
    options = {"split_tokens": 256, "causal": True, "backend": "triton", "device": device}
    spread = explain_with_kvcache(q, cache, cache, **options).config
    assert spread["grid"][0] == 2 * 2 * 4
    assert spread["workspace_bytes"] == 16 * 16 * 33 * 4
    monkeypatch.setattr(cache_tiles, "SPREAD_BYTES", 0)
    joined = explain_with_kvcache(q, cache, cache, **options).config
    assert joined["grid"][0] == 2 * 2 and joined["workspace_bytes"] == 0
    assert spread["tile"] == joined["tile"]
    chunk = q.expand(2, 4096, 2, 32)
    assert explain_with_kvcache(chunk, cache, cache, **options).config["tile"] == joined["tile"]


@by_backend
def test_packed_sequences_have_the_bits_of_dense_ones(backend, dtype, device):
    of = sequences_of("causal", FEW, device, backend, dtype)
    edges = torch.tensor([0, *itertools.accumulate(FEW)], dtype=torch.int32, device=device)
    packed = [torch.cat(x) for x in of[:3]]
    longest = max(FEW), max(FEW) + 100
    for _ in range(3):  # a repeated call may find its launch
        out, lse = flash_attn_varlen_func(*packed, edges, edges, *longest, **of.options)
        assert same_bits(out, torch.cat(of.out)) and same_bits(lse.T, torch.cat(of.lse))


@by_backend
def test_addresses_change_no_bits(backend, dtype, device):
    of = sequences_of("causal", FEW, device, backend, dtype)
    tensors = [shifted((1, *x[0].shape), 1, x[0]).copy_(x[0]) for x in of[:3]]
    for _ in range(2):
        out, lse = flash_attn_func(*tensors, **of.options)
        assert same_bits(out[0], of.out[0]) and same_bits(lse[0].T, of.lse[0])


@by_backend
def test_gradients_are_those_of_the_same_attention(backend, dtype, device):
    generator = torch.Generator().manual_seed(0)
    found = []
    q, k, v = torch.randn(3, 1, 40, 2, 32, generator=generator, dtype=torch.float64)
    for options in ({"split_tokens": SPAN, "backend": backend}, {"backend": "reference"}):
        of = torch.float64 if len(options) == 1 else dtype
        leaves = [x.to(device, of).requires_grad_() for x in (q, k, v)]
        flash_attn_func(*leaves, causal=True, **options).sum().backward()
        found.append([x.grad.double() for x in leaves])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.02, atol=0.02)


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


REFUSED = [
    ({"split_tokens": 100}, "split_tokens must be None or a multiple of 128, got 100"),
    (
        {"split_tokens": 128, "num_splits": 4},
        "num_splits must be 0 with split_tokens and in batch-invariant mode, which cut keys into "
        "spans, got 4",
    ),
]
NOT_PROMISED = [
    ({"return_max_logit": True}, "split_tokens=128: takes no return_max_logit"),
    ({"alibi_slopes": torch.ones(2)}, "split_tokens=128: takes no alibi_slopes"),
    ({"bias": half(1, 1, 4, 4)}, "split_tokens=128: takes no bias"),
    ({"mask": flashattn3.masks.prefix_lm([2], 4)}, "split_tokens=128: takes no mask"),
    ({"dtype": torch.float8_e4m3fn}, "split_tokens=128: a block of tokens"),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED)
def test_invalid_spans_have_an_error(changed, text):
    q = half(1, 4, 2, 32)
    for call in (flash_attn_func, flash_attn_with_kvcache, explain):
        with pytest.raises((ValueError, TypeError)) as raised:
            call(q, q, q, **changed)
        assert text in str(raised.value)


@pytest.mark.parametrize(("changed", "text"), NOT_PROMISED, ids=lambda x: next(iter(x), ""))
def test_options_that_break_the_promise_are_refused_by_name(changed, text, device):
    changed = dict(changed)
    q = half(1, 4, 2, 32).to(device, changed.pop("dtype", torch.float16))
    changed = {name: x.to(device) if hasattr(x, "to") else x for name, x in changed.items()}
    with pytest.raises(flashattn3.UnsupportedError, match=text):
        flash_attn_func(q, q, q, split_tokens=128, **changed)
