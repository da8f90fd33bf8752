"""What a cached call refuses, from metadata alone, and what it checks of values."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import A100, CPU, H100, SIXTEEN_BIT, ints, words
from torch.utils.flop_counter import FlopCounterMode

from flashattn3 import (
    UnsupportedError,
    append_kvcache,
    explain_with_kvcache,
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from flashattn3.backends.registry import BACKENDS
from flashattn3.call.cached import DecodeOptions, DecodeTensors, Lengths, describe_decode
from flashattn3.call.cached_checks import check_decode
from flashattn3.call.metadata import metadata_of
from flashattn3.run import cached_plans
from flashattn3.run.planner import choose

B, SQ, H, HK, D, CAP, PAGE = 2, 3, 4, 2, 16, 32, 8


def legal(of=torch.float32):
    return {"q": torch.randn(B, SQ, H, D, dtype=of), **caches(of), "cache_seqlens": ints(5, 7)}


def call(function=flash_attn_with_kvcache, **changes):
    """A legal call with changes; None leaves an argument out."""
    arguments = {**legal(changes.pop("dtype", torch.float32)), **changes}
    return function(**{name: x for name, x in arguments.items() if x is not None})


def caches(dtype=torch.float32, lead=(B, CAP)):
    return {f"{x}_cache": torch.randn(*lead, HK, D).to(dtype) for x in "kv"}


def new(tokens=1, dtype=torch.float32):
    return {name: torch.randn(B, tokens, HK, D).to(dtype) for name in "kv"}


def paged(**changes):
    table = {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4)}
    return caches(lead=(9, PAGE)) | table | changes


def prefix(**changes):
    pages = {"prefix_page_table": ints(6, 7, 8)[None], "prefix_len": 20}
    return paged(**pages) | changes


def tree(tree_mask, **changes):
    return {"tree_mask": tree_mask, "causal": True, **changes}


def tables(columns=D // 2, **changes):
    return {f"rotary_{x}": torch.randn(64, columns) for x in ("cos", "sin")} | changes


RAGGED_Q = {"q": torch.randn(6, H, D), "cu_seqlens_q": ints(0, 2, 6)}
HALF_Q = {"q": torch.randn(B, SQ, H, D).half()}
FP8 = torch.float8_e4m3fn


def text_of(value):
    return value if isinstance(value, str) else ""


# Each: changes to a legal call, and what the message of its error must hold.
VALUE_ERRORS = [
    ({"k": new()["k"]}, "v must be a tensor"),
    ({"v": new()["v"]}, "k must be a tensor"),
    (tables(), "rotary_cos must be None without k and v"),
    (new() | {"rotary_cos": torch.randn(64, 8)}, "rotary_sin must be a tensor"),
    (new() | tables(rotary_sin=torch.randn(64, 7)), "rotary_sin.shape must be"),
    (new() | tables(9), "rotary_cos.shape[1] must be between 1 and 8"),
    (new() | {"cache_seqlens": None}, "cache_seqlens must be an int or an int32 tensor"),
    ({"k": torch.randn(B, 1, 3, D), "v": torch.randn(B, 1, 3, D)}, "k.shape[-2:] must be"),
    ({name: torch.randn(3, 1, HK, D) for name in "kv"}, "k.shape[0] must be 2 (q's batch), got 3"),
    ({"out": torch.empty(1, SQ, H, D).expand(B, -1, -1, -1)}, "out.stride must be without a strid"),
    (
        new() | {"k_cache": torch.zeros(1, CAP, HK, D).expand(B, -1, -1, -1)},
        "k_cache.stride must be without a stride of 0: new tokens are written to it",
    ),
    ({"q": torch.ones(B, SQ, H, D).int()}, "q.dtype must be one of"),
    ({"q": torch.randn(B, H, D)}, "q.shape must be (batch, seqlen_q"),
    ({"q": torch.randn(B, SQ, 3, D)}, "q.shape[-2] must be a multiple of"),
    ({"q": torch.randn(B, SQ, H, 8)}, "k_cache.shape[-1] must be 8"),
    ({"v_cache": torch.randn(B, 9, HK, D)}, "v_cache.shape[:3] must be (2, 32, 2)"),
    (caches(lead=(3, CAP)), "k_cache.shape[0] must be 2 (batch) without cache_batch_idx"),
    (paged(page_table=ints(0, 1)), "page_table.shape must be two-"),
    (paged(page_table=words(3, 4)), "page_table.shape[0] must be 2"),
    ({"cache_seqlens": ints(5)}, "cache_seqlens.shape[0] must be 2"),
    ({"cache_seqlens": ints(5)[0]}, "cache_seqlens.shape must be one-dimensional"),
    ({"cache_seqlens": -1}, "cache_seqlens must be >= 0"),
    ({"cache_leftpad": ints(1)}, "cache_leftpad.shape[0] must be 2"),
    ({"k_descale": torch.ones(B)}, "k_descale.shape must be (2, 2)"),
    (new(dtype=FP8), f"k.dtype must be torch.float32 as k_cache's, got {FP8}"),
    (
        HALF_Q | caches(FP8) | new(),
        f"k.dtype must be one of {SIXTEEN_BIT} for a cache of {FP8}, got torch.float32",
    ),
    (caches(FP8), f"k_cache.dtype must be torch.float32 as q's, got {FP8}"),
    (
        HALF_Q | caches(torch.uint8),
        f"k_cache.dtype must be torch.float16 as q's, or one of {(FP8, torch.int8)}, got torch.uin",
    ),
    (
        {"q": torch.ones(B, SQ, H, D).to(FP8), **caches(torch.int8)},
        f"k_cache.dtype must be {FP8} as q's, got torch.int8",
    ),
    (
        HALF_Q | caches(FP8) | {"v_cache": caches(torch.int8)["v_cache"]},
        f"v_cache.dtype must be {FP8} as k_cache's, got torch.int8",
    ),
    (
        HALF_Q | caches(torch.int8) | {"k_descale": torch.ones(1)},
        "v_descale must be a float32 tensor where v_cache is torch.int8, got None",
    ),
    (
        {"k_descale": torch.ones(B, CAP - 1, HK)},
        "k_descale.shape must be (2, 2) (batch, num_heads_kv), or (2, 32, 2) or (2, 1, 2) "
        "(num_caches, tokens or 1, num_heads_kv), got (2, 31, 2)",
    ),
    (
        paged(v_descale=torch.ones(B, PAGE, HK)),
        "v_descale.shape must be (2, 2) (batch, num_heads_kv), or (9, 8, 2) or (9, 1, 2) "
        "(num_pages, ",
    ),
    (
        HALF_Q
        | caches(FP8)
        | new(dtype=torch.float16)
        | {"k_descale": torch.ones(B, CAP, 1).expand(B, CAP, HK)},
        "k_descale.stride must be without a stride of 0",
    ),
    ({"sinks": torch.ones(3)}, "sinks.shape must be (4,)"),
    ({"out": torch.empty(B, SQ, H, 8)}, "out.shape must be (2, 3, 4, 16)"),
    ({"out_dtype": torch.float16}, "out_dtype must be None or"),
    (RAGGED_Q, "max_seqlen_q must be an int"),
    ({"max_seqlen_q": 3}, "max_seqlen_q must be None without cu_seqlens_q"),
    (
        {"scheduler_metadata": words(14)},
        "scheduler_metadata.shape[0] must be 10, from get_scheduler_metadata with batch_size=2, "
        "got 14",
    ),
    (
        {**{name: torch.randn(3, HK, D) for name in ("k", "v")}, "cu_seqlens_k_new": ints(0, 3)},
        "cu_seqlens_k_new.shape[0] must be 3",
    ),
    ({"num_splits": 257}, "num_splits must be at most 256"),
    ({"sm_margin": -1}, "sm_margin must be >= 0"),
    ({"softcap": -1.0}, "softcap must be finite and >= 0"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
    ({"backend": "nobody"}, "backend must be one of"),
    ({"tree_mask": words(B, SQ, 1)}, "causal must be True with tree_mask"),
    (tree(words(B, SQ, 2)), "tree_mask.shape must be (2, 3, 1), a bit for each new token"),
    (tree(words(B, 2, 1)), "tree_mask.shape must be (2, 3, 1)"),
    (tree(words(B, SQ)), "tree_mask.shape must be (2, 3, 1)"),
    ({"alibi_slopes": torch.ones(3)}, "alibi_slopes.shape must be (4,) (num_heads_q,) or (2, 4)"),
    (
        tree(words(B, SQ, 1), alibi_slopes=torch.ones(H)),
        "alibi_slopes must be None beside tree_mask",
    ),
    (prefix(prefix_page_table=None), "prefix_page_table must be given with prefix_len, got None"),
    (prefix(prefix_len=None), "prefix_len must be given with prefix_page_table, got None"),
    (prefix(prefix_page_table=words(2, 3)), "prefix_page_table.shape must be (1, pages), got (2"),
    (prefix(prefix_page_table=words(1, 6)[:, ::2]), "prefix_page_table.stride(-1) must be 1"),
    (prefix(prefix_len=ints(20).to("meta")), "prefix_len.device must be cpu as q's"),
    (prefix(prefix_len=25), "prefix_len must be at most 24, the tokens of its pages, got 25"),
    (prefix(prefix_len=-1), "prefix_len must be >= 0, got -1"),
    (prefix(prefix_len=words(3)), "prefix_len must be an int or int32 of shape (1,)"),
    (
        prefix(page_table=None, cache_batch_idx=ints(0, 1), cache_seqlens=3),
        "page_table must be a tensor with prefix_page_table",
    ),
    (prefix(split_tokens=128), "split_tokens must be None with prefix_page_table"),
]
# Values, which are checked on a CPU.
VALUE_ERRORS += [
    ({"cache_seqlens": ints(5, 33)}, "cache_seqlens[1] must be"),
    ({"cache_seqlens": ints(-1, 3)}, "cache_seqlens[0] must be"),
    (new(3) | {"cache_seqlens": ints(5, 30)}, "cache_seqlens[1] must be at most"),
    (
        paged(page_table=ints(0, 9, 1, 1, 1, 1, 1, 1).view(2, 4), cache_seqlens=ints(9, 1)),
        "page_table must be between 0 and 8",
    ),
    ({"cache_leftpad": ints(0, 8)}, "cache_leftpad[1] must be 0 to 7"),
    ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx[1] must be 0 to 1"),
    (new() | {"cache_batch_idx": ints(1, 1)}, "cache_batch_idx must be without duplicates"),
    (
        RAGGED_Q | {"cu_seqlens_q": ints(0, 4, 3), "max_seqlen_q": 6},
        "cu_seqlens_q must be non-decreasing",
    ),
    (RAGGED_Q | {"max_seqlen_q": 3}, "max_seqlen_q must be >= 4"),
    (prefix(prefix_len=ints(25)), "prefix_len must be between 0 and 24, the tokens of its pages"),
    (
        prefix(prefix_page_table=ints(6, 9, -1)[None], prefix_len=10),
        "prefix_page_table must be between 0 and 8 up to each sequence's length, got [9]",
    ),
]
UNSUPPORTED = [
    (
        {
            "q": torch.randn(1, 1, 4, 576),
            "k_cache": torch.randn(1, 8, 1, 576),
            "v_cache": torch.randn(1, 8, 1, 512),
            "cache_seqlens": 3,
        },
        "k_cache.shape[-1] must be at most 256, got 576",
    ),
    (
        {**new(), "v_descale": torch.ones(B, CAP, HK)},
        "v_descale.shape must be (batch, num_heads_kv) where new tokens are written to torch.float",
    ),
    ({"qv": torch.ones(1)}, "qv must be None"),
    ({"attention_chunk": 8}, "attention_chunk must be 0"),
    ({"pack_gqa": False}, "pack_gqa must be None or True"),
    (
        {"q": torch.randn(B, SQ, H, D, requires_grad=True)},
        "q.requires_grad must be False, got True: flash_attn_with_kvcache has no gradient",
    ),
    (
        {**new(), "v": torch.randn(B, 1, HK, D, requires_grad=True)},
        "v.requires_grad must be False, got True",
    ),
    (
        tree(words(B, 65, 3), q=torch.zeros(B, 65, H, D), **caches(lead=(B, 80))),
        "q.shape[1] must be at most 64 with tree_mask, got 65",
    ),
    (prefix(alibi_slopes=torch.ones(H)), "alibi_slopes must be None with prefix_page_table"),
    (prefix(window_size=(9, 0)), "window_size must be open to the left with prefix_page_table"),
    (prefix(**new(), **tables()), "rotary_cos must be None"),
    (prefix(q_descale=torch.ones(B, HK)), "q_descale must be None or one number with prefix_page"),
    *(
        (
            prefix(**{name: torch.ones(B, HK)}),
            f"{name} must be None, one number or one for each page or token with prefix_page_table",
        )
        for name in ("k_descale", "v_descale")
    ),
]


class Distributed(torch.Tensor):
    """Stands for a DTensor."""

    device_mesh = None


TYPE_ERRORS = [
    ({"cache_seqlens": [5, 7]}, "cache_seqlens must be an int"),
    ({"rotary_interleaved": "y"}, "rotary_interleaved must be a bool, got 'y' (str)"),
    ({"k_cache": [1.0]}, "k_cache must be a torch.Tensor"),
    ({"sinks": torch.Tensor}, "sinks must be a torch.Tensor, got <class 'torch.Tensor'>"),
    (prefix(prefix_page_table=3), "prefix_page_table must be a torch.Tensor, got 3"),
    *(
        (given | {name: given[name].as_subclass(Distributed)}, f"{name} must be a local tensor")
        for name, given in (
            ("q", legal()),
            ("v_cache", legal()),
            ("cache_seqlens", legal()),
            ("k", new()),
            ("rotary_cos", new() | tables()),
            ("sinks", {"sinks": torch.ones(H)}),
            ("prefix_page_table", prefix()),
            ("out", {"out": torch.empty(B, SQ, H, D)}),
        )
    ),
]
REFUSED = [
    (kind, *row)
    for kind, rows in (
        (ValueError, VALUE_ERRORS),
        (UnsupportedError, UNSUPPORTED),
        (TypeError, TYPE_ERRORS),
    )
    for row in rows
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED, ids=text_of)
def test_refused_by_name(kind, changes, message):
    with pytest.raises(kind, match=re.escape(f"flash_attn_with_kvcache: {message}")) as caught:
        call(**changes)
    assert type(caught.value) is kind


# Each tensor of a call: the call with it, and which dtype its error asks for.
OF_INT32 = {
    "cache_seqlens": legal(),
    "page_table": paged(),
    "prefix_page_table": prefix(),
    "cache_batch_idx": {"cache_batch_idx": ints(1, 0)},
    "cache_leftpad": {"cache_leftpad": ints(1, 0)},
    "cu_seqlens_q": RAGGED_Q | {"max_seqlen_q": 4},
    "scheduler_metadata": {"scheduler_metadata": words(10)},
    "tree_mask": tree(words(B, 40, 2), q=torch.zeros(B, 40, H, D), **caches(lead=(B, 80))),
}
OF_FLOATS = {
    "k_cache": ("torch.float32 as q's", legal()),
    "v_cache": ("torch.float32 as k_cache's", legal()),
    "out": ("torch.float32", {"out": torch.empty(B, SQ, H, D)}),
    "k": ("torch.float32 as k_cache's", new()),
    "v": ("torch.float32 as k_cache's", new()),
    "rotary_cos": ("one of", new() | tables()),
    "sinks": ("torch.float32", {"sinks": torch.ones(H)}),
    "alibi_slopes": ("torch.float32", {"alibi_slopes": torch.ones(H)}),
    "q_descale": ("torch.float32", {"q_descale": torch.ones(B, HK)}),
    "k_descale": ("torch.float32", {"k_descale": torch.ones(B, HK)}),
}
ANY_STRIDES = "k", "v", "rotary_cos", "sinks", "alibi_slopes", "q_descale", "k_descale"
ANY_STRIDES += ("prefix_page_table",)
TENSORS = {name: ("torch.int32", given) for name, given in OF_INT32.items()} | OF_FLOATS


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_another_device_dtype_or_stride_is_refused_by_name(name):
    dtype, given = TENSORS[name]
    x = given[name]
    wrong = [
        (x.to("meta"), "device must be cpu"),
        (x.long() if name in OF_INT32 else x.half(), f"dtype must be {dtype}"),
    ]
    if name not in ANY_STRIDES:
        wrong.append((torch.stack((x, x), -1)[..., 0], "stride(-1) must be 1"))
    for other, said in wrong:
        with pytest.raises(ValueError, match=re.escape(f"flash_attn_with_kvcache: {name}.{said}")):
            call(**{**given, name: other})


def test_a_legal_call_of_each_form():
    call()
    call(**paged())
    call(**RAGGED_Q, max_seqlen_q=4)
    call(**new(2), **tables(), cache_seqlens=3)
    call(pack_gqa=True, num_splits=-1, sm_margin=4, causal=1)
    with torch.no_grad():
        call(q=torch.randn(B, SQ, H, D, requires_grad=True))


@pytest.mark.parametrize(
    ("mode", "of_cache"),
    [
        (nullcontext, torch.Tensor),
        (nullcontext, partial(torch.nn.Parameter, requires_grad=False)),
        (partial(FlopCounterMode, display=False), torch.Tensor),
    ],
    ids=["plain", "parameters", "mode"],
)
def test_nothing_is_written_before_all_is_checked(mode, of_cache):
    """An invalid option of attention, or out, leaves the cache as it was."""
    caches = {f"{x}_cache": of_cache(torch.zeros(B, CAP, HK, D)) for x in ("k", "v")}
    of_options = {"num_splits": 300}, {"sinks": torch.ones(3)}, {"softcap": -1.0}
    of_out = {"out": torch.empty(B, SQ, H, 8)}, {"out": torch.empty(B, SQ, H, D).half()}
    of_values = {"cache_leftpad": ints(9, 0)}, {"scheduler_metadata": metadata()}
    for changes in (*of_options, *of_out, *of_values):
        with mode(), pytest.raises(ValueError):
            call(**caches, **new(), **changes)
    assert not any(cache.any() for cache in caches.values())


def test_a_page_without_a_key_that_a_query_sees_or_past_the_length_is_not_looked_at():
    call(**paged(page_table=ints(0, -1, -1, 1, 2, 9, 9, 9).view(2, 4), cache_seqlens=ints(8, 8)))
    none = {"page_table": ints(-1, -1, -1, -1, 2, 3, 4, 5).view(2, 4), "cache_seqlens": ints(9, 9)}
    assert not call(**paged(**none), cache_leftpad=ints(9, 0))[0].any()
    call(**paged(page_table=ints(0, 1, -1, 99, 2, -7, 9, 9).view(2, 4), cache_seqlens=ints(9, 8)))


CACHES = legal()
METADATA = {
    "batch_size": B,
    "max_seqlen_q": SQ,
    "max_seqlen_k": CAP,
    "num_heads_q": H,
    "num_heads_kv": HK,
    "headdim": D,
    "cache_seqlens": ints(5, 7),
    "qkv_dtype": torch.float32,
}


def metadata(**changes):
    return get_scheduler_metadata(**{**METADATA, **changes})


STALE = [
    ({"causal": True}, "must be made with causal=False, got causal=True"),
    (
        {"window_size": (4, 0), "has_softcap": True},
        "must be made with has_softcap=False, window_size=(-1, -1), "
        "got has_softcap=True, window_size=(4, 0)",
    ),
    ({"num_splits": 3, "causal": True}, "must be made with causal=False, num_splits=0, got "),
    ({"num_heads_q": 6}, "must be made with num_heads_q=4, got num_heads_q=6"),
    ({"page_size": 8}, "must be made with page_size=None, got page_size=8"),
    ({"qkv_dtype": torch.float16}, "must be made with qkv_dtype=torch.float32, got "),
    (
        {"cache_seqlens": ints(5, 8)},
        "of sequence 1 must be (7, 0, 3, 0) (cached, new, queries, left padding)",
    ),
    ({"word 0": 0}, "must be from get_scheduler_metadata, got other numbers"),
    ({"word 1": 0}, "must be made with the options of this call, got other options"),
]


@pytest.mark.parametrize(("changes", "message"), STALE, ids=text_of)
def test_stale_metadata_is_an_error_that_names_what_differs(changes, message):
    wrong = metadata(**{name: x for name, x in changes.items() if name[:4] != "word"})
    for index in range(2):
        wrong[index] = changes.get(f"word {index}", wrong[index])
    with pytest.raises(ValueError, match=re.escape(f"scheduler_metadata {message}")):
        call(scheduler_metadata=wrong)
    call(scheduler_metadata=metadata())


def test_metadata_for_new_tokens_fits_a_call_without():
    edges = ints(0, 1, 4)
    wanted = call(scheduler_metadata=None, **CACHES)
    for changes in ({"max_seqlen_k_new": 1}, {"cu_seqlens_k_new": edges}):
        given = metadata(**changes)
        assert torch.equal(call(scheduler_metadata=given, **CACHES), wanted)
        with pytest.raises(ValueError, match=r"sequence 0 must be \(5, 2, 3, 0\)"):
            call(scheduler_metadata=given, **new(2))


def test_arguments_of_new_tokens_and_of_tables_have_no_effect_without():
    """FlashAttention-3 ignores them."""
    without_k = {"cu_seqlens_k_new": ints(0, 1, 2), "rotary_seqlens": ints(0, 1)}
    wanted = call(**CACHES)
    for given in (without_k, {"cu_seqlens_k_new": ints(3)}, {"rotary_seqlens": "nonsense"}):
        assert torch.equal(call(**CACHES, **given), wanted)
    caches = {name: x.clone() for name, x in CACHES.items() if name != "q"}
    copies = {name: x.clone() for name, x in caches.items()}
    given = {"q": CACHES["q"], **new()}
    wanted = call(**caches, **given)
    assert torch.equal(call(**copies, **given, rotary_seqlens=ints(0, 1)), wanted)
    assert all(torch.equal(copies[name], caches[name]) for name in caches)
    arguments = {"cache_seqlens": ints(5, 7), **CACHES, **without_k}
    explained = explain_with_kvcache(**arguments)
    assert explained.unused_hints == {
        "cu_seqlens_k_new": "writes nothing without k and v",
        "rotary_seqlens": "rotates nothing without rotary_cos and rotary_sin",
    }
    rows = {name: x.flatten(0, 1) for name, x in new().items()}
    assert not explain_with_kvcache(**arguments, **rows, **tables()).unused_hints


PARTS = torch.randn(2, B, SQ, H, D)
# Functions beside flash_attn_with_kvcache, and a legal call of each.
FUNCTIONS = {
    get_scheduler_metadata: METADATA,
    append_kvcache: new() | caches() | {"cache_seqlens": 3},
    flash_attn_combine: {"out_partial": PARTS, "lse_partial": PARTS[..., 0].contiguous()},
}
REFUSED_BY = {
    get_scheduler_metadata: [
        ({"qkv_dtype": "bf16"}, "qkv_dtype must be one of"),
        ({"batch_size": -1}, "batch_size must be between 0 and 1073741824, got -1"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must be between 0 and"),
        ({"max_seqlen_k_new": 2**31}, "max_seqlen_k_new must be between 0 and"),
        ({"num_heads_q": 3}, "num_heads_q must be a multiple of num_heads_kv, 2, got 3"),
        ({"headdim": 0}, "headdim must be between 1 and"),
        ({"page_size": 0}, "page_size must be between 1 and"),
    ],
    append_kvcache: [
        ({"q": torch.randn(B, 1, H, D)}, "q must be None without rotary_cos"),
        ({"v": new(dtype=torch.float16)["v"]}, "v.dtype must be torch.float32 as k_cache's"),
        ({"k": torch.randn(B, HK, D)}, "k.shape must be (batch, seqlen_new"),
        ({"cu_seqlens_q": ints(0, 1, 2)}, "cu_seqlens_q must be None without q"),
        ({"rotary_seqlens": ints(0, 1)}, "rotary_seqlens must be None without rotary_cos"),
        ({"cache_seqlens": None}, "cache_seqlens must be an int or an int32 tensor"),
    ],
    flash_attn_combine: [
        ({"out_partial": torch.randn(2, 3, 4)}, "out_partial.shape must be (num_splits"),
        ({"lse_partial": torch.randn(2, B, H, SQ)}, "lse_partial.shape must be (2, 2, 3, 4)"),
        ({"lse_partial": torch.randn(2, B, SQ, H).half()}, "lse_partial.dtype must be"),
        ({"out": torch.empty(B, SQ, H, 3)}, "out.shape must be (2, 3, 4, 16)"),
        ({"out": torch.empty(B, SQ, H, D).int()}, "out.dtype must be one of"),
        ({"out_dtype": torch.int32}, "out_dtype must be one of"),
        ({"out": torch.empty(B, SQ, 1, D).expand(-1, -1, H, -1)}, "out.stride must be without"),
    ],
}


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [(function, *row) for function, rows in REFUSED_BY.items() for row in rows],
    ids=text_of,
)
def test_other_functions_refuse_by_name(function, changes, message):
    function(**FUNCTIONS[function])
    with pytest.raises(ValueError, match=re.escape(f"{function.__name__}: {message}")):
        function(**{**FUNCTIONS[function], **changes})


def problem_of(dtype=torch.bfloat16, device="cuda", **options):
    like = torch.empty(B, 1, H, 128, dtype=dtype, device="meta")
    found = tuple(
        None if x is None else metadata_of(x)._replace(device=torch.device(device))
        for x in DecodeTensors(like, like[:, :, :HK], like[:, :, :HK])
    )
    check_decode(found, DecodeOptions(**options), Lengths())
    return describe_decode(found, DecodeOptions(**options), None)


def test_dispatch_without_a_gpu():
    """The reference backend runs where Triton does not; each says why it does not."""
    unlinked = BACKENDS[1:]
    for device in (A100, H100):
        plan = choose(problem_of(), device, unlinked)
        assert plan.backend.name == "triton" and plan.launch.tile.block_m == 16
    assert choose(problem_of(device="cpu"), CPU, BACKENDS).backend.name == "reference"
    plan = choose(problem_of(torch.float32), A100, unlinked)
    assert plan.backend.name == "reference" and "float32" in dict(plan.declined)["triton"]
    with pytest.raises(UnsupportedError, match=r"triton: takes torch\.float16, torch\.bfloat16"):
        choose(problem_of(torch.float32, backend="triton"), A100, BACKENDS)


def test_use_backend_holds_for_cached_calls():
    from flashattn3 import use_backend

    with use_backend("hopper"), pytest.raises(UnsupportedError, match="hopper: needs an NVIDIA"):
        call(dtype=torch.bfloat16)
    with use_backend("reference"):
        call()
    assert cached_plans.BACKENDS is BACKENDS
