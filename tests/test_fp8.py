"""FP8 attention: every form of the inputs on every backend against float64 of what they stand for,
what 16-bit tensors lose by it, and the sentences for what is illegal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import EVERY_BACKEND, GPU, case_named, run_python, skip_what_is_declined

import flashattn3
from flashattn3 import (
    BlockScaled,
    UnsupportedError,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    quantize_block_fp8,
)
from flashattn3.problem import Options, Tensors
from flashattn3.quantization import block_fp8
from flashattn3.scales import BLOCKS, FP8
from flashattn3.testing import (
    FORMS,
    FORWARD_CASES,
    FORWARD_FACTOR,
    attention,
    call,
    check,
    check_fp8,
    check_lse,
    make_fp8_inputs,
    make_inputs,
    score_floor,
)
from flashattn3.testing.cases import dense, varlen
from flashattn3.testing.tolerance import FP8_LSE_TOLERANCE

poisoned = pytest.mark.usefixtures("poisoned_memory")
# Blocks of q, k and v that end elsewhere than the tiles, and more than one of each.
LONGER = (
    dense("blocks", (200, 300), heads=(4, 2), batch=2),
    dense("blocks-causal", (257, 385), heads=(4, 1), causal=True, dims=(128, 64)),
    dense("blocks-window", (200, 520), window=(150, 20), batch=1),
    dense("blocks-splits", (33, 700), num_splits=3, heads=(4, 2), softcap=20.0),
    varlen("blocks-varlen", (200, 7, 129), (300, 260, 129), heads=(4, 2), causal=True),
    varlen("blocks-used", (200, 129), (300, 260), seqused_q=(200, 90), seqused_k=(65, 257)),
)
FEATURES = ("causal-empty-rows", "gqa-8", "window-both", "softcap-causal", "dim-72-40")
FEATURES += ("scale-negative", "varlen-seqused", "varlen-splits", "layout-packed", "no-keys")


def fits(case, form: str) -> bool:
    return form != "rotated" or case.head_dim & (case.head_dim - 1) == 0


def holds(case, form: str, backend: str, device, **options) -> None:
    """out and lse against float64: as tight as 16 bits, where e4m3 is multiplied in float16."""
    skip_what_is_declined(case, backend)
    given, values = make_fp8_inputs(case, device, form)
    exact = backend == "reference"
    options.setdefault("out_dtype", torch.float32 if exact else torch.float16)
    out, lse = call(case, given, return_lse=True, backend=backend, **options)
    assert (out.dtype, lse.dtype) == (options["out_dtype"], torch.float32)
    truth, truth_lse = attention(values, **case.truth_options())
    if exact or not GPU:
        precision = torch.float32 if exact else torch.float16
        plain, _ = attention(values, **case.truth_options(), dtype=precision)
        floor = score_floor(lse) if exact else None
        check("out", out, truth, plain, FORWARD_FACTOR, case, backend, floor)
        check_lse(lse, truth_lse, case, backend)
        return
    if case.distribution == "large":
        pytest.skip("the tensor cores add e4m3 products in too few bits for scores of 1e4")
    check_fp8("out", out, truth, case, backend)
    check_lse(lse, truth_lse, case, backend, FP8_LSE_TOLERANCE)


@poisoned
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case.name)
def test_every_case_without_descales(case, backend, device):
    holds(case, "raw", backend, device)


@poisoned
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", (*LONGER, *map(case_named, FEATURES)), ids=lambda case: case.name)
def test_every_form(case, form, backend, device):
    if not fits(case, form):
        pytest.skip("the head dim is no power of two")
    holds(case, form, backend, device)
