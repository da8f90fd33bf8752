"""Cached calls with keys that all sequences have in front of their own: ``prefix_page_table``."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import (
    SIXTEEN_BIT,
    TRITON_DTYPES,
    cached_calls_of_an_h100,
    library_double,
    needs_hopper,
)

from flashattn3 import cached_explanation, explain_with_kvcache, flash_attn_with_kvcache
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.decode_choice import PREFIX_ROWS
from flashattn3.backends.hopper.kernel_configs import CACHED_CONFIGS
from flashattn3.backends.reference.backend import BACKEND as REFERENCE
from flashattn3.call.cached import DecodeTensors
from flashattn3.run import cached_plans
from flashattn3.run.shared_prefix import is_one_launch

PAGE, PREFIX = 16, 48  # a whole number of pages, so that one table holds both parts
LENGTHS, QUERIES = (20, 33, 3), (1, 5, 3)
CASES = {
    "decode": (1, {}),
    "chunk": (3, {"causal": True}),
    "ragged-sinks": (None, {"causal": True, "sinks": True}),
    "softcap-splits": (3, {"causal": True, "softcap": 2.0, "num_splits": 2}),
    "appended": (3, {"causal": True, "new": True}),
}


def call_of(
    seqlen_q: int | None, device, dtype, dim: int = 64
) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Arguments of a call without its prefix, the pages of the prefix and those of all keys. The
    last rows of ragged queries are of no sequence."""
    generator = torch.Generator().manual_seed(0)
    num_pages = 20

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    pages = torch.randperm(num_pages, generator=generator)[: 3 + 3 * 3].int().to(device)
    prefix, own = pages[None, :3], pages[3:].view(3, 3)
    rows = (sum(QUERIES) + 2,) if seqlen_q is None else (3, seqlen_q)
    arguments = {
        "q": normal(*rows, 8, dim),
        "k_cache": normal(num_pages, PAGE, 2, dim),
        "v_cache": normal(num_pages, PAGE, 2, dim),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32, device=device),
    }
    if seqlen_q is None:
        edges = torch.tensor([0, 1, 6, 9], dtype=torch.int32, device=device)
        arguments |= {"cu_seqlens_q": edges, "max_seqlen_q": 5}
    return arguments, prefix, own


FP8, INT8 = torch.float8_e4m3fn, torch.int8
DESCALES = {"one": (1,), "pages": (20, 1, 2), "tokens": (20, PAGE, 2)}
DESCALED = "decode", "chunk", "ragged-sinks"
# Backend, q's dtype and head dim.
BOTH = [(backend, torch.float16, 64) for backend in ("reference", "triton")]
HOPPER = [("hopper", dtype, dim) for dtype in SIXTEEN_BIT for dim in (64, 128)]
WITHOUT = [*BOTH[:1], ("reference", torch.float64, 64), ("hopper", torch.bfloat16, 64)]
WITHOUT += [("triton", dtype, 64) for dtype in TRITON_DTYPES]
# Case, kind of descales, dtype of the caches if it is not q's.
RUNS = [
    *product(CASES, ("",), (None,), WITHOUT),
    *product((*DESCALED, "appended"), ("one",), (None, FP8, INT8), BOTH + HOPPER),
    *product(DESCALED, ("pages", "tokens"), (FP8, INT8), BOTH + HOPPER),
]


@pytest.mark.interpreted(
    quick=lambda name, kind, stored, backend, dtype, dim: (
        backend == "reference"
        or (name, kind, stored) in (("decode", "", None), ("chunk", "one", FP8))
    )
)
@pytest.mark.parametrize(
    ("name", "kind", "stored", "backend", "dtype", "dim"),
    [
        pytest.param(*of, *run, marks=needs_hopper if run[0] == "hopper" else ())
        for *of, run in RUNS
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_a_prefix_is_the_first_keys_of_every_sequence(
    name, kind, stored, backend, dtype, dim, device
):
    """Of one call over all keys in float64, of real numbers where there are descales."""
    seqlen_q, options = CASES[name]
    arguments, prefix, own = call_of(seqlen_q, device, dtype, dim)
    options = dict(options)
    if backend == "hopper" and "num_splits" in options:
        pytest.skip("Hopper cuts the batch into equal shares")
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(8, generator=torch.Generator().manual_seed(1)).to(device)
    generator = torch.Generator().manual_seed(2)
    real = {x: arguments[x].double() for x in ("q", "k_cache", "v_cache")}
    if kind:
        real["q"] = real["q"] * 0.5
        arguments["q_descale"] = torch.full((1,), 0.5, device=device)
        for side in "kv":
            by = torch.rand(DESCALES[kind], generator=generator).add(0.5).div(16).to(device)
            codes = arguments[f"{side}_cache"].mul(16).to(stored or dtype)
            arguments |= {f"{side}_cache": codes, f"{side}_descale": by}
            by = by if kind == "one" else by[..., None]
            real[f"{side}_cache"] = codes.double() * by.double()
    if options.pop("new", False):  # which an append stores as the codes that these numbers have
        new = {x: real[f"{x}_cache"][0, :9].view(3, 3, 2, dim).clone() for x in "kv"}
        real |= new
        arguments |= {x: of.to(dtype) for x, of in new.items()}
    table = torch.cat((prefix.expand(3, -1), own), 1)
    whole = arguments | real | {"cache_seqlens": arguments["cache_seqlens"] + PREFIX}
    whole = {x: of for x, of in whole.items() if not x.endswith("_descale")}
    of = {**options, "num_splits": 0, "return_lse": True, "backend": "reference"}
    wanted = flash_attn_with_kvcache(**whole, page_table=table, **of)
    length = PREFIX
    if name == "decode":
        length = torch.tensor([PREFIX], dtype=torch.int32, device=device)
    prefix_of = {"prefix_page_table": prefix, "prefix_len": length, "page_table": own}
    call = arguments | prefix_of | options | {"return_lse": True, "backend": backend}
    other = {x: of.clone() if x.endswith("_cache") else of for x, of in call.items()}
    out = torch.full_like(arguments["q"], torch.nan)
    found = flash_attn_with_kvcache(**call, out=out)
    assert found[0] is out
    bound = 1e-9 if dtype == torch.float64 else 4e-3
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=bound, atol=bound)
    if kind == "one":
        descales = {x: of.view(()) for x, of in other.items() if x.endswith("_descale")}
        assert all(map(torch.equal, flash_attn_with_kvcache(**other | descales), found))
    if backend == "hopper":
        assert explain_with_kvcache(**call).config["prefix"] == "in the same launch"
    again = call | {"k": None, "v": None, "backend": None}  # tokens were appended by the first call
    assert flash_attn_with_kvcache(**again)[0].shape == out.shape


def test_one_number_divides_new_tokens_in_pages_of_one(device):
    """Where a descale of each page is one of each token, which an append would write."""
    arguments, _, _ = call_of(1, device, torch.float16)
    pages = torch.arange(20, dtype=torch.int32, device=device)[None]
    new = torch.ones(3, 1, 2, 64, dtype=torch.float16, device=device)
    caches = {x: torch.zeros(20, 1, 2, 64, device=device).to(FP8) for x in ("k_cache", "v_cache")}
    out = flash_attn_with_kvcache(
        **arguments | caches | {"cache_seqlens": 1}, k=new, v=new,
        page_table=pages[:, :9].view(3, 3), prefix_page_table=pages[:, 9:], prefix_len=1,
        k_descale=torch.tensor(0.5, device=device), v_descale=torch.tensor(0.5, device=device),
    )  # fmt: skip
    assert (caches["k_cache"][[1, 4, 7]].float() == 2).all() and out.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_step_without_queries_has_empty_results_and_appends(backend, device):
    arguments, prefix, own = call_of(None, device, torch.float16)
    new = arguments["k_cache"][:1, :9].view(9, 2, 64).clone()
    edges = torch.tensor([0, 1, 6, 9], dtype=torch.int32, device=device)
    arguments |= {"q": arguments["q"][:0], "cu_seqlens_q": torch.zeros_like(edges)}
    arguments |= {"k": new, "v": new, "cu_seqlens_k_new": edges}
    prefix_of = {"prefix_page_table": prefix, "prefix_len": PREFIX, "page_table": own}
    out, lse = flash_attn_with_kvcache(**arguments, **prefix_of, return_lse=True, backend=backend)
    assert out.shape == (0, 8, 64) and lse.shape == (8, 0)
    pages = arguments["k_cache"][own[1].long()].flatten(0, 1)
    assert torch.equal(pages[33:38], new[1:6])


def test_a_prefix_is_checked_before_new_tokens_are_written():
    arguments, prefix, own = call_of(3, "cpu", torch.float16)
    new = {name: torch.ones(3, 3, 2, 64).half() for name in "kv"}
    before = arguments["k_cache"].clone()
    too_long = torch.tensor([3 * PAGE + 1], dtype=torch.int32)
    prefix_of = {"prefix_page_table": prefix, "prefix_len": too_long, "page_table": own}
    with pytest.raises(ValueError, match="prefix_len must be between 0 and 48"):
        flash_attn_with_kvcache(**arguments, **new, **prefix_of)
    assert torch.equal(arguments["k_cache"], before)


@pytest.mark.parametrize("length", [PREFIX, torch.tensor(PREFIX, dtype=torch.int32)], ids=type)
@pytest.mark.parametrize("backend", ["reference", "aot_eager"])
def test_explained_and_compiled(backend, length):
    arguments, prefix, own = call_of(1, "cpu", torch.float16)
    prefix_of = {"prefix_page_table": prefix, "prefix_len": length, "page_table": own}
    if backend == "reference":
        explained = explain_with_kvcache(**arguments, **prefix_of, backend=backend)
        assert explained.config["prefix"].startswith("reference")
        return

    @torch.compile(backend=backend, fullgraph=True)
    def attend(q):
        return flash_attn_with_kvcache(q, **others, **prefix_of, backend="reference")

    others = {name: x for name, x in arguments.items() if name != "q"}
    wanted = flash_attn_with_kvcache(**arguments, **prefix_of, backend="reference")
    torch.testing.assert_close(attend(arguments["q"]), wanted)


@pytest.fixture
def on_hopper(monkeypatch):
    """Plan calls on CPU tensors for an H100; keeps what the operator receives."""
    received = []

    def decode_after_prefix(out, *arguments):
        received.append((out, *arguments))
        out.fill_(1.0)

    library = library_double(decode_after_prefix=decode_after_prefix)
    hopper = HopperBackend(library=lambda: library, only_measured=False)
    modules = cached_plans, cached_explanation
    with cached_calls_of_an_h100(monkeypatch, hopper, REFERENCE, modules=modules):
        yield received


def test_hopper_reads_the_prefix_in_the_launch_of_the_own_keys(on_hopper):
    arguments, prefix, own = call_of(3, "cpu", torch.float16)
    tensor = torch.tensor([PREFIX], dtype=torch.int32)
    wide = torch.zeros(3, 4, 8, 64).half()[:, :3]  # tokens of two strides are copied
    alone = torch.zeros(1, 4, 16, 64).half()[:, :3, :8]  # those of one sequence have one
    one = {"cache_seqlens": arguments["cache_seqlens"][:1], "page_table": own[:1]}
    for length, q, options in (
        (PREFIX, arguments["q"], {}),
        (PREFIX, alone, one),
        (tensor, wide, {"return_lse": True, "out": torch.zeros(3, 3, 8, 64).half()}),
    ):
        call = {**arguments, "q": q, "page_table": own, "prefix_page_table": prefix, **options}
        result = flash_attn_with_kvcache(**call, prefix_len=length)
        out, pages, seqlen, number, handle, lse, *numbers = on_hopper.pop()
        found, lse_found = result if "return_lse" in options else (result, None)
        assert found is out and lse is lse_found and bool((out == 1).all())
        assert out is options.get("out", out) and pages is prefix
        assert (seqlen, number) == ((None, PREFIX) if length is PREFIX else (tensor, 0))
        config = CACHED_CONFIGS[handle.config]
        assert config.name == "decode_fp16_d64_64x4_prefix" and handle.record.page_size == PAGE
        tensors = DecodeTensors(*numbers[4:])
        assert tensors.page_table is call["page_table"]
        assert tensors.q.is_contiguous() == (q is not alone)
        assert (tensors.q is q) == (q is not wide)


def test_what_hopper_says_of_a_prefix(on_hopper):
    arguments, prefix, own = call_of(1, "cpu", torch.float16)
    arguments |= {"page_table": own, "prefix_page_table": prefix, "prefix_len": PREFIX}
    config = explain_with_kvcache(**arguments).config
    assert config["prefix"] == "in the same launch"
    assert config["kernel config"] == "decode_fp16_d64_64x4_prefix"


def test_which_calls_with_a_prefix_are_one_launch_on_hopper():
    """Where a decode kernel takes the rows of each sequence and has a kernel with a prefix."""
    of = pytest.importorskip("test_kvcache_hopper")
    page, named = {"page_size": 16}, {"backend": "hopper"}
    tree = {"tree_mask": of.tree_of(seqlen_q=3)}
    careful = HopperBackend(library=of.library_double)
    for options, given, one_launch in (
        (named, {}, True),
        (named, {"seqlen_q": 48, "d": 96, "dv": 64}, True),
        (named, {"seqlen_q": 49}, False),
        (named, {"d": 256}, False),
        (named, {"k_descale": torch.ones(()), "q_descale": torch.ones(1)}, True),
        (named, {"stored": FP8, "d": 96, "dv": 64}, True),
        (named, {"stored": INT8, "v_descale": torch.ones(99, 16, 8)}, True),
        (named, {"stored": FP8, "d": 256}, False),
        ({}, {"stored": FP8}, True),
        (named | {"window_left": 9}, {}, False),
        (named, {"seqlen_q": 3, **tree}, False),
    ):
        launch = of.plan_of(options, hopper=careful, **page, **given).launch
        assert launch.rows_after_prefix == PREFIX_ROWS * one_launch, given
    launch = of.plan_of(named, hopper=careful).launch
    assert launch.rows_after_prefix == 0  # no pages
    launch = of.plan_of(named, hopper=careful, **page).launch
    for batch, one_launch in ((PREFIX_ROWS // 4, True), (PREFIX_ROWS // 4 + 1, False)):
        q = torch.empty(batch, 1, 32, 128, device="meta")
        tensors = of.tensors_of(**page)._replace(q=q)
        assert is_one_launch(launch, tensors) == one_launch
