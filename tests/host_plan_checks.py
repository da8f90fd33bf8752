"""Pairs of calls that differ in one field of the tables of calls: they share a launch exactly where
no plan depends on the field (tests/host_checks.py runs these checks).

The host library has no second GPU, so the pairs of "device" are missing.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from helpers import forget_cached_calls
from host_cached_checks import (
    dense,
    expect_metadata,
    passed_by,
    use_cached_calls,
    with_metadata,
    with_prefix,
)

from flashattn3.call.cached import DECODE
from flashattn3.call.fields import CALL, Options
from flashattn3.call.operands import Tensors
from flashattn3.call.tensor_fields import BIAS, CACHED_PLAN, EDGES, FOUND, ROWS, SINKS, SLOPES
from flashattn3.run import doors, operators
from flashattn3.run.launches import cached_launch_cache

SHAPES = {"q": (2, 40, 4, 64), "k": (2, 40, 2, 64), "v": (2, 40, 2, 64)}


def in_axes(x, is_bhsd):
    return x.transpose(1, 2) if is_bhsd else x


def changed_rows(name: str, varlen: bool):
    """(property, tensor) of each way in which one of q, k and v differs from that of the call, with
    tokens before heads."""
    shape = SHAPES[name]
    for axis in range(4):
        yield (
            "sizes",
            torch.zeros([size + 8 * (i == axis) for i, size in enumerate(shape)]).bfloat16(),
        )
    *lead, columns = shape
    zeros = partial(torch.zeros, dtype=torch.bfloat16)
    yield "dtype", zeros(shape, dtype=torch.float16)
    yield "readable", zeros(*lead, columns + 1)[..., 1:]
    yield "readable", zeros(*lead, 2 * columns)[..., ::2]
    yield "readable", zeros(1, *shape[1:]).expand(shape)
    yield "strides", zeros(*lead, columns + 8)[..., :columns]
    heads_first = zeros(shape).transpose(1, 2).contiguous().transpose(1, 2)
    # With cu_seqlens, sequences follow each other in memory.
    yield "readable" if varlen else "strides", heads_first
    yield "address", zeros(shape)
    yield "requires_grad", zeros(shape).requires_grad_()


def changed_edges(edges):
    yield "count", torch.tensor([0, 3, 8, 80], dtype=torch.int32)
    yield "given", None
    yield "values", torch.tensor([0, 79, 80], dtype=torch.int32)
    yield "address", edges.clone()


def changed_sinks(sinks):
    yield "given", None
    yield "dtype", sinks.bfloat16()
    yield "readable", torch.zeros(8)[::2]
    yield from unplanned(sinks)


def changed_slopes(slopes):
    yield "given", None
    yield "rank", slopes[0] if slopes.ndim == 2 else torch.zeros(2, 4)
    yield "readable", torch.zeros(*slopes.shape[:-1], 8)[..., ::2]
    if slopes.ndim == 2:
        yield "strides", torch.zeros(2, 8)[:, :4]
    yield from unplanned(slopes)


def changed_bias(bias):
    zeros = partial(torch.zeros, dtype=torch.bfloat16)
    yield "given", None
    yield "dtype", bias.half()
    yield "sizes", zeros(2, 4, 40, 40)
    yield "sizes", zeros(1, 1, 40, 40)
    yield "readable", zeros(1, 4, 40, 41)[..., 1:]
    yield "readable", zeros(1, 4, 1, 40).expand(1, 4, 40, 40)
    yield "strides", zeros(1, 4, 40, 48)[..., :40]
    yield from unplanned(bias)


def unplanned(x):
    yield "values", x + 1
    yield "address", x.clone()
    yield "requires_grad", x.clone().requires_grad_()


CHANGES = {EDGES: changed_edges, SINKS: changed_sinks, SLOPES: changed_slopes, BIAS: changed_bias}
# No kernel takes slopes and a bias.
SCORES = (
    {},
    {"sinks": torch.zeros(4), "alibi_slopes": torch.zeros(4)},
    {"alibi_slopes": torch.zeros(2, 4)},
    {"sinks": torch.zeros(4), "bias": torch.zeros(1, 4, 40, 40).bfloat16()},
)


def is_shared(cache, tensors) -> bool:
    """Whether the operators of both passes find a launch for the tensors."""
    q, *_ = tensors
    with torch.no_grad():
        out, lse = cache.operators.forward_scores(cache.number, True, *tensors)
        known = torch.zeros(2, 40, 4, 64, dtype=q.dtype), torch.zeros(2, 4, 40)
        if tensors[3] is not None:  # (heads, rows) of all sequences
            known = known[0], torch.zeros(4, 2, 40).transpose(0, 1)
        given = (torch.zeros_like(known[0]), *known) if out is None else (out.clone(), out, lse)
        of_call = cache.number, *given, *tensors
        dq, *_, dsinks, dbias = cache.operators.backward_scores(*of_call, True)
        if tensors[5] is tensors[6] is tensors[7] is None:
            of_plain = cache.number, False, *tensors[:5]
            found = cache.operators.forward(*of_plain)
            assert (found[0] is None) == (out is None) and found[1] is None
            assert (cache.operators.backward(*of_call[:-3])[0] is None) == (out is None)
    assert (out is None) == (dq is None)
    if out is not None:
        sinks, _, bias = tensors[5:]
        for gradient, x in ((dsinks, sinks), (dbias, bias)):
            assert (gradient is None) == (x is None)
            assert x is None or (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
    return out is not None


def check_calls_that_differ_in_one_tensor(host):
    """Never a shared launch where a plan depends on the property, always elsewhere."""
    names = [field.name for field in FOUND]
    found = torch.ops.flashattn3_hopper.forward_kept.scores._schema.arguments[1:]
    assert [x.name for x in found] == ["returns_lse", *names, "max_logit"]
    edges = torch.tensor([0, 40, 80], dtype=torch.int32)
    for is_bhsd, varlen, scores in product((True, False), (True, False), SCORES):
        if varlen and "bias" in scores:
            continue
        sides = [torch.zeros(shape).bfloat16() for shape in SHAPES.values()]
        given = dict.fromkeys(names) | scores
        given |= {name: in_axes(x, is_bhsd) for name, x in zip(SHAPES, sides, strict=True)}
        given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), edges if varlen else None)
        options = Options(softmax_scale=0.25 + is_bhsd + 2 * varlen, backend="")
        in_rows = [x.flatten(0, 1) if varlen else x for x in sides]
        indices = (edges if varlen else None,) * 2
        launch = operators.launch_of(Tensors(*in_rows, *indices, **scores), options)
        cache = doors.launch_cache(options, is_bhsd)
        cache.keep(launch.keep, is_bhsd, *given.values())
        assert is_shared(cache, tuple(given.values()))
        for field in FOUND:
            value = given[field.name]
            if value is None:
                continue
            if field.kind is ROWS:
                changes = [
                    (x, in_axes(value, is_bhsd)) for x, value in changed_rows(field.name, varlen)
                ]
            else:
                changes = [*CHANGES[field.kind](value)]
            for name, other in changes:
                shared = is_shared(cache, tuple((given | {field.name: other}).values()))
                wanted = name not in field.kind.plan
                assert shared == wanted, (field.name, name, is_bhsd, varlen, [*scores])
            assert {name for name, _ in changes} >= {*field.kind.plan} - {"device"}
        doors.launch_cache.cache_clear()  # the next call has the same options


def other_value(name: str, value):
    """A value of an option that differs from its default."""
    if name == "out_dtype":
        return torch.float16
    if isinstance(value, bool):
        return not value
    return {"backend": "hopper", "pack_gqa": True, "function": "other"}.get(name, 7)


def check_calls_that_differ_in_one_option(host):
    """A plan depends on every option, so that launches are kept under the number of all of them."""
    for kind, cached in (
        (CALL, partial(doors.launch_cache, bhsd=False)),
        (DECODE, cached_launch_cache),
    ):
        plain = kind.Options()
        assert cached(plain) is cached(kind.Options())
        for name in plain._fields:
            other = plain._replace(**{name: other_value(name, getattr(plain, name))})
            assert other != plain and cached(other) is not cached(plain), name
    assert doors.launch_cache(Options(), True) is not doors.launch_cache(Options(), False)


def cached_call(page_size=0, stored=None, prefix=None, **of):
    """stored: the dtype of the caches, if not q's. prefix: pages and length of keys in front of
    those of all sequences."""
    given = dense(**{"tokens": 64, **of})
    caches = {name: given[name] for name in ("k_cache", "v_cache")}
    if page_size:
        batch, tokens = caches["k_cache"].shape[:2]
        given["page_table"] = torch.zeros(batch, tokens // page_size, dtype=torch.int32)
        caches = {name: x.view(-1, page_size, *x.shape[2:]) for name, x in caches.items()}
    given |= {name: x.to(stored or x.dtype) for name, x in caches.items()}
    return given if prefix is None else with_prefix(given, prefix[1], prefix[0])


CACHED_CHANGES = {
    "dtype": {"dtype": torch.float16},
    "seqlen_q": {"seqlen_q": 2},
    "num_heads_q": {"heads": (4, 2)},
    "num_heads_kv": {"heads": (8, 4)},
    "head_dim": {"dims": (56, 64)},
    "head_dim_v": {"dims": (64, 56)},
    "page_size": {"page_size": 16},
    "byte_cache": {"stored": torch.float8_e4m3fn},
}
IN_NO_CACHED_PLAN = {"batch": (5,), "tokens": (128,)}
PREFIXES = (3, 40), (9, 40), (3, 0), (3, torch.tensor([40], dtype=torch.int32)), None


def check_cached_calls_that_differ_in_one_size(host):
    use_cached_calls()
    assert {*CACHED_CHANGES, "device"} == {*CACHED_PLAN}
    for paged in ({}, {"page_size": 32}, {"page_size": 32, "prefix": (4, 40)}):
        changes = [(name, change, True) for name, change in CACHED_CHANGES.items()]
        others = IN_NO_CACHED_PLAN
        if "prefix" in paged:
            others = others | {"prefix": PREFIXES}
            changes = [x for x in changes if x[0] != "byte_cache"]  # two calls and a combination
        changes += [(name, {name: x}, False) for name, values in others.items() for x in values]
        for name, change, in_plan in changes:
            forget_cached_calls()
            first = passed_by(host, cached_call(**paged))
            again = passed_by(host, cached_call(**paged))
            assert (first.checks, again.checks) == (1, 0)
            other = passed_by(host, cached_call(**(paged | change)))
            assert not isinstance(other.result, str), other.result
            assert (other.checks == 0) == (not in_plan), (name, paged)
            of_metadata = with_metadata(cached_call(**(paged | change)), causal=True)
            launches = 2 + ("prefix_len" in of_metadata)
            expect_metadata(host, of_metadata, launches, causal=True)
