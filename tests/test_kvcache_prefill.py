"""Cached calls of many query rows: which kernels of the Hopper backend run them, and that chunks of
prompts are right on every backend.

The parts about the choice need no GPU.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import test_kvcache_hopper
import torch
from cached_kernels import CAUSAL, G8, WINDOW, inputs_of, kernel_of
from helpers import (
    A100,
    GPU,
    H100,
    HOPPER_IS_MISSING,
    SIXTEEN_BIT,
    Prepared,
    library_double,
)
from support.kvcache import CacheCase, call_cached, check_cached, make_cache_inputs
from test_kvcache_hopper import LIBRARY, call_of, problem_of, size_of, tensors_of

from flashattn3 import doctor, flash_attn_with_kvcache
from flashattn3.backends.hopper import decode_choice
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.decode_choice import DECODE_ROWS
from flashattn3.backends.hopper.kernel_configs import (
    CACHED_CONFIGS,
    CACHED_FORWARD_MEASURED,
    select_cached_forward_config,
    select_decode_config,
)
from flashattn3.backends.reference.backend import BACKEND as REFERENCE
from flashattn3.backends.triton.backend import BACKEND as TRITON

pytest.importorskip("triton")
HOPPER = HopperBackend(library=library_double, only_measured=False)
needs_hopper = pytest.mark.skipif(
    HOPPER_IS_MISSING is not None or not CACHED_FORWARD_MEASURED,
    reason=f"hopper: {HOPPER_IS_MISSING or 'the cached forward kernels were never run on a GPU'}",
)


plan_of = partial(test_kvcache_hopper.plan_of, hopper=HOPPER)


def floats(*shape):
    return torch.empty(shape, dtype=torch.float32, device="meta")


DESCALE = floats(4, 8)
NAMED = {"backend": "hopper"}
FEW = f"decode: up to {DECODE_ROWS} packed rows"
MANY = f"forward: over {DECODE_ROWS} packed rows"
CHOICES = [
    ({}, FEW),
    ({"page_size": 1}, FEW),
    ({"page_size": 256, "d": 64}, FEW),
    ({"d": 40, "dv": 24, "dtype": torch.float16}, FEW),
    ({"d": 256, "heads": (8, 1)}, FEW),
    ({"heads": (96, 1), "d": 192, "dv": 128, "seqlen_q": 2}, FEW),
    (
        {"seqlen_q": 3, "options": {"causal": True, "window_left": 127, "window_right": 0}},
        FEW,
    ),
    ({"seqlen_q": 48}, FEW),
    ({"seqlen_q": 49}, MANY),
    ({"seqlen_q": 2048, "page_size": 16}, MANY),
    ({"seqlen_q": 64, "heads": (8, 1), "page_size": 1}, MANY),
    ({"seqlen_q": 192, "heads": (8, 8)}, FEW),
    ({"seqlen_q": 193, "heads": (8, 8)}, MANY),
    ({"seqlen_q": 300, "d": 40, "dv": 24, "dtype": torch.float16}, MANY),
    ({"seqlen_q": 300, "d": 192, "dv": 128}, MANY),
    ({"seqlen_q": 300, "options": {"num_splits": 1, "softcap": 3.0, "sm_margin": 8}}, MANY),
    ({"seqlen_q": 300, "options": {"causal": True, "window_left": 99}}, MANY),
    ({"seqlen_q": 300, "sinks": floats(32), "options": NAMED}, MANY),
    (
        {"seqlen_q": 300, "k_descale": DESCALE, "options": NAMED},
        "decode: forward kernels take no k_descale",
    ),
    ({"seqlen_q": 3, "q_descale": DESCALE}, FEW),
]


@pytest.mark.parametrize(("of", "said"), CHOICES, ids=str)
def test_which_kernels_run_a_call(of, said):
    of = dict(of)
    options = of.pop("options", {})
    plan = plan_of(options, **of)
    assert plan.backend.name == "hopper" and not plan.unused_hints
    described = plan.launch.describe()
    assert described["kernel"] == said
    select = select_decode_config if said.startswith("decode") else select_cached_forward_config
    dtype = "fp16" if of.get("dtype") == torch.float16 else "bf16"
    config = select(dtype, max(of.get("d", 128), of.get("dv", 0)))
    assert described["kernel config"] == config.name
    handle = plan.launch.kernel_launch.handle
    assert CACHED_CONFIGS[handle.config] is config
    if config.kind == "forward":
        rows = f"{config.block_m // 64} x 64 rows of a head"
        assert described["tile"] == f"{rows} x {config.block_n} keys"
        assert described["parts"] == "none: whole tiles"
        assert described["warpgroups"] == f"1 loads, {config.num_mma_warpgroups} multiply"
    assert handle.record.num_sms == 132 - options.get("sm_margin", 0)
    on_ampere = plan_of({**options, "backend": None}, device=A100, **of)
    assert on_ampere.backend.name == "triton"


def test_short_sequences_of_a_ragged_call_run_on_a_decode_kernel_beside():
    edges = torch.empty(5, dtype=torch.int32, device="meta")
    q = torch.empty(900, 32, 128, dtype=torch.bfloat16, device="meta")
    for longest, short in ((300, 16), (1, 0)):
        plan = plan_of(max_seqlen_q=longest, q=q, cu_seqlens_q=edges)
        record = plan.launch.kernel_launch.handle.record
        assert record.short_queries == short
        config = select_decode_config("bf16", 128)
        assert record.short_config == (CACHED_CONFIGS.index(config) if short else -1)
        said = plan.launch.describe().get("short sequences")
        assert said == (f"up to 16 queries: {config.name}, at once" if short else None)


def test_ragged_calls_are_chosen_by_their_longest_sequence():
    edges = torch.empty(5, dtype=torch.int32, device="meta")
    q = torch.empty(300, 32, 128, dtype=torch.bfloat16, device="meta")
    for longest, said in ((1, FEW), (48, FEW), (49, MANY), (300, MANY), (None, MANY)):
        plan = plan_of(max_seqlen_q=longest, q=q, cu_seqlens_q=edges)
        assert plan.launch.describe()["kernel"] == said


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("rows", [(1,), (65, 300, 2048)], ids=str)
def test_sizes_that_change_from_step_to_step_do_not_change_the_plan(rows, page_size):
    """Neither batch, capacity, table width, page count nor length is in the key of a plan."""
    problems = set()
    for batch, size, seqlen_q in itertools.product((1, 7), (30, 33), rows):
        lead = (size, page_size) if page_size else (batch, size)
        cache = torch.empty(*lead, 8, 128, dtype=torch.bfloat16, device="meta")
        given = {"k_cache": cache, "v_cache": cache}
        given["cache_seqlens"] = torch.empty(batch, dtype=torch.int32, device="meta")
        if page_size:
            given["page_table"] = torch.empty(batch, size, dtype=torch.int32, device="meta")
        problems.add(problem_of(tensors_of(batch=batch, seqlen_q=seqlen_q, **given)))
    assert len(problems) == 1


def test_an_expanded_cache_runs_on_a_decode_kernel_and_an_expanded_q_is_copied():
    like = tensors_of(seqlen_q=300)
    wide = like.k_cache[:1].expand(4, -1, -1, -1)
    plan = plan_of(NAMED, seqlen_q=300, k_cache=wide)
    said = "decode: forward kernels need strides that are not 0: k_cache is expanded"
    assert plan.launch.describe()["kernel"] == said
    q = like.q[:1].expand(4, -1, -1, -1)
    described = plan_of(seqlen_q=300, q=q).launch.describe()
    assert (described["kernel"], described["copied first"]) == (MANY, "q")
    few = plan_of(q=q[:, :1]).launch.describe()
    assert (few["kernel"], few["copied first"]) == (FEW, "nothing")
    assert not problem_of(tensors_of(batch=1)).expanded, "an axis of one row"


def test_a_forward_kernel_that_is_not_there_or_was_never_run_serves_no_call(monkeypatch):
    """Triton does, or a decode kernel for a call that names the backend."""
    name = select_cached_forward_config("bf16", 128).name
    decode = frozenset({select_decode_config("bf16", 128).name})

    def unmeasured(*of):
        return select_cached_forward_config(*of)._replace(measured="")

    monkeypatch.setattr(decode_choice, "select_cached_forward_config", unmeasured)
    absent = HopperBackend(library=lambda: library_double(configs=decode), only_measured=False)
    careful = HopperBackend(library=library_double)
    for backend, said in (
        (absent, f"kernel config {name} is not in this build (FLASHATTN3_KERNELS)"),
        (careful, f"kernel config {name} was never run on a GPU"),
    ):
        plan = plan_of(hopper=backend, seqlen_q=300)
        assert plan.backend.name == "triton" and said in dict(plan.declined)["hopper"]
        named = plan_of(NAMED, hopper=backend, seqlen_q=300)
        assert named.launch.describe()["kernel"] == f"decode: {said}"
        assert plan_of(hopper=backend).launch.describe()["kernel"] == FEW


def test_doctor_names_the_kernels(monkeypatch):
    monkeypatch.setattr(doctor, "BACKENDS", (HOPPER, TRITON, REFERENCE))
    device = torch.device("cuda", 0)
    assert doctor._cached(device, H100, 1) == f"hopper ({FEW})"
    assert doctor._cached(device, H100, 2048) == f"hopper ({MANY})"


def prepared(**changes):
    of = select_cached_forward_config("bf16", 128)
    return test_kvcache_hopper.prepared(of, **{"window_right": 0, **changes})


def test_the_grid_and_the_workspace_of_forward_rows():
    """A CTA for each SM, at most one for each work tile; only ragged batches have a workspace."""
    handle, threads, _ = prepared()
    assert threads == 512
    size = size_of
    # 8 KV heads with 4 query heads each, 12 slices of 64 rows for a KV head, or 16. One slice is a
    # tile up to 132 slices, two are up to 264, then three.
    assert size(handle, 1, 192, 64) == (96, 0) and size(handle, 1, 193, 64) == (128, 0)
    assert size(handle, 2, 192, 64) == (96, 0) and size(handle, 4, 192, 64) == (128, 0)
    assert size(handle, 4, 2048, 2**20) == (132, 0)
    assert size(prepared(num_sms=5)[0], 4, 2048, 64) == (5, 0)
    # batch + 1 VarlenPlace of 16 bytes, batch int32, the tile semaphore, and what fills 16 bytes.
    assert size(handle, 4, 2048, 2**20, 2051) == (132, 5 * 16 + 4 * 4 + 4 + 12)
    assert size(handle, 4, 2048, 2**20, 4)[0] == 64  # of 4 sequences with 4 slices each
    # Float32 totals of spans and 64 bytes of statistics for each row of a CTA, beyond 128 columns.
    spans = {"split_tokens": 1024, "window_right": 0}
    for dim, row in ((128, 0), (256, 256 * 4 + 64)):
        config = select_cached_forward_config("bf16", dim, spans=True)
        of_dim = test_kvcache_hopper.prepared(config, head_dim=dim, head_dim_v=dim, **spans)[0]
        assert size(of_dim, 4, 2048, 2**20) == (132, 132 * 128 * row)
    assert prepared(page_size=3)[0] is not None


def test_what_a_forward_kernel_refuses():
    with pytest.raises(RuntimeError, match="launch: head_dim must be at most 128 for forward_bf16"):
        prepared(head_dim=136)
    handle = prepared()[0]
    with pytest.raises(RuntimeError, match=r"decode: q\.device must be a GPU"):
        LIBRARY.decode(handle, *call_of())
    with pytest.raises(RuntimeError, match="decode: k_cache must be of rows at multiples of 16"):
        wide = torch.zeros(2, 128, 8, 132, dtype=torch.bfloat16)[..., :128]
        LIBRARY.decode(handle, *call_of(k_cache=wide))
    assert isinstance(plan_of(seqlen_q=300).launch.kernel_launch.handle, Prepared)


LONG = (700, 64, 65, 331)
CHUNKS = (
    *(
        CacheCase(f"chunk-{name}-page-{page}", LONG, 64, page_size=page, **G8, options=options)
        for page in (0, 1, 3, 16, 64, 128)
        for name, options in (("causal", CAUSAL), ("window", WINDOW))
    ),
    *(
        CacheCase(f"long-{page}", (300, 900), 300, page_size=page, options=CAUSAL)
        for page in (0, 3, 48, 256)
    ),
    *(
        CacheCase(f"ragged-{page}", (40, 900, 64, 1000, 9, 700), (1, 700, 64, 300, 0, 5),
                  page_size=page, options=CAUSAL)
        for page in (0, 16, 128)
    ),
    CacheCase("no-mask", LONG, 64, page_size=16, **G8),
    CacheCase("more-queries-than-keys", (0, 2, 100, 299), 300, page_size=16, options=CAUSAL),
    CacheCase("window-both", (300, 700), 200, page_size=16, options={"window_size": (130, 40)}),
    CacheCase("window-narrow", (900, 900), 300, options={"window_size": (0, 0)}),
    CacheCase("leftpad", (300, 700, 650), 200, page_size=16, leftpad=(0, 299, 400), options=CAUSAL),
    CacheCase("leftpad-all", (300, 40), 200, leftpad=(300, 40)),
    CacheCase("batch-idx", LONG, 64, others=3, **G8, options=CAUSAL),
    CacheCase("batch-idx-paged", LONG, 64, others=3, page_size=16, **G8, options=CAUSAL),
    CacheCase("hnd", LONG, 64, page_size=16, layout="hnd", **G8, options=CAUSAL),
    CacheCase("hnd-dense", LONG, 64, layout="hnd", **G8, options=CAUSAL),
    CacheCase("one-tensor", LONG, 64, page_size=16, layout="one", **G8, options=CAUSAL),
    CacheCase("one-tensor-dense", LONG, 64, layout="one", **G8, options=CAUSAL),
    CacheCase("softcap", LONG, 64, page_size=64, **G8, options={"softcap": 2.0, **CAUSAL}),
    CacheCase("scale-negative", LONG, 64, **G8, options={"softmax_scale": -0.3}),
    CacheCase("scale-zero", LONG, 64, **G8, options={"softmax_scale": 0.0}),
    CacheCase("group-1", (300, 700), 300, num_heads_q=2, page_size=16, options=CAUSAL),
    CacheCase("group-5", (300, 700), 50, num_heads_q=5, num_heads_kv=1, options=CAUSAL),
    CacheCase("dim-40-24", LONG, 100, head_dim=40, head_dim_v=24, page_size=16, options=CAUSAL),
    *(
        CacheCase(f"dim-{d}-{dv}-page-{page}", LONG, 100, head_dim=d, head_dim_v=dv, page_size=page,
                  options=CAUSAL)
        for d, dv, page in (
            (40, 24, 0), (40, 24, 1), (24, 40, 0), (72, 56, 3), (56, 8, 0), (104, 72, 64),
        )
    ),
    CacheCase("dim-24-56", LONG, 100, head_dim=24, head_dim_v=56, page_size=3, options=CAUSAL),
    CacheCase("dim-128", LONG, 100, head_dim=128, head_dim_v=128, page_size=16, options=CAUSAL),
    CacheCase("dim-192-128", LONG, 100, head_dim=192, head_dim_v=128, page_size=16, options=CAUSAL),
    CacheCase("dim-256", LONG, 100, head_dim=256, head_dim_v=256, page_size=16, options=CAUSAL),
    CacheCase("every-option", (700, 300, 400), (3, 300, 90), page_size=16, others=2,
              leftpad=(30, 0, 320), layout="hnd",
              options={"causal": True, "window_size": (60, 0), "softcap": 3.0}),
    CacheCase("sinks", LONG, 64, page_size=16, sinks=True, **G8, options=CAUSAL),
)  # fmt: skip
# Rows at odd distances, which the Hopper backend does not take: loads of single elements.
ODD_STRIDES = tuple(
    CacheCase(f"odd-strides-{d}-{dv}-page-{page}", LONG, 100, head_dim=d, head_dim_v=dv,
              page_size=page, layout="one", options=CAUSAL)
    for d, dv, page in ((40, 23, 0), (40, 23, 1), (64, 31, 16), (128, 9, 0), (24, 15, 3))
)  # fmt: skip
# Only decode kernels take these, at any number of rows.
DECODE_CHUNKS = (
    CacheCase("descales", (700, 300), (300, 64), page_size=16, descales="heads", options=CAUSAL),
)
# The reference backend runs every option with short chunks in test_kvcache.py, of which its long
# ones take no other path.
QUICK = ("chunk-window-page-3", "long-48", "ragged-16", "every-option", "more-queries-than-keys")
CHUNK_BACKENDS = (
    "reference",
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("hopper", marks=needs_hopper),
)


pytestmark = pytest.mark.usefixtures("poisoned_memory")  # of out, lse and the workspace


@pytest.mark.interpreted(
    quick=lambda case, backend, dtype: case.name in QUICK and dtype == torch.float16,
    sweep=lambda case, backend, dtype: case.name not in QUICK and case not in CHUNKS[:1],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", CHUNK_BACKENDS)
@pytest.mark.parametrize("case", CHUNKS + DECODE_CHUNKS)
def test_chunks_against_float64(case, backend, dtype, device):
    inputs = make_cache_inputs(case, device, dtype)
    if backend == "hopper":
        kind = "decode" if case in DECODE_CHUNKS else "forward"
        assert kernel_of(inputs, backend=backend).startswith(kind)
    check_cached(case, inputs, *call_cached(inputs, backend=backend), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("case", ODD_STRIDES)
def test_odd_strides_against_float64(case, dtype, device):
    inputs = make_cache_inputs(case, device, dtype)
    check_cached(case, inputs, *call_cached(inputs, backend="triton"), "triton")


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("backend", CHUNK_BACKENDS[:2])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dims", [(64, 32), (128, 16), (40, 24)], ids=str)
def test_tensors_that_begin_anywhere_against_float64(dims, stored, backend, dtype, device):
    """One element further than a multiple of 16 bytes."""
    lengths, rows = (LONG, 100) if GPU else ((40, 17), 3)
    case = CacheCase("begin", lengths, rows, head_dim=dims[0], head_dim_v=dims[1], stored=stored,
                     options=CAUSAL)  # fmt: skip
    inputs = make_cache_inputs(case, device, dtype)
    for name in ("q", "k_cache", "v_cache"):
        given = inputs.arguments[name]
        memory = torch.empty(given.numel() + 1, dtype=given.dtype, device=device)
        inputs.arguments[name] = memory[1:].view_as(given).copy_(given)
    check_cached(case, inputs, *call_cached(inputs, backend=backend), backend)


@needs_hopper
@pytest.mark.parametrize("page_size", [0, 16])
def test_new_tokens_are_written_and_then_attended_to(page_size):
    """Chunked prefill: the call with new tokens equals one on a cache that has them already."""
    case = CacheCase("append", (500, 331), 200, page_size=page_size, options=CAUSAL, capacity=512)
    full = inputs_of(case, "cuda", "hopper")
    wanted = call_cached(full, backend="hopper")
    given = make_cache_inputs(case, "cuda", torch.float16).arguments
    new = [torch.stack([x[-200:] for x in of]).cuda() for of in (full.k, full.v)]
    for index, length in enumerate(case.seqlens):  # forget them
        for cache in (given["k_cache"], given["v_cache"]):
            if page_size:
                tokens = torch.arange(length - 200, length, device="cuda")
                pages = given["page_table"][index, tokens // page_size].long()
                cache[pages, tokens % page_size] = math.nan
            else:
                cache[index, length - 200 : length] = math.nan
    given["cache_seqlens"] = given["cache_seqlens"] - 200
    found = flash_attn_with_kvcache(k=new[0], v=new[1], **given, return_lse=True, backend="hopper")
    assert all(map(torch.equal, found, wanted))


@needs_hopper
def test_triton_and_hopper_agree_on_a_long_prompt():
    """Many work tiles for each CTA, and a cache that L2 does not hold."""
    lengths = (9000, 16000, 300)
    case = CacheCase(
        "long", lengths, 2048, num_heads_q=8, num_heads_kv=2, head_dim=128, head_dim_v=128,
        page_size=16, options=CAUSAL,
    )  # fmt: skip
    inputs = inputs_of(case, "cuda", "hopper", torch.bfloat16)
    found = call_cached(inputs, backend="hopper")
    wanted = call_cached(inputs, backend="triton")
    torch.testing.assert_close(found[0], wanted[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-3)
