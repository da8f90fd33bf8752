"""Calls of few query rows on the Triton backend: the kernels of cached calls run their forward."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    A100,
    H100,
    WITHOUT_HOPPER,
    case_named,
    forward_holds,
    gradients_hold,
)

from flashattn3.call.inputs import Tensors, metadata_of
from flashattn3.call.problem import describe
from flashattn3.call.spec import Options
from flashattn3.dispatch.planner import choose
from flashattn3.testing import call, make_inputs, make_output_gradients

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def plan(device, batch, seqlen_q, seqlen_k, heads=32, heads_kv=8, dtype=torch.bfloat16, **options):
    shapes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    tensors = (torch.empty(batch, *of, 128, device="meta", dtype=dtype) for of in shapes)
    problem = describe(tuple(map(metadata_of, Tensors(*tensors))), Options(**options))
    return choose(problem, device, WITHOUT_HOPPER)


SHORT = ((16, 1, 8192), (64, 1, 2048), (1, 1, 65536))
CHUNKS = ((1, 64, 16384), (1, 256, 16384))


@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
def test_which_calls_are_packed(device):
    """With one split only rows that one tile holds: with more, a tile would read all keys again."""
    for shape in SHORT:
        config = plan(device, *shape).launch.config
        assert config.packed.block_m == 16 and config.num_splits == 1
    for shape in CHUNKS:
        assert plan(device, *shape).launch.config.packed is None
    for shape in (*SHORT, CHUNKS[0]):
        config = plan(device, *shape, num_splits=0).launch.config
        assert config.packed is not None and config.grid[0] >= config.packed.num_ctas
    for others in (
        {"seqlen_k": 512},
        {"seqlen_q": 4096, "seqlen_k": 4096, "num_splits": 0},
        {"pack_gqa": False, "num_splits": 0},
    ):
        of = {"batch": 1, "seqlen_q": 1, "seqlen_k": 8192, **others}
        assert plan(device, **of).launch.config.packed is None
    assert plan(device, 1, 300, 300, pack_gqa=True).launch.config.packed is not None


def test_explain_describes_the_packed_tile():
    described = plan(A100, *SHORT[0], num_splits=0).launch.describe()
    assert described["tile"] == "16 packed rows x 64 keys"
    assert described["num_splits"] == "chosen"
    used = plan(A100, *SHORT[0], pack_gqa=True, sm_margin=8)
    assert not used.unused_hints and used.launch.config.packed.num_ctas == 2 * 100
    unused = plan(A100, 1, 4096, 4096, sm_margin=8, pack_gqa=False).unused_hints
    assert set(unused) == {"sm_margin"}


NAMES = (
    *("gqa-2", "causal-empty-rows", "softcap-causal", "scale-negative", "scale-zero", "dim-8"),
    *("layout-bhsd", "layout-packed", "layout-unaligned", "splits", "no-keys", "no-queries"),
)


@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, device):
    case = case_named(name)
    forward_holds(case, make_inputs(case, device, torch.float16), "triton", pack_gqa=True)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_gradients_after_a_packed_forward(num_splits, device):
    case = case_named("splits")
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    dout, dlse = make_output_gradients(case, tensors)
    options = {"backend": "triton", "pack_gqa": True, "num_splits": num_splits}
    outputs = call(case, tensors, return_lse=True, **options)
    again = call(case, tensors, return_lse=True, **options)
    assert all(map(torch.equal, outputs, again))
    found = torch.autograd.grad(outputs, tensors[:3], (dout, dlse))
    gradients_hold(case, tensors, found, dout, dlse, "triton")
