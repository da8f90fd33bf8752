"""Checks of saved tensors that tests/host_checks.py runs: no kernel computes, so they see what is
saved, which errors are raised and what the driver gets."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
from host_cached_checks import events_of
from saved_tensors import (
    AROUND,
    LENGTHS,
    RIGHT,
    WRONG,
    attention_of,
    gradients_of,
    inputs,
    of_two_shapes,
    saved_by,
    saved_of,
    under_compiled_autograd,
    with_hook,
)

from flashattn3 import flash_attn_varlen_func
from flashattn3.backends.hopper.backend import HopperLaunch
from flashattn3.run import bhsd, doors, operators

NODES = "ScaledDotProductFlashAttentionForCpuBackward0", "_AttentionBackward"


def forget_kept_calls() -> None:
    for cache in (doors.launch_cache, bhsd._launch_cache):
        cache.cache_clear()


@contextmanager
def node(in_cpp: bool):
    """Calls have the autograd node in C++, or the one in Python."""
    with pytest.MonkeyPatch.context() as patch:
        if not in_cpp:
            patch.setattr(HopperLaunch, "keep", None)
            forget_kept_calls()
            operators._plan.cache_clear()  # launches keep that function
        yield
    forget_kept_calls()


def calls(is_bhsd: bool):
    """Kinds of calls, each with its tensors; the last two need copies or columns of zeros."""
    for n in LENGTHS:
        for other in ({}, {"dtype": torch.bfloat16}, {"heads": (2, 2)}, {"dv": 32}, {"d": 20}):
            yield inputs(n, **{"d": 64, **other})
    yield [x.detach()[..., 1:].requires_grad_() for x in inputs(64, d=65)]
    few = inputs(4096, d=64)
    yield [few[0].detach()[:, :2].requires_grad_(), *few[1:]]  # a decode kernel runs the forward


def check_what_a_call_saves(host):
    """It depends on the call alone: first or later, whatever ran before, with either node."""
    for is_bhsd in (False, True):
        attention = attention_of(is_bhsd)
        for has_node in (True, False):
            with node(has_node):
                for fresh, tensors in product((True, False), calls(is_bhsd)):
                    if fresh:
                        forget_kept_calls()
                    for _ in range(2):
                        assert saved_by(partial(attention, *tensors)) == saved_of(*tensors, is_bhsd)
                    kind = type(attention(*tensors).grad_fn).__name__
                    assert kind == NODES[1] or has_node


def check_calls_that_change_scores(host):
    """What they save, and the errors for exchanged tensors, are the same whether the operators find
    the launch of a call or Python plans it."""
    for is_bhsd, scores in product(
        (False, True),
        (
            {"sinks": torch.zeros(4, requires_grad=True)},
            {"sinks": torch.zeros(4).half(), "alibi_slopes": torch.zeros(1, 4)},
            {"bias": torch.zeros(1, 4, 72, 72).half().requires_grad_()},
            {"alibi_slopes": torch.zeros(4)},
            {"return_max_logit": True},
        ),
    ):
        attention, tensors = attention_of(is_bhsd, **scores), inputs(72, d=64)
        given = [x for x in scores.values() if isinstance(x, torch.Tensor)]
        wanted = [(tuple(x.shape), x.dtype) for x in given] + saved_of(*tensors, is_bhsd)

        def out_of(*tensors, attention=attention):
            found = attention(*tensors)
            return found[0] if isinstance(found, tuple) else found

        errors = []
        for finds in (True, False):
            with node(finds):
                for _ in range(2):
                    assert saved_by(partial(attention, *tensors)) == wanted
                planned = operators._plan.cache_info()[:2]
                attention(*tensors)
                assert (operators._plan.cache_info()[:2] == planned) == finds
                for kind, index in product(WRONG, range(len(wanted))):
                    side = index - len(given)  # below 0: a tensor that changes scores
                    if kind == "device" or (kind == "shape" and side in (-2, -1, 0, 2)):
                        continue
                    if side < 0 and given[index].dtype == torch.half and given[index].ndim == 1:
                        continue  # sinks may be of 32 bits
                    match = r"^flash_attn\w+: " + ("saved" if side >= 0 else r"\w+\.dtype must")
                    with pytest.raises((ValueError, RuntimeError), match=match) as error:
                        gradients_of(with_hook(out_of, WRONG[kind], index), tensors)
                    errors.append(str(error.value))
        assert errors[: len(errors) // 2] == errors[len(errors) // 2 :]


def check_checkpoints(host):
    """Also where the launches of the forward are no longer kept in the backward."""
    for is_bhsd, scores in product((False, True), SCORES):
        attention = attention_of(is_bhsd, **scores)
        model = attention if scores else of_two_shapes(attention)  # sinks are of all heads
        for around, has_node in product(AROUND.values(), (True, False)):
            with node(has_node):
                for n in LENGTHS:
                    leaves = [x.detach().requires_grad_() for x in inputs(n, d=64)]
                    out = around(model, *leaves)
                    forget_kept_calls()
                    out.sum().backward()
                    assert all(x.grad.shape == x.shape for x in leaves)


def check_exchanged_tensors(host):
    """Copies are read where TMA cannot read the tensors; others are refused with one sentence."""
    names = "k", "q", "v", "lse", "out"
    for is_bhsd, has_node in product((False, True), (True, False)):
        attention, tensors = attention_of(is_bhsd), inputs(72, d=64)
        with node(has_node):
            gradients_of(attention, tensors)
            for unpack in RIGHT.values():
                run = partial(gradients_of, with_hook(attention, unpack), tensors)
                descriptors = [x[1] for x in events_of(host, run) if x[0] == "descriptor"]
                assert all(address % 16 == 0 for address in descriptors)
            for (kind, unpack), (index, name) in product(WRONG.items(), enumerate(names)):
                # The CPU is the GPU here, and k and v may have any number of rows.
                if kind == "device" or (kind == "shape" and name in "kv"):
                    continue
                what = r"\w+" if kind == "shape" else name
                error = RuntimeError if has_node else ValueError
                with pytest.raises(error, match=rf"flash_attn\w+: saved {what}\.{kind} must"):
                    gradients_of(with_hook(attention, unpack, index), tensors)


SCORES = {}, {"sinks": torch.zeros(4, requires_grad=True)}


def check_hooks_that_raise(host):
    """Their errors are passed on, and no tensor is saved twice."""
    for error, is_bhsd, scores in product((RuntimeError, KeyError), (False, True), SCORES):
        seen = []

        def pack(x, seen=seen, error=error):
            seen.append(x)
            if len(seen) == 4:
                raise error("of the hook")

        tensors, attention = inputs(64, d=64), attention_of(is_bhsd, **scores)
        attention(*tensors)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            pytest.raises(error, match="of the hook"),
        ):
            attention(*tensors)
        assert len(seen) == 4


def check_errors_of_calls_that_a_node_gets(host):
    """A call that is invalid is refused as where no call ran before."""
    q, k, v = inputs(64, d=64)
    for is_bhsd, scores in product((False, True), SCORES):
        attention = attention_of(is_bhsd, **scores)
        invalid = [(q, k.float(), v), (q, k[:, :9], v), (q, k[..., :8], v), (q[0], k[0], v[0])]
        calls = [(attention, wrong) for wrong in invalid]
        for wrong in (torch.zeros(3), torch.zeros(4).double(), torch.zeros(2, 4)):
            of_wrong = {"sinks": wrong.requires_grad_()} if scores else {"alibi_slopes": wrong}
            calls.append((attention_of(is_bhsd, **of_wrong), (q, k, v)))
        for call, wrong in calls:
            found = []
            for known in (False, True):
                forget_kept_calls()
                if known:
                    attention(q, k, v)
                with pytest.raises(ValueError, match=r"^flash_attn") as error:
                    call(*wrong)
                found.append(str(error.value))
            assert found[0] == found[1], found


def check_compiled_autograd(host):
    """inductor expects other strides of the nodes' gradients where tokens come first."""
    for is_bhsd, scores in product((False, True), SCORES):
        tensors = inputs(88, d=64)
        found = under_compiled_autograd(attention_of(is_bhsd, **scores), tensors, "aot_eager")
        assert [x.shape for x in found] == [x.shape for x in tensors]


def check_no_query_row(host):
    q, k, v = (torch.zeros(n, 2, 64).half().requires_grad_() for n in (0, 24, 24))
    edges = [torch.tensor(x, dtype=torch.int32) for x in ([0, 0], [0, 24])]
    out = flash_attn_varlen_func(q, k, v, *edges, 1, 24)
    events = events_of(host, out.sum().backward)
    cleared = [x[2] for x in events if x[0] == "memset"]
    assert cleared == [k.numel() * 2, v.numel() * 2]


def check_sinks_without_scores(host):
    """Their gradient is zeros, which Python writes and no kernel, whatever launches are kept."""
    for is_bhsd, shape in product((False, True), ((0, 40, 40), (2, 0, 40), (2, 40, 0))):
        batch, *lengths = shape
        sinks = torch.zeros(4, requires_grad=True)
        attention = attention_of(is_bhsd, sinks=sinks)
        attention(*inputs(64, d=64))
        sides = zip((*lengths, lengths[1]), (4, 2, 2), strict=True)
        tensors = [torch.zeros(batch, n, heads, 64).half() for n, heads in sides]
        for _ in range(2):
            out = attention(*tensors)
            planned = operators._plan.cache_info()[:2]
            (gradient,) = torch.autograd.grad(out.sum(), sinks)
            assert not gradient.any() and operators._plan.cache_info()[:2] != planned
        forget_kept_calls()
