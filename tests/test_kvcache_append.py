"""append_kvcache against index_put in float64, to caches of 16 and of 8 bits, and appended tokens
within a cached call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from helpers import CACHE_BACKENDS as BACKENDS
from helpers import GPU, TRITON_DTYPES, needs_hopper
from support.kvcache import CacheCase, CacheInputs, check_cached

from flashattn3 import append_kvcache, flash_attn_with_kvcache
from flashattn3.run import cached_plans

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}


@dataclass(frozen=True)
class AppendCase:
    """lengths: cached tokens. new: of each sequence, or one number for dense k. dims: of k and v.
    gaps: elements behind each head's columns. stored: dtype of the caches, if not k's. descales:
    their kind; those of tokens are NaN, which the append computes."""

    name: str
    lengths: tuple[int, ...]
    new: int | tuple[int, ...]
    page_size: int = 0
    capacity: int = 48
    rotary_dim: int = 0
    interleaved: bool = True
    tables: torch.dtype = torch.float32
    others: int = 0
    offsets: tuple[int, ...] | None = None
    heads: int = 2
    dims: tuple[int, int] = (24, 24)
    gaps: int = 0
    stored: torch.dtype | None = None
    descales: str = ""

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
    AppendCase("descales", (5, 7), 3, descales="heads", rotary_dim=24),
    AppendCase("nothing-new", (5, 7), 0),
)
# The interpreter takes seconds for the others.
QUICK = ("paged", "ragged", "overflow", "rotary-partial", "rotary-halves", "descales")
# A GPU moves whole vectors or single columns: head dims of k and v, interleaved pairs, rotated
# columns, page size, gaps between tokens; of many tokens and heads.
LAYOUTS = tuple(
    AppendCase(
        f"dims-{dim}-{dim_v}-page-{page}",
        *(((5,) * 5, (700, 0, 1, 2048, 33)) if GPU else ((5,) * 3, (3, 0, 1))),
        page_size=page, capacity=2304 if GPU else 128, heads=4 if GPU else 2, dims=(dim, dim_v),
        rotary_dim=rotary, interleaved=interleaved, gaps=gaps,
    )
    for dim, dim_v, interleaved, rotary, page, gaps in (
        (128, 128, True, 128, 16, 0),
        (128, 128, False, 128, 0, 0),
        (64, 128, False, 32, 1, 0),
        (64, 32, True, 24, 16, 0),
        (256, 256, False, 256, 64, 4),
        (96, 40, False, 96, 0, 0),
        (80, 80, True, 20, 16, 0),
        (40, 36, False, 40, 3, 4),
    )
)  # fmt: skip
# dtype of the caches, kind of descales, page size, rotated columns, new tokens.
OF_8_BITS = tuple(
    AppendCase(
        f"{str(dtype).removeprefix('torch.')}-{kind}-page-{page}", (0, 15, 7), new,
        page_size=page, rotary_dim=rotary, dims=(32, 32), stored=dtype, descales=kind,
    )
    for dtype, kind, page, rotary, new in (
        (FP8, "heads", 16, 24, (2, 0, 5)),
        (INT8, "heads", 0, 0, 2),
        (FP8, "pages", 16, 0, (2, 0, 5)),
        (INT8, "pages", 0, 10, 2),
        (FP8, "tokens", 16, 24, (2, 0, 5)),
        (INT8, "tokens", 3, 10, 2),
        (INT8, "tokens", 0, 24, (2, 0, 5)),
        (FP8, "", 0, 24, 2),
    )
)  # fmt: skip
RUNS = [
    *product(CASES, ("reference", "triton", "hopper"), (torch.float16,)),
    *product(OF_8_BITS, ("reference", "triton"), (torch.float16,)),
]
for case, dtype in product(LAYOUTS, TRITON_DTYPES):
    for named, tables in (("float32", torch.float32), ("16-bits", dtype)):
        case_of = replace(case, name=f"{case.name}-{named}", tables=tables)
        RUNS += product((case_of,), ("triton", "hopper"), (dtype,))


def make(case: AppendCase, device, dtype=torch.float16):
    """(k, v, caches, arguments): the cache is random, so a wrong write shows anywhere."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        wide = torch.randn(*shape[:-1], shape[-1] + case.gaps, generator=generator)
        return wide.to(device, dtype)[..., : shape[-1]]

    def ints(values):
        return torch.as_tensor(values).to(device, torch.int32)

    batch, num_caches = len(case.lengths), len(case.lengths) + case.others
    lead = (batch, case.new) if isinstance(case.new, int) else (sum(case.new),)
    k, v = (normal(*lead, case.heads, dim) for dim in case.dims)
    arguments = {"cache_seqlens": ints(case.lengths)}
    if not isinstance(case.new, int):
        arguments["cu_seqlens_k_new"] = ints(torch.tensor([0, *case.new]).cumsum(0))
    shape = (num_caches, case.capacity)
    if case.page_size:
        width = case.capacity // case.page_size
        pages = torch.randperm(num_caches * width + 2, generator=generator)
        arguments["page_table"] = ints(pages[: num_caches * width].view(num_caches, width))
        shape = (pages.numel(), case.page_size)
    if case.others:
        rows = torch.randperm(num_caches, generator=generator)[:batch]
        arguments["cache_batch_idx"] = ints(rows)
    caches = [normal(*shape, case.heads, dim) for dim in case.dims]
    if case.stored:
        codes = (torch.randint(0, 100, x.shape, generator=generator) for x in caches)
        caches = [x.to(torch.uint8).view(case.stored).to(device) for x in codes]
    if case.rotary_dim:
        angles = torch.rand(2 * case.capacity, case.rotary_dim // 2, generator=generator) * 6
        arguments["rotary_cos"] = angles.cos().to(device, case.tables)
        arguments["rotary_sin"] = angles.sin().to(device, case.tables)
        arguments["rotary_interleaved"] = case.interleaved
    if case.offsets:
        arguments["rotary_seqlens"] = ints(case.offsets)
    sizes = {"heads": (batch,), "pages": (shape[0], 1), "tokens": shape}
    for name in ("k_descale", "v_descale") if case.descales else ():
        factors = torch.rand(*sizes[case.descales], case.heads, generator=generator)
        factors = factors / 30 if case.stored else 0.5 + factors
        if case.descales == "tokens":
            factors.fill_(torch.nan)
        arguments[name] = factors.to(device)
    return k, v, caches, arguments


def turned(case: AppendCase, x, position: int, arguments):
    """One token (heads, dim) in float64."""
    x, half = x.double().clone(), case.rotary_dim // 2
    if half == 0:
        return x
    cos, sin = (arguments[f"rotary_{name}"][position].double().cpu() for name in ("cos", "sin"))
    low, high = slice(0, half), slice(half, 2 * half)
    if case.interleaved:
        low, high = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    first, second = x[:, low].clone(), x[:, high].clone()
    x[:, low] = first * cos - second * sin
    x[:, high] = first * sin + second * cos
    return x


def places_of(case: AppendCase, arguments, index: int):
    """Of a sequence: its row of a dense cache, or its pages."""
    rows, table = arguments.get("cache_batch_idx"), arguments.get("page_table")
    row = index if rows is None else int(rows[index])
    return row if table is None else table[row].long().cpu()


def expected(case: AppendCase, k, v, caches, arguments):
    """The new numbers of both caches, in float64, written token by token; NaN elsewhere."""
    wanted = [torch.full(cache.shape, torch.nan, dtype=torch.float64) for cache in caches]
    k, v = (x.flatten(0, -3).cpu() for x in (k, v))
    token = 0
    for index, (cached, new) in enumerate(zip(case.lengths, case.news, strict=True)):
        where, size = places_of(case, arguments, index), case.page_size
        begin = (case.offsets or case.lengths)[index]
        for i in range(new):
            place = min(cached, case.capacity) + i
            if place < case.capacity:
                at = (where[place // size], place % size) if size else (where, place)
                wanted[0][at] = turned(case, k[token], begin + i, arguments)
                wanted[1][at] = v[token].double()
            token += 1
    return wanted


def factors_of(case: AppendCase, descale, arguments, shape):
    """The descale of each token and head of a cache, (places, tokens, heads, 1)."""
    found = torch.ones(shape[:3], dtype=torch.float64)
    if descale is not None and case.descales != "heads":
        found = descale.double().cpu().expand(shape[:3])
    elif descale is not None:
        for index, own in enumerate(descale.double().cpu()):
            found[places_of(case, arguments, index)] = own
    return found.unsqueeze(-1)


def check_stored(found, wanted):
    """Numbers of 16 bits are rounded once, codes of 8 are within half a step."""
    if found.dtype.itemsize == 2:
        bound = wanted.abs() * torch.finfo(found.dtype).eps / 2 + 2.0**-20
    else:
        largest, half_a_step = LARGEST[found.dtype], 0.5
        wanted = wanted.clamp(-largest, largest)
        if found.dtype == FP8:  # three bits behind the first one, down to steps of 2**-9
            half_a_step = 2.0 ** (wanted.abs().clamp(min=2.0**-6).log2().floor() - 4)
        bound = half_a_step * (1 + 1e-4) + 1e-6
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), float(error.max())


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Tokens that do not fit are an error where values are checked."""
    monkeypatch.setattr(cached_plans, "is_checked", lambda device: False)


@pytest.mark.interpreted(
    quick=lambda case, backend, dtype: (
        backend != "triton" or case not in CASES or case.name in QUICK
    )
)
@pytest.mark.parametrize(
    ("case", "backend", "dtype"),
    [pytest.param(*run, marks=needs_hopper if run[1] == "hopper" else ()) for run in RUNS],
    ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")),
)
def test_append(case, backend, dtype, device):
    """New numbers are those of index_put, divided by their descales, and nothing else changes."""
    k, v, caches, arguments = make(case, device, dtype)
    wanted = expected(case, k, v, caches, arguments)
    before = [cache.cpu().clone() for cache in caches]
    q = torch.randn(*k.shape[:-2], 3 * case.heads, case.dims[0], device=device, dtype=dtype)
    of_q = {"q": q, "cu_seqlens_q": arguments.get("cu_seqlens_k_new")} if case.rotary_dim else {}
    rotated = append_kvcache(k, v, *caches, **arguments, **of_q, backend=backend)
    assert (rotated is None) == (not of_q)
    if of_q:
        begins = case.offsets or case.lengths
        places = [a + i for a, n in zip(begins, case.news, strict=True) for i in range(n)]
        tokens = (x.cpu().flatten(0, -3) for x in (q, rotated))
        for x, got, place in zip(*tokens, places, strict=True):
            check_stored(got, turned(case, x, place, arguments))
    for side, found, old, numbers in zip("kv", caches, before, wanted, strict=True):
        found, written = found.cpu(), ~numbers.isnan()
        assert written.any() == any(case.news)
        kept = found.double()[~written], old.double()[~written]
        assert torch.equal(*kept), "slots that are not new"
        descale = arguments.get(f"{side}_descale")
        if case.descales == "tokens":
            new, amax = written[..., 0], numbers.abs().amax(-1).float()
            assert descale.cpu()[~new].isnan().all()
            computed = amax[new] / LARGEST[found.dtype]
            torch.testing.assert_close(descale.cpu()[new], computed, rtol=1e-6, atol=0)
        divided = numbers / factors_of(case, descale, arguments, found.shape)
        check_stored(found[written], divided[written])


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
    q = torch.randn(3, 2, 4, 24, device=device, dtype=k.dtype)
    new = expected(case, k, v, caches, arguments)
    filled = [
        torch.where(x.isnan(), cache.cpu().double(), x).to(device, k.dtype)
        for x, cache in zip(new, caches, strict=True)
    ]
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
    truth = CacheCase("call", lengths, 2, head_dim=24, head_dim_v=24, options={"causal": True})
    inputs = CacheInputs({"q": right}, *keys)
    check_cached(truth, inputs, found.cpu(), lse.cpu(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequences(backend, device):
    """Rows behind the last edge belong to no sequence: nothing is written, q is not rotated."""
    none = {"dtype": torch.int32, "device": device}
    edges, table = torch.zeros(1, **none), torch.zeros(0, 2, **none)
    rows, pages = (torch.ones(*x, 2, 24, device=device).half() for x in ((1,), (4, 8)))
    cos = torch.ones(8, 12, device=device)
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
    q = torch.randn(1, 1, 2, 24, device=device, dtype=k.dtype).expand(1, 2, 2, 24)
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
