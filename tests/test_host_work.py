"""Bounds the Python work of a call by its number of function calls, which unlike time does not
depend on the machine. Stubs replace the Hopper GPU and its operators.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import GPU, H100, ROOT, WITHOUT_HOPPER, cached_calls_of_an_h100, library_double
from torch.nn.attention.flex_attention import create_block_mask

import flashattn3
from flashattn3 import flash_attn_fp8_func, flash_attn_func, flash_attn_with_kvcache, masks
from flashattn3.backends.base import CachedOperators
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.decode_launch import DecodeLaunch
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.call.fields import Options
from flashattn3.call.operands import Tensors
from flashattn3.integrations.segments import Segments
from flashattn3.integrations.transformers import attention
from flashattn3.masks import triton_lists
from flashattn3.quantization import dispatch
from flashattn3.run import cached_plans, quantized
from flashattn3.run import operators as run

PACKAGE = flashattn3.__path__[0]


def profiled(call, observe) -> None:
    """Show each event of a prepared call to the profiler ``observe``."""
    for _ in range(3):
        call()
    sys.setprofile(observe)
    try:
        call()
    finally:
        sys.setprofile(None)


def work_of(call) -> int:
    """Count the Python functions that a prepared call enters and the C functions that the package
    calls."""
    count = 0

    def observe(frame, event, argument):
        nonlocal count
        own = frame.f_code.co_filename.startswith(PACKAGE)
        count += event == "call" or (event == "c_call" and own)

    profiled(call, observe)
    return count


@pytest.fixture
def on_hopper(monkeypatch):
    """Plan CPU tensors for an H100, with operators that return clones of preallocated tensors."""
    q = torch.zeros(2, 128, 4, 64, dtype=torch.bfloat16)
    data, slots = q.to(INT8), torch.zeros(2, 4, 8, 64, 16).to(FP8)
    lse, descale = torch.zeros(2, 4, 128), torch.ones(2, 4, 1)
    results = {"forward": (q, lse), "backward": (q, q, q)}
    results["quantize_qkv"] = (data, descale, data, descale, slots, descale)
    operators = {
        name: lambda *_, found=found: tuple(x.clone() for x in found)
        for name, found in results.items()
    }
    quantize_qkv = SimpleNamespace(default=operators.pop("quantize_qkv"))
    library = library_double(permute_v=None, **operators)
    hopper = HopperBackend(library=lambda: library, only_measured=False)
    for module in (run, quantized):
        monkeypatch.setattr(module, "BACKENDS", (hopper, *WITHOUT_HOPPER))
        monkeypatch.setattr(module, "describe_device", lambda device: H100)
    monkeypatch.setattr(dispatch, "runs_on", lambda name, *device: name == "hopper")
    namespace = SimpleNamespace(quantize_qkv=quantize_qkv)
    monkeypatch.setattr(torch.ops, "flashattn3_hopper", namespace, raising=False)
    caches = run._plan, quantized._checked_once
    for cache in caches:
        cache.cache_clear()
    yield [torch.randn(2, 128, 4, 64).bfloat16() for _ in range(3)]
    for cache in caches:
        cache.cache_clear()


def files_of(call, q) -> list[str]:
    """The package's files with a function to which a prepared call passes q, or a tuple with it, in
    the order in which q comes to them."""
    found = {}

    def observe(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            values = [*frame.f_locals.values()]
            values += [x for value in values if isinstance(value, tuple) for x in value]
            if any(value is q for value in values):
                found[path.removeprefix(PACKAGE + "/")] = None

    profiled(call, observe)
    return [*found]


def all_files_of(call) -> set[str]:
    """The files with a function that a call enters."""
    found = set()
    profiled(call, lambda frame, event, _: event == "call" and found.add(frame.f_code.co_filename))
    return found


def path_in_python() -> tuple[str, ...]:
    """The files that CONTRIBUTING.md lists, up to the Hopper operator."""
    if not (ROOT / "build_support").is_dir():
        pytest.skip("needs a checkout")
    sys.path.insert(0, str(ROOT))
    from build_support.reading import PATH_IN_PYTHON

    return PATH_IN_PYTHON


def test_files_that_q_crosses_to_the_hopper_operator(on_hopper):
    found = files_of(lambda: flash_attn_func(*on_hopper, causal=True), on_hopper[0])
    assert found == [*path_in_python()]


@pytest.mark.skipif(GPU, reason="prepared for the interpreter")
@pytest.mark.parametrize(
    ("backend", "files"),
    [("triton", ("launch.py", "kernels/launch.py")), ("reference", ("backend.py",))],
)
def test_files_that_q_crosses_to_other_backends(backend, files):
    """Triton's kernel follows in kernels/forward.py, the seventh file."""
    q = torch.randn(1, 16, 1, 16).half()
    found = files_of(lambda: flash_attn_func(q, q, q, backend=backend), q)
    assert found == [*path_in_python()[:-1], *(f"backends/{backend}/{file}" for file in files)]


def with_gradients(*tensors):
    leaves = [x.requires_grad_() for x in tensors]
    return lambda: flash_attn_func(*leaves, causal=True)


def both_passes(*tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    dout = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)


# Bounds are a quarter above the counts, which vary with the versions of torch and Python.
EAGER = {
    "forward": (41, lambda *x: partial(flash_attn_func, *x, causal=True)),
    "forward with gradients": (44, with_gradients),
    "both passes": (112, both_passes),
    "8 bits from 16": (134, lambda *x: partial(flash_attn_fp8_func, *x, causal=True)),
}
TINY = 66
CACHED = {"compiled": 115, "cached_on_hopper": 60}
APPEND_ON_HOPPER, KEPT_ON_HOPPER, KEPT_APPEND_ON_HOPPER = 126, 24, 38
NEXT_TOKEN_ON_HOPPER = {"dynamic": 35, "static": 41}
FORWARD_OPERATOR, BACKWARD_OPERATOR = 44, 48
LENGTHS = torch.tensor([700, 100, 224])
PARENTS = torch.arange(-1, 1023)
SEEN = torch.ones(1024, 1024, dtype=torch.bool)
IDS = torch.arange(1024) // 300
BLOCK_MASK = create_block_mask(
    lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), 1, 1, 1024, 1024, "cpu"
)
MASKS = {
    "documents": (36, lambda: masks.documents(LENGTHS, seqlen=1024, causal=True)),
    "prefix_lm": (33, lambda: masks.prefix_lm(LENGTHS[:1], 1024)),
    "blocks": (42, lambda: masks.blocks(SEEN[None, None, :8, :8], 128, 128, seqlen_q=1024)),
    "from_bool": (42, lambda: masks.from_bool(SEEN)),
    "tree": (41, lambda: masks.tree(PARENTS)),
    "from_block_mask": (46, lambda: masks.from_block_mask(BLOCK_MASK)),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_calls_on_hopper(name, on_hopper):
    bound, call_of = EAGER[name]
    assert work_of(call_of(*on_hopper)) <= bound


def test_operators_of_a_compiled_graph_on_hopper(on_hopper):
    """The dispatcher calls Python once in each pass, and not torch's autograd for operators."""
    tensors, options = Tensors(*on_hopper), Options(causal=True)
    operators = torch.ops.flashattn3
    arguments = run.operator_arguments(tensors, options)
    with torch.no_grad():
        out, lse = operators.forward.default(*arguments)
        given = (torch.ones_like(out), None, out, lse, *arguments)
        calls = {
            FORWARD_OPERATOR: lambda: operators.forward.default(*arguments),
            BACKWARD_OPERATOR: lambda: operators.backward.default(*given),
        }
        for bound, call in calls.items():
            assert work_of(call) <= bound
            assert not any("torch/_library" in file for file in all_files_of(call))


@pytest.fixture
def compiled(monkeypatch):
    """Plan cached calls on CPU tensors for an H100, with compiled kernels that do nothing."""
    pytest.importorskip("triton")
    from flashattn3.backends.triton.kernels import variable_launch

    class Starters(dict):
        def get(self, key):
            return lambda *_: None

    def prepared(*arguments):
        launch = variable_launch.VariableLaunch(*arguments)
        launch._starters = Starters()
        return launch

    from flashattn3.backends.triton import cached_launch

    monkeypatch.setattr(cached_launch, "VariableLaunch", prepared)
    with cached_calls_of_an_h100(monkeypatch, *cached_plans.BACKENDS[1:]):
        yield


@pytest.fixture
def cached_on_hopper(monkeypatch):
    """Plan cached calls on CPU tensors for an H100, with an operator that does nothing."""
    library = library_double(decode=lambda *_: None, append=lambda *_: None)
    hopper = HopperBackend(library=lambda: library, only_measured=False)
    with cached_calls_of_an_h100(monkeypatch, hopper, *cached_plans.BACKENDS[1:]):
        yield


def cached_call(length):
    q, cache = (torch.zeros(1, n, 8, 128, dtype=torch.bfloat16) for n in (1, 256))
    given = itertools.count(1) if length == "int" else itertools.repeat(torch.tensor([9]).int())
    return lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=next(given))


@pytest.mark.parametrize("length", ["tensor", "int"])
@pytest.mark.parametrize("backend", CACHED)
def test_a_cached_call(backend, length, request):
    """A length as an int, which grows from call to call, costs no more."""
    request.getfixturevalue(backend)
    assert work_of(cached_call(length)) <= CACHED[backend]


def test_a_cached_call_like_the_one_before_on_hopper(cached_on_hopper, monkeypatch):
    """An operator checks it and finds its launch."""
    call, result = cached_call("tensor"), torch.zeros(1)
    operators = CachedOperators(lambda *_: result, None, None)
    monkeypatch.setattr(DecodeLaunch, "keep", lambda *_: operators)
    call()
    assert call() is result and work_of(call) <= KEPT_ON_HOPPER


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_the_next_token_of_a_model_on_hopper(cache, cached_on_hopper, monkeypatch):
    """A layer finds its launch as a cached call does; the mask of a static cache holds a length."""
    q, k = (torch.zeros(1, 8, n, 128, dtype=torch.bfloat16) for n in (1, 256))
    operators = CachedOperators(lambda *_: q, None, None)
    monkeypatch.setattr(DecodeLaunch, "keep", lambda *_: operators)
    mask, module = None, torch.nn.Module()
    if cache == "static":
        length = torch.tensor([9], dtype=torch.int32)
        mask = Segments(True, cache_seqlens=length, lengths=(1, 256)).as_mask(q.device)

    def call():
        return attention(module, q, k, k, mask, scaling=0.1, position_ids=None, use_cache=True)[0]

    call()
    assert call() is q and work_of(call) <= NEXT_TOKEN_ON_HOPPER[cache]


def appending_call():
    """Return a call that appends a token, with rotary tables."""
    q, new, cache = (torch.zeros(1, n, 8, 128, dtype=torch.bfloat16) for n in (1, 1, 256))
    tables, length = torch.zeros(2, 256, 64), torch.tensor([9]).int()
    named = {"rotary_cos": tables[0], "rotary_sin": tables[1], "cache_seqlens": length}
    return partial(flash_attn_with_kvcache, q, cache, cache, new, new, **named, causal=True)


def test_a_call_that_appends_like_the_one_before_on_hopper(cached_on_hopper, monkeypatch):
    """One operator."""
    call, result = appending_call(), torch.zeros(1)
    operators = CachedOperators(None, None, lambda *_: result)
    monkeypatch.setattr(DecodeLaunch, "keep", lambda *_: operators)
    call()
    assert call() is result and work_of(call) <= KEPT_APPEND_ON_HOPPER


def test_a_cached_call_that_appends_on_hopper(cached_on_hopper):
    """Two operators."""
    assert work_of(appending_call()) <= APPEND_ON_HOPPER


@pytest.mark.parametrize("name", MASKS)
def test_a_mask(name, monkeypatch):
    """Without its launches."""
    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    for launches in ("_launch", "_launch_of_code"):
        monkeypatch.setattr(triton_lists, launches, lambda *_, **about: lambda *_: None)
    monkeypatch.setattr(triton_lists, "_list_launches", lambda *_: (lambda *_: None,) * 2)
    monkeypatch.setattr("flashattn3.masks.arguments.is_checked", lambda device: False)
    bound, build = MASKS[name]
    assert work_of(build) <= bound


def test_a_tiny_call_on_a_cpu():
    q = torch.randn(1, 4, 1, 8)
    assert work_of(lambda: flash_attn_func(q, q, q, backend="reference")) <= TINY


def test_the_count_grows_with_the_work():
    q = torch.randn(1, 4, 1, 8)

    def once():
        return flash_attn_func(q, q, q, backend="reference")

    def twice():
        once()
        once()

    assert work_of(twice) >= 2 * work_of(once)
