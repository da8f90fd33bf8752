"""Appends on the Hopper backend: which run on the append kernel, and what its operator takes.

The parts about planning and the operator's checks need no GPU: the operator checks its tensors
before it looks for one. tests/test_kvcache_append.py compares results.
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers import H100, cached_calls_of_an_h100, ints, library_double, needs_hopper

from flashattn3 import append_kvcache, flash_attn_with_kvcache
from flashattn3.backends.hopper import cached
from flashattn3.backends.hopper.append_launch import AppendLaunch
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.library import find_library
from flashattn3.backends.reference.backend import BACKEND as REFERENCE
from flashattn3.backends.triton.backend import BACKEND as TRITON
from flashattn3.backends.triton.cached import TritonCachedCall
from flashattn3.call.cached import AppendOptions, AppendTensors, describe_append
from flashattn3.call.metadata import metadata_of
from flashattn3.call.tensor_fields import APPEND_TENSORS
from flashattn3.run.planner import choose

LIBRARY = find_library()
pytest.importorskip("triton")

B, NEW, CAP, HEADS, DIM = 2, 3, 64, 4, 64
FP8 = torch.float8_e4m3fn
NAMED = AppendOptions(backend="hopper")


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def caches(dtype):
    return {f"{name}_cache": zeros(B, CAP, HEADS, DIM, dtype=dtype) for name in "kv"}


def tensors_of(dtype=torch.bfloat16, d=DIM, **changes) -> AppendTensors:
    """The tensors of a dense append with every optional argument that goes with it."""
    like = {
        **{name: zeros(B, NEW, HEADS, d, dtype=dtype) for name in ("k", "v")},
        **{name: zeros(B, CAP, HEADS, d, dtype=dtype) for name in ("k_cache", "v_cache")},
        **{name: zeros(B, NEW, 8, d, dtype=dtype) for name in ("q", "q_out")},
        **{name: zeros(CAP, d // 2, dtype=torch.float32) for name in ("rotary_cos", "rotary_sin")},
        **{name: zeros(B, HEADS, dtype=torch.float32) for name in ("k_descale", "v_descale")},
        **{name: ints(0, 0) for name in ("cache_seqlens", "cache_batch_idx", "rotary_seqlens")},
    }
    return AppendTensors(**like)._replace(**changes)


def of_operator(tensors: AppendTensors) -> tuple:
    """Those that the compiled kernel takes: it writes no descales."""
    return tensors[: len(APPEND_TENSORS)]


def problem_of(options=NAMED, **changes):
    return describe_append(tuple(map(metadata_of, tensors_of(**changes))), options)


def plan_of(problem, **options):
    hopper = HopperBackend(library=library_double, **options)
    return choose(problem, H100, (hopper, TRITON, REFERENCE))


def test_the_kernel_runs_where_it_is_named_or_measured(monkeypatch):
    monkeypatch.setattr(cached, "APPEND_MEASURED", "")
    plan = plan_of(problem_of())
    assert type(plan.launch) is AppendLaunch and plan.backend.name == "hopper"
    unnamed = problem_of(AppendOptions())
    plan = plan_of(unnamed)
    assert type(plan.launch) is TritonCachedCall and plan.backend.name == "hopper"
    said = cached.append_reason(HopperBackend(library=library_double), unnamed)
    assert said == "the append kernel was never run on a GPU; backend='hopper' would run it"
    assert type(plan_of(unnamed, only_measured=False).launch) is AppendLaunch
    monkeypatch.setattr(cached, "APPEND_MEASURED", "H100")
    assert type(plan_of(unnamed).launch) is AppendLaunch
    triton = plan_of(problem_of(AppendOptions(backend="triton")))
    assert triton.backend.name == "triton" and type(triton.launch) is TritonCachedCall


def test_every_layout_of_16_bits_is_taken():
    for changes in ({"d": 36}, {"d": 256, "dtype": torch.float16}, {"rotary_cos": None}):
        assert type(plan_of(problem_of(**changes)).launch) is AppendLaunch


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": torch.float32}, "writes float16 and bfloat16, not torch.float32"),
        (caches(FP8), "writes float16 and bfloat16, not torch.float8_e4m3fn"),
        *(
            (
                {f"{name}_descale": zeros(B, tokens, HEADS).float() for name in "kv"},
                "takes a descale for each head of a sequence, k_descale has",
            )
            for tokens in (1, CAP)
        ),
    ],
    ids=["float32", "e4m3", "descales of pages", "descales of tokens"],
)
def test_what_the_kernel_declines(changes, said):
    hopper = HopperBackend(library=library_double)
    assert cached.append_reason(hopper, problem_of(**changes)).startswith(said)
    if changes == {"dtype": torch.float32}:
        found = hopper.decline_reason(problem_of(**changes), H100)
        assert found.startswith("runs Triton's kernel for this: takes torch.float16")


@pytest.fixture
def on_hopper(monkeypatch):
    """Plan cached calls on CPU tensors for an H100; keeps what the operators receive."""
    received = []
    library = library_double(
        append=lambda *given: received.append(("append", given)),
        decode=lambda *given: received.append(("decode", given)),
    )
    hopper = HopperBackend(library=lambda: library, only_measured=False)
    with cached_calls_of_an_h100(monkeypatch, hopper, TRITON, REFERENCE):
        yield received


def test_what_an_append_passes_to_the_operator(on_hopper):
    given = tensors_of(cache_batch_idx=None)
    named = {
        name: x
        for name, x in given._asdict().items()
        if name not in ("k", "v", "k_cache", "v_cache") and not name.endswith("_out")
    }
    rotated = append_kvcache(*given[:4], **named, rotary_interleaved=False)
    ((name, arguments),) = on_hopper
    wanted = (*of_operator(given._replace(q_out=rotated)), -1, False, False)
    assert name == "append" and len(arguments) == len(wanted)
    assert all(a is b for a, b in zip(arguments, wanted, strict=True))
    append_kvcache(*given[:4], cache_seqlens=7)
    assert on_hopper[-1][1][4:] == (*[None] * 12, 7, True, False)


def test_a_call_appends_before_it_attends(on_hopper):
    given = tensors_of()
    tables = {"rotary_cos": given.rotary_cos, "rotary_sin": given.rotary_sin}
    caches, lengths = given[2:4], {"cache_seqlens": given.cache_seqlens}
    flash_attn_with_kvcache(given.q, *caches, *given[:2], **tables, **lengths)
    (first, appended), (then, attended) = on_hopper
    assert (first, then) == ("append", "decode")
    assert appended[4] is given.q and appended[-1] is True  # neither causal nor a window
    assert attended[6] is appended[5]  # the rotated q
    flash_attn_with_kvcache(given.q, *caches, *given[:2], **tables, **lengths, causal=True)
    assert on_hopper[2][1][-1] is False


def test_columns_with_gaps_are_copied_first(on_hopper):
    """New tokens and queries may have any strides, the two tables have one between them."""
    given = tensors_of()
    gaps = zeros(B, NEW, HEADS, 2 * DIM)[..., ::2]
    table = zeros(CAP, DIM, dtype=torch.float32)[:, : DIM // 2]
    append_kvcache(
        gaps, given.v, *given[2:4], cache_seqlens=0, rotary_cos=given.rotary_cos, rotary_sin=table
    )
    found = AppendTensors(*on_hopper[0][1][:-3])
    assert found.k.is_contiguous() and found.v is given.v
    assert found.rotary_sin.is_contiguous() and found.rotary_cos.is_contiguous()


@pytest.fixture(scope="module")
def operator():
    if LIBRARY.error is not None:
        pytest.skip(LIBRARY.error)
    return LIBRARY.append


def test_the_operator_takes_the_tensors_of_an_append(operator):
    arguments = torch.ops.flashattn3_hopper.append.default._schema.arguments
    names = [argument.name for argument in arguments]
    assert names == [
        *(field.name for field in APPEND_TENSORS),
        "seqlen",
        "rotary_interleaved",
        "one_q_position",
    ]
    written = [argument.name for argument in arguments if argument.is_write]
    assert written == ["k_cache", "v_cache", "q_out"]


FLOATS = zeros(B, HEADS, dtype=torch.float32)
TABLE = zeros(CAP, DIM // 2, dtype=torch.float32)
RAGGED = {
    **dict.fromkeys(("k", "v"), zeros(5, HEADS, DIM)),
    **dict.fromkeys(("q", "q_out"), zeros(7, 8, DIM)),
    "cu_seqlens_k_new": ints(0, 2, 5),
    "cu_seqlens_q": ints(0, 3, 7),
}
CALLS = [
    ({}, "k.device must be a GPU, got another device"),
    ({"q": None, "q_out": None}, "k.device must be a GPU"),
    ({"k": zeros(B, NEW, HEADS, DIM, dtype=torch.float32)}, "k.dtype must be fp16 or bf16"),
    ({"k": zeros(B, HEADS, DIM)}, "the number of axes of k must be 4, got 3"),
    ({"k": zeros(B, NEW, 2, DIM)}, "k.shape must be (2, 3, 4, 64), got (2, 3, 2, 64)"),
    ({"v": zeros(B, 1, HEADS, DIM)}, "v.shape must be (2, 3, 4, 64), got (2, 1, 4, 64)"),
    ({"v": zeros(B, NEW, HEADS, DIM).half()}, "v.dtype must be k's, got another dtype"),
    ({"v": zeros(B, NEW, HEADS, 2 * DIM)[..., ::2]}, "v.stride(-1) must be 1, got another"),
    ({"k_cache": zeros(B, CAP, HEADS, DIM).half()}, "k_cache.dtype must be k's"),
    ({"v_cache": zeros(B, CAP, 3, DIM)}, "v_cache.shape must be (2, 64, 4, 64), got (2, 64, 3"),
    ({"v_cache": zeros(B, CAP, DIM)}, "the number of axes of v_cache must be 4, got 3"),
    ({"cache_seqlens": ints(1)}, "cache_seqlens.shape must be (2,), got (1,)"),
    ({"cache_seqlens": ints(1, 2).long()}, "cache_seqlens.dtype must be int32"),
    ({"cache_batch_idx": ints(1, 2, 3)}, "cache_batch_idx.shape must be (2,), got (3,)"),
    ({"rotary_seqlens": ints(1, 2, 3)[::2]}, "rotary_seqlens.stride(-1) must be 1"),
    ({"page_table": ints(1, 2)}, "the number of axes of page_table must be 2, got 1"),
    ({"page_table": ints(1, 2)[:, None].long()}, "page_table.dtype must be int32"),
    ({"page_table": ints(1)[:, None], "cache_batch_idx": None}, "the number of caches must be 2"),
    ({"q": None}, "q_out must be None without q, got a tensor"),
    ({"q_out": None}, "q_out must be a tensor beside q, got None"),
    ({"q": zeros(1, NEW, 8, DIM)}, "q.shape[0] must be 2, got 1"),
    ({"q": zeros(B, NEW, 8, 32)}, "q.shape must be (2, 3, 8, 64), got (2, 3, 8, 32)"),
    ({"q_out": zeros(B, NEW, 4, DIM)}, "q_out.shape must be (2, 3, 8, 64), got (2, 3, 4, 64)"),
    ({"cu_seqlens_q": ints(0, 1, 2)}, "the number of axes of q must be 3, got 4"),
    ({"cu_seqlens_k_new": ints(0, 1, 2)}, "the number of axes of k must be 3, got 4"),
    ({"cu_seqlens_k_new": ints()}, "the number of axes of k must be 3, got 4"),
    ({"rotary_sin": None}, "rotary_sin must be a tensor beside rotary_cos, got None"),
    ({"rotary_cos": None}, "rotary_sin must be None without rotary_cos, got a tensor"),
    ({"rotary_cos": zeros(9, DIM, dtype=torch.float32)}, "rotary_cos.shape[1] must be between 1"),
    ({"rotary_sin": TABLE[1:]}, "rotary_sin.shape must be (64, 32), got (63, 32)"),
    ({"rotary_sin": TABLE.bfloat16()}, "rotary_sin.dtype must be rotary_cos's"),
    ({"rotary_cos": TABLE.half()}, "rotary_cos.dtype must be float32 or k's"),
    ({"rotary_sin": zeros(CAP, DIM).float()[:, :32]}, "rotary_sin.stride(0) must be 32, got 64"),
    ({"k_descale": FLOATS[:, :1]}, "k_descale.shape must be (2, 4), got (2, 1)"),
    ({"v_descale": FLOATS.half()}, "v_descale.dtype must be float32"),
    (RAGGED, "k.device must be a GPU"),
    (
        RAGGED | {"cu_seqlens_k_new": ints()},
        "cu_seqlens_k_new.shape[0] must be at least 1, got 0",
    ),
    (RAGGED | {"cu_seqlens_k_new": ints(0, 5)}, "cache_seqlens.shape must be (1,), got (2,)"),
    (RAGGED | {"cu_seqlens_q": ints(0, 7)}, "cu_seqlens_q.shape must be (3,), got (2,)"),
    (RAGGED | {"v": zeros(4, HEADS, DIM)}, "v.shape must be (5, 4, 64), got (4, 4, 64)"),
]


@pytest.mark.parametrize(("changes", "said"), CALLS, ids=[said for _, said in CALLS])
def test_wrong_tensors_are_named(operator, changes, said):
    with pytest.raises(RuntimeError, match=re.escape(f"append: {said}")):
        operator(*of_operator(tensors_of(**changes)), -1, True, False)


@needs_hopper
def test_a_captured_append_is_right_for_other_lengths():
    """A replay allocates nothing, and the decode kernel after it sees the new keys."""
    heads, dim, page = 2, 128, 16
    q, k, v = (torch.randn(3, 1, h, dim, device="cuda").half() for h in (8, heads, heads))
    caches = [torch.randn(24, page, heads, dim, device="cuda").half() for _ in range(2)]
    table = torch.randperm(24, device="cuda").int().view(3, 8)
    angles = torch.rand(160, dim // 2, device="cuda") * 6  # also past the capacity
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")

    def call(backend, caches):
        return flash_attn_with_kvcache(
            q, *caches, k, v, **tables, cache_seqlens=lengths, page_table=table, causal=True,
            backend=backend,
        )  # fmt: skip

    call("hopper", [cache.clone() for cache in caches])
    torch.cuda.synchronize()
    graph, captured = torch.cuda.CUDAGraph(), [cache.clone() for cache in caches]
    with torch.cuda.graph(graph):
        found = call("hopper", captured)
    for step in ((0, 0, 0), (5, 15, 100), (6, 16, 101), (126, 127, 128)):
        lengths.copy_(torch.tensor(step))
        for x in (q, k, v):
            x.normal_()
        wanted_caches = [cache.clone() for cache in captured]
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        wanted = call("triton", wanted_caches)
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
        for cache, right in zip(captured, wanted_caches, strict=True):
            torch.testing.assert_close(cache, right, atol=1e-3, rtol=1e-3)


@needs_hopper
def test_appends_in_a_row_see_each_other():
    """Early starts: each append and each attention waits for the kernels before it."""
    heads, dim, steps = 8, 128, 40
    caches = [torch.zeros(4, 64, heads, dim, device="cuda").half() for _ in range(2)]
    new = torch.randn(2, steps, 4, 1, heads, dim, device="cuda").half()
    q = torch.randn(4, 1, 32, dim, device="cuda").half()
    found = [
        flash_attn_with_kvcache(
            q, *caches, new[0, i], new[1, i], cache_seqlens=i, causal=True, backend="hopper"
        )
        for i in range(steps)
    ]
    keys, values = (x[:, :, 0].transpose(0, 1) for x in new)  # (batch, steps, heads, dim)
    for i, out in enumerate(found):
        seen = keys[:, : i + 1], values[:, : i + 1]
        right = flash_attn_with_kvcache(q, *seen, backend="reference")
        torch.testing.assert_close(out, right, atol=2e-3, rtol=2e-3)
