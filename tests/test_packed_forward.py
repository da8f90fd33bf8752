"""Calls of few query rows on the Triton backend: the kernels of cached calls run their forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import (
    A100,
    B200,
    H100,
    L4,
    ORIN,
    WITHOUT_HOPPER,
    case_named,
    described,
    forward_holds,
    gradients_hold,
    library_double,
    meta_qkv,
)
from support.cases import call
from support.inputs import make_inputs, make_output_gradients

from flashattn3 import flash_attn_func, flash_attn_varlen_func
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.call.operands import Tensors
from flashattn3.run.planner import choose

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
HOPPER = HopperBackend(library=library_double)


def plan(
    device, batch, seqlen_q, seqlen_k, heads=32, heads_kv=8, dims=(128, 128), varlen=False,
    backends=WITHOUT_HOPPER, dtype=torch.bfloat16, scores=None, **options,
):  # fmt: skip
    tensors = meta_qkv(batch, seqlen_q, seqlen_k, (heads, heads_kv), *dims, dtype)[:3]
    if varlen:
        edges = torch.empty(batch + 1, device="meta", dtype=torch.int32)
        tensors = [*(x.flatten(0, 1) for x in tensors), edges, edges]
        options |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    tensors = Tensors(*tensors)._replace(**scores or {})
    return choose(described(tensors, **options), device, backends)


def on_hopper(*shape, **options):
    return plan(H100, *shape, backends=(HOPPER, *WITHOUT_HOPPER), **options)


# batch, queries, keys, query and KV heads of calls that must not read with a CTA for each head.
LONG = (
    *((1, 1, 1024, 32, 8), (1, 1, 16384, 32, 8), (1, 1, 65536, 32, 8), (1, 1, 131072, 32, 8)),
    *((1, 1, 65536, 8, 1), (1, 4, 65536, 32, 32), (4, 1, 32768, 32, 8), (1, 16, 16384, 32, 8)),
    *((16, 1, 8192, 32, 8), (64, 1, 2048, 32, 8), (1, 64, 16384, 8, 8), (1, 128, 16384, 8, 8)),
)
# Small GPUs have a CTA for each of their SMs in some of them.
SMALL = LONG[:9]
DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_the_default_occupies_every_sm(varlen):
    """Few queries of many keys are packed and cut into parts on every GPU, with every head dim."""
    for shape in LONG:
        for dims in DIMS:
            packed = on_hopper(*shape, dims=dims, varlen=varlen).launch.config.packed
            assert packed.kernel_config.kind == "decode", (shape, dims)
            record = packed.kernel_launch.handle.record
            assert not record.whole_tiles and record.num_sms == 132, (shape, dims)
    for device in (H100, A100, L4, ORIN, B200):
        for shape in LONG if device.num_sms > 100 else SMALL:
            config = plan(device, *shape, varlen=varlen).launch.config
            assert config.packed is not None and config.num_splits == 0, (device.name, shape)
            assert config.grid[0] > device.num_sms, (device.name, shape)
            none = plan(device, *shape, varlen=varlen, num_splits=1).launch.config
            assert none.num_splits == 1, (device.name, shape)
            assert none.packed is None or none.grid[0] <= 64 * shape[0], (device.name, shape)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_left": 4000, "softcap": 3.0}])
def test_masks_are_packed_too(options):
    for shape in LONG[1:]:
        for found in (on_hopper(*shape, **options), plan(ORIN, *shape, **options)):
            if found.device is H100 or shape in SMALL:
                assert found.launch.config.packed is not None, (shape, found.device.name)


def test_which_calls_are_not_packed():
    """Short keys, enough CTAs, num_splits=1 with rows of several tiles, pack_gqa=False."""
    wide = {"seqlen_q": 4096, "seqlen_k": 4096}
    for others in (
        {"seqlen_q": 16, "seqlen_k": 512},
        wide,
        {"seqlen_q": 500},
        {"seqlen_q": 64, "num_splits": 1},
        {"pack_gqa": False},
    ):
        of = {"batch": 1, "seqlen_q": 1, "seqlen_k": 8192, **others}
        assert plan(A100, **of).launch.config.packed is None, others
        assert on_hopper(**of).launch.config.packed is None, others
    assert plan(A100, 1, 300, 300, pack_gqa=True).launch.config.packed is not None
    used = on_hopper(1, 8, 8192, varlen=True, num_splits=3)
    assert set(used.unused_hints) == {"num_splits"}
    assert str(used.launch.describe()["num_splits"]).startswith("about ")
    assert not on_hopper(1, 4096, 4096, num_splits=1).unused_hints
    assert set(on_hopper(1, 4096, 4096, num_splits=2).unused_hints) == {"num_splits"}


# Queries, keys, query and KV heads, head dim, microseconds on an H100 of the forward kernel and of
# the decode kernel.
MEASURED = (
    *(
        (1, 512, 32, 8, 128, 12.5, 8.1),
        (1, 512, 8, 1, 256, 13.8, 9.4),
        (1, 256, 16, 16, 64, 9.2, 7.3),
    ),
    *((16, 1024, 32, 8, 128, 16.5, 26.9), (16, 4096, 32, 8, 128, 44.2, 29.6)),
    *((64, 2048, 8, 8, 128, 25.5, 27.9), (64, 16384, 8, 8, 128, 148.6, 49.7)),
    *((128, 16384, 32, 8, 128, 177.0, 132.3), (128, 16384, 32, 8, 64, 102.9, 107.7)),
    *((300, 16384, 32, 8, 128, 227.1, 398.0), (300, 16384, 8, 8, 128, 228.0, 109.9)),
    *((192, 16384, 32, 32, 128, 225.5, 299.2), (300, 16384, 16, 8, 256, 300.3, 396.0)),
)


def test_the_faster_kernel_is_chosen_on_hopper():
    for queries, keys, heads, heads_kv, d, forward_us, packed_us in MEASURED:
        found = on_hopper(1, queries, keys, heads, heads_kv, (d, d)).launch.config.packing
        assert found.packs == (packed_us < forward_us), (queries, keys, heads, d, found)


def test_explain_shows_the_splits_and_the_hints_without_effect():
    for splits, wanted in ((0, "about 2 of each work tile: 344 CTAs for 128"), (3, 3)):
        launch = plan(A100, 16, 1, 8192, num_splits=splits).launch
        assert launch.describe()["num_splits"] == wanted
    used = plan(A100, 16, 1, 8192, pack_gqa=True, sm_margin=8)
    assert not used.unused_hints and used.launch.config.packed.num_ctas == 2 * 100
    unused = plan(A100, 1, 4096, 4096, sm_margin=8, pack_gqa=False).unused_hints
    assert set(unused) == {"sm_margin"}


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_sinks_are_packed_and_no_other_score(varlen):
    heads = torch.empty(32, device="meta")
    for device, backends in ((H100, (HOPPER, *WITHOUT_HOPPER)), (A100, WITHOUT_HOPPER)):
        run = partial(plan, device, 1, 1, 16384, backends=backends, varlen=varlen)
        found = run(scores={"sinks": heads}).launch.config.packed
        assert found is not None
        assert device is not H100 or found.problem.given >= {"sinks"}
        for options in ({"scores": {"alibi_slopes": heads}}, {"return_max_logit": True}):
            assert run(**options).launch.config.packed is None, options


NAMES = (
    *("gqa-2", "causal-empty-rows", "softcap-causal", "scale-negative", "scale-zero", "dim-8"),
    *("layout-bhsd", "layout-packed", "layout-unaligned", "splits", "no-keys", "no-queries"),
    *("varlen-causal-cross", "varlen-empty-sequences", "varlen-no-keys", "varlen-no-queries"),
    *("varlen-no-sequence", "varlen-seqused", "varlen-tail-rows", "varlen-splits"),
)


@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, device):
    case = case_named(name)
    forward_holds(case, make_inputs(case, device, torch.float16), "triton", pack_gqa=True)


def test_no_sequence_sees_its_neighbours(device):
    """Their keys are in the same cache. NaN in them reaches no row of another sequence."""
    edges = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    edges_k = torch.tensor([0, 70, 203], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(n, 2, 16, device=device).half() for n in (8, 203, 203))
    options = {"backend": "triton", "pack_gqa": True, "return_lse": True}
    lengths = edges, edges_k, 5, 133
    whole = flash_attn_varlen_func(q, k, v, *lengths, **options)
    for hidden, rows in ((slice(0, 70), slice(3, 8)), (slice(70, 203), slice(0, 3))):
        wrong = [x.clone().index_fill_(0, torch.arange(203, device=device)[hidden], float("nan"))
                 for x in (k, v)]  # fmt: skip
        out, lse = flash_attn_varlen_func(q, *wrong, *lengths, **options)
        assert torch.equal(out[rows], whole[0][rows])
        assert torch.equal(lse[:, rows], whole[1][:, rows])
    used = torch.tensor([9, 100], dtype=torch.int32, device=device)
    found = flash_attn_varlen_func(q, k, v, *lengths, seqused_k=used, **options)
    wanted = flash_attn_func(q[None, 3:], k[None, 70:170], v[None, 70:170], **options)
    torch.testing.assert_close(found[0][3:], wanted[0][0], atol=2e-3, rtol=2e-3)


@pytest.mark.interpreted(quick=lambda num_splits, **_: num_splits == 0)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("name", ["splits", "varlen-splits"])
def test_gradients_after_a_packed_forward(name, num_splits, device):
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    dout, dlse = make_output_gradients(case, tensors)
    options = {"backend": "triton", "pack_gqa": True, "num_splits": num_splits}
    outputs = call(case, tensors, return_lse=True, **options)
    again = call(case, tensors, return_lse=True, **options)
    assert all(map(torch.equal, outputs, again))
    found = torch.autograd.grad(outputs, tensors[:3], (dout, dlse))
    gradients_hold(case, tensors, found, dout, dlse, "triton")
