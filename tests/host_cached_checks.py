"""Checks of cached calls that tests/host_checks.py runs: what the operators pass to the driver."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from helpers import H100, forget_cached_calls, ints
from torch.nn import Parameter

from flashattn3 import append_kvcache, flash_attn_with_kvcache, get_scheduler_metadata
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.library import find_library
from flashattn3.call.cached import DECODE
from flashattn3.call.metadata import metadata_of
from flashattn3.run import cached_plans, shared_prefix
from flashattn3.run.launches import cached_launch_cache


def use_cached_calls() -> None:
    backend = HopperBackend(library=find_library, only_measured=False)
    cached_plans.BACKENDS, cached_plans.describe_device = (backend,), lambda device: H100
    cached_plans.is_checked = shared_prefix.is_checked = lambda device: False


def events_of(host, call, allocations=False) -> list[list]:
    """Return what a call passes to the driver, in order: a name and numbers for each event.
    allocations: what it asks torch for as well."""
    host.host_log(True)
    call()
    events = [line.split() for line in host.host_events().decode().splitlines()]
    host.host_log(False)
    events = [[name, *map(int, numbers)] for name, *numbers in events]
    return events if allocations else [event for event in events if event != ["allocate"]]


def mixed_call(longest: int) -> partial:
    """A call of three sequences of one query and one of many."""
    use_cached_calls()
    q = torch.zeros(longest + 3, 32, 128).bfloat16()
    k, v = torch.zeros(2, 4, 1024, 8, 128).bfloat16()
    edges = torch.tensor([0, 1, 2, 3, longest + 3], dtype=torch.int32)
    caches = {"k_cache": k, "v_cache": v}
    return partial(flash_attn_with_kvcache, q, **caches, cu_seqlens_q=edges, max_seqlen_q=longest)


def side_by_side(host, call) -> list[list]:
    """Launches of a call, and what orders those of two streams."""
    return [event for event in events_of(host, call) if event[0] in ("record", "wait", "launch")]


def check_short_sequences_beside_long_ones(host):
    """A decode kernel in a stream beside, or before the forward kernel if SMs are to stay free."""
    call = mixed_call(300)
    begin, forked, decode, prepare, forward, end, joined = side_by_side(host, call)
    assert (begin, forked, end, joined) == (["record", 0], ["wait", 1], ["record", 1], ["wait", 0])
    # Ten shares of the work for each of eight KV heads, on five eighths of the SMs.
    alone = 116 * 1024  # bytes of shared memory with which no two CTAs share an SM
    # A CTA of the preparing kernel for each SM, as many for each of the 4 sequences and one more.
    assert decode == ["launch", 80, 256, alone] and prepare == ["launch", 130, 256, 0]
    # At most 13 work tiles of a KV head: 303 tokens of 4 sequences have up to 8 slices of a head.
    assert forward[:3] == ["launch", 104, 512]
    prepare[1] = forward[1] = 100
    assert side_by_side(host, partial(call, sm_margin=32)) == [
        ["launch", 96, 256, alone],
        prepare,
        forward,
    ]


def check_the_side_stream_forks_behind_allocations(host):
    """Where torch is deterministic it fills new memory, on the stream of the caller."""
    call = mixed_call(250)
    call()
    first, *events = [name for name, *_ in events_of(host, call, allocations=True)]
    fork = events.index("record")
    # out, the order of the forward kernel's work tiles, the parts of the decode kernel
    assert [first, *events[:fork]] == ["allocate"] * 3 and "allocate" not in events[fork:], events


def check_the_side_stream(host):
    """It has the priority of the caller's stream, and is joined after a launch that failed too."""
    call = mixed_call(200)
    for priority in (-2, -1):
        host.host_stream_priority(priority)
        created = [event for event in events_of(host, call) if event[0] == "stream"]
        assert created == [["stream", priority]]
    host.host_stream_priority(0)

    def fail():
        host.host_fail_next_launch()
        with pytest.raises(RuntimeError, match="no GPU"):
            call()

    fork, join = [["record", 0], ["wait", 1]], [["record", 1], ["wait", 0]]
    assert side_by_side(host, fail) == [*fork, *join]


def check_units_of_a_mixed_batch(host):
    """A call is refused for the work that it may have, not for that of 64 prompts as long as its
    one: 64 * 8 * 256 * 2**14 units are 2**31."""
    use_cached_calls()
    q = torch.zeros(63 + 2048, 64, 128).bfloat16()
    k, v = torch.zeros(2, 1, 256, 8, 128).bfloat16()
    edges = torch.tensor([*range(64), 63 + 2048], dtype=torch.int32)
    table = torch.zeros(64, 2**20 // 256, dtype=torch.int32)
    lengths = torch.full((64,), 4000, dtype=torch.int32)
    call = partial(flash_attn_with_kvcache, k_cache=k, v_cache=v, page_table=table)
    assert call(q, cu_seqlens_q=edges, max_seqlen_q=2048, cache_seqlens=lengths).shape == q.shape


class Passed(NamedTuple):
    """A call: what it passed to the driver and returned, or its error; the number of its tensors'
    writes that autograd counts; the number of its checks in Python."""

    events: list[list]
    result: object
    written: list[int]
    checks: int


def passed_by(host, given, **options) -> Passed:
    caches = cached_plans._checked_decode, cached_plans._checked_append
    counts = [sum(cache.cache_info()[:2]) for cache in caches]
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    versions = [None if x.is_inference() else x._version for x in tensors]
    kept = []

    def call():
        try:
            kept.append(flash_attn_with_kvcache(**given, **options))
        except (RuntimeError, TypeError, ValueError) as error:
            kept.append(f"{type(error)} {error}")

    events = events_of(host, call)
    (result,) = kept
    written = [0 if n is None else x._version - n for x, n in zip(tensors, versions, strict=True)]
    counts = [sum(c.cache_info()[:2]) - n for c, n in zip(caches, counts, strict=True)]
    return Passed(events, result, written, sum(counts))


def both(host, given, **options) -> Passed:
    """A call with the launches that the operators know, which is as one without them."""
    found = again = passed_by(host, given, **options)
    known = {x.data_ptr() for x in given.values() if isinstance(x, torch.Tensor) and has_data(x)}
    for attempt in range(4):
        forget_cached_calls()
        wanted = passed_by(host, given, **options)
        try:
            expect_same_events(again.events, wanted.events, known)
            break
        except AssertionError:
            # In one of the two, malloc may have given memory that was freed during the call.
            if attempt == 3:
                raise
            again = passed_by(host, given, **options)
    assert found.written == wanted.written, (found.written, wanted.written)
    described = [described_result(x.result, given.get("out")) for x in (found, wanted)]
    assert described[0] == described[1], described
    return found


def has_data(x) -> bool:
    return x.layout is torch.strided and not x.is_meta


def described_result(result, out):
    if isinstance(result, str):
        return result
    results = result if isinstance(result, tuple) else (result,)
    return [(*metadata_of(x)[:3], x is out) for x in results]


def expect_same_events(found, wanted, known) -> None:
    """The events are the same but for the addresses of new memory. known: of the call's tensors."""
    new = {}
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            if a != b:
                assert all(type(x) is int and 2**44 < x < 2**48 for x in (a, b)), (one, other)
                assert not {a, b} & known and new.setdefault(a, b) == b, (one, other)
    assert len(set(new.values())) == len(new)


def launches_in(passed: Passed) -> list[list[int]]:
    return [event[1:] for event in passed.events if event[0] == "launch"]


def dense(batch=3, tokens=200, dtype=torch.bfloat16, heads=(8, 2), seqlen_q=1, dims=(64, 64)):
    q = torch.zeros(batch, seqlen_q, heads[0], dims[0], dtype=dtype)
    k, v = (torch.zeros(batch, tokens, heads[1], d, dtype=dtype) for d in dims)
    lengths = torch.full((batch,), 9, dtype=torch.int32)
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}


def paged(width=4, pages=24, size=16, seqlen_q=1):
    table = torch.zeros(3, width, dtype=torch.int32)
    k, v = torch.zeros(2, pages, size, 2, 64).bfloat16()
    return dense(seqlen_q=seqlen_q) | {"page_table": table, "k_cache": k, "v_cache": v}


def new_tokens(batch=3, tokens=1, heads=2, dtype=torch.bfloat16, tables=None, interleaved=True):
    """tables: dtype of rotary tables."""
    k, v = torch.zeros(2, batch, tokens, heads, 64, dtype=dtype)
    given = {"k": k, "v": v, "rotary_interleaved": interleaved}
    if tables is not None:
        cos, sin = torch.zeros(2, 300, 16, dtype=tables)
        given |= {"rotary_cos": cos, "rotary_sin": sin}
    return given


def varlen(given):
    """The call with its queries in one row."""
    q = given["q"]
    batch, seqlen_q = q.shape[:2]
    edges = torch.arange(0, (batch + 1) * seqlen_q, seqlen_q, dtype=torch.int32)
    return given | {"q": q.flatten(0, 1), "cu_seqlens_q": edges, "max_seqlen_q": seqlen_q}


def with_out(given):
    return given | {"out": torch.empty_like(given["q"])}


FURTHER = (
    lambda given: given | {"cache_batch_idx": ints(2, 0, 1)},
    lambda given: given | {"cache_leftpad": ints(2, 0, 1)},
    varlen,
    with_out,
    lambda given: with_out(varlen(given | {"cache_batch_idx": ints(2, 0, 1)})),
)
OPTIONS = [{"causal": c, "return_lse": lse} for c in (False, True) for lse in (False, True)]


def after(host, known, given, **options) -> Passed:
    """A call behind known ones, which ran in other modes."""
    forget_cached_calls()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for call in known:
            flash_attn_with_kvcache(**call, **options)
    return both(host, given, **options)


def expect_kept(host, given, num_launches, **options):
    """A call like an earlier one is not checked in Python."""
    found = after(host, (given,), given, **options)
    assert not isinstance(found.result, str), found.result
    assert (found.checks, len(launches_in(found))) == (0, num_launches), (launches_in(found), given)


def compare_changes(host, known, others=(), invalid=(), **options):
    """A launch serves no call that it is not planned for, and errors are those of a first call.
    others: calls behind the known ones, with the number of their checks in Python. invalid: changes
    of the first of the known ones."""
    for given, checks in others:
        found = after(host, known, given, **options)
        assert found.checks == checks and launches_in(found), (found, checks, list(given))
    for changes in invalid:
        found = after(host, known, known[0] | changes, **options)
        assert isinstance(found.result, str) and found.events == [], (changes, found)


def wrong_tensors(given, *names):
    """Changes of a call: one of these tensors is missing, of another kind, shape or dtype, or has a
    gradient."""
    for name in names:
        x = given[name]
        leaf = (x.clone() if x.is_floating_point() else x.float()).requires_grad_()
        kinds = x.to_sparse(), x.to("meta"), x.double(), x.to(torch.int8), x.tolist(), leaf
        yield from ({name: other} for other in (None, x[0], *kinds))


def check_kept_calls_with_further_arguments(host):
    """They pass to the driver what they pass without the operator that finds their launch."""
    use_cached_calls()
    for layout, seqlen_q, options in product((dense, paged), (1, 3), OPTIONS):
        for further in FURTHER:
            given = further(layout(seqlen_q=seqlen_q))
            # A kernel clears the rows of no sequence.
            expect_kept(host, given, 1 + ("cu_seqlens_q" in given), **options)


def with_metadata(given, **options):
    """The call with scheduler metadata made for it."""
    q, k, lengths = (given[name] for name in ("q", "k_cache", "cache_seqlens"))
    seqlen_q = given.get("max_seqlen_q", q.shape[1])
    new = given.get("k")
    metadata = get_scheduler_metadata(
        batch_size=len(lengths),
        max_seqlen_q=seqlen_q,
        max_seqlen_k=200,
        num_heads_q=q.shape[-2],
        num_heads_kv=k.shape[2],
        headdim=q.shape[-1],
        headdim_v=given["v_cache"].shape[-1],
        cache_seqlens=lengths,
        qkv_dtype=q.dtype,
        cu_seqlens_q=given.get("cu_seqlens_q"),
        cache_leftpad=given.get("cache_leftpad"),
        page_size=k.shape[1] if "page_table" in given else None,
        max_seqlen_k_new=0 if new is None else new.shape[1],
        causal=options["causal"],
    )
    return given | {"scheduler_metadata": metadata}


def check_kept_calls_with_metadata(host):
    """A kernel compares it; what it must hold is kept with the launch."""
    use_cached_calls()
    for layout, seqlen_q, options in product((dense, paged), (1, 3), OPTIONS):
        for further in (lambda given: given, *FURTHER, in_8_bits):
            given = further(layout(seqlen_q=seqlen_q))
            expect_metadata(host, with_metadata(given, **options), 2, **options)
        given = layout(seqlen_q=seqlen_q) | new_tokens()
        expect_metadata(host, with_metadata(given, **options), 3, **options)
    given = with_metadata(dense(), causal=True)
    metadata = given["scheduler_metadata"]
    wrong = (
        *(metadata[:-1], metadata[None], metadata.long(), metadata.to("meta")),
        *(metadata.repeat(2)[::2], metadata.tolist(), metadata.float().requires_grad_()),
    )
    invalid = [{"scheduler_metadata": x} for x in wrong]
    compare_changes(host, (given,), invalid=invalid, causal=True)


def expect_metadata(host, given, num_launches, **options):
    expect_kept(host, given, num_launches, **options)
    *_, (name, *words) = passed_by(host, given, **options).events
    metadata = given["scheduler_metadata"]
    assert name == "arguments" and words[-2:] == [metadata.data_ptr(), int(metadata[1])]


FP8 = torch.float8_e4m3fn


def in_8_bits(given, dtype=FP8, kind="heads"):
    """The call with caches of 8 bits. kind: of descales; "": none."""
    pages, tokens, heads = given["k_cache"].shape[:3]
    shapes = {"heads": (3, heads), "pages": (pages, 1, heads), "tokens": (pages, tokens, heads)}
    shapes["one"] = ()
    given = given | {f"{x}_cache": given[f"{x}_cache"].to(dtype) for x in "kv"}
    return given | {f"{x}_descale": torch.ones(shapes[kind]) for x in "kv" if kind}


def check_kept_calls_of_8_bits(host):
    """Both dtypes and all descales that kernels read where they lie have one launch."""
    use_cached_calls()
    kinds = [(FP8, ""), *product((FP8, torch.int8), KINDS)]
    for layout, further in product((dense, paged), (lambda given: given, *FURTHER)):
        for dtype, kind in kinds:
            given = further(in_8_bits(layout(seqlen_q=3), dtype, kind))
            expect_kept(host, given, 1 + ("cu_seqlens_q" in given), causal=True)
    for given in (dense(), paged(seqlen_q=3)):
        expect_kept(host, given | {"k_descale": torch.ones(3, 2)}, 1)


KINDS = "heads", "pages", "tokens"


def check_kept_calls_of_8_bits_and_others(host):
    """One property of a call changes at a time."""
    use_cached_calls()
    known, ones = in_8_bits(paged()), torch.ones(3, 2)
    others = (
        (known | {"cache_seqlens": 5}, 0),
        (known | {"k_descale": 2 * ones}, 0),
        (known | {"k_descale": None, "v_descale": None}, 0),
        (known | {"sinks": torch.zeros(8)}, 0),
        *((in_8_bits(paged(), torch.int8, kind), 0) for kind in KINDS),
        (paged(), 1),
        (paged() | {"k_descale": ones}, 1),
        (in_8_bits(dense()), 1),
        (in_8_bits(paged(size=32)), 1),
        (in_8_bits(paged(seqlen_q=2)), 1),
        (known | {"q": known["q"].half()}, 1),
        (known | {"q_descale": ones}, 1),
        (known | {"k_descale": torch.ones(())}, 0),
        (known | {"v_descale": torch.ones(1, 1).expand(3, 2)}, 0),
        (known | {"v_descale": torch.ones(2, 3).mT}, 0),
    )
    wrong = ones[:2], ones.half(), ones.to("meta"), ones.clone().requires_grad_(), ones.tolist()
    invalid = (
        in_8_bits(paged(), torch.int8) | {"k_descale": None},
        in_8_bits(paged(), torch.int8) | {"v_descale": None},
        *({name: x} for name in ("k_descale", "v_descale") for x in wrong),
        {"k_descale": torch.ones(24, 8, 2)},
        {"v_cache": known["v_cache"].to(torch.int8)},
        {"v_cache": paged()["v_cache"]},
        {f"{x}_cache": known["k_cache"].float().to(torch.float8_e5m2) for x in "kv"},
    )
    compare_changes(host, (known,), others, invalid, causal=True)


def check_trees(host):
    """Kernels get the mask where it lies. Python plans each call, and the operators do not take it
    for the one without a mask that they know."""
    use_cached_calls()
    forget_cached_calls()
    given = dense(seqlen_q=9)
    for _ in range(2):
        passed_by(host, given, causal=True)
    tree = torch.zeros(3, 9, 3, dtype=torch.int32)[..., :1]
    edges = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    packed = given | {"q": given["q"][0], "cu_seqlens_q": edges, "max_seqlen_q": 6}
    of_batch = given | {"tree_mask": tree}, [tree.data_ptr(), 27, 3, 1]
    of_packed = packed | {"tree_mask": tree[0]}, [tree.data_ptr(), 0, 3, 1]
    for call, wanted in (of_batch, of_packed) * 2:
        found = passed_by(host, call, causal=True)
        words = next(words for name, *words in found.events if name == "arguments")
        assert words[-4:] == wanted and found.checks == 1, (words, found)
        assert passed_by(host, given, causal=True).checks == 0
    # Four slices of 64 rows for each KV head of a sequence, each in a CTA of its own.
    long = dense(seqlen_q=64) | {"tree_mask": torch.zeros(3, 64, 2, dtype=torch.int32)}
    (launch,) = launches_in(passed_by(host, long, causal=True))
    assert launch[:2] == [3 * 2 * 4, 512]
    for rows, longest in product((0, 2), (0, 5)):  # of no sequence
        tree = torch.zeros(rows, min(longest, 1), dtype=torch.int32)
        none = packed | {"q": given["q"][0, :rows], "cu_seqlens_q": torch.zeros_like(edges)}
        none |= {"max_seqlen_q": longest, "tree_mask": tree}
        assert passed_by(host, none, causal=True).result.shape == (rows, 8, 64)
    wrong = long | {"tree_mask": torch.zeros(3, 64, 1, dtype=torch.int32)}
    assert "tree_mask.shape must be (3, 64, 2)" in passed_by(host, wrong, causal=True).result


def check_shared_prefixes(host):
    """One launch reads the prefix and the sequences' own keys, and a kernel joins both results."""
    use_cached_calls()
    forget_cached_calls()
    pages = torch.zeros(1, 5, dtype=torch.int32)
    table, edges = torch.zeros(3, 4, dtype=torch.int32), ints(0, 2, 2, 6)
    k, v = torch.zeros(2, 20, 16, 2, 128).bfloat16()
    out, q = torch.zeros(2, 3, 2, 8, 128).bfloat16()
    given = {"q": q, "k_cache": k, "v_cache": v, "page_table": table, "prefix_page_table": pages}
    packed = {"q": q.flatten(0, 1), "cu_seqlens_q": edges, "max_seqlen_q": 4}
    for more, length in product(({}, packed), (70, ints(70))):
        call = given | {"out": out.flatten(0, 1) if more else out, "prefix_len": length, **more}
        found = passed_by(host, call, causal=True, return_lse=True)
        assert found.result[0] is call["out"], found.result
        decode, join, *fill = launches_in(found)
        # A unit of each of three sequences and two of the prefix, of each of two KV heads, and a
        # warp for each of 48 rows.
        assert decode[:2] == [10, 256] and join == [6, 256, 0] and bool(fill) == bool(more), found
        words, of_join = [words for name, *words in found.events if name == "arguments"][:2]
        at = words.index(pages.data_ptr())
        tensor = isinstance(length, torch.Tensor)
        assert words[at + 1] == (length.data_ptr() if tensor else 0)
        assert words[at + 2] == (0 if tensor else 70) | 80 << 32 and words[at + 3] & 0xFFFFFFFF == 6
        results = of_join[0], of_join[1]
        assert tuple(words[at + 4 : at + 6]) == results
        assert results[1] - results[0] == 2 * 48 * 128 * 4 and of_join[2] == 48
        assert call["out"].data_ptr() in of_join and found.result[1].data_ptr() in of_join


def with_prefix(given, length=20, width=2):
    """The call with keys in front of those of all sequences, in pages of 16."""
    pages = torch.zeros(1, width, dtype=torch.int32)
    return given | {"prefix_page_table": pages, "prefix_len": length}


def check_kept_calls_with_a_prefix(host):
    """They pass to the driver what they pass without the operator that finds their launch."""
    use_cached_calls()
    for seqlen_q, options, length in product((1, 3), OPTIONS, (20, ints(20))):
        for further in (lambda given: given, *FURTHER):
            given = with_prefix(further(paged(seqlen_q=seqlen_q)), length)
            launches = 2 + ("cu_seqlens_q" in given)
            expect_kept(host, given, launches, **options)
            expect_kept(host, given | new_tokens(), launches + 1, **options)
    kinds = [(FP8, ""), *product((FP8, torch.int8), ("one", "pages", "tokens"))]
    for further in (lambda given: given, *FURTHER):
        given = with_prefix(further(paged(seqlen_q=3)))
        launches = 2 + ("cu_seqlens_q" in given)
        expect_kept(
            host, given | {"k_descale": torch.ones(()), "v_descale": torch.ones(1)}, launches
        )
        for dtype, kind in kinds:
            expect_kept(host, in_8_bits(given, dtype, kind), launches, causal=True)


def check_kept_calls_with_a_prefix_and_others(host):
    """One property of a call changes at a time. Python plans calls with a prefix that are two
    launches and a combination, and those whose queries it copies."""
    use_cached_calls()
    known, new = with_prefix(paged()), new_tokens()
    strided = torch.zeros(3, 2, 8, 64).bfloat16()[:, :1]
    largest = {"q": torch.zeros(128, 1, 8, 64).bfloat16(), "cache_seqlens": None}
    largest["page_table"] = torch.zeros(128, 4, dtype=torch.int32)
    others = (
        (paged(), 0),
        (with_prefix(paged(), 0), 0),
        (with_prefix(paged(), 32), 0),
        (with_prefix(paged(), ints(20)), 0),
        (with_prefix(paged(), ints(999), 5), 0),
        (with_prefix(paged(), width=0, length=0), 0),
        (with_prefix(paged(width=0)), 0),
        (known | {"prefix_page_table": torch.zeros(3, 9, dtype=torch.int32)[1:2]}, 0),
        (with_prefix(paged(width=9, pages=99)), 0),
        (known | {"sinks": torch.zeros(8)}, 0),
        (known | {"k_descale": torch.ones(())}, 0),
        (known | largest, 0),
        (in_8_bits(known, kind="pages"), 1),
        (known | {"q": strided}, 1),
        (known | {"q": known["q"].half(), **halves(known)}, 1),
        (with_prefix(paged(seqlen_q=2)), 1),
        (with_prefix(paged(size=32)), 1),
    )
    compare_changes(host, (known,), others, causal=True)
    more = {name: torch.cat((x, x[:1])) for name, x in largest.items() if x is not None}
    many = known | largest | more
    without = {name: x for name, x in many.items() if not name.startswith("prefix")}
    flash_attn_with_kvcache(**without, causal=True)
    assert passed_by(host, many, causal=True).checks >= 2
    pages = known["prefix_page_table"]
    rotary = {name: torch.zeros(300, 16) for name in ("rotary_cos", "rotary_sin")}
    for changes in (
        *({"prefix_len": x} for x in (33, -1, None, 1.5, ints(1, 2), ints(20)[None])),
        *({"prefix_len": x} for x in (ints(20).long(), ints(20).to("meta"), [20])),
        *({"prefix_page_table": x} for x in (None, pages.long(), pages[0], pages.repeat(2, 1))),
        *({"prefix_page_table": x} for x in (pages.to("meta"), pages.repeat(1, 2)[:, ::2])),
        {"page_table": None},
        {"split_tokens": 128},
        {"window_size": (9, 0)},
        {"alibi_slopes": torch.zeros(8)},
        *({f"{x}_descale": torch.ones(3, 2)} for x in "qkv"),
        new | rotary,
    ):
        for given in (known, known | new):
            other = given | changes
            without = {name: x for name, x in other.items() if not name.startswith("prefix")}
            passed_by(host, without, causal=True), flash_attn_with_kvcache(**given, causal=True)
            found = both(host, other, causal=True)
            assert isinstance(found.result, str) and found.events == [], (changes, found)


def halves(given):
    return {name: given[name].half() for name in ("k_cache", "v_cache")}


def check_caches_that_are_widened(host):
    """Before a forward kernel reads them; KV heads take turns where they would take over 1 GiB."""
    use_cached_calls()
    caches = in_8_bits(paged(width=13, seqlen_q=60))
    # 6 units of 128 keys of two heads; a work tile for each of 3 sequences and 8 heads.
    widen, forward = [6, 256, 0], [24, 512]
    for given in (caches, in_8_bits(paged(width=13, seqlen_q=60), torch.int8, "tokens")):
        first, second = launches_in(passed_by(host, given))
        assert (first, second[:2]) == (widen, forward)
    turns = passed_by(host, caches | {"page_table": torch.zeros(3, 87382, dtype=torch.int32)})
    assert not isinstance(turns.result, str), turns.result
    assert [launch[:2] for launch in launches_in(turns)] == 2 * [[528, 256], [12, 512]]
    # Without pages the forward kernel sees no keys in the workspace, which nothing has written.
    none = in_8_bits(paged(width=13, pages=0, seqlen_q=60))
    extents = [event[2:] for event in passed_by(host, none).events if event[0] == "descriptor"]
    assert [64, 1, 2, 3] in extents and [64, 208, 2, 3] not in extents, extents
    # Beside the decode kernel of 8 bits.
    call = mixed_call(300)
    wide = call.keywords | {f"{x}_cache": call.keywords[f"{x}_cache"].to(FP8) for x in "kv"}
    found = [name for name, *_ in side_by_side(host, partial(call.func, *call.args, **wide))]
    assert found == ["record", "wait", *["launch"] * 4, "record", "wait"]


def check_kept_calls_that_append(host):
    """The append comes first."""
    use_cached_calls()
    appends = [new_tokens(), new_tokens(tokens=3)]
    for tables, interleaved in product((torch.float32, torch.bfloat16), (False, True)):
        appends.append(new_tokens(tables=tables, interleaved=interleaved))
    k, v = appends[1]["k"].flatten(0, 1), appends[1]["v"].flatten(0, 1)
    appends.append({"k": k, "v": v, "cu_seqlens_k_new": ints(0, 4, 4, 9)})
    for layout, new, options in product((dense, paged), appends, OPTIONS):
        for further in (lambda given: given, *FURTHER):
            given = further(layout(seqlen_q=3)) | new
            expect_kept(host, given, 2 + ("cu_seqlens_q" in given), **options)
        expect_kept(host, layout() | new | {"cache_seqlens": 7}, 2, **options)
    given = dense() | new_tokens(tables=torch.float32)
    wide = torch.zeros(3, 1, 8, 65).bfloat16()[..., :64]  # is rotated to other memory
    expect_kept(host, given | {"q": wide}, 2)


def check_kept_calls_of_changed_tensors(host):
    """Calls with new tokens. One property changes at a time, or one tensor in place."""
    use_cached_calls()
    table = torch.zeros(300, 16)
    rotary = {"rotary_cos": table, "rotary_sin": table.clone()}
    known = dense() | new_tokens() | rotary
    options = {"causal": True}

    def run(given):
        flash_attn_with_kvcache(**given, **options)

    others = (
        (dense(5) | new_tokens(5), 0),
        (dense(tokens=999) | new_tokens(tokens=7), 0),
        (paged(pages=99, width=9) | new_tokens(tokens=0), 0),
        (dense(dtype=torch.half) | new_tokens(dtype=torch.half), 2),
        (dense(heads=(4, 4)) | new_tokens(heads=4), 2),
        (dense(seqlen_q=3) | new_tokens(), 2),
        (varlen(dense(seqlen_q=2)) | new_tokens(), 0),  # the third launch
        (paged(size=32) | new_tokens(), 2),
        (known | {"k": known["k"].mT.contiguous().mT}, 2),  # is copied
        (known | {"rotary_sin": torch.zeros(300, 32)[:, :16]}, 2),
        (known | {"out": torch.zeros(3, 1, 8, 65).bfloat16()[..., :64]}, 2),
        (known | {"k_descale": torch.ones(3, 2), "v_descale": torch.ones(3, 2)}, 2),
        (known | {"rotary_seqlens": ints(1, 2, 3)}, 2),
        (known | {"sinks": torch.zeros(8)}, 0),
        (known | {"sinks": torch.zeros(8).bfloat16()}, 2),
        (known | {"sinks": torch.zeros(16)[::2]}, 2),  # are copied
        (known | {"k": Parameter(known["k"], requires_grad=False)}, 2),
        (known | {"out": Parameter(torch.zeros_like(known["q"]), requires_grad=False)}, 2),
    )
    before = known, paged() | new_tokens(), dense(seqlen_q=2) | new_tokens()
    compare_changes(host, before, others, **options)
    with torch.no_grad():
        leaves = [{name: known[name].clone().requires_grad_()} for name in ("k", "v", "v_cache")]
        compare_changes(host, (known,), [(known | leaf, 0) for leaf in leaves], **options)
    for _ in range(2):  # a forward kernel
        many = passed_by(host, varlen(dense(seqlen_q=60)) | new_tokens(), **options)
        assert many.checks == 2, many
    # The tensors of a known call, with other contents.
    run(known)
    before = both(host, known, **options)
    run(known)
    known["k"].resize_(3, 4, 2, 64), known["v"].resize_(3, 4, 2, 64)
    after = both(host, known, **options)
    assert after.checks == before.checks == 0 and after.events != before.events
    run(known)
    known["k"].resize_(2, 4, 2, 64)
    assert "k.shape[0] must be 3" in both(host, known, **options).result
    known["k"].resize_(3, 4, 2, 64)
    known["k"].data = known["k"].half()
    assert "k.dtype must be torch.bfloat16" in both(host, known, **options).result
    known["k"].data = known["k"].bfloat16()
    once = known["k_cache"][:, :1].expand(3, 200, 2, 64)
    new = {name: known[name] for name in ("k", "v", *rotary, "rotary_interleaved")}
    plain = {name: x for name, x in known.items() if name not in new}
    invalid = (
        *wrong_tensors(known, *new.keys() - {"rotary_interleaved"}),
        *({name: known[name][..., :8]} for name in ("k", "v", "rotary_sin")),
        *({name: known[name][:2]} for name in ("k", "v", "rotary_sin")),
        {"k": known["k"][:, :1]},
        {"rotary_cos": table.mT, "rotary_sin": table.mT},
        {"rotary_cos": torch.zeros(300, 40), "rotary_sin": torch.zeros(300, 40)},
        {"rotary_interleaved": "no"},
        {"cu_seqlens_k_new": ints(0, 1, 2, 3)},
        *({f"{x}_cache": once} for x in "kv"),
        {"cache_seqlens": None},
    )
    packed = varlen(plain)
    compare_changes(host, (known, packed | new), (), invalid, **options)
    for more in (new, {}):
        of_both = wrong_of_both(plain)
        compare_changes(host, (plain | more, packed | more), (), of_both, **options)


def wrong_of_both(given):
    """Changes of a dense call, with new tokens or without, that are errors."""
    edges, idx, out = ints(0, 1, 2, 3), ints(0, 1, 2), torch.zeros_like(given["q"])
    packed = varlen(given)
    wide = torch.zeros(3, 200, 2, 68).bfloat16()
    lengths = given["cache_seqlens"]
    yield from wrong_tensors(given, "q", "k_cache", "v_cache")
    yield from list(wrong_tensors(given, "cache_seqlens"))[1:]
    yield {"q": given["q"][..., :8]}
    yield from ({name: wide[..., :64]} for name in ("k_cache", "v_cache"))
    yield from ({"cache_seqlens": x} for x in (-1, 1.5, lengths.long(), lengths.repeat(2)[::2]))
    yield {f"{x}_cache": given["k_cache"].to(torch.float8_e5m2) for x in "kv"}
    yield {"sinks": torch.zeros(8, requires_grad=True)}
    yield from ({"cache_batch_idx": x} for x in (idx[:2], idx.long(), idx[None], [0, 1, 2]))
    yield from ({"cache_leftpad": x} for x in (idx[:2], idx.long(), idx[None], idx.to("meta")))
    yield from ({"out": x} for x in (out[:2], out.half(), out[:1].expand(3, 1, 8, 64), out.mT))
    yield from ({"out": x} for x in (out.to("meta"), out.clone().requires_grad_()))
    yield from ({"cu_seqlens_q": edges}, {"max_seqlen_q": 1})
    yield {"cu_seqlens_q": edges, "max_seqlen_q": 1}
    for wrong in (edges.long(), edges[:3], edges[None], edges[:0], edges.to("meta")):
        yield packed | {"cu_seqlens_q": wrong}
    yield from (packed | x for x in ({"max_seqlen_q": -1}, {"max_seqlen_q": None}, {"out": out}))


def check_the_schemas_of_kept_operators(host):
    """The schema of each operator declares what it writes and what it returns."""
    use_cached_calls()
    forget_cached_calls()
    given = dense() | new_tokens(tables=torch.float32)
    flash_attn_with_kvcache(**given)
    options = DECODE.convert("flash_attn_with_kvcache", {"backend": None})
    number = cached_launch_cache(options).number
    read = (given[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens"))
    lse = torch.zeros(3, 8, 1)
    call = (number, *read, None, -1, lse)
    new = given["k"], given["v"], None, given["rotary_cos"], given["rotary_sin"], True, False
    for out in (None, torch.zeros_like(given["q"])):
        further = out, -1, None, None, None, None, None
        for name, arguments in (
            ("decode_kept", call),
            ("decode_kept_with", (*call, *further, None, None)),
            ("append_kept", (*call, *further, *new)),
        ):
            operator = getattr(torch.ops.flashattn3_hopper, name).default
            tests = "test_schema", "test_autograd_registration"
            torch.library.opcheck(operator, arguments, test_utils=tests)
            result = operator(*arguments)
            assert result.shape == given["q"].shape
            assert (result is out) == (out is not None and name != "decode_kept")


def check_kept_calls(host):
    """A call like an earlier one passes the same to the driver, whatever became of its tensors, and
    invalid ones raise the same."""
    use_cached_calls()
    for return_lse in (False, True):
        compare_kept_calls(host, {"causal": True, "return_lse": return_lse})


def compare_kept_calls(host, like):
    calls, pages = (dense(), dense(1), dense(70), dense(3, 5000)), paged()
    calls = *calls, dense() | {"cache_seqlens": 7}, pages, paged(40), paged(4, 999)
    calls = *calls, pages | {"cache_seqlens": None}
    compare_changes(host, (dense(), pages), [(given, 0) for given in calls], **like)

    def run(given):
        return flash_attn_with_kvcache(**given, **like)

    # The tensors of a known call, other ones after it.
    given = dense(70)
    q, k, v, lengths = given.values()
    run(given)
    q.data = torch.zeros(70 * 8 * 64 + 1).bfloat16()[1:].view(70, 1, 8, 64)  # is copied
    assert both(host, given, **like).checks == 1
    q.data = torch.zeros(70, 1, 8, 64).half()
    said = "k_cache.dtype must be torch.float16 as q's, or one of "
    assert said in both(host, given, **like).result
    k.data, v.data = k.half(), v.half()
    found = both(host, given, **like).events
    q.resize_(5, 1, 8, 64)
    assert "k_cache.shape[0] must be 5" in both(host, given, **like).result
    for x in (k, v, lengths):
        x.set_(x[:5].clone())
    assert both(host, given, **like).events != found
    v.set_(v.transpose(2, 3).contiguous().transpose(2, 3))
    assert "v_cache.stride(-1) must be 1" in both(host, given, **like).result
    table = pages["page_table"]
    wrong = None, table.mT, table.mT.contiguous().mT, table.long(), table[0].tolist()
    invalid = [{"page_table": x} for x in wrong]
    invalid.append({f"{x}_cache": pages[f"{x}_cache"][:, :0] for x in "kv"})
    compare_changes(host, (pages, dense()), (), invalid, **like)


def check_the_grid_of_an_append(host):
    """A kernel without shared memory of its choice: CTAs of K, V and q, then of attention."""
    use_cached_calls()

    def tensors(batch, seqlen, d, heads=8):
        return [torch.zeros(batch, n, heads, d).bfloat16() for n in (seqlen, seqlen, 99, 99)]

    def append(k, v, k_cache, v_cache, **named):
        call = partial(append_kvcache, k, v, k_cache, v_cache, cache_seqlens=5, **named)
        return [numbers for name, *numbers in events_of(host, call) if name == "launch"]

    # A CTA takes tokens of 1024 vectors; where a tensor has few tokens, one.
    assert append(*tensors(64, 1, 128)) == [[64 + 64, 256, 0]]
    assert append(*tensors(8, 1024, 128)) == [[2 * 8192 // 8, 256, 0]]
    assert append(*tensors(2, 4096, 36, 1)) == [[2 * 1171, 256, 0]]  # of 7 tokens
    assert append(*tensors(3, 0, 64)) == append(*tensors(0, 2, 64)) == []
    table = torch.zeros(99, 64)
    q = torch.zeros(64, 1, 32, 128).bfloat16()
    new = tensors(64, 1, 128)
    rotary = {"rotary_cos": table, "rotary_sin": table}
    assert append(*new, **rotary, q=q) == [[3 * 64, 256, 0]]
    one = torch.tensor(2.0)
    passed = [
        events_of(host, partial(append_kvcache, *new, cache_seqlens=5, k_descale=x, v_descale=x))
        for x in (one, one.expand(1), one.expand(64, 8))
    ]
    assert passed[0] == passed[1] == passed[2] and one.data_ptr() in passed[0][1], passed
    # In halves a thread takes two vectors of each of two heads.
    whole = tensors(1, 8192, 128)
    assert append(*whole, **rotary, rotary_interleaved=False) == [[2048, 256, 0]]
    assert append(*tensors(1, 8192, 128, 16), **rotary, rotary_interleaved=False) == [
        [4096, 256, 0]
    ]
