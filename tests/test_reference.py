"""The reference backend against plain attention, with tiles so small that cases have several."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from support.cases import FORWARD_CASES
from support.inputs import make_inputs, make_output_gradients
from support.strategies import random_cases
from support.tolerance import check_lse, score_floor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn3 import flash_attn_func
from flashattn3.backends.device import DeviceInfo
from flashattn3.backends.reference import buckets, tiled_call
from flashattn3.backends.reference.backend import BACKEND, ReferenceLaunch
from flashattn3.backends.reference.buckets import ReferenceConfig
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.call.fields import Options, ScoreScale
from flashattn3.call.operands import Tensors, metadata_of
from flashattn3.call.problem import describe
from flashattn3.run.operators import plan_of
from flashattn3_bench.checking import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Case,
    attention,
    check,
    gradients,
)
from flashattn3_bench.checking.cases import dense, varlen
from flashattn3_bench.checking.shapes import NAMED_SHAPES, OTHER_DIMS, PAPER_GRID

CPU = DeviceInfo("cpu", "cpu")
SMALL_TILES = ReferenceConfig(block_m=24, block_n=40)
BY_NAME = {case.name: case for case in FORWARD_CASES}
every_case = pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case.id)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they bring to small tensors, and far more where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def launch_of(
    case: Case, tensors: Tensors, config: ReferenceConfig | None = None
) -> ReferenceLaunch:
    options = case.options()
    window_left, window_right = options.pop("window_size")
    if case.varlen:
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    options = Options(window_left=window_left, window_right=window_right, **options)
    problem = describe(tuple(map(metadata_of, tensors)), options)
    return ReferenceLaunch(problem, config or BACKEND.configure(problem, CPU))


def assert_right(case: Case, dtype: torch.dtype, config: ReferenceConfig | None = None) -> None:
    """out, lse, dq, dk and dv, with and without a gradient of lse, hold the tolerance rule."""
    tensors = make_inputs(case, "cpu", dtype)
    launch = launch_of(case, tensors, config)
    out, lse = launch.forward(tensors)
    reference = attention(tensors, **case.reference_options())
    plain = attention(tensors, **case.reference_options(), dtype=dtype)
    check("out", out, reference[0], plain[0], FORWARD_FACTOR, case, launch.config)
    check_lse(lse, reference[1], case, launch.config)
    dout, random_dlse = make_output_gradients(case, tensors)
    for dlse in (random_dlse, None):
        got = launch.backward(dout, dlse, out, lse, tensors)
        references = gradients(tensors, dout, dlse, **case.reference_options())
        plains = gradients(tensors, dout, dlse, **case.reference_options(), dtype=dtype)
        for name, *values in zip(("dq", "dk", "dv"), got, references, plains, strict=True):
            check(name, *values, GRADIENT_FACTOR, case, launch.config, score_floor(lse))
    for result, like in zip((out, *got), (out, *tensors[:3]), strict=True):
        assert result.dtype == dtype and result.shape == like.shape and result.is_contiguous()


@every_case
def test_float64(case):
    assert_right(case, torch.float64, SMALL_TILES)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=random_cases(max_seqlen=90, head_dims=range(1, 20)))
def test_random_problems(case):
    assert_right(case, torch.float64, SMALL_TILES)


def test_case_names_are_unique():
    names = [case.name for case in (*FORWARD_CASES, *PAPER_GRID, *OTHER_DIMS, *NAMED_SHAPES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_gradient_of_blind_rows_is_zero_whatever_dlse(value):
    case = BY_NAME["causal-empty-rows"]
    tensors = make_inputs(case, "cpu", torch.float32)
    launch = launch_of(case, tensors)
    out, lse = launch.forward(tensors)
    dout, dlse = make_output_gradients(case, tensors)
    blind = lse == -math.inf
    assert blind.any()
    expected = launch.backward(dout, dlse, out, lse, tensors)
    got = launch.backward(dout, dlse.masked_fill(blind, value), out, lse, tensors)
    assert all(map(torch.equal, got, expected))


def test_autocast_does_not_lower_the_precision():
    case = BY_NAME["causal"]
    tensors = make_inputs(case, "cpu", torch.float32)
    launch = launch_of(case, tensors)
    dout, dlse = make_output_gradients(case, tensors)
    plain = launch.forward(tensors)
    plain += launch.backward(dout, dlse, *plain, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        cast = launch.forward(tensors)
        cast += launch.backward(dout, dlse, *cast, tensors)
    assert all(map(torch.equal, cast, plain))


class Elements(TorchDispatchMode):
    """The elements that operators write: the most of one operator, and the sum over all."""

    largest = total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in function._schema.returns]
        if any(alias and not alias.is_write for alias in aliases):
            return result
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                self.total += x.numel()
        return result


@pytest.fixture
def capturing(monkeypatch):
    """As while a CUDA graph is captured: no value may be read on the host."""
    for module in (buckets, tiled_call):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)


@pytest.mark.parametrize("is_varlen", (False, True), ids=("dense", "varlen"))
def test_memory_is_linear_and_a_graph_can_be_captured(is_varlen, capturing):
    """With fake tensors any look at a value raises, as it would end the capture."""
    length = 8192
    options = {"heads": (1, 1), "dims": (8, 8), "causal": True}
    if is_varlen:
        case = varlen("long", (length, 1), (length, 1), seqused_k=(length, 1), **options)
    else:
        case = dense("long", (length, length), batch=1, **options)
    inputs = make_inputs(case, "cpu", torch.float32)
    with FakeTensorMode() as fake, Elements() as elements:
        tensors = Tensors(*(x if x is None else fake.from_tensor(x) for x in inputs))
        launch = launch_of(case, tensors, ReferenceConfig(block_m=1024, block_n=1024))
        out, lse = launch.forward(tensors)
        launch.backward(torch.empty_like(out), torch.empty_like(lse), out, lse, tensors)
    assert 0 < elements.largest <= 2 * 1024 * 1024


@pytest.mark.parametrize("case", [case for case in FORWARD_CASES if case.varlen], ids=str)
def test_varlen_while_a_graph_is_captured(case, capturing):
    assert_right(case, torch.float64, SMALL_TILES)


def test_equal_lengths_that_are_not_neighbours():
    lengths_q, lengths_k = (30, 7, 30, 0, 7, 30), (41, 7, 41, 9, 7, 12)
    used = {"seqused_q": (30, 5, 30, 0, 5, 30), "seqused_k": (11, 7, 11, 3, 7, 0)}
    for options in ({}, used):
        case = varlen("mixed", lengths_q, lengths_k, (6, 2), (16, 8), window=(9, 3), **options)
        assert_right(case, torch.float64, SMALL_TILES)


RAGGED = {"one-long": (512, *[16] * 31), "alike": (40,) * 30, "different": tuple(range(1, 60, 3))}


def elements_of_call(tensors: Tensors, options: dict) -> Elements:
    """Of a forward and a backward."""
    launch = plan_of(tensors, Options(window_right=0, **options)).launch
    with Elements() as elements:
        out, lse = launch.forward(tensors)
        launch.backward(torch.ones_like(out), None, out, lse, tensors)
    return elements


@pytest.mark.parametrize("loose", (1, 100), ids=("tight", "loose-max_seqlen"))
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_varlen_costs_what_its_sequences_cost(lengths, loose):
    q, k, v = torch.randn(3, sum(lengths), 4, 16).unbind()
    edges = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)
    longest = max(lengths) * loose
    together = elements_of_call(
        Tensors(q, k, v, edges, edges), {"max_seqlen_q": longest, "max_seqlen_k": longest}
    )
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    apart = [elements_of_call(Tensors(*(x.unsqueeze(0) for x in part)), {}) for part in parts]
    assert together.total <= 1.3 * sum(elements.total for elements in apart)
    assert together.largest <= 2 * max(q.numel(), *(elements.largest for elements in apart))


# Of key 20: the score of a finite one overflows float32.
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf, 3e38))
@pytest.mark.parametrize(
    "options",
    (
        {"window_right": 0},
        {"window_left": 4, "window_right": 3},
        {"window_left": 6},
        {"window_right": 2, "softcap": 2.0},
        {"window_right": 0, "num_splits": 3},
    ),
    ids=str,
)
@pytest.mark.parametrize("is_varlen", (False, True), ids=("dense", "varlen"))
def test_rows_ignore_a_key_that_they_do_not_see(value, options, is_varlen):
    length, bad = 40, 20
    q, dout = torch.randn(2, 1, length, 4, 8).unbind()
    k, v = torch.randn(2, 1, length, 2, 8).unbind()
    broken = k.clone()
    broken[:, bad] = value
    edges = (torch.tensor([0, length], dtype=torch.int32),) * 2 if is_varlen else ()
    results = []
    for keys in (k, broken):
        tensors = Tensors(q, keys, v)
        if is_varlen:
            tensors = Tensors(*(x[0] for x in tensors[:3]), *edges)
        launch = plan_of(tensors, Options(**options)).launch
        launch = replace(launch, config=ReferenceConfig(16, 12))
        out, lse = launch.forward(tensors)
        given = dout.view_as(out)
        gradients = launch.backward(given, None, out, lse, tensors)
        rows = out, lse.transpose(-1, -2), *gradients
        results.append([x.reshape(length, -1) for x in rows])
    distance = torch.arange(length) - torch.arange(length).unsqueeze(1)  # key - query
    left, right = options.get("window_left", length), options.get("window_right", length)
    visible = (distance >= -left) & (distance <= right)
    clean = ~visible[:, bad]
    assert clean.any() and not clean.all()
    unmixed = ~visible[~clean].any(0)  # keys that only clean rows see
    wanted, got = results
    for name, rows, x, y in zip(
        ("out", "lse", "dq", "dk", "dv"),
        (clean, clean, clean, unmixed, unmixed),
        wanted,
        got,
        strict=True,
    ):
        assert torch.equal(x[rows], y[rows]), name
    assert math.isfinite(value) or value < 0 or got[0][~clean].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_small_call_in_one_tile_is_like_a_large_one(dtype):
    """Two splits take the way of large calls. Scores up to 400, and rows whose scores are -inf."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 9, 2, 16), (3, 11, 2, 16), (3, 11, 2, 24))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    q = 30 * q
    q[1, 3], k[1, :, 1] = 1.0, -math.inf
    found = flash_attn_func(q, k, v, return_lse=True, backend="reference")
    wanted = flash_attn_func(q, k, v, num_splits=2, return_lse=True, backend="reference")
    assert wanted[0][1, 3, 1].eq(0).all() and wanted[1][1, 1, 3] == -math.inf
    for x, y in zip(found, wanted, strict=True):
        assert x.is_contiguous() and x.dtype == y.dtype
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_8_bits_without_descales_in_one_tile(dtype, out_dtype):
    x = 4 * torch.randn((2, 5, 3, 8), generator=torch.Generator().manual_seed(0))
    options = {"softmax_scale": 0.01, "out_dtype": out_dtype, "backend": "reference"}
    q, v = x.to(dtype), x.to(FP8)
    found = flash_attn_func(q, q, v, **options)
    wanted = flash_attn_func(q, q, v, num_splits=2, **options)
    assert found.dtype == (out_dtype or torch.bfloat16) and found.is_contiguous()
    torch.testing.assert_close(found, wanted)


def test_declines_with_a_sentence():
    tensors = make_inputs(BY_NAME["odd"], "cpu", torch.float32)
    problem = launch_of(BY_NAME["odd"], tensors).problem
    assert BACKEND.unavailable_reason(CPU) is None
    assert BACKEND.decline_reason(problem, CPU) is None
    of_float64 = {"dtype": torch.float64, "out_dtype": torch.float64}
    for scale, others, named in (
        ((1e38,), {}, "softmax_scale"),
        ((-1e-40,), {}, "softmax_scale"),
        ((2.0**90, 2.0**-40), {}, "softmax_scale / softcap"),
        ((1e300,), of_float64, "softmax_scale"),
    ):
        changed = replace(problem, score_scale=ScoreScale(*scale), **others)
        assert named in BACKEND.decline_reason(changed, CPU)
