"""Random legal problems, forward and backward, against float64.

FLASHATTN3_RANDOM_EXAMPLES: how many for each backend and chunk, 8 unless said.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers import (
    EVERY_BACKEND,
    GPU,
    SIXTEEN_BIT,
    TRITON_DTYPES,
    forward_holds,
    gradients_hold,
)
from hypothesis import HealthCheck, given, seed, settings

from flashattn3.testing import make_inputs, make_output_gradients
from flashattn3.testing.strategies import random_cases

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
CHUNKS = (0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 6)))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_random_problems(backend, chunk, device, poisoned_memory):
    dtypes = DTYPES[backend]
    dtype = dtypes[chunk % len(dtypes)]
    strategy = random_cases(max_seqlen=200 if GPU else 100, head_dims=HEAD_DIMS[backend])

    @seed(chunk)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(strategy)
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
