"""Checks that tests/test_host_library.py runs: eager calls with gradients, and appends, over the
operator library that is linked with a CUDA runtime without a GPU. CPU tensors count as a GPU's. No
kernel runs, so the checks read what an operator passes to the driver, never a result.

python tests/host_checks.py LIBRARY [--time]

--time prints the host's time of calls, without the driver. Tensors on a CPU come from malloc:
MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=1000000000 keeps it from asking the system.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from timeit import repeat
from typing import NamedTuple

import host_cached_checks
import host_plan_checks
import host_saved_checks
import host_scaled_checks
import pytest
import torch
from helpers import H100, WITHOUT_HOPPER, forget_cached_calls
from host_cached_checks import events_of, expect_same_events, use_cached_calls
from host_saved_checks import forget_kept_calls
from test_host_work import work_of
from torch.utils.checkpoint import checkpoint

from flashattn3 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    masks,
    rotate_and_quantize,
    use_backend,
)
from flashattn3.backends.hopper import library as hopper_library
from flashattn3.backends.hopper.backend import HopperBackend, HopperLaunch
from flashattn3.call.fields import Options
from flashattn3.call.operands import Tensors
from flashattn3.integrations.segments import Segments
from flashattn3.integrations.transformers import attention, flash_attn_bhsd_func
from flashattn3.run import bhsd, launches, operators
from flashattn3.run.cached_plans import _checked_decode
from flashattn3.run.mask_launches import known_masks

NODE = "ScaledDotProductFlashAttentionForCpuBackward0"
SCORE_NODE = "ScaledDotProductFusedAttentionOverrideableBackward0"
OWN_NODE = "_AttentionBackward"
# Events in which equal calls differ: descriptors are cached, and arguments have words that nothing
# wrote.
DIFFERENT = "descriptor", "strides", "arguments"


def use(path: Path) -> ctypes.CDLL:
    """Plan CPU tensors for an H100 whose operators are the library's."""
    hopper_library.OPS_LIBRARY = path
    library = hopper_library.find_library()
    assert library.error is None, library.error
    host = ctypes.CDLL(str(path))
    host.host_events.restype = ctypes.c_char_p
    launches.has_node = attrgetter("is_cpu")
    launches.nodes_of(library)
    host.host_register_nodes()
    backend = HopperBackend(library=lambda: library, only_measured=False)
    operators.BACKENDS, operators.describe_device = (backend, *WITHOUT_HOPPER), lambda device: H100
    return host


def inputs(seqlen_q, seqlen_k=None, heads=(4, 2), d=64, dv=None, dtype=torch.bfloat16, batch=2):
    """q, k and v of a length that no other check uses: descriptors are cached by their sizes."""
    shapes = ((seqlen_q, heads[0], d), (seqlen_k or seqlen_q, heads[1], d))
    shapes = (*shapes, (seqlen_k or seqlen_q, heads[1], dv or d))
    return [torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in shapes]


class Observed(NamedTuple):
    """Return what a call passes to the driver, its result, and whether Python looked for a plan."""

    events: list[list]
    result: object
    is_planned: bool

    def kinds(self):
        """Layouts of the tensors that a call returns."""
        results = self.result if isinstance(self.result, (tuple, list)) else [self.result]
        return [(x.shape, x.stride(), x.dtype, type(x.grad_fn).__name__) for x in results]

    def without(self, *ignored):
        return [event for event in self.events if event[0] not in ignored]

    def numbers(self, name):
        """Those of events of this name: of a descriptor its address and extents."""
        return [numbers for event, *numbers in self.events if event == name]


def observed(host: ctypes.CDLL, call) -> Observed:
    results, before = [], operators._plan.cache_info()[:2]
    events = events_of(host, lambda: results.append(call()))
    return Observed(events, results[0], operators._plan.cache_info()[:2] != before)


def expect_found(host, call, known, *ignored) -> Observed:
    """Return the first of three equal calls. Python plans it; then the operators find its launches,
    and what it passes to the driver and returns is the same. known: tensors of the call. ignored:
    events that differ."""
    first, *others = (observed(host, call) for _ in range(3))
    assert first.is_planned
    addresses = {x.data_ptr() for x in known if isinstance(x, torch.Tensor)}
    for found in others:
        assert found.kinds() == first.kinds() and not found.is_planned
        expect_same_events(found.without(*ignored), first.without(*ignored), addresses)
    return first


def recorded(host: ctypes.CDLL, call) -> tuple[object, list[list[int]], int]:
    """The result of a call; address and extents of its TMA descriptors; its number of launches."""
    found = observed(host, call)
    return found.result, found.numbers("descriptor"), len(found.numbers("launch"))


def extents(x):
    """Of a TMA descriptor: head_dim, tokens, heads, batch."""
    return [x.shape[3], x.shape[1], x.shape[2], x.shape[0]]


def expect_descriptors(descriptors, *tensors):
    assert descriptors[: len(tensors)] == [[x.data_ptr(), *extents(x)] for x in tensors]


def expect_sums(host, out, tensors, num_launches, *extents_of_sums):
    """The backward stores dk and dv, which have these extents, as the results."""
    gradients, descriptors, launches = recorded(
        host, lambda: torch.autograd.grad(out, tensors, torch.randn_like(out))
    )
    assert launches == num_launches
    results = [x.data_ptr() for x in gradients[1:]]
    stored = zip(results, extents_of_sums, strict=True)
    assert all([address, *extents] in descriptors for address, extents in stored)


def check_divided_heads(host):
    """Few work tiles: each query head has a tile, and the tiles of a KV head are summed by the same
    kernel. In a varlen batch the fourth launch, the first, sorts the sequences."""
    tensors = inputs(76, 92, dv=32)
    out = flash_attn_func(*tensors, causal=True)
    expect_sums(host, out, tensors, 3, [64, 92, 2, 2], [32, 92, 2, 2])
    tensors = [x.detach().flatten(0, 1).requires_grad_() for x in inputs(78, 94, dv=32)]
    edges = [torch.tensor([0, 20, n], dtype=torch.int32) for n in (156, 188)]
    out = flash_attn_varlen_func(*tensors, *edges, 136, 168, causal=True)
    expect_sums(host, out, tensors, 4, [64, 188, 2, 1], [32, 188, 2, 1])


def check_out_of_memory(host):
    """The error is torch's own, on a GPU torch.OutOfMemoryError."""
    q = torch.zeros(1, 1, 64, 128).bfloat16().expand(2**29, 1, 64, 128)  # 8 TiB of out
    k = torch.zeros(1, 8, 64, 128).bfloat16().expand(2**29, 8, 64, 128)
    host_cached_checks.use_cached_calls()
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        flash_attn_with_kvcache(q, k, k)


def check_both_passes(host):
    q, k, v = inputs(72, 88, heads=(4, 4), dv=32)
    out, descriptors, launches = recorded(host, lambda: flash_attn_func(q, k, v, causal=True))
    assert type(out.grad_fn).__name__ == NODE and launches == 1
    assert out.shape == (2, 72, 4, 32) and out.is_contiguous()
    expect_descriptors(descriptors, q, out, k, v)
    dout = torch.randn_like(out)
    gradients, descriptors, launches = recorded(
        host, lambda: torch.autograd.grad(out, (q, k, v), dout)
    )
    assert launches == 3
    dq, dk, dv = gradients
    expect_descriptors([x for x in descriptors if x[0] in (dk.data_ptr(), dv.data_ptr())], dk, dv)
    expect_descriptors([x for x in descriptors if x[0] == dout.data_ptr()], dout)
    for x, gradient in ((q, dq), (k, dk), (v, dv)):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype


def check_bhsd(host):
    """The driver gets the same as from transposed tensors, with one node less for each."""

    def passed(call, leaves, dout):
        """Numbers of all events, with a tensor in place of its address, and the results. Without
        descriptors in the workspace, whose address may be that of a freed one, already known."""
        kept = {}

        def both():
            kept["out"] = out = call(*leaves)
            kept["gradients"] = torch.autograd.grad(out, leaves, dout)

        events, found, known = events_of(host, both), [], True
        names = {x.data_ptr(): i for i, x in enumerate((*leaves, dout, kept["out"]))}
        for event in events:
            if event[0] == "descriptor":
                known = event[1] in names
                event[1] = names.get(event[1])
            if known or event[0] not in ("descriptor", "strides"):
                found.append(event)
        return found, kept

    for dense in (False, True):  # in the memory of q, k and v, heads or tokens come first
        results = []
        for is_bhsd in (False, True):
            leaves = [x.detach() for x in inputs(136 + 8 * dense, 152 + 8 * dense, dv=32)]
            if dense:
                leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
            dout = torch.randn(2, 136 + 8 * dense, 4, 32).bfloat16()
            leaves = [x.transpose(1, 2) if is_bhsd else x for x in leaves]
            leaves = [x.requires_grad_() for x in leaves]
            function = flash_attn_bhsd_func if is_bhsd else flash_attn_func
            results.append((*passed(partial(function, causal=True), leaves, dout), leaves))
        (wanted, _, _), (found, kept, leaves) = results
        assert found == wanted and sum(event[0] == "launch" for event in found) == 4
        out = kept["out"]
        assert type(out.grad_fn).__name__ == NODE and out.is_contiguous()
        assert out.grad_fn.next_functions[0][0].variable is leaves[0]
        for x, gradient in zip(leaves, kept["gradients"], strict=True):
            assert gradient.shape == x.shape and gradient.transpose(1, 2).is_contiguous()
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in inputs(80))
    out, lse = flash_attn_bhsd_func(q, k, v, return_lse=True)  # through transposes
    assert type(out.grad_fn).__name__ == OWN_NODE and (out.shape[1], lse.shape[1]) == (80, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_bhsd_func(q.float(), k, v.float())
    assert type(out.grad_fn).__name__ == NODE and out.dtype == torch.bfloat16
    with torch.no_grad():
        assert flash_attn_bhsd_func(q, k, v).grad_fn is None


def check_operators_of_compiled_graphs(host):
    """A call like an earlier one passes the same to the driver and returns the same kind of
    tensors, without a key or a plan; one that is not, or that needs a copy, has its own plan."""
    registered = torch.ops.flashattn3
    values = 0.3, True, -1, 0, 0.0
    edges = torch.tensor([0, 3, 44, 88, 88], dtype=torch.int32)

    def given(tokens=True, **other):
        made = (x.detach().transpose(1, 2) for x in inputs(**{"seqlen_q": 44, "dv": 32, **other}))
        return [x if tokens else x.contiguous() for x in made]  # come before heads in memory

    def both(tensors, packed, dlse=False):
        arguments = *tensors, *((edges, edges) if packed else (None, None)), *values
        out, lse = registered.forward_bhsd.default(*arguments)
        dout, dlse = torch.zeros_like(out), torch.zeros_like(lse) if dlse else None
        return out, lse, *registered.backward_bhsd.default(dout, dlse, out, lse, *arguments)

    def is_planned(*arguments, **options):
        return observed(host, partial(both, *arguments, **options)).is_planned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bhsd, "is_checked", lambda device: False)
        for packed in (False, True):
            for other in ({}, {"dtype": torch.float16}, {"heads": (2, 2)}, {"d": 96, "dv": 96}):
                tensors = given(**other)
                call = partial(both, tensors, packed)
                expect_found(host, call, (*tensors, edges), "descriptor", "strides")
            assert is_planned(given(tokens=False), packed) == packed  # rows are a copy if packed
            assert not is_planned(given(), packed)
            assert is_planned(given(), packed, dlse=True)
            for other in ({"batch": 1}, {"seqlen_q": 43}, {"heads": (8, 2)}, {"dv": 64}):
                if not packed:
                    assert is_planned(given(**other), packed)
            unaligned = [torch.zeros(2, 4, 44, 65).bfloat16()[..., 1:] for _ in range(3)]
            assert all(is_planned(unaligned, packed) for _ in range(2))
        operator = registered.forward_bhsd.default
        tensors = given()
        with pytest.raises(ValueError, match=r"cu_seqlens_q.dtype must be torch.int32"):
            operator(*tensors, edges.long(), edges, *values)
        with pytest.raises(ValueError, match=r"k.dtype must be torch.bfloat16"):
            operator(tensors[0], tensors[1].half(), tensors[2], None, None, *values)


def check_calls_like_an_earlier_one(host):
    """Such a call finds its launch without Python, passes the same to the driver and returns the
    same. Any other call is checked as the first one was."""

    def given(is_bhsd, **other):
        tensors = (x.detach() for x in inputs(**{"seqlen_q": 56, **other}))
        return [x.transpose(1, 2) if is_bhsd else x for x in tensors]

    def run(tensors, is_bhsd, gradients, **options):
        """The results of a call and of its gradient."""
        function = flash_attn_bhsd_func if is_bhsd else flash_attn_func
        leaves = [x.detach().requires_grad_(gradients) for x in tensors]
        learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        found = function(*leaves, causal="mask" not in options, **options)
        results = list(found) if isinstance(found, tuple) else [found]
        if gradients:
            ones = torch.ones_like(results[0])
            results.extend(torch.autograd.grad(results[0], leaves + learned, ones))
        return results

    def is_planned_in_python(*arguments, **options):
        return observed(host, partial(run, *arguments, **options)).is_planned

    for is_bhsd, gradients in itertools.product((False, True), repeat=2):
        forget_kept_calls()
        for other in ({}, {"dtype": torch.float16}, {"heads": (2, 2)}, {"dv": 32}):
            tensors = given(is_bhsd, **other)
            first = expect_found(
                host, partial(run, tensors, is_bhsd, gradients), tensors, *DIFFERENT
            )
            assert len(first.numbers("launch")) == 1 + gradients * 3
        assert not is_planned_in_python(given(is_bhsd), is_bhsd, gradients)
        for other in ({"batch": 1}, {"seqlen_q": 57}, {"heads": (8, 2)}, {"dv": 16}):
            assert is_planned_in_python(given(is_bhsd, **other), is_bhsd, gradients)
            assert not is_planned_in_python(given(is_bhsd, **other), is_bhsd, gradients)
        unaligned = [torch.zeros(2, 4, 4, 65).bfloat16()[..., 1:] for _ in range(3)]
        for _ in range(2):
            assert is_planned_in_python(unaligned, is_bhsd, gradients)
        assert is_planned_in_python(given(is_bhsd), is_bhsd, gradients, softmax_scale=0.3)
        for score in (
            {"return_lse": True},  # the nodes in C++ differentiate out alone
            {"return_max_logit": True},
            {"sinks": torch.randn(4)},
            {"sinks": torch.randn(4).bfloat16()},
            {"alibi_slopes": torch.rand(4)},
            {"alibi_slopes": torch.rand(2, 4), "sinks": torch.randn(4)},
            {"sinks": torch.randn(4), "return_max_logit": True},
            {"bias": torch.randn(1, 4, 56, 56).bfloat16()},
            {"bias": torch.randn(2, 1, 56, 56).bfloat16(), "sinks": torch.randn(4)},
            {"mask": masks.documents([20, 36], causal=True)},
            {"mask": masks.window(56, 9, 0), "sinks": torch.randn(4)},
        ):
            for name in {"sinks", "bias"} & {*score}:
                score[name].requires_grad_(gradients)
            tensors = given(is_bhsd)
            call = partial(run, tensors, is_bhsd, gradients, **score)
            expect_found(host, call, (*tensors, *score.values()), *DIFFERENT)
        with use_backend("reference"):
            assert is_planned_in_python(given(is_bhsd), is_bhsd, gradients)
        function = flash_attn_bhsd_func if is_bhsd else flash_attn_func
        meta = [x.to("meta").requires_grad_(gradients) for x in given(is_bhsd)]
        out = function(*meta, causal=True)
        assert out.is_meta and out.shape == (2, 56, 4, 64)
        q, k, v = given(is_bhsd)
        for other, message in (
            (k.half(), "k.dtype must be torch.bfloat16"),
            (k.to("meta"), "k.device must be cpu"),  # torch computes its own operators with such
            (k.to_sparse(), "k.layout must be torch.strided"),  # no operator takes it
        ):
            for score in ({}, {"sinks": torch.zeros(4)}):
                function(q.requires_grad_(gradients), k, v, causal=True, **score)
                with pytest.raises((TypeError, ValueError), match=rf"func: {message}"):
                    function(q, other, v, causal=True, **score)


def check_few_queries_of_many_keys(host):
    """A decode kernel runs the forward of such a call as it runs the cached call, with an autograd
    node in C++ if there are gradients."""
    use_cached_calls()
    scores = {}, {"sinks": torch.zeros(32)}
    for batch, is_bhsd, gradients, more in itertools.product(
        (1, 3), (False, True), (False, True), scores
    ):
        forget_kept_calls()
        shapes = (2, 32), (2000 + batch, 8), (2000 + batch, 8)
        tensors = [torch.zeros(batch, *shape, 128).bfloat16() for shape in shapes]
        options = {"causal": True, **more}
        cached = observed(host, partial(flash_attn_with_kvcache, *tensors, **options))
        leaves = [x.transpose(1, 2) if is_bhsd else x for x in tensors]
        leaves = [x.requires_grad_(gradients) for x in leaves]
        call = partial(flash_attn_bhsd_func if is_bhsd else flash_attn_func, *leaves, **options)
        found = expect_found(host, call, tensors, *DIFFERENT)
        assert found.numbers("launch") == cached.numbers("launch")
        out = found.result
        assert out.shape == tensors[0].shape and out.is_contiguous()
        if gradients:
            assert type(out.grad_fn).__name__ == (SCORE_NODE if more else NODE)
            assert recorded(host, partial(torch.autograd.grad, out, leaves, out))[2] >= 3
        else:
            assert call(return_lse=True)[1].shape == (batch, 32, 2)


def check_few_queries_of_many_keys_in_packed_batches(host):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bhsd, "is_checked", lambda device: False)
        edges = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (1, 900)]
        shapes = (32, 2), (8, 1800), (8, 1800)
        tensors = [torch.zeros(1, *shape, 128).bfloat16() for shape in shapes]
        operator = torch.ops.flashattn3.forward_bhsd.default
        call = partial(operator, *tensors, *edges, 0.3, True, -1, 0, 0.0)
        found = expect_found(host, call, tensors, *DIFFERENT)
        decode, _ = found.numbers("launch")  # the second clears other rows
        assert decode[0] > H100.num_sms
        assert [x.shape for x in found.result] == [(1, 2, 32, 128), (1, 32, 2)]


def check_layers_like_an_earlier_one(host):
    """A layer of a model finds the launch of the function for its layout and options."""
    layer = torch.nn.Module()
    layer.is_causal = True
    cases = (
        ({}, {"causal": True}),
        ({"is_causal": False, "scaling": 0.2}, {"softmax_scale": 0.2}),
        (
            {"sliding_window": 9, "softcap": 7.0},
            {"causal": True, "window_size": (8, 0), "softcap": 7.0},
        ),
        ({"sliding_window": 9, "is_causal": False}, {"window_size": (8, 8)}),
    )
    for options, of_function in cases:
        forget_kept_calls()
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in inputs(64)]
        wanted = options_of(flash_attn_bhsd_func(*leaves, **of_function))
        for _ in range(3):
            out, _ = attention(layer, *leaves, None, **options)
            assert options_of(out) == wanted
        before = operators._plan.cache_info()
        attention(layer, *leaves, None, **options)
        with torch.no_grad():
            attention(layer, *leaves, None, **options)
        assert operators._plan.cache_info() == before


def check_gradients_that_tma_cannot_read(host):
    q, k, v = inputs(40, heads=(2, 2))
    flash_attn_func(q, k, v).sum().backward()  # an expanded gradient
    assert q.grad.shape == q.shape
    out = flash_attn_func(q, k, v)
    unaligned = torch.randn(out.numel() + 1).bfloat16()[1:].view_as(out)
    _, descriptors, launches = recorded(host, lambda: out.backward(unaligned))
    assert launches == 3 and unaligned.data_ptr() not in [x[0] for x in descriptors]


def check_autograd_rules(host):
    q, k, v = inputs(104)
    out = flash_attn_func(q, k, v)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out = flash_attn_func(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
    out = flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(dq.sum(), q)
    checkpoint(flash_attn_func, q, k, v, use_reentrant=False).sum().backward()
    only_k = [x.detach().requires_grad_(x is k) for x in (q, k, v)]
    flash_attn_func(*only_k).sum().backward()
    assert [x.grad is None for x in only_k] == [True, False, True]
    with torch.no_grad():
        assert flash_attn_func(q, k, v).grad_fn is None


def check_a_plan_made_for_inference(host):
    q, k, v = inputs(120)
    with torch.inference_mode():
        flash_attn_func(q, k, v)
    with torch.autograd.graph.save_on_cpu():
        out = flash_attn_func(q, k, v)
    assert type(out.grad_fn).__name__ == NODE
    out.sum().backward()


def check_calls_without_the_node(host):
    q, k, v = inputs(48)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert type(out.grad_fn).__name__ == type(lse.grad_fn).__name__ == OWN_NODE
    edges = torch.tensor([0, 48, 96], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_varlen_func(*rows, edges, edges, 48, 48)
    assert type(out.grad_fn).__name__ == OWN_NODE
    shifted = torch.randn(q.numel() + 1).bfloat16()[1:].view_as(q).requires_grad_()
    for tensors in (inputs(48, d=20), inputs(48, dv=36), (shifted, k, v)):
        forget_kept_calls()
        assert type(flash_attn_func(*tensors).grad_fn).__name__ == OWN_NODE
        flash_attn_func(q, k, v)  # now there are launches for these options
        assert type(flash_attn_func(*tensors).grad_fn).__name__ == NODE


def check_a_bias(host):
    """The forward reads it, and a copy where rows are not aligned. One work tile stores its
    gradient, two add to it; the sums of more, and zeros where a mask hides blocks, are one more
    launch."""
    for batch, shape, keys, causal, num_launches, shared in (
        (2, (2, 4), 136, False, 3, False),
        (2, (1, 4), 136, True, 3, False),
        (3, (1, 4), 136, False, 4, True),
        (2, (2, 1), 131, False, 4, True),
        (2, (2, 4), 131, True, 4, False),
    ):
        q = torch.randn(batch, 80, 4, 64).bfloat16().requires_grad_()
        k, v = (torch.randn(batch, keys, 4, 64).bfloat16().requires_grad_() for _ in range(2))
        bias = torch.randn(*shape, 80, keys).bfloat16().requires_grad_()
        call = partial(flash_attn_func, q, k, v, causal=causal, bias=bias)
        out, descriptors, forward = recorded(host, call)
        assert forward == 1
        read = [address for address, *extents in descriptors if extents == [keys, 80, *shape[::-1]]]
        assert len(read) == 1 and (read[0] == bias.data_ptr()) == (keys % 8 == 0)
        inputs_of = (q, k, v, bias)
        grad = partial(torch.autograd.grad, out, inputs_of, torch.randn_like(out))
        gradients, descriptors, backward = recorded(host, grad)
        assert backward == num_launches
        assert [x.shape for x in gradients] == [x.shape for x in inputs_of]
        assert gradients[3].is_contiguous()
        stored = [batch, 4] if shared else list(shape)
        extents = [keys, 80, *stored[::-1]]
        assert sum(found == extents for _, *found in descriptors) >= 1


def check_a_mask(host):
    """Kernels read the mask's own tensors: the forward the lists of queries, the backward those of
    keys, in a deterministic call with turns. An earlier call of these sizes had no mask."""

    def expect_lists(events, lists, *numbers):
        """Returns the word behind the lists in the main kernel's arguments."""
        (words,) = (words for name, *words in events if name == "arguments")
        at = words.index(lists.entries.data_ptr())
        tensors = lists.entries, lists.work, lists.tiles
        assert words[at : at + 3] == [x.data_ptr() for x in tensors]
        halves = [word >> shift & 2**32 - 1 for word in words[at + 3 : at + 6] for shift in (0, 32)]
        assert halves[:5] == [*numbers, len(lists.tiles)]
        return words[at + 6]

    for d, of_batch, of_heads in ((64, 1, 1), (128, 2, 4), (128, 1, 4), (40, 2, 1)):
        tensors = inputs(200, 300, heads=(4, 2), d=d)
        mask = masks.from_bool(torch.rand(of_batch, of_heads, 200, 300) < 0.5)
        steps = of_heads if of_batch > 1 else 0, int(of_heads > 1)  # from list to list
        for deterministic in (False, True):
            attend = partial(flash_attn_func, *tensors, deterministic=deterministic)
            attend()
            for later in (False, True):  # the operators find the launch
                events, out, is_planned = observed(host, partial(attend, mask=mask))
                expect_lists(events, mask.of_queries, *steps, 2, 5)
                assert type(out.grad_fn).__name__ == (OWN_NODE if deterministic else NODE)
                grad = partial(torch.autograd.grad, out, tensors, torch.ones_like(out))
                events, gradients, backward_is_planned = observed(host, grad)
                assert [x.shape for x in gradients] == [x.shape for x in tensors]
                turns = expect_lists(events, mask.of_keys, *steps, 3, 4)
                assert (turns != 0) == deterministic
                kept = later and not deterministic
                assert (is_planned or backward_is_planned) != kept
    of = Tensors(*(x.detach() for x in tensors), *(None,) * 7, *mask.tensors)
    launch = operators.launch_of(of, Options())
    for name, value, message in (
        ("mask_work_q", of.mask_work_q[:, :, :1], r"shape must be \(2, 1, 2, 4\), got"),
        ("mask_tiles_q", of.mask_tiles_q.int(), "must be int64, got another dtype"),
        (
            "mask_entries_q",
            torch.zeros(21).int()[1:].view(2, 1, 2, 5),
            "must be at a multiple of 16",
        ),
    ):
        with pytest.raises(RuntimeError, match=rf"forward: {name[:-2]}\.?.*{message}"):
            launch.forward(of._replace(**{name: value}))


def check_calls_with_a_mask_that_differ_in_one_property(host):
    """The launches that the operators find by a mask object are those that Python plans, whichever
    other calls with this object, of its sizes, or without a mask they have kept before."""

    def given(**other):
        return [x.detach() for x in inputs(56, **other)]

    def strided(which):
        """Memory of heads before tokens, or of rows that are longer than head_dim."""
        tensors = given()
        x = tensors[which]
        if which == 1:
            tensors[1] = x.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            tensors[which] = torch.nn.functional.pad(x, (0, 64))[..., :64]
        return tensors

    mask, other = masks.documents([20, 36], causal=True), masks.documents([30, 26], causal=True)
    alive = []

    def passes(make, mask, gradients, options):
        """Launches of a call with new tensors, and whether each one has the lists of the mask; the
        results' layouts; whether Python looked for a plan. TMA descriptors are those of q, k and v.
        """
        tensors, results = [x.requires_grad_(gradients) for x in make()], []
        alive.append(tensors)

        def both():
            results.append(flash_attn_func(*tensors, mask=mask, **options))
            if gradients:
                ones = torch.ones_like(results[0])
                results.extend(torch.autograd.grad(results[0], tensors, ones))

        events, _, planned = observed(host, both)
        own = {x.data_ptr(): x for x in tensors}
        for (name, *extents), (_, *strides) in itertools.pairwise(events):
            if name == "descriptor" and extents[0] in own:  # one of earlier memory may be cached
                x = own[extents[0]]
                assert extents[1:] == [x.shape[axis] for axis in (3, 1, 2, 0)]
                for axis, stride in zip((1, 2, 0), strides, strict=True):
                    assert x.shape[axis] == 1 or stride == 2 * x.stride(axis)
        sides = () if mask is None else (mask.of_queries, mask.of_keys)
        lists = [[x.data_ptr() for x in side] for side in sides]
        found = []
        for name, *words in events:
            if name == "arguments":
                found.append(any(words[i : i + 3] in lists for i in range(len(words))))
            elif name == "launch":
                found.append(words)
        kinds = [(x.shape, x.stride(), x.dtype) for x in results]
        return (found, kinds), planned

    calls = [
        (given, mask, {}),
        (partial(given, dtype=torch.float16), mask, {}),
        (partial(given, batch=1), mask, {}),
        (partial(given, heads=(2, 2)), mask, {}),
        (partial(given, heads=(4, 4)), mask, {}),
        (partial(given, d=128), mask, {}),
        (given, other, {}),
        (given, None, {}),
        (given, mask, {"softmax_scale": 0.3}),
        (given, mask, {"softcap": 20.0}),
        (given, mask, {"sinks": torch.zeros(4)}),
        *((partial(strided, which), mask, {}) for which in range(3)),
    ]
    flash_attn_func(*given())  # clears the counters of the stream
    for gradients in (False, True):
        wanted = []
        for make, of_call, options in calls:
            forget_kept_calls()
            known_masks.clear()
            found, planned = passes(make, of_call, gradients, options)
            assert planned
            wanted.append(found)
        forget_kept_calls()
        known_masks.clear()
        for kept in (False, True, True):
            for (make, of_call, options), call in zip(calls, wanted, strict=True):
                found, planned = passes(make, of_call, gradients, options)
                assert found == call, (make, options)
                is_strided = getattr(make, "func", None) is strided  # a launch serves all strides
                assert planned == (not kept and not is_strided), (make, options)


def check_the_life_of_a_mask(host):
    """The operators keep its tensors until neither its user nor a gradient needs them, and no node
    has a Python object but where it has no tensor to save or hooks would get it."""

    def number_of(out):
        return int(out.grad_fn._saved_dropout_p)

    sinks, tensors = torch.zeros(4), inputs(200)
    kept = masks.window(200, 20, 0)
    found = [flash_attn_func(*tensors, mask=kept) for _ in range(2)]
    nothing = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    for hooks, scores in ((nullcontext(), {}), (nothing, {}), (nullcontext(), {"sinks": sinks})):
        mask = masks.window(200, 30, 0)
        with hooks:
            out = [flash_attn_func(*tensors, mask=mask, **scores) for _ in range(2)][1]
        number = number_of(out)
        cache = launches._with_node[number]
        assert number != number_of(found[1])
        has_object = bool(scores) or hooks is nothing
        assert bool(out.grad_fn.metadata) == has_object
        assert scores or (out.grad_fn._saved_attn_mask is None) == has_object
        identity, life = id(mask), [weakref.ref(x) for x in mask.tensors]
        assert identity in known_masks
        del mask
        assert identity not in known_masks and number in launches._with_node
        torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
        given = *(x.detach() for x in tensors), None, None, scores.get("sinks"), None, None
        find = partial(cache.operators.forward_scores, number, True, *given)
        assert find()[0] is not None
        assert all(x() is not None for x in life)
        del out
        assert number not in launches._with_node
        assert find()[0] is None
        del cache, find
        assert all(x() is None for x in life)
    torch.autograd.grad(found, tensors, [torch.ones_like(x) for x in found])


def check_a_mask_that_is_new_in_inference_mode(host):
    """Its first call may be in this mode, whose tensors autograd does not save."""
    tensors, mask = inputs(104), masks.window(104, 30, 0)
    with torch.inference_mode():
        flash_attn_func(*tensors, mask=mask)
    out = flash_attn_func(*tensors, mask=mask)
    assert type(out.grad_fn).__name__ == NODE
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def check_refusals(host):
    q, k, v = inputs(32)
    operator = torch._scaled_dot_product_flash_attention_for_cpu
    number = flash_attn_func(q, k, v).grad_fn._saved_dropout_p
    for wrong in (0.0, number + 0.5, -1.0):
        with pytest.raises(RuntimeError, match="dropout_p must be the number of a call's options"):
            operator(q, k, v, wrong)
    for given in ({"is_causal": True}, {"attn_mask": q.detach()}, {"scale": 0.5}):
        with pytest.raises(RuntimeError, match="must be unset: the options have a number"):
            operator(q, k, v, number, **given)
    with pytest.raises(RuntimeError, match=r"^flash_attn_func: v\.shape\[-3\] must be 31"):
        operator(q, k[:, :31], v, number)
    of_score, sinks = (
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
        torch.zeros(4),
    )
    for given in ((sinks, 0.0, False, False), (sinks, number, True, False)):
        with pytest.raises(RuntimeError, match=r"must be (the number|unset)"):
            of_score(q, k, v, *given, scale=0)
    for score, scale in ((sinks, None), (sinks, 3), (sinks, 0.5), (None, 0)):
        with pytest.raises(RuntimeError, match="scale must be the index of attn_bias"):
            of_score(q, k, v, score, number, scale=scale)


def check_python_work(host):
    """As in tests/test_host_work.py. The backward is all C++."""
    leaves = inputs(24)
    dout = torch.randn_like(leaves[0])
    assert work_of(lambda: flash_attn_func(*leaves, causal=True)) <= 29
    plain, sinks = [x.detach() for x in leaves], torch.zeros(4, requires_grad=True)
    assert work_of(lambda: flash_attn_func(*plain, causal=True)) <= 28
    assert work_of(lambda: flash_attn_func(*leaves, causal=True, sinks=sinks)) <= 31
    layers = [torch.nn.Module() for _ in range(2)]
    for i, layer in enumerate(layers):
        layer.is_causal, layer.layer_idx = True, i
    turned, positions = [x.transpose(1, 2) for x in leaves], torch.arange(24)[None]
    attention(layers[0], *turned, None, position_ids=positions)  # reads the positions
    later = partial(attention, layers[1], *turned, None, position_ids=positions, use_cache=False)
    assert work_of(later) <= 27

    def work_of_backward(out):
        return work_of(lambda: out.backward(dout, retain_graph=True))

    out = flash_attn_func(*leaves, causal=True)
    assert work_of_backward(out) <= work_of_backward(leaves[0] + leaves[1].sum()) + 1


@torch.no_grad()
def check_the_next_token_of_a_model(host):
    """A layer passes on what its cached call passes, and finds the launch of an earlier one."""
    use_cached_calls()
    tensors = {name: x for name, x in host_cached_checks.dense().items() if x.ndim == 4}
    bhsd = [x.transpose(1, 2) for x in tensors.values()]
    ends, begins = (torch.full((3,), n, dtype=torch.int32) for n in (9, 2))
    for segments in (
        Segments(True),
        Segments(True, 5),
        Segments(True, cache_seqlens=ends),
        Segments(True, cache_seqlens=ends, cache_leftpad=begins),
    ):
        lengths = tuple(x.shape[2] for x in bhsd[:2])
        mask = segments._replace(lengths=lengths).as_mask(ends.device)
        found = Segments.of_mask(mask, 3, lengths, None)
        lengths = {"cache_seqlens": found.cache_seqlens, "cache_leftpad": found.cache_leftpad}
        options = {"causal": True, "window_size": (found.left, 0), "softmax_scale": 0.1}
        forget_cached_calls()
        call = partial(flash_attn_with_kvcache, **tensors, **lengths, **options)
        call()
        wanted, checks = events_of(host, call), _checked_decode.cache_info()
        layer = partial(attention, None, *bhsd, mask, scaling=0.1, use_cache=True)
        known = {x.data_ptr() for x in (mask, *tensors.values())}
        expect_same_events(events_of(host, layer), wanted, known)
        assert _checked_decode.cache_info() == checks
        assert [event[0] for event in wanted].count("launch") == 1


def options_of(out):
    """The options whose number the autograd node of out has saved."""
    found = launches._with_node[int(out.grad_fn._saved_dropout_p)].options
    return found._replace(backend=None, window_right=0 if found.causal else found.window_right)


def times_of_calls() -> dict[str, float]:
    """Microseconds of the fastest of 40 samples of 50 calls."""
    q, k, v = inputs(64, heads=(2, 2))
    plain = [x.detach() for x in (q, k, v)]
    dout = torch.ones_like(q)

    def both(**scores):
        leaves = [q, k, v, *(x for x in scores.values() if getattr(x, "requires_grad", False))]
        torch.autograd.grad(flash_attn_func(q, k, v, **scores), leaves, dout)

    sinks, plain_sinks = torch.zeros(2, requires_grad=True), torch.zeros(2)
    bias = q.new_zeros(1, 2, 64, 64, requires_grad=True)
    mask = masks.documents([20, 44], causal=True)

    lengths = torch.full((2,), 40, dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    pages = [x.detach().view(8, 16, 2, 64) for x in (k, v)]
    prefix = {"prefix_page_table": table[:1], "prefix_len": 30}
    options = {"causal": True, "cache_seqlens": lengths}
    cached = partial(flash_attn_with_kvcache, plain[0][:, :1], **options)
    new = {"k": plain[1][:, :1].clone(), "v": plain[2][:, :1].clone()}
    rotary = dict(zip(("rotary_cos", "rotary_sin"), torch.zeros(2, 64, 32), strict=True))
    edges = torch.arange(3, dtype=torch.int32)
    rows = [plain[0][:, 0].contiguous(), *plain[1:]]
    of_rows = partial(flash_attn_with_kvcache, *rows, cu_seqlens_q=edges, max_seqlen_q=1, **options)
    codes = [x.to(torch.float8_e4m3fn) for x in plain[1:]]
    one = {"k_descale": torch.ones(()), "v_descale": torch.ones(())}
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]

    def both_of_bhsd():
        torch.autograd.grad(flash_attn_bhsd_func(*turned), turned, dout)

    def both_of_transposes():
        views = [x.transpose(1, 2) for x in turned]
        torch.autograd.grad(flash_attn_func(*views), turned, dout)

    def both_of_a_graph(edges=None):
        given = *(x.detach() for x in turned), edges, edges, None, True, -1, 0, 0.0
        out, lse = torch.ops.flashattn3.forward_bhsd.default(*given)
        torch.ops.flashattn3.backward_bhsd.default(dout, None, out, lse, *given)

    embedded = {**dict(zip("qkv", plain, strict=True)), **rotary}
    scaled = rotate_and_quantize(**embedded)

    def pair_of_8_bits():
        flash_attn_func(*rotate_and_quantize(**embedded))

    # Of one row of q and k, because a CPU takes time for the products that rotate them back.
    row = {"rows": (1, 1), "heads": (1, 1)}
    pair_with_gradients, both_of_pair = host_scaled_checks.both_passes(**row)

    calls = {
        "forward": lambda: flash_attn_func(*plain),
        "forward with gradients": lambda: flash_attn_func(q, k, v),
        "forward and backward": both,
        "forward, sinks": lambda: flash_attn_func(*plain, sinks=plain_sinks),
        "forward with gradients, sinks": lambda: flash_attn_func(q, k, v, sinks=sinks),
        "forward and backward, sinks": partial(both, sinks=sinks),
        "forward and backward, bias": partial(both, bias=bias),
        "forward, mask": lambda: flash_attn_func(*plain, mask=mask),
        "forward with gradients, mask": lambda: flash_attn_func(q, k, v, mask=mask),
        "forward and backward, mask": partial(both, mask=mask),
        "forward and backward, heads first": both_of_bhsd,
        "forward and backward, transposed": both_of_transposes,
        "operators of a compiled graph": both_of_a_graph,
        "operators of a compiled graph, packed": partial(both_of_a_graph, edges * 64),
        "rotate_and_quantize": lambda: rotate_and_quantize(**embedded),
        "forward of 8 bits": lambda: flash_attn_func(*scaled),
        "rotate_and_quantize and forward of 8 bits": pair_of_8_bits,
        "rotate_and_quantize and forward of 8 bits, with gradients": pair_with_gradients,
        "rotate_and_quantize and 8 bits, forward and backward": both_of_pair,
        "cached call": partial(cached, *plain[1:]),
        "cached call, paged": partial(cached, *pages, page_table=table),
        "cached call with a prefix": partial(cached, *pages, page_table=table, **prefix),
        "cached call with new keys": partial(cached, *plain[1:], **new),
        "cached call with new keys, rotary": partial(cached, *plain[1:], **new, **rotary),
        "cached call with cu_seqlens_q": of_rows,
        "cached call with cache_batch_idx": partial(cached, *plain[1:], cache_batch_idx=edges[:2]),
        "cached call of 8 bits": partial(cached, *codes),
        "cached call of 8 bits, one descale": partial(cached, *codes, **one),
        "cached call with out": partial(cached, *plain[1:], out=plain[0][:, :1].clone()),
    }
    return {name: min(repeat(call, repeat=40, number=50)) * 2e4 for name, call in calls.items()}


def print_times() -> None:
    """Times of calls with this autograd node and with the one in Python."""
    torch.set_num_threads(1)
    use_cached_calls()
    bhsd.is_checked = lambda device: False
    with host_scaled_checks.quantization():
        with_node = times_of_calls()
        HopperLaunch.keep = None
        operators._plan.cache_clear()
        forget_kept_calls()
        host_scaled_checks.forget()
        without = times_of_calls()
    for name, time in with_node.items():
        print(f"{name}: {time:.1f} us, without the node in C++ {without[name]:.1f}")


def main() -> None:
    host = use(Path(sys.argv[1]).resolve())
    if sys.argv[2:] == ["--time"]:
        return print_times()
    torch.manual_seed(0)
    named = globals() | vars(host_cached_checks) | vars(host_saved_checks) | vars(host_plan_checks)
    named |= vars(host_scaled_checks)
    wanted = sys.argv[2] if sys.argv[2:] else "check_"
    checks = [check for name, check in named.items() if name.startswith(wanted)]
    for check in checks:
        check(host)
        print(check.__name__)


if __name__ == "__main__":
    main()
