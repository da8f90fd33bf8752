"""The Hopper backend of cached calls: which it takes, how it prepares them, what it passes on.

The parts about planning need no GPU: launches are prepared without one, and the operator checks its
tensors before it looks for one.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from helpers import (
    H100,
    ROOT,
    WITHOUT_HOPPER,
    Prepared,
    bf16,
    built,
    cached_calls_of_an_h100,
    described,
    library_double,
    meta_qkv,
    needs_hopper,
    words,
)

from flashattn3 import (
    UnsupportedError,
    explain_with_kvcache,
    flash_attn_func,
    flash_attn_with_kvcache,
)
from flashattn3 import cached_explanation as explanation
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.kernel_configs import (
    CACHED_CONFIGS,
    DECODE_CONFIGS,
    select_byte_decode_config,
    select_decode_config,
)
from flashattn3.backends.hopper.launch_record import DecodeRecord
from flashattn3.backends.hopper.library import find_library
from flashattn3.backends.reference.backend import BACKEND as REFERENCE
from flashattn3.backends.triton.backend import BACKEND as TRITON
from flashattn3.call.cached import (
    AppendOptions,
    AppendTensors,
    CombineProblem,
    DecodeOptions,
    DecodeTensors,
    describe_append,
    describe_decode,
    new_out,
)
from flashattn3.call.metadata import metadata_of
from flashattn3.call.scheduler_metadata import HEADER, MAGIC, PER_SEQUENCE
from flashattn3.call.tensor_fields import DECODE_TENSORS
from flashattn3.run import cached_plans
from flashattn3.run.planner import choose

LIBRARY = find_library()
HOPPER = HopperBackend(library=library_double)
BACKENDS = (HOPPER, TRITON, REFERENCE)
pytest.importorskip("triton")


def tensors_of(
    batch=4,
    seqlen_q=1,
    heads=(32, 8),
    d=128,
    dv=None,
    page_size=0,
    dtype=torch.bfloat16,
    stored=None,
    **more,
):
    """Tensors without memory. stored: the dtype of the caches, if it is not q's."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens = page_size or 4096
    lead = 99 if page_size else batch, tokens, heads[1]
    caches = [empty(*lead, x, dtype=stored or dtype) for x in (d, dv or d)]
    given = {}
    if page_size:
        given["page_table"] = empty(batch, 16, dtype=torch.int32)
    q = empty(batch, seqlen_q, heads[0], d)
    return DecodeTensors(q, *caches, **given)._replace(**more)


def problem_of(tensors, max_seqlen_q=None, **options):
    found = tuple(x and x._replace(device=torch.device("cuda")) for x in map(metadata_of, tensors))
    return describe_decode(found, DecodeOptions(**options), max_seqlen_q)


def plan_of(options=None, max_seqlen_q=None, hopper=HOPPER, device=H100, **of):
    problem = problem_of(tensors_of(**of), max_seqlen_q, **options or {})
    return choose(problem, device, (hopper, TRITON, REFERENCE))


def test_a_plan_is_for_one_dtype_of_every_tensor():
    """Triton's kernels are compiled for the dtypes of their tensors."""
    sinks = [torch.empty(32, dtype=x, device="meta") for x in (torch.float32, torch.bfloat16)]
    assert len({problem_of(tensors_of(sinks=x)) for x in sinks}) == 2
    problems = set()
    for dtype in (torch.float32, torch.bfloat16):
        found = append_tensors(dtype)
        problems.add(describe_append(tuple(map(metadata_of, found)), AppendOptions()))
    assert len(problems) == 2


def append_tensors(table_dtype):
    k, cache = (torch.empty(4, n, 8, 128, dtype=torch.bfloat16, device="meta") for n in (1, 4096))
    table = torch.empty(4096, 64, dtype=table_dtype, device="meta")
    return AppendTensors(k, k, cache, cache, rotary_cos=table, rotary_sin=table)


def tree_of(batch=4, seqlen_q=1):
    return torch.empty(batch, seqlen_q, -(-seqlen_q // 32), dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("of", "config"),
    [
        ({"seqlen_q": 1}, "decode_bf16_d128_64x2_tree"),
        ({"seqlen_q": 48, "page_size": 16}, "decode_bf16_d128_64x2_tree"),
        ({"seqlen_q": 64, "page_size": 16}, "forward_bf16_d128_cached_192x64x4_q2_tree"),
        ({"seqlen_q": 49, "d": 96, "dv": 64}, "forward_bf16_d128_cached_192x64x4_q2_tree"),
        (
            {"seqlen_q": 64, "d": 40, "dtype": torch.float16},
            "forward_fp16_d64_cached_192x128x4_q2_tree",
        ),
        ({"seqlen_q": 9, "d": 64, "dtype": torch.float16}, "decode_fp16_d64_64x4_tree"),
    ],
    ids=str,
)
def test_trees_run_on_kernels_that_read_their_bits(of, config):
    """Up to 192 packed rows on a decode kernel. A plan is made for each call."""
    plan = plan_of(tree_mask=tree_of(seqlen_q=of["seqlen_q"]), options={"causal": True}, **of)
    assert plan.backend.name == "hopper" and plan.launch.keep is None
    assert plan.launch.describe()["kernel config"] == config
    record = handle_of(plan).record
    assert (record.window_left, record.window_right) == (-1, -1)


TREE = {"tree_mask": tree_of(seqlen_q=9), "seqlen_q": 9}
CAUSAL = {"causal": True}
HEAD_DIMS = "takes head dims that are multiples of 8 up to 256, "
DECLINED = {
    "float32": ({"dtype": torch.float32}, "computes in float16 and bfloat16, not in torch.float32"),
    "head_dim": ({"d": 36}, f"{HEAD_DIMS}head_dim is 36"),
    "head_dim_v": ({"dv": 36}, f"{HEAD_DIMS}head_dim_v is 36"),
    "parts": ({"options": {"num_splits": 3}}, "(num_splits=0) or no sequence (1), num_splits is 3"),
    "scale": (
        {"options": {"softmax_scale": 2.0**101}},
        "softmax_scale must be 0 or between 2**-100 and 2**100",
    ),
    "slopes": (
        {"alibi_slopes": torch.empty(32, device="meta")},
        "has no kernel of cached calls with alibi_slopes",
    ),
    **{
        f"descales-{kind}": (
            {"page_size": 16, "k_descale": torch.empty(99, tokens, 8, device="meta")},
            f"takes a descale for each head of a sequence, k_descale has those of {kind}",
        )
        for kind, tokens in (("pages", 1), ("tokens", 16))
    },
    "tree-spans": (
        TREE | {"options": CAUSAL | {"split_tokens": 128}},
        "has no kernel with spans of keys and a tree_mask",
    ),
    "tree-wide": (TREE | {"dv": 136, "options": CAUSAL}, "takes a tree_mask up to head_dim 128"),
    **{
        f"tree-{dtype}": (
            TREE | {"stored": dtype, "options": CAUSAL},
            "has no kernel for caches of 8 bits with a tree_mask",
        )
        for dtype in (torch.float8_e4m3fn, torch.int8)
    },
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined_by_name(name):
    of, reason = DECLINED[name]
    of = dict(of)
    options = of.pop("options", {})
    assert reason in HOPPER.decline_reason(problem_of(tensors_of(**of), **options), H100)
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        plan_of(options={**options, "backend": "hopper"}, **of)


def test_short_sequences_beside_a_tree_run_on_a_kernel_with_a_tree():
    edges = torch.empty(5, dtype=torch.int32, device="meta")
    tensors = tensors_of()._replace(
        q=torch.empty(99, 32, 128, dtype=torch.bfloat16, device="meta"),
        tree_mask=torch.empty(99, 2, dtype=torch.int32, device="meta"),
        cu_seqlens_q=edges,
    )
    plan = choose(problem_of(tensors, 64, causal=True), H100, BACKENDS)
    record = handle_of(plan).record
    assert record.short_queries == 16
    assert CACHED_CONFIGS[record.short_config].name == "decode_bf16_d128_64x2_tree"


def test_misaligned_caches_are_declined_and_a_misaligned_q_is_copied():
    like = tensors_of()
    wide = torch.empty(4, 4096, 8, 132, dtype=torch.bfloat16, device="meta")[..., :128]
    plan = choose(problem_of(like._replace(k_cache=wide)), H100, BACKENDS)
    assert plan.backend.name == "triton"
    reason = "copies 16 bytes at once: rows of k_cache begin at other addresses"
    assert dict(plan.declined)["hopper"] == reason
    q = torch.empty(4, 1, 32, 132, dtype=torch.bfloat16, device="meta")[..., :128]
    plan = choose(problem_of(like._replace(q=q)), H100, BACKENDS)
    assert plan.backend.name == "hopper" and plan.launch.describe()["copied first"] == "q"
    found = list(map(metadata_of, like))
    found[2] = found[2]._replace(aligned=False)
    problem = describe_decode(tuple(found), DecodeOptions(), None)
    assert problem.misaligned == {"v_cache"}


def test_the_strides_of_an_axis_of_one_do_not_matter():
    like = tensors_of(batch=1)
    q = like.q.as_strided(like.q.shape, (3, 5, 128, 1))
    assert not problem_of(like._replace(q=q)).misaligned


def test_without_the_library_triton_serves_hopper():
    absent = HopperBackend(library=lambda: library_double(error="not built"))
    plan = choose(problem_of(tensors_of()), H100, (absent, TRITON, REFERENCE))
    assert plan.backend.name == "triton" and "not built" in dict(plan.declined)["hopper"]
    few = HopperBackend(library=lambda: library_double(configs=frozenset()))
    reason = few.decline_reason(problem_of(tensors_of()), H100)
    assert reason == "kernel config decode_bf16_d128_64x2 is not in this build (FLASHATTN3_KERNELS)"


def test_combinations_run_on_triton(monkeypatch):
    """Without it a launch appends nothing."""
    of = torch.device("cuda"), 8, 8, None
    wide, narrow = (
        CombineProblem("f", dtype, dtype, *of) for dtype in (torch.float64, torch.float16)
    )
    said = "runs Triton's kernel for this: "
    assert HOPPER.decline_reason(wide, H100).startswith(f"{said}takes torch.float16")
    monkeypatch.setattr(TRITON, "unavailable_reason", lambda device: "Triton is not installed")
    assert HOPPER.decline_reason(narrow, H100) == f"{said}Triton is not installed"
    assert choose(problem_of(tensors_of()), H100, BACKENDS).backend.name == "hopper"


def test_the_layout_of_the_metadata_is_that_of_the_kernel():
    source = ROOT / "csrc" / "decode" / "fill_rows.cuh"
    if not source.is_file():
        pytest.skip("needs a source checkout")
    text = source.read_text()
    assert f"kMetadataMagic = {hex(MAGIC)};" in text
    assert f"kMetadataHeader = {HEADER}, kMetadataPerSequence = {PER_SEQUENCE};" in text


def handle_of(plan) -> Prepared:
    return plan.launch.kernel_launch.handle


def test_what_a_plan_passes_to_the_library():
    handle = handle_of(plan_of(seqlen_q=2, options={"causal": True, "sm_margin": 20}))
    assert DECODE_CONFIGS[handle.config].name == "decode_bf16_d128_64x2"
    record = DecodeRecord(
        32, 8, 128, 128, 0, False, 128**-0.5, 0.0, -1, 0, 0, False, True, 112, -1, 0
    )
    assert handle.record == record
    options = {"num_splits": 1, "softcap": 3.0, "window_left": 2**40, "sm_margin": 10**9}
    record = handle_of(plan_of(page_size=16, options=options)).record
    assert (record.page_size, record.whole_tiles, record.num_sms) == (16, True, 1)
    assert (record.softcap, record.window_left, record.window_right) == (3.0, 2**30, -1)


RECORD = DecodeRecord(32, 8, 128, 128, 0, False, 0.1, 0.0, -1, -1, 0, False, False, 132, -1, 0)


def prepared(config=None, **changes):
    config = built(config or select_decode_config("bf16", 128), LIBRARY)
    return LIBRARY.prepare_decode(CACHED_CONFIGS.index(config), *RECORD._replace(**changes))


def size_of(handle, *sizes, on_warps=False):
    """The grid and the workspace of calls that a warp kernel takes, or does not."""
    num_ctas, workspace_bytes, found = LIBRARY.decode_size(handle, *sizes)
    assert found == on_warps
    return num_ctas, workspace_bytes


def test_the_grid_and_the_workspace_at_any_length():
    """At most two CTAs for each SM; the workspace has a limit, whatever batch and capacity are."""
    handle, threads, _ = prepared()
    assert threads == 256
    size = size_of
    assert size(handle, 20, 1, 64)[0] == 160  # 8 KV heads of 20 sequences
    assert size(handle, 1, 17, 64)[0] == 16  # 4 heads of 17 tokens are two tiles
    full = size(handle, 10**6, 1, 64)
    # Of each CTA two parts of so many rows: columns and twice (max, sum), the groups' among them.
    row_bytes = 2 * (128 + 4) * 4
    assert full == (264, 264 * 4 * row_bytes)
    # One sequence: two groups of 16 shares of each KV head, not 33. More than 32 rows: one CTA for
    # each SM, of which 128 have equal shares of 8 KV heads.
    sizes = (1, 4, 256), (2, 8, 256), (8, 32, 256), (16, 64, 128), (64, 64, 128)
    for queries, rows, num_ctas in sizes:
        found = size(handle, 1, queries, 2**20)
        assert found == (num_ctas, num_ctas * rows * row_bytes) and found[1] <= 9e6
    assert size(handle, 0, 5, 0) == (8, 8 * 20 * row_bytes)
    whole = prepared(whole_tiles=True)[0]
    assert size(whole, 1, 1, 2**20) == (8, 0)
    assert size(whole, 64, 1, 64) == (256, 0)  # two of 64 work tiles of a head for each CTA
    assert size(whole, 63, 1, 64) == (256, 0) and size(whole, 50, 1, 64) == (264, 0)
    assert size(prepared(num_sms=5)[0], 64, 1, 64)[0] == 10
    assert size(prepared(num_sms=5, leaves_sms=True)[0], 64, 1, 64)[0] == 5
    # A share for each KV block up to 16, then at least two: fewer parts to combine. (5 queries: 20
    # packed rows.)
    for keys, shares in ((16 * 64, 16), (17 * 64, 16), (36 * 64, 18), (64 * 64, 32)):
        assert size(handle, 1, 5, keys)[0] == 8 * shares
    # One KV head of a long sequence would have 264 parts to combine: groups of 16 on half SMs.
    assert size(prepared(num_heads_kv=1, num_heads_q=8)[0], 1, 1, 2**20)[0] == 128


def test_few_rows_of_few_sequences_run_on_a_warp_kernel():
    """One CTA for each SM; each has its part of a work tile in the workspace, 40 bytes for eight
    columns of a row, and four words."""
    size = partial(size_of, on_warps=True)
    handle = prepared()[0]

    def with_parts(ctas, rows):
        return 8 * ctas, 2 * 144 * 4 + 8 * ctas * rows * 16 * 40

    # Four warps of a CTA have 16 keys each, at least.
    for keys, ctas in ((65, 2), (1024, 16), (1025, 16), (2**15, 16)):
        assert size(handle, 1, 1, keys) == with_parts(ctas, rows=4)
    assert size(handle, 1, 4, 2**15) == with_parts(16, rows=16)
    assert size(handle, 8, 1, 4096) == with_parts(16, rows=4)
    for sizes in ((1, 1, 1), (1, 1, 64), (8, 1, 64)):  # a CTA for each work tile
        assert size(handle, *sizes) == (8 * sizes[0], 0)
    assert size(prepared(num_heads_kv=1, num_heads_q=8)[0], 1, 1, 2**15)[0] == 132
    assert size(prepared(num_heads_kv=1, num_heads_q=8)[0], 32, 1, 8192)[0] == 132
    assert size(prepared(window_left=100)[0], 1, 1, 2**15)[0] == 8 * 2
    assert size(prepared(num_sms=40, leaves_sms=True)[0], 1, 1, 2**15)[0] == 40
    # Rows, sequences, work tiles and bytes up to which they do. Whole tiles and batches of pages
    # never do.
    on_warps = [
        LIBRARY.decode_size(prepared(**changes)[0], *sizes)[2]
        for changes, sizes in (
            ({}, (1, 4, 2**15)),
            ({"whole_tiles": True}, (1, 4, 2**15)),
            ({}, (1, 5, 2**15)),
            ({}, (9, 1, 1024)),
            ({}, (1, 1, 2**16)),
            ({}, (1, 1, 2**16 + 1)),
            ({"page_size": 16}, (1, 1, 1024)),
            ({"page_size": 16}, (2, 1, 1024)),
            ({"num_sms": 7, "leaves_sms": True}, (1, 1, 1024)),
        )
    ]
    assert on_warps == [True, False, False, False, True, False, True, False, False]


def test_few_rows_of_many_sequences_with_bytes_run_on_warps_in_equal_shares():
    bytes_of = partial(prepared, select_byte_decode_config("bf16", 128), byte_cache=True)
    handle = bytes_of()[0]
    assert size_of(handle, 1, 2, 4096, on_warps=True)[0] == 8 * 16
    # A part of at most 16 rows, two of each CTA, one for each SM: columns and twice (max, sum).
    of_row = 2 * (128 + 4) * 4
    for queries in (1, 2, 3, 4):
        wanted = 128, 128 * 4 * queries * of_row
        assert size_of(handle, 32, queries, 4096, on_warps=True) == wanted
    assert size_of(bytes_of(page_size=16)[0], 2, 1, 4096, on_warps=True)[0] == 128
    assert size_of(handle, 32, 5, 4096)[0] == 256  # 20 rows: two CTAs for each SM widen tiles
    wide = prepared(select_byte_decode_config("bf16", 256), byte_cache=True, head_dim=256)[0]
    size_of(wide, 32, 2, 4096, on_warps=True)
    size_of(wide, 32, 3, 4096)  # 12 rows
    size_of(bytes_of(whole_tiles=True)[0], 32, 1, 4096)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 136}, "launch: head_dim must be a multiple of 8, at most 128 for decode_bf"),
        ({"head_dim_v": 100}, "launch: head_dim_v must be a multiple of 8, at most 128 for decode"),
        ({"num_heads_q": 9}, "prepare_decode: num_heads_q must be a multiple of num_heads_kv, got"),
        ({"num_heads_kv": 0}, "prepare_decode: num_heads_kv must be at least 1, got 0"),
        ({"page_size": -1}, "prepare_decode: page_size must be at least 0, got -1"),
        ({"num_sms": 0}, "prepare_decode: num_sms must be at least 1, got 0"),
        ({"window_left": 2**31}, "prepare_decode: window_left must be a number of 32 bits, got"),
    ],
    ids=str,
)
def test_what_a_kernel_does_not_take_is_refused_once(changes, said):
    with pytest.raises(RuntimeError, match=re.escape(said)):
        prepared(**changes)


def test_sizes_beyond_32_bits_are_refused():
    handle = prepared()[0]
    with pytest.raises(RuntimeError, match="decode: the batch must be between 0 and 2\\^30"):
        LIBRARY.decode_size(handle, 2**31, 1, 1)
    said = re.escape("launch: the number of units of work must be below 2^31 - 1, got")
    with pytest.raises(RuntimeError, match=said):
        LIBRARY.decode_size(handle, 2**20, 1, 2**20)


B, SQ, CAP, PAGE = 2, 3, 128, 16


def call_of(**changes):
    """The operator's arguments of a call on a CPU, which the checks refuse at last."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype)

    given = {
        "lse": empty(B, 32, SQ, dtype=torch.float32),
        "q": empty(B, SQ, 32, 128),
        "k_cache": empty(B, CAP, 8, 128),
        "v_cache": empty(B, CAP, 8, 128),
        **changes,
    }
    numbers = [-1, 0, -1, 0]
    return [given["lse"], *numbers, *(given.get(field.name) for field in DECODE_TENSORS)]


WIDE = bf16(B, CAP, 8, 132)[..., :128]
OFF = bf16(B * SQ * 32 * 128 + 1)[1:].view(B, SQ, 32, 128)
TABLE = words(B, 7)
PAGES = {"k_cache": bf16(9, PAGE, 8, 128), "v_cache": bf16(9, PAGE, 8, 128), "page_table": TABLE}
RAGGED = {"q": bf16(5, 32, 128), "lse": torch.zeros(32, 5), "cu_seqlens_q": words(B + 1)}
ON_A_CPU = "q.device must be a GPU, got another device"  # the last check
CALLS = [
    ({}, ON_A_CPU),
    ({"q": bf16(B, SQ, 32, 64)}, "q.shape must be (2, 3, 32, 128), got (2, 3, 3"),
    ({"q": bf16(B, 32, 128)}, "the number of axes of q must be 4, got 3"),
    ({"q": bf16(B, SQ, 32, 128).half()}, "q.dtype must be bf16, got another dtype"),
    ({"q": OFF}, "q must be of rows at multiples of 16 bytes, got another layout"),
    ({"lse": torch.zeros(B, SQ, 32)}, "lse.shape must be (2, 32, 3), got (2, 3, 32)"),
    ({"lse": torch.zeros(B, 32, SQ).half()}, "lse.dtype must be float32"),
    ({"k_cache": WIDE}, "k_cache must be of rows at multiples of 16 bytes"),
    ({"v_cache": WIDE[:, 1:]}, "v_cache.shape must be (2, 128, 8, 128), got (2, 127, 8, 128)"),
    ({"page_table": words(B, 1)}, "page_table must be None of a dense launch, got a tensor"),
    ({"cache_seqlens": words(1)}, "cache_seqlens.shape must be (2,), got (1,)"),
    ({"cache_seqlens": words(B).long()}, "cache_seqlens must be int32, got another dtype"),
    ({"cache_leftpad": words(B, 2)[:, 0]}, "cache_leftpad must be contiguous"),
    ({"sinks": bf16(32)}, "sinks must be float32, got another dtype"),
    ({"k_descale": torch.ones(1, 8)}, "k_descale.shape must be (2, 8), got (1, 8)"),
    ({"q_descale": torch.ones(B, 8).half()}, "q_descale.dtype must be float32"),
    ({"tree_mask": words(B, SQ, 2)}, "tree_mask.shape must be (2, 3, 1), got"),
    ({"tree_mask": torch.zeros(B, SQ, 1)}, "tree_mask.dtype must be int32, got another dtype"),
    ({"scheduler_metadata": words(B)}, "scheduler_metadata.shape must be (10,), got (2,)"),
    (
        {"k_cache": bf16(5, CAP, 8, 128), "v_cache": bf16(5, CAP, 8, 128)},
        "the number of caches must be 2, got 5",
    ),
    ({"out": OFF}, "out must be of rows at multiples of 16 bytes"),
    ({"out": OFF[:, :2]}, "out.shape must be (2, 3, 32, 128), got (2, 2, 32, 128)"),
    ({"out": OFF.half()}, "out.dtype must be bf16, got another dtype"),
    ({"out": bf16(B, SQ, 32, 128)}, ON_A_CPU),
    (PAGES, ON_A_CPU),
    (PAGES | {"page_table": None}, "page_table must be a tensor of a paged launch, got None"),
    (PAGES | {"page_table": TABLE.long()}, "page_table.dtype must be int32"),
    (PAGES | {"page_table": TABLE.mT.contiguous().mT}, "page_table.stride(-1) must be 1, got 2"),
    (PAGES | {"page_table": TABLE[0]}, "the number of axes of page_table must be 2, got 1"),
    (PAGES | {"page_table": TABLE[:1]}, "the number of caches must be 2, got 1"),
    (
        PAGES | {name: PAGES[name][:, :8] for name in ("k_cache", "v_cache")},
        "k_cache.shape[1] must be 16, got 8",
    ),
    (RAGGED, ON_A_CPU),
    (RAGGED | {"lse": torch.zeros(B, 32, SQ)}, "lse.shape must be (32, 5), got (2, 32, 3)"),
    (RAGGED | {"cu_seqlens_q": words(B)}, "the number of caches must be 1, got 2"),
    (RAGGED | {"q": bf16(B, SQ, 32, 128)}, "the number of axes of q must be 3, got 4"),
]


@pytest.mark.parametrize(("changes", "said"), CALLS, ids=[said for _, said in CALLS])
def test_tensors_of_another_call_are_named(changes, said):
    """A paged launch takes pages of its size alone."""
    handle = prepared(page_size=PAGE if changes.keys() >= PAGES.keys() else 0)[0]
    given = dict(changes)
    out = given.pop("out", None)
    with pytest.raises(RuntimeError, match=re.escape(f"decode: {said}")):
        if out is None:
            LIBRARY.decode(handle, *call_of(**given))
        else:
            LIBRARY.decode_into(out, handle, *call_of())


@pytest.mark.parametrize(
    ("pages", "seqlen", "said"),
    [
        (words(1, 3), None, ON_A_CPU),
        (words(1, 3), words(1), ON_A_CPU),
        (words(2, 3), None, "prefix_page_table.shape[0] must be 1, got 2"),
        (words(3), None, "the number of axes of page_table must be 2, got 1"),
        (words(1, 3).long(), None, "page_table.dtype must be int32"),
        (words(1, 3), words(2), "prefix_seqlen.shape must be (1,), got (2,)"),
    ],
)
def test_a_prefix_of_another_shape_is_named(pages, seqlen, said):
    handle = prepared(select_decode_config("bf16", 128, prefix=True), page_size=PAGE)[0]
    out = bf16(B, SQ, 32, 128)
    with pytest.raises(RuntimeError, match=re.escape(f"decode: {said}")):
        LIBRARY.decode_after_prefix(out, pages, seqlen, 5, handle, *call_of(**PAGES))


def test_the_workspace_of_a_prefix_has_two_results_of_each_row():
    """And two parts of 64 rows of each CTA: those of all sequences are rows of the prefix."""
    config = select_decode_config("bf16", 128, prefix=True)
    handle = prepared(config, page_size=16)[0]
    results, parts = 2 * 64 * 32 * (128 + 2) * 4, 2 * 64 * (128 + 4) * 4
    for pages, num_ctas in ((512, 264), (0, 264)):
        found = LIBRARY.decode_size(handle, 64, 1, 512, -1, pages)
        assert found == (num_ctas, results + num_ctas * parts, False)
    whole = prepared(config, page_size=16, whole_tiles=True)[0]
    assert LIBRARY.decode_size(whole, 64, 1, 512, -1, 512) == (264, results, False)


def test_only_a_prepared_decode_launch_is_taken():
    handle = prepared()[0]
    for other in (torch.zeros_like(handle), handle.int(), handle[:3], torch.zeros(3)):
        said = "decode: launch must be a result of prepare_decode, got another tensor"
        with pytest.raises(RuntimeError, match=said):
            LIBRARY.decode(other, *call_of())


@pytest.fixture
def on_hopper(monkeypatch):
    """Plan cached calls on CPU tensors for an H100; keeps what the operator receives."""
    received = []

    def decode_into(out, handle, lse, *arguments):
        received.append((out, lse, *arguments))
        out.fill_(1.0)

    def decode(handle, lse, *arguments):
        out = new_out(DecodeTensors(*arguments[4:]))
        decode_into(out, handle, lse, *arguments)
        return out

    operators = {"decode": decode, "decode_into": decode_into}
    hopper = HopperBackend(library=lambda: library_double(**operators))
    backends, modules = (hopper, TRITON, REFERENCE), (cached_plans, explanation)
    with cached_calls_of_an_h100(monkeypatch, *backends, modules=modules):
        yield received


def test_what_a_call_passes_to_the_operator(on_hopper):
    q, k, v = (torch.randn(2, n, h, 64).half() for n, h in ((1, 4), (32, 2), (32, 2)))
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    (given,) = on_hopper
    assert given[0] is out and given[1] is None
    numbers, tensors = slice(2, 6), slice(6, None)
    # Up to the last one that the call has.
    assert [id(x) for x in given[tensors]] == [id(x) for x in (q, k, v, lengths)]
    assert given[numbers] == (-1, 0, -1, 0)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    assert len(on_hopper[-1][tensors]) == 3 and on_hopper[-1][numbers] == (7, 0, -1, 0)
    edges = torch.tensor([0, 1, 2], dtype=torch.int32)
    flash_attn_with_kvcache(q[:, 0], k, v, cu_seqlens_q=edges, max_seqlen_q=1)
    assert on_hopper[-1][numbers] == (-1, 0, 1, 0)
    assert on_hopper[-1][tensors][-1] is edges and len(on_hopper[-1][tensors]) == 8


def test_what_is_converted_first(on_hopper):
    """q and out to aligned rows, sinks to float32; descales are read where they lie."""
    q, k, v = (torch.randn(2, n, h, 64).half() for n, h in ((1, 4), (32, 2), (32, 2)))
    sinks, scale = torch.randn(4).half(), torch.ones(1).expand(2, 2)
    skewed = torch.zeros(2, 1, 4, 68).half()[..., :64].copy_(q)
    out = torch.zeros(2, 1, 4, 68).half()[..., :64]
    named = {"sinks": sinks, "k_descale": scale, "v_descale": scale}
    found = flash_attn_with_kvcache(skewed, k, v, out=out, **named)
    (given,) = on_hopper
    tensors = DecodeTensors(*given[6:])
    assert found is out and given[0] is not out and torch.equal(out, torch.ones_like(out))
    assert torch.equal(tensors.q, q) and tensors.q.is_contiguous()
    assert tensors.sinks.dtype == torch.float32
    assert all(x.data_ptr() == scale.data_ptr() for x in (tensors.k_descale, tensors.v_descale))
    assert tensors.q_descale is None


def test_explain_shows_the_launch(on_hopper):
    q, k, v = (
        torch.empty(2, n, h, 64, device="meta").half() for n, h in ((1, 4), (32, 2), (32, 2))
    )
    shown = explain_with_kvcache(q, k, v, device="cpu", sm_margin=8)
    assert shown.backend == "hopper" and not shown.unused_hints
    assert shown.config["parts"] == "equal shares on 124 SMs"
    assert (shown.grid, shown.config["workspace_bytes"]) == ((11, 1, 1), 16)
    assert "append" not in shown.config
    new = explain_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=3, device="cpu")
    assert new.config["append"] == "hopper: append kernel"
    whole = explain_with_kvcache(q, k, v, device="cpu", num_splits=1)
    assert whole.config["parts"] == "none: whole tiles"
    skewed = torch.zeros(2, 32, 2, 68).half()[..., :64]
    q = torch.zeros(2, 1, 4, 64).half()
    shown = explain_with_kvcache(q, skewed, skewed)
    assert shown.backend == "triton" and "k_cache" in shown.declined["hopper"]


FORWARD = HopperBackend(library=library_double)


def forward_plan(batch, seqlen_q, seqlen_k, heads=32, heads_kv=8, d=128, **options):
    tensors = meta_qkv(batch, seqlen_q, seqlen_k, (heads, heads_kv), d)
    return choose(described(tensors, **options), H100, (FORWARD, *WITHOUT_HOPPER))


def test_forwards_of_few_query_rows_run_on_a_decode_kernel():
    for shape in ((16, 1, 8192), (64, 1, 2048), (1, 1, 65536)):
        for num_splits in (0, 1, 3):
            plan = forward_plan(*shape, num_splits=num_splits)
            packed = plan.launch.config.packed
            assert packed.kernel_config.name == "decode_bf16_d128_64x2"
            assert packed.kernel_launch.handle.record.whole_tiles == (num_splits == 1)
            assert set(plan.unused_hints) == ({"num_splits"} if num_splits > 1 else set())
    chunk = 1, 64, 16384
    assert forward_plan(*chunk).launch.config.packed is not None
    assert forward_plan(*chunk, num_splits=1).launch.config.packed is None
    for others in (
        {"seqlen_q": 8, "seqlen_k": 512},
        {"seqlen_q": 129},
        {"pack_gqa": False},
        {"d": 132},
    ):
        of = {"batch": 1, "seqlen_q": 1, "seqlen_k": 8192, **others}
        assert forward_plan(**of).launch.config.packed is None, others
    described = forward_plan(*chunk, num_splits=0, causal=True).launch.describe()
    assert described["grid"] == (11, 1, 1) and described["workspace_bytes"] == 16
    assert described["gradient"].startswith("backward_bf16_d128")


@needs_hopper
@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 1, 5000), {}),
        ((1, 16, 3000), {"causal": True}),
        ((2, 7, 2000), {"window_size": (300, 0), "softcap": 5.0}),
    ],
    ids=str,
)
def test_a_packed_forward_equals_the_cached_call(shape, options, num_splits, poisoned_memory):
    """Bit for bit, and its gradient is that of the forward kernel's result."""
    batch, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, seqlen_q, 32, 128, device="cuda").bfloat16()
    k, v = (torch.randn(batch, seqlen_k, 8, 128, device="cuda").bfloat16() for _ in range(2))
    options = {**options, "num_splits": num_splits, "backend": "hopper", "return_lse": True}
    found = flash_attn_func(q, k, v, **options, pack_gqa=True)
    wanted = flash_attn_with_kvcache(q, k, v, **options)
    assert all(map(torch.equal, found, wanted))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    gradients = []
    for pack_gqa in (True, False):
        out, _ = flash_attn_func(*leaves, **options, pack_gqa=pack_gqa)
        gradients.append(torch.autograd.grad(out, leaves, dout))
    for got, right in zip(*gradients, strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)
