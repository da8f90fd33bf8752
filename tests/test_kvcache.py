"""Parts, bits, strides, metadata and wrong values of cached calls."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from cached_kernels import CAUSAL, PAGED, RAGGED, every_kernel, inputs_of
from helpers import (
    CACHE_BACKENDS,
    GPU,
    H100,
    forget_cached_calls,
    needs_hopper,
)
from support.kvcache import CacheCase, call_cached, check_cached, make_cache_inputs

from flashattn3 import (
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    use_backend,
)
from flashattn3.backends.triton.backend import BACKEND as TRITON_CACHE
from flashattn3.call.cached import CombineProblem
from flashattn3.run import cached_plans

GPU_BACKENDS = CACHE_BACKENDS[1:]
interpreted = pytest.mark.interpreted(quick=lambda backend, **_: backend == "reference")


pytestmark = pytest.mark.usefixtures("poisoned_memory")  # of out, lse and the workspace


SPLIT = CacheCase("split", (700, 1, 90, 0), 2, page_size=16, options={"causal": True})
SPLIT_CASES = (
    SPLIT,
    CacheCase("split-dense-sinks", (700, 90), sinks=True),
    CacheCase("split-ragged", (700, 3, 200), (2, 1, 20), page_size=16, options={"causal": True}),
    CacheCase("split-window", (700, 90), 3, options={"window_size": (300, 0)}),
    CacheCase("split-leftpad", (700, 90), leftpad=(650, 3), sinks=True),
)


@interpreted
@pytest.mark.parametrize(
    ("case", "num_splits", "backend"),
    [
        *((case, 0, backend) for case in SPLIT_CASES for backend in ("reference", "triton")),
        *((case, 3, "triton") for case in SPLIT_CASES),
        *((SPLIT, splits, "triton") for splits in (1, 256)),
        *(
            pytest.param(case, splits, "hopper", marks=needs_hopper)
            for case, splits in (*((case, 0) for case in SPLIT_CASES), (SPLIT, 1))
        ),
    ],
)
def test_parts(case, backend, num_splits, device, monkeypatch):
    """Long enough to be cut into parts, which a test shorter than a part would not see."""
    if backend == "triton":
        _several_ctas(monkeypatch)
    inputs = make_cache_inputs(case, device, torch.float16)
    options = {"backend": backend, "num_splits": num_splits}
    check_cached(case, inputs, *call_cached(inputs, **options), options)


def _several_ctas(monkeypatch):
    """A CPU counts as one SM: cut the batch into parts all the same."""
    from flashattn3.backends.triton import cache_tiles

    monkeypatch.setattr(cache_tiles, "PROGRAMS_PER_SM", 2 if GPU else 24)
    forget_cached_calls()


@pytest.fixture(autouse=True)
def plans_of_this_test():
    yield
    forget_cached_calls()


@pytest.mark.parametrize("num_splits", [0, 3])
def test_several_parts_ran(num_splits, device, monkeypatch):
    """What the workspace holds afterwards shows how many parts there were."""
    pytest.importorskip("triton")
    _several_ctas(monkeypatch)
    from flashattn3.backends.triton import cached_launch

    joined = []
    build = cached_launch.combine_parts_launch

    def recorded(problem, tile):
        launch = build(problem, tile)

        def run(grid, tensors, *rest):
            joined.append(tensors[1].view(-1, launch.constants["SLOT_M"]).clone())
            launch(grid, tensors, *rest)

        run.constants = launch.constants
        return run

    monkeypatch.setattr(cached_launch, "combine_parts_launch", recorded)
    inputs = make_cache_inputs(SPLIT, device, torch.float16)
    call_cached(inputs, backend="triton", num_splits=num_splits)
    (lse_parts,) = joined
    # 700 keys are 6 tiles, in 3 parts of each of two heads; the other sequences are one part each.
    assert int((~lse_parts[:, 0].isnan()).sum()) == 6


@interpreted
@pytest.mark.parametrize("case", (*SPLIT_CASES, PAGED, RAGGED) if GPU else (SPLIT,))
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_twenty_runs_are_bitwise_the_same(case, backend, device, monkeypatch):
    """On Hopper's forward kernels on any number of SMs; the decode kernel of a mixed batch divides
    sequences by the SMs that it has."""
    _several_ctas(monkeypatch)
    inputs = make_cache_inputs(case, device, torch.float16)
    first = call_cached(inputs, backend=backend)
    on_other_sms = {"num_splits": 1}, {"sm_margin": 129}, {"sm_margin": 1}
    others = on_other_sms if (backend, case) == ("hopper", PAGED) else ()
    for options in (*((19 if GPU else 1) * ({},)), *others):
        again = call_cached(inputs, backend=backend, **options)
        assert all(map(torch.equal, first, again)), options


@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_the_grid_and_the_workspace_hold_every_part(num_splits):
    """The bounds that the host computes without a length, against the parts of random lengths."""
    pytest.importorskip("triton")
    from flashattn3.backends.triton.cache_tiles import CacheTile
    from flashattn3.backends.triton.kernels.cache_parts import MIN_UNITS

    generator = random.Random(0)
    for _ in range(300):
        num_ctas, heads = generator.choice((2, 16, 264)), generator.choice((1, 8))
        batch = generator.choice((1, 5, 300))
        m_blocks = [generator.choice((0, 1, 4)) for _ in range(batch)]
        n_blocks = [int(2 ** generator.uniform(0, 12)) - 1 for _ in range(batch)]
        work = sum(m * n for m, n in zip(m_blocks, n_blocks, strict=True)) * heads
        share = max(MIN_UNITS.value, -(-work // num_ctas))
        programs = slots = 0
        for m, n in zip(m_blocks, n_blocks, strict=True):
            parts = max(1, min(n, num_splits or n // share))
            programs += m * heads * parts
            slots += m * heads * parts * (parts > 1)
        problem = SimpleNamespace(
            qhead_per_kvhead=1, num_heads_kv=heads, num_splits=num_splits, varlen=True,
            split_tokens=None,
        )  # fmt: skip
        tile = CacheTile(16, 64, 4, 3, num_ctas, 16)
        _, *bound = tile.grid(problem, batch, 16 * sum(m_blocks), 16 * max(m_blocks), 0)
        assert programs <= bound[0] and slots <= bound[1]
    # The workspace of 132 SMs, 64 rows of 128, at any batch and capacity.
    tile, problem.num_splits = CacheTile(64, 64, 4, 3, 2 * 132, 64), 0
    slots = tile.grid(problem, 10**6, 10**7, 64, 0)[2]
    assert tile.workspace_bytes(slots, 128) <= 9e6


@every_kernel
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(backend, rows, device):
    """Where it is not divided, in pages and dense. Forward kernels never divide one."""
    lengths, num_splits = ((90, 3, 33), 1) if rows == 2 else ((400, 203, 900), 0)
    case = CacheCase("batch", lengths, rows, page_size=16, options=CAUSAL)
    inputs = inputs_of(case, device, backend)
    options = {"causal": True, "num_splits": num_splits, "return_lse": True, "backend": backend}
    out, lse = call_cached(inputs, backend=backend, num_splits=num_splits)
    for index, (k, v) in enumerate(zip(inputs.k, inputs.v, strict=True)):
        keys = k[None].to(device), v[None].to(device)
        alone = flash_attn_with_kvcache(inputs.arguments["q"][index, None], *keys, **options)
        assert torch.equal(alone[0][0], out[index]) and torch.equal(alone[1][0], lse[index])


@every_kernel
def test_the_capacity_does_not_change_the_bits(backend, rows, device, monkeypatch):
    _several_ctas(monkeypatch)
    results = []
    for capacity in (300, 1000):
        case = CacheCase("capacity", (300, 90), rows, page_size=16, capacity=capacity)
        results.append(call_cached(inputs_of(case, device, backend), backend=backend))
    assert all(map(torch.equal, *results))


OF_SIGNS = (
    CacheCase("heads", (17, 40, 9), descales="heads"),
    CacheCase("tokens", (17, 40, 9), 2, stored=torch.int8, descales="tokens"),
)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *itertools.product(OF_SIGNS, ("reference", "triton")),
        pytest.param(OF_SIGNS[0], "hopper", marks=needs_hopper),
    ],
)
def test_descales_of_any_sign(case, backend, device):
    """NaN shows in the rows of its sequence."""
    inputs = make_cache_inputs(case, device, torch.float16)
    by_tokens = case.descales == "tokens"
    for side, of in (("k", inputs.k), ("v", inputs.v)):
        descale = inputs.arguments[f"{side}_descale"]
        signs = torch.randint(-1, 2, descale.shape, generator=torch.Generator().manual_seed(3))
        descale *= signs.to(device)
        if by_tokens:
            of[:] = [x * row[: len(x), :, None] for x, row in zip(of, signs, strict=True)]
    out, lse = call_cached(inputs, backend=backend)
    check_cached(case, inputs, out, lse, backend)
    for name in ("k_descale", "v_descale"):
        with_nan = inputs.arguments[name].clone()
        with_nan[(1, 3) if by_tokens else 1] = math.nan
        found, _ = call_cached(CacheInputsWith(inputs, **{name: with_nan}), backend=backend)
        assert found[1].isnan().all() and torch.equal(found[::2], out[::2])


@pytest.mark.parametrize("backend", CACHE_BACKENDS)
def test_seqlen_as_an_int_and_as_none(backend, device):
    case = CacheCase("int", (20, 20), capacity=20)
    inputs = make_cache_inputs(case, device, torch.float16)
    wanted = call_cached(inputs, backend=backend)
    for seqlen in (20, None):
        inputs.arguments["cache_seqlens"] = seqlen
        assert all(map(torch.equal, call_cached(inputs, backend=backend), wanted))


@every_kernel
def test_out_of_the_caller_and_any_strides_of_q(backend, rows, device):
    inputs = inputs_of(CacheCase("out", (220, 233), rows), device, backend)
    wanted = call_cached(inputs, backend=backend)
    like = {"device": device, "dtype": torch.float16}
    for width in (32, 36, 40):  # rows of out at multiples of 16 bytes, or not
        whole = torch.full((2, rows + 6, 4, width), 7.0, **like)
        out = whole[:, 3:-3, :, :32]
        assert call_cached(inputs, backend=backend, out=out)[0] is out
        assert torch.equal(out, wanted[0])
        assert (whole[:, :3] == 7).all() and (whole[:, -3:] == 7).all()
        assert (whole[..., 32:] == 7).all()
    alone = flash_attn_with_kvcache(**inputs.arguments, backend=backend)
    assert torch.equal(alone, wanted[0])
    q = inputs.arguments["q"]
    wide = torch.full((2, rows, 4, 36), math.nan, **like)[..., :32]
    for other in (q.transpose(1, 3).contiguous().transpose(1, 3), wide.copy_(q)):
        found = call_cached(CacheInputsWith(inputs, q=other), backend=backend)
        assert all(map(torch.equal, found, wanted))
    found, wanted = (
        call_cached(CacheInputsWith(inputs, q=same), backend=backend)
        for same in (q[:1].expand(2, -1, -1, -1), q[:1].repeat(2, 1, 1, 1))
    )
    assert all(map(torch.equal, found, wanted))


@pytest.fixture
def unchecked(monkeypatch):
    """As on a GPU without FLASHATTN3_CHECK."""
    monkeypatch.setattr(cached_plans, "is_checked", lambda device: False)


@every_kernel
def test_wrong_values_stay_inside_the_tensors(backend, rows, device, unchecked):
    """A length over the capacity is cut; rows of a missing page or cache are NaN, others right."""
    lengths, capacity = ((16, 40, 30), 48) if rows == 2 else ((316, 240, 330), 352)
    case = CacheCase("wrong", lengths, rows, page_size=16, capacity=capacity)
    inputs = inputs_of(case, device, backend)
    wanted = call_cached(inputs, backend=backend)

    def call(given=inputs, **changes):
        return call_cached(CacheInputsWith(given, **changes), backend=backend)

    pages = (-1, 1000, 2**31 - 1, -(2**31))
    for page in pages[: 1 if backend == "triton" and not GPU else None]:
        table = inputs.arguments["page_table"].clone()
        table[1, 1] = page
        for got, right in zip(call(page_table=table), wanted, strict=True):
            assert got[1].isnan().all() and torch.equal(got[::2], right[::2])
    index = torch.tensor([0, -1, 7], dtype=torch.int32, device=device)
    for got, right in zip(call(cache_batch_idx=index), wanted, strict=True):
        assert torch.equal(got[0], right[0]) and got[1:].isnan().all()
    beyond = torch.full_like(index, 2**30)
    assert call(cache_seqlens=beyond)[0].isnan().all(), "entries of the table that are no page"
    full = 40 if rows == 2 else 240
    dense = inputs_of(CacheCase("cut", (full, full), rows, capacity=full), device, backend)
    wanted = call_cached(dense, backend=backend)
    for first, second in ((full + 1, 2**31 - 1), (2**30, full), (-5, full)):
        seqlens = torch.tensor([first, second], dtype=torch.int32, device=device)
        out, lse = call(dense, cache_seqlens=seqlens)
        assert torch.equal(out[1], wanted[0][1]) and torch.equal(lse[1], wanted[1][1])
        if first < 0:
            assert not out[0].any() and (lse[0] == -math.inf).all()
        else:
            assert torch.equal(out[0], wanted[0][0]) and torch.equal(lse[0], wanted[1][0])


def CacheInputsWith(inputs, **changes):
    return type(inputs)({**inputs.arguments, **changes}, inputs.k, inputs.v)


METADATA_CASES = (
    CacheCase("metadata", (20, 33), 2, page_size=16, options={"causal": True}),
    CacheCase("metadata-ragged", (20, 33), (1, 2), leftpad=(0, 3)),
)


def metadata_of(case, inputs, **changes):
    given = inputs.arguments
    options = {
        "batch_size": case.batch,
        "max_seqlen_q": max(case.queries),
        "max_seqlen_k": 1000,
        "num_heads_q": case.num_heads_q,
        "num_heads_kv": case.num_heads_kv,
        "headdim": case.head_dim,
        "cache_seqlens": given["cache_seqlens"],
        "qkv_dtype": given["q"].dtype,
        "cu_seqlens_q": given.get("cu_seqlens_q"),
        "cache_leftpad": given.get("cache_leftpad"),
        "page_size": case.page_size or None,
        **case.options,
    }
    return get_scheduler_metadata(**{**options, **changes})


@pytest.mark.interpreted(
    quick=lambda case, backend: backend == "reference" or case is METADATA_CASES[1]
)
@pytest.mark.parametrize("backend", CACHE_BACKENDS)
@pytest.mark.parametrize("case", (*METADATA_CASES, PAGED, RAGGED) if GPU else METADATA_CASES)
def test_scheduler_metadata(case, backend, device, unchecked):
    """Metadata of the call changes nothing; of other lengths, its rows are NaN; of other options,
    all are."""
    inputs = make_cache_inputs(case, device, torch.float16)
    wanted = call_cached(inputs, backend=backend)
    found = metadata_of(case, inputs)
    assert found.dtype == torch.int32 and found.device == inputs.arguments["q"].device

    def call(metadata):
        return call_cached(inputs, backend=backend, scheduler_metadata=metadata)

    assert all(map(torch.equal, call(found), wanted))
    buffer = torch.full((40,), 99, dtype=torch.int32, device=device)
    buffer[: found.numel()] = found
    assert all(map(torch.equal, call(buffer[: found.numel()]), wanted))
    for_new_tokens = metadata_of(case, inputs, max_seqlen_k_new=1)  # the call has none
    assert all(map(torch.equal, call(for_new_tokens), wanted))
    stale = inputs.arguments["cache_seqlens"].clone()
    stale[1] += -1
    out, lse = call(metadata_of(case, inputs, cache_seqlens=stale))
    ends = list(itertools.accumulate(case.queries))
    for index, (end, queries) in enumerate(zip(ends, case.queries, strict=True)):
        of = slice(end - queries, end) if case.ragged else index
        for got, right in (
            (out[of], wanted[0][of]),
            *([(lse[:, of], wanted[1][:, of])] if case.ragged else [(lse[of], wanted[1][of])]),
        ):
            assert got.isnan().all() if index == 1 else torch.equal(got, right)
    others = (
        {"num_heads_q": 2 * case.num_heads_q},
        {"causal": not case.options.get("causal", False)},
        {"window_size": (7, 0)},
        {"has_softcap": True},
        {"num_splits": 2},
        {"page_size": 128},
        {"qkv_dtype": torch.bfloat16},
    )
    for changes in others[: 1 if backend == "triton" and not GPU else None]:
        out, lse = call(metadata_of(case, inputs, **changes))
        assert out.isnan().all() and lse.isnan().all(), changes
    out, lse = call(torch.zeros_like(found))
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("backend", CACHE_BACKENDS)
@pytest.mark.parametrize("ragged", [False, True])
def test_combine_joins_calls_over_parts_of_the_keys(ragged, backend, device):
    """A prefix in one call, the rest in another; the sink in one of them alone."""
    case = CacheCase("combine", (50, 60), (2, 3) if ragged else 2, sinks=True)
    inputs = make_cache_inputs(case, device, torch.float16)
    calls = []
    for span, sink in ((slice(0, 30), True), (slice(30, None), False)):
        k, v = ([x[span] for x in of] for of in (inputs.k, inputs.v))
        lengths = tuple(x.shape[0] for x in k)
        of = make_cache_inputs(CacheCase("part", lengths, case.seqlens_q), device, torch.float16)
        for name, rows in (("k_cache", k), ("v_cache", v)):
            for index, x in enumerate(rows):
                of.arguments[name][index, : x.shape[0]] = x.to(device)
        of.arguments["q"] = inputs.arguments["q"]
        if sink:
            of.arguments["sinks"] = inputs.arguments["sinks"]
        calls.append(call_cached(of, backend=backend))
    outs, lses = (torch.stack(x) for x in zip(*calls, strict=True))
    parts = outs.float(), lses.transpose(-1, -2)
    with use_backend(backend):
        out, lse = flash_attn_combine(*parts, out_dtype=torch.float16)
        given = torch.empty_like(out)
        assert flash_attn_combine(*parts, out=given)[0] is given
    assert torch.equal(given, out)
    check_cached(case, inputs, out, lse.transpose(-1, -2), "combine")
    empty = torch.full_like(lses, -math.inf).transpose(-1, -2)
    out, lse = flash_attn_combine(torch.full_like(outs, math.nan), empty)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("head_dim", [1, 300, 512, 1100])
def test_combine_takes_any_head_dim(head_dim, device):
    """On a GPU by a kernel, not by the reference backend."""
    parts = torch.randn(3, 5, 2, head_dim, device=device), torch.randn(3, 5, 2, device=device)
    wide = [x.double() for x in parts]
    weights = wide[1].softmax(0).unsqueeze(-1)
    with use_backend("triton"):
        out, lse = flash_attn_combine(*parts)
    torch.testing.assert_close(out.double(), (weights * wide[0]).sum(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), wide[1].logsumexp(0), atol=1e-6, rtol=1e-6)
    dtypes = torch.float32, torch.bfloat16, torch.device("cuda", 0)
    problem = CombineProblem("flash_attn_combine", *dtypes, head_dim, head_dim, None)
    assert TRITON_CACHE.decline_reason(problem, H100) is None
