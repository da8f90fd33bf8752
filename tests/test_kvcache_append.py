"""append_kvcache against index_put, and appended tokens within a cached call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import CACHE_BACKENDS as BACKENDS
from helpers import GPU, TRITON_DTYPES
from support.kvcache import CacheCase, CacheInputs, check_cached

from flashattn3 import append_kvcache, flash_attn_with_kvcache
from flashattn3.run import cached_plans

HEADS, DIM = 2, 24


@dataclass(frozen=True)
class AppendCase:
    """lengths: cached tokens. new: of each sequence, or one number for dense k."""

    name: str
    lengths: tuple[int, ...]
    new: int | tuple[int, ...]
    page_size: int = 0
    capacity: int = 48
    rotary_dim: int = 0
    interleaved: bool = True
    tables: torch.dtype = torch.float32
    others: int = 0
    descales: bool = False
    offsets: tuple[int, ...] | None = None

    @property
    def news(self) -> tuple[int, ...]:
        return (self.new,) * len(self.lengths) if isinstance(self.new, int) else self.new


CASES = (
    AppendCase("one-token", (0, 7, 47), 1),
    AppendCase("paged", (0, 15, 16, 17), 3, page_size=16),
    AppendCase("page-1", (0, 7), 2, page_size=1),
    AppendCase("page-3", (0, 2, 7), 5, page_size=3),
    AppendCase("ragged", (0, 7, 20, 3), (3, 0, 20, 1), page_size=16),
    AppendCase("ragged-dense", (0, 7), (17, 5)),
    AppendCase("overflow", (46, 48, 100), 4),
    AppendCase("overflow-paged", (46, 48), (4, 1), page_size=16),
    AppendCase("batch-idx", (0, 7), 2, others=2),
    AppendCase("rotary", (0, 7, 30), 3, rotary_dim=24),
    AppendCase("rotary-halves", (0, 7), (3, 2), rotary_dim=24, interleaved=False, page_size=8),
    AppendCase("rotary-partial", (0, 7), 3, rotary_dim=10, tables=torch.float16),
    AppendCase("rotary-partial-halves", (5, 7), 3, rotary_dim=6, interleaved=False),
    AppendCase("rotary-offsets", (5, 7), 3, rotary_dim=24, offsets=(0, 40)),
    AppendCase("descales", (5, 7), 3, descales=True, rotary_dim=24),
    AppendCase("nothing-new", (5, 7), 0),
)
QUICK = ("paged", "ragged", "overflow", "rotary-partial", "rotary-halves", "descales")
interpreted = pytest.mark.interpreted(
    quick=lambda case, backend, **_: backend != "triton" or case.name in QUICK
)


def make(case: AppendCase, device, dtype=torch.float16):
    """(k, v, caches, arguments): the cache is random, so a wrong write shows anywhere."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    batch = len(case.lengths)
    lead = (batch, case.new) if isinstance(case.new, int) else (sum(case.new),)
    k, v = (normal(*lead, HEADS, DIM) for _ in range(2))
    arguments = {"cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32, device=device)}
    if not isinstance(case.new, int):
        edges = torch.tensor([0, *case.new]).cumsum(0).int()
        arguments["cu_seqlens_k_new"] = edges.to(device)
    num_caches = batch + case.others
    if case.page_size:
        width = case.capacity // case.page_size
        pages = torch.randperm(num_caches * width + 2, generator=generator)
        table = pages[: num_caches * width].view(num_caches, width).int()
        arguments["page_table"] = table.to(device)
        shape = (pages.numel(), case.page_size)
    else:
        shape = (num_caches, case.capacity)
    if case.others:
        rows = torch.randperm(num_caches, generator=generator)[:batch]
        arguments["cache_batch_idx"] = rows.to(device, torch.int32)
    caches = [normal(*shape, HEADS, DIM) for _ in range(2)]
    if case.rotary_dim:
        angles = torch.rand(64, case.rotary_dim // 2, generator=generator) * 6
        arguments["rotary_cos"] = angles.cos().to(device, case.tables)
        arguments["rotary_sin"] = angles.sin().to(device, case.tables)
        arguments["rotary_interleaved"] = case.interleaved
    if case.offsets:
        arguments["rotary_seqlens"] = torch.tensor(case.offsets, device=device).int()
    if case.descales:
        for name in ("k_descale", "v_descale"):
            factors = 0.5 + torch.rand(batch, HEADS, generator=generator)
            arguments[name] = factors.to(device)
    return k, v, caches, arguments


def turned(case: AppendCase, x, position: int, arguments):
    """One token (heads, dim) in float64."""
    x, half = x.double().clone(), case.rotary_dim // 2
    if half == 0:
        return x
    cos, sin = (arguments[f"rotary_{name}"][position].double().cpu() for name in ("cos", "sin"))
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if case.interleaved else (pair, pair + half)
        first, second = x[:, a].clone(), x[:, b].clone()
        x[:, a] = first * cos[pair] - second * sin[pair]
        x[:, b] = first * sin[pair] + second * cos[pair]
    return x


def expected(case: AppendCase, k, v, caches, arguments):
    """The caches afterwards, in float64, written token by token."""
    wanted = [cache.double().cpu() for cache in caches]
    table, rows = arguments.get("page_table"), arguments.get("cache_batch_idx")
    k, v = (x.flatten(0, -3).cpu() for x in (k, v))
    token = 0
    for index, (cached, new) in enumerate(zip(case.lengths, case.news, strict=True)):
        row = index if rows is None else int(rows[index])
        cached = min(cached, case.capacity)
        for i in range(new):
            place, position = cached + i, (case.offsets or case.lengths)[index] + i
            if place < case.capacity:
                of = (turned(case, k[token], position, arguments), v[token].double())
                for name, cache, x in zip(("k_descale", "v_descale"), wanted, of, strict=True):
                    if name in arguments:
                        x = x / arguments[name][index].double().cpu().unsqueeze(-1)
                    if table is None:
                        cache[row, place] = x
                    else:
                        page = int(table[row, place // case.page_size])
                        cache[page, place % case.page_size] = x
            token += 1
    return wanted


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Tokens that do not fit are an error where values are checked."""
    monkeypatch.setattr(cached_plans, "is_checked", lambda device: False)


@interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_append(case, backend, device):
    k, v, caches, arguments = make(case, device)
    wanted = expected(case, k, v, caches, arguments)
    before = [cache.clone() for cache in caches]
    q = torch.randn(*k.shape[:-2], 6, DIM, device=device, dtype=k.dtype)
    of_q = {"q": q, "cu_seqlens_q": arguments.get("cu_seqlens_k_new")} if case.rotary_dim else {}
    rotated = append_kvcache(k, v, *caches, **arguments, **of_q, backend=backend)
    if not of_q:
        assert rotated is None
    else:
        begins = case.offsets or case.lengths
        places = [a + i for a, n in zip(begins, case.news, strict=True) for i in range(n)]
        for x, got, place in zip(q.flatten(0, -3), rotated.flatten(0, -3), places, strict=True):
            error = (got.double().cpu() - turned(case, x.cpu(), place, arguments)).abs().max()
            assert error < 2e-3, float(error)
    for found, right, old in zip(caches, wanted, before, strict=True):
        written = right != old.double().cpu()
        assert torch.equal(found.cpu()[~written], old.cpu()[~written]), "slots that are not new"
        error = (found.double().cpu() - right).abs()
        assert (error <= right.abs() * 2.0**-11 + 2.0**-20).all(), float(error.max())


# head dims of k and v, interleaved pairs, rotated columns, page size, whether tokens have gaps
# between them: a GPU moves whole vectors or single columns.
SHAPES = (
    (128, 128, True, 128, 16, False),
    (128, 128, False, 128, 0, False),
    (64, 128, False, 32, 1, False),
    (64, 32, True, 24, 16, False),
    (256, 256, False, 256, 64, True),
    (96, 40, False, 96, 0, False),
    (80, 80, True, 20, 16, False),
    (40, 36, False, 40, 3, True),
)


@pytest.mark.parametrize("tables", ["float32", "16 bits"])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_appends_of_every_layout(shape, backend, dtype, tables, device):
    """Varlen keys and queries of many heads, against the same append in float64."""
    dim, dim_v, interleaved, rotary_dim, page_size, gaps = shape
    new = (700, 0, 1, 2048, 33) if GPU else (3, 0, 1)
    heads, capacity = (4, 2304) if GPU else (2, 128)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        wide = torch.randn(*shape[:-1], shape[-1] + 4 * gaps, generator=generator)
        return wide.to(device, dtype)[..., : shape[-1]]

    batch, total = len(new), sum(new)
    width = capacity // page_size if page_size else 1
    lead = (batch * width, page_size) if page_size else (batch, capacity)
    caches = [normal(*lead, heads, d) for d in (dim, dim_v)]
    k, v, q = (normal(total, h, d) for h, d in ((heads, dim), (heads, dim_v), (3 * heads, dim)))
    angles = torch.rand(2 * capacity, rotary_dim // 2, generator=generator) * 6
    cos, sin = (x.to(device, torch.float32) for x in (angles.cos(), angles.sin()))
    if tables == "16 bits":
        cos, sin = cos.to(dtype), sin.to(dtype)
    edges = torch.tensor([0, *new]).cumsum(0).int().to(device)
    arguments = {
        "cache_seqlens": torch.tensor([5] * batch, dtype=torch.int32, device=device),
        "cu_seqlens_k_new": edges,
        "cu_seqlens_q": edges,
        "rotary_interleaved": interleaved,
    }
    if page_size:
        pages = torch.randperm(batch * width, generator=generator).int()
        arguments["page_table"] = pages.view(batch, width).to(device)
    wanted = [x.double() for x in caches]
    right = append_kvcache(
        k.double(), v.double(), *wanted, q=q.double(), rotary_cos=cos.float(),
        rotary_sin=sin.float(), **arguments, backend="reference",
    )  # fmt: skip
    before = [x.clone() for x in caches]
    found = append_kvcache(
        k, v, *caches, q=q, rotary_cos=cos, rotary_sin=sin, **arguments, backend=backend
    )
    unit = torch.finfo(dtype).eps / 2
    for got, truth in ((found, right), *zip(caches, wanted, strict=True)):
        error = (got.double() - truth).abs()
        assert (error <= truth.abs() * unit + 2.0**-20).all(), float(error.max())
    for got, truth, old in zip(caches, wanted, before, strict=True):
        kept = truth == old.double()
        assert torch.equal(got[kept], old[kept]) and not kept.all(), "slots that are not new"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_position_without_a_table_row_is_nan(backend, device):
    case = AppendCase("nan", (1, 30), 1, rotary_dim=24)
    k, v, caches, arguments = make(case, device)
    for name in ("rotary_cos", "rotary_sin"):
        arguments[name] = arguments[name][:20]
    append_kvcache(k, v, *caches, **arguments, backend=backend)
    assert caches[0][0].isfinite().all() and caches[0][1, 30].isnan().all()
    assert caches[1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_places_are_not_written(backend, device):
    case = AppendCase("wrong", (0, 16), 2, page_size=16)
    k, v, caches, arguments = make(case, device)
    arguments["page_table"][:, :2] = torch.tensor([[-1, 0], [0, 1000]])
    before = [cache.clone() for cache in caches]
    append_kvcache(k, v, *caches, **arguments, backend=backend)
    assert all(map(torch.equal, caches, before))
    arguments["cache_batch_idx"] = torch.tensor([-1, 2], dtype=torch.int32, device=device)
    append_kvcache(k, v, *caches, **arguments, backend=backend)
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_doubled_cache_index_stays_inside_its_cache(backend, device):
    case = AppendCase("doubled", (3, 3), 1, others=1)
    k, v, caches, arguments = make(case, device)
    arguments["cache_batch_idx"] = torch.tensor([1, 1], dtype=torch.int32, device=device)
    before = [cache.clone() for cache in caches]
    append_kvcache(k, v, *caches, **arguments, backend=backend)
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        # Either sequence's value in each element: on a GPU they write at the same time.
        assert ((cache[1, 3] == new[0, 0]) | (cache[1, 3] == new[1, 0])).all()
        cache[1, 3] = old[1, 3]
        assert torch.equal(cache, old)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotary", [False, True])
def test_a_call_appends_and_then_attends(backend, rotary, device):
    """Equal to attention over the cache that index_put and a rotation of q prepare."""
    case = AppendCase("call", (0, 7, 30), 2, page_size=16, rotary_dim=24 * rotary)
    k, v, caches, arguments = make(case, device)
    q = torch.randn(3, 2, 4, DIM, device=device, dtype=k.dtype)
    filled = [x.to(device, k.dtype) for x in expected(case, k, v, caches, arguments)]
    table = arguments["page_table"]
    right = q.clone().cpu()
    for index, cached in enumerate(case.lengths):
        for i in range(2):
            right[index, i] = turned(case, right[index, i], cached + i, arguments)
    lengths = tuple(n + 2 for n in case.lengths)
    found, lse = flash_attn_with_kvcache(
        q, *caches, k, v, **arguments, causal=True, return_softmax_lse=True, backend=backend
    )
    for cache, wanted in zip(caches, filled, strict=True):
        torch.testing.assert_close(cache, wanted, atol=1e-3, rtol=1e-3)
    keys = [
        [cache.cpu()[table.cpu()[i].long()].flatten(0, 1)[:n] for i, n in enumerate(lengths)]
        for cache in caches
    ]
    truth = CacheCase("call", lengths, 2, head_dim=DIM, head_dim_v=DIM, options={"causal": True})
    inputs = CacheInputs({"q": right}, *keys)
    check_cached(truth, inputs, found.cpu(), lse.cpu(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequences(backend, device):
    """Rows behind the last edge belong to no sequence: nothing is written, q is not rotated."""
    none = {"dtype": torch.int32, "device": device}
    edges, table = torch.zeros(1, **none), torch.zeros(0, 2, **none)
    rows, pages = (torch.ones(*x, 2, DIM, device=device).half() for x in ((1,), (4, 8)))
    cos = torch.ones(8, DIM // 2, device=device)
    named = {"cache_seqlens": torch.zeros(0, **none), "page_table": table, "backend": backend}
    turned = {"q": rows, "cu_seqlens_q": edges, "rotary_cos": cos, "rotary_sin": cos}
    given = rows, rows, pages.zero_(), pages.clone()
    found = append_kvcache(*given, cu_seqlens_k_new=edges, **named, **turned)
    assert not any(cache.any() for cache in given[2:]) and found.shape == rows.shape
    out = flash_attn_with_kvcache(
        rows, *given[2:], rows, rows, cu_seqlens_q=edges, cu_seqlens_k_new=edges, max_seqlen_q=0,
        **named,
    )  # fmt: skip
    assert not out.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_position_without_a_mask(backend, device):
    """Without causal and window FlashAttention-3 gives all queries the first new position."""
    case = AppendCase("fixed", (7,), 2, rotary_dim=24)
    k, v, caches, arguments = make(case, device)
    q = torch.randn(1, 1, 2, DIM, device=device, dtype=k.dtype).expand(1, 2, 2, DIM)
    out = flash_attn_with_kvcache(q, *caches, k, v, **arguments, backend=backend)
    assert torch.equal(out[:, 0], out[:, 1])
    causal = flash_attn_with_kvcache(q, *caches, k, v, **arguments, causal=True, backend=backend)
    assert not torch.equal(causal[:, 0], causal[:, 1])


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_have_64_bits(backend, page_size, device):
    """The second of two caches, or pages, begins 2**31 elements behind the first."""
    memory = [torch.empty(2**31 + 1024, dtype=torch.float16, device=device) for _ in range(2)]
    tokens = page_size or 8
    caches = [x.as_strided((2, tokens, 1, 16), (2**31, 16, 16, 1)) for x in memory]
    for cache in caches:
        cache[:] = torch.randn(cache.shape, device=device)
    new = torch.randn(1, 1, 1, 16, device=device).half()
    index = torch.tensor([1], dtype=torch.int32, device=device)
    where = {"page_table": index[None]} if page_size else {"cache_batch_idx": index}
    found = flash_attn_with_kvcache(
        new, *caches, new, new, cache_seqlens=3, **where, causal=True, backend=backend
    )
    assert torch.equal(caches[0][1, 3], new[0, 0]) and not torch.equal(caches[0][0, 3], new[0, 0])
    alone = [cache[1:].clone() for cache in caches]
    wanted = flash_attn_with_kvcache(new, *alone, cache_seqlens=4, causal=True, backend=backend)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
