"""Random legal problems, forward and backward, against float64.

FLASHATTN3_RANDOM_EXAMPLES: how many for each backend and chunk, 8 unless said.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from helpers import EVERY_BACKEND, GPU, SIXTEEN_BIT, TRITON_DTYPES, forward_holds, gradients_hold
from hypothesis import HealthCheck, given, seed, settings
from support.cases import call
from support.fp8 import make_fp8_inputs, scales_of_v
from support.inputs import make_inputs, make_output_gradients
from support.rounding import FLOAT32_EPS, dropped_values
from support.strategies import random_cases, random_fp8_problems
from support.tolerance import (
    FP8_DROPPED_WEIGHT,
    FP8_EXP2_ERROR,
    check_lse,
    check_rounded_p,
    score_floor,
)

from flashattn3 import BlockScaled
from flashattn3_bench.checking import (
    E4M3_TRUNCATION,
    FORWARD_FACTOR,
    attention,
    check,
    score_rounding,
)

# On a GPU nearly every example of Triton's is a set of kernels to compile: few head dims, and
# chunks that pytest-xdist can spread.
HEAD_DIMS = {
    "hopper": range(1, 257),
    "triton": (40, 64) if GPU else range(8, 97),
    "reference": range(1, 97),
}
DTYPES = {
    "hopper": SIXTEEN_BIT,
    "triton": TRITON_DTYPES,
    "reference": (torch.float32, torch.bfloat16),
}
NUM_EXAMPLES = int(os.environ.get("FLASHATTN3_RANDOM_EXAMPLES", 8))
MAX_SEQLEN = 200 if GPU else 100
CHUNKS = (0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 6)))
few_chunks = pytest.mark.interpreted(sweep=lambda chunk, **_: chunk > 2)  # without a GPU


def of_chunk(chunk: int):
    """Decorates a function of ``given``: NUM_EXAMPLES, the same in every run."""
    how = settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return lambda function: seed(chunk)(how(function))


@few_chunks
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_random_problems(backend, chunk, device, poisoned_memory):
    dtypes = DTYPES[backend]
    dtype = dtypes[chunk % len(dtypes)]

    @of_chunk(chunk)
    @given(random_cases(MAX_SEQLEN, HEAD_DIMS[backend]))
    def holds(case):
        tensors = make_inputs(case, device, dtype, requires_grad=True)
        out, lse = forward_holds(case, tensors, backend)
        # The gradient of scores of 1e4 is lost in the rounding of the LSE that P comes from, and
        # that of huge values leaves float16's range.
        if case.distribution in ("large", "monotone"):
            return
        if case.distribution == "huge" and dtype != torch.bfloat16:
            return
        dout, dlse = make_output_gradients(case, tensors)
        got = torch.autograd.grad((out, lse), tensors[:3], (dout, dlse))
        gradients_hold(case, tensors, got, dout, dlse, backend)

    holds()


@few_chunks
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_random_fp8_problems(backend, chunk, device, poisoned_memory):
    @of_chunk(chunk)
    @given(random_fp8_problems(MAX_SEQLEN, HEAD_DIMS[backend]))
    def holds(problem):
        case = problem.case
        # Triton's interpreter cuts bfloat16 off where a GPU rounds, and float16 has less range.
        out_dtype = torch.float32 if backend == "reference" else TRITON_DTYPES[-1]
        v_factor = problem.v_factor
        if out_dtype == torch.float16:
            v_factor = math.copysign(1.0, v_factor)
        tensors, values = make_fp8_inputs(case, device, problem.form)
        tensors = with_v_factor(case, tensors, v_factor)
        how = {"return_lse": True, "backend": backend, "out_dtype": out_dtype}
        out, lse = call(case, tensors, **how)
        assert out.dtype == out_dtype
        out = out / v_factor  # a power of two
        reference, reference_lse = attention(values, **case.reference_options())
        if GPU and backend != "reference":
            weights, _ = attention(values._replace(v=values.v.abs()), **case.reference_options())
            scales = scales_of_v(tensors)
            dropped = dropped_values(values, scales, FP8_DROPPED_WEIGHT, **case.reference_options())
            q = tensors.q.data if isinstance(tensors.q, BlockScaled) else tensors.q
            e4m3 = q.dtype == torch.float8_e4m3fn
            unit = case.head_dim * E4M3_TRUNCATION if e4m3 else FLOAT32_EPS
            moved = score_rounding(values, unit=unit, **case.reference_options())
            by_row = moved.transpose(-1, -2)
            check_rounded_p("out", out, reference, weights, dropped, problem, backend, by_row)
            check_lse(lse, reference_lse, problem, backend, FP8_EXP2_ERROR, moved)
            return
        plain, _ = attention(values, **case.reference_options(), dtype=out_dtype)
        floor = score_floor(lse) if backend == "reference" else None
        check("out", out, reference, plain, FORWARD_FACTOR, problem, backend, floor)
        check_lse(lse, reference_lse, problem, backend)

    holds()


def with_v_factor(case, tensors, factor: float):
    """All descales of V multiplied."""
    if isinstance(tensors.v, BlockScaled):
        return tensors._replace(v=replace(tensors.v, descale=tensors.v.descale * factor))
    descale = tensors.v_descale
    if descale is None:
        descale = torch.ones(case.batch, case.num_heads_kv, device=tensors.v.device)
    return tensors._replace(v_descale=descale * factor)
