"""The backends against each other, where the float64 truth would be too slow or too big.

The reference backend in float32 stands in for the fp64 reference; plain PyTorch stays the baseline
of the rule.
"""

from __future__ import annotations

import pytest
import torch
from helpers import BACKEND_DTYPES, EVERY_BACKEND, GPU
from support.cases import call
from support.fp8 import make_fp8_inputs
from support.inputs import make_inputs, make_output_gradients
from support.tolerance import FP8_LSE_TOLERANCE, check_exp2_lse, check_lse

from flashattn3_bench.checking import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Case,
    attention,
    check,
    check_fp8,
    gradients,
)
from flashattn3_bench.checking.cases import dense, varlen
from flashattn3_bench.checking.shapes import NAMED_SHAPES

SMALL = (
    dense("two-tiles", (200, 300), heads=(4, 2), causal=True, batch=1),
    dense("window", (257, 257), window=(64, 16), heads=(2, 1), batch=1),
    varlen("ragged", (130, 3, 257), (64, 200, 257), heads=(4, 2), causal=True, softcap=30.0),
)
LARGE = (
    *NAMED_SHAPES[:2],
    dense("causal-2k", (2048, 2048), heads=(8, 2), dims=(128, 128), causal=True, batch=2),
    dense("causal-odd", (1999, 3001), heads=(4, 4), causal=True, batch=2),
    dense("window-4k", (4096, 4096), heads=(4, 1), window=(511, 0), batch=1),
    dense("few-queries", (16, 8192), heads=(8, 1), dims=(128, 128), num_splits=0, batch=1),
    varlen("ragged-4k", (4096, 1, 777, 2048), (4096, 513, 777, 100), heads=(4, 2), causal=True),
)
# Without a GPU "ragged" alone runs, the case with most features: test_backward.py and test_fp8.py
# hold the kernels to float64 in cases like the others.
RAGGED = SMALL[-1]
CASES = (*SMALL, *LARGE) if GPU else (RAGGED,)
COMPILED = [parameters for parameters in BACKEND_DTYPES if parameters.values[0] != "reference"]


def widened(tensors):
    """The same values in float32, as leaves."""
    wide = (x.detach().float().requires_grad_() for x in tensors[:3])
    return type(tensors)(*wide, *tensors[3:])


@pytest.mark.parametrize(("backend", "dtype"), COMPILED)
@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_agree_with_the_reference(case: Case, backend, dtype, device):
    tensors = make_inputs(case, device, dtype, requires_grad=True)
    exact = widened(tensors)
    out, lse = call(case, tensors, return_lse=True, backend=backend)
    wanted, wanted_lse = call(case, exact, return_lse=True, backend="reference")
    plain, _ = attention(tensors, **case.reference_options(), dtype=dtype)
    check("out", out, wanted, plain, FORWARD_FACTOR, case, f"{backend} against reference")
    check_lse(lse, wanted_lse, case, f"{backend} against reference")

    dout, dlse = make_output_gradients(case, tensors)
    got = torch.autograd.grad((out, lse), tensors[:3], (dout, dlse))
    wanted = torch.autograd.grad((wanted, wanted_lse), exact[:3], (dout.float(), dlse))
    plain = gradients(tensors, dout, dlse, **case.reference_options(), dtype=dtype)
    for name, *values in zip(("dq", "dk", "dv"), got, wanted, plain, strict=True):
        check(name, *values, GRADIENT_FACTOR, case, f"{backend} against reference")


@pytest.mark.interpreted(quick=lambda case, form, backend: form == "int8 rotated")
@pytest.mark.parametrize("backend", EVERY_BACKEND[:-1])
@pytest.mark.parametrize("form", ["rotated", "int8 rotated"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_of_8_bits_agree_with_the_reference(case: Case, form, backend, device):
    given, _ = make_fp8_inputs(case, device, form)
    out, lse = call(case, given, return_lse=True, backend=backend)
    exact = {"backend": "reference", "out_dtype": torch.float32}
    wanted, wanted_lse = call(case, given, return_lse=True, **exact)
    check_fp8("out", out, wanted, case, f"{backend} against reference")
    if backend == "hopper":
        check_exp2_lse(lse, wanted_lse, case, f"{backend} against reference")
    else:
        check_lse(lse, wanted_lse, case, f"{backend} against reference", FP8_LSE_TOLERANCE)


@pytest.mark.parametrize("backend", EVERY_BACKEND[:-1])
@pytest.mark.parametrize("case", SMALL)
def test_results_are_laid_out_alike(case, backend, device):
    """Shapes, dtypes and strides, which compiled graphs rely on, do not depend on the backend."""
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    layouts = []
    for name in (backend, "reference"):
        out, lse = call(case, tensors, return_lse=True, backend=name)
        results = (out, lse, *torch.autograd.grad(out.sum(), tensors[:3]))
        layouts.append([(x.shape, x.dtype, x.stride(), x.device) for x in results])
    assert layouts[0] == layouts[1]
