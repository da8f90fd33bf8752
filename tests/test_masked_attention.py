"""Attention with a mask object against plain attention with its bool tensor."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers import GPU, TRITON_DTYPES, needs_hopper, on_hopper_gpu
from support.rounding import gradient_rounding, out_rounding
from test_masks import random_case

import flashattn3
from flashattn3 import flash_attn_fp8_func, flash_attn_func, masks
from flashattn3.call.operands import Tensors
from flashattn3_bench.checking import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    attention,
    check,
    gradients,
    max_logit,
)

DEVICE = "cuda" if GPU else "cpu"


def inputs(shape, keys, heads_kv, dim, dim_v=None, dtype=torch.float32, seed=0):
    """q, k and v of (batch, queries, heads)."""
    generator = torch.Generator().manual_seed(seed)
    batch, queries, heads = shape
    sizes = (queries, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v or dim)
    made = (torch.randn(batch, *size, generator=generator) for size in sizes)
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def holds(mask, seen, q, k, v, backend, name="", sinks=None, slopes=None, softcap=0.0):
    """Forward and gradients, also through lse, against float64 by the tolerance rule."""
    call = partial(flash_attn_func, q, k, v, mask=mask.to(DEVICE), backend=backend, softcap=softcap)
    looks = backend != "hopper"  # which has no kernel for a mask and max_logit
    given = {"sinks": sinks, "alibi_slopes": slopes, "return_max_logit": looks, "return_lse": True}
    out, lse, *largest = call(**given)
    hidden = torch.zeros(seen.shape).masked_fill(~seen, -math.inf).to(DEVICE)
    tensors = Tensors(q, k, v, sinks=sinks, alibi_slopes=slopes, bias=hidden)
    scores = {"softmax_scale": q.shape[-1] ** -0.5, "softcap": softcap}
    rounding = partial(out_rounding, tensors, q.dtype, **scores)
    reference, reference_lse = attention(tensors, **scores)
    baseline, _ = attention(tensors, **scores, dtype=q.dtype)
    check("out", out, reference, baseline, FORWARD_FACTOR, name, backend, rounding=rounding)
    torch.testing.assert_close(lse.double(), reference_lse, atol=1e-4, rtol=1e-4)
    for highest in largest:
        wanted = max_logit(tensors, **scores)
        torch.testing.assert_close(highest.double(), wanted, atol=1e-2, rtol=1e-2)
    dout = torch.sin(torch.arange(out.numel(), device=DEVICE)).view(out.shape).to(out.dtype)
    dlse = torch.cos(torch.arange(lse.numel(), device=DEVICE)).view(lse.shape).to(lse)
    dlse = dlse.masked_fill(lse.isinf(), 0.0)
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    expected = (
        gradients(tensors, dout, dlse, **scores, dtype=of)[:4] for of in (torch.float64, q.dtype)
    )
    roundings = partial(gradient_rounding, tensors, dout, dlse, q.dtype, **scores)
    of_all = zip(("dq", "dk", "dv", "dsinks"), found, *expected, strict=False)
    for i, (of, *values) in enumerate(of_all):
        check(of, *values, GRADIENT_FACTOR, name, backend, rounding=lambda i=i: roundings()[i])


def bits(batch, heads, queries, keys, density=0.3):
    seen = torch.rand(batch, heads, queries, keys, generator=torch.manual_seed(3)) < density
    seen[:, :, 1 :: 2 + queries // 3] = False  # rows without keys
    return masks.from_bool(seen), seen


def built(mask):
    return mask, mask.to_bool()


# name: the mask and its bools, (batch, queries, heads), keys, heads_kv, dims, options
CASES = {
    "bits": (lambda: bits(2, 2, 130, 150), (2, 130, 2), 150, 1, (16,), {}),
    "bits-shared": (lambda: bits(1, 1, 130, 70), (2, 130, 2), 70, 2, (16, 24), {"softcap": 2.0}),
    "documents": (
        lambda: built(masks.documents([100, 28, 50, 60], causal=True)),
        *((1, 238, 2), 238, 1, (32,), {}),
    ),
    "prefixes": (lambda: built(masks.prefix_lm([0, 65], 129)), (2, 129, 2), 129, 2, (16,), {}),
    "blocks": (
        lambda: built(masks.blocks(torch.rand(1, 2, 2, 5).argsort(-1) < 2, seqlen_q=140)),
        *((1, 140, 2), 320, 2, (16,), {}),
    ),
    "sinks-slopes": (
        lambda: bits(1, 2, 140, 140),
        *((2, 140, 2), 140, 1, (16,), {"sinks": True, "slopes": True}),
    ),
    "nothing": (lambda: bits(1, 1, 70, 70, 0.0), (1, 70, 2), 70, 2, (16,), {"sinks": True}),
    "nothing-at-all": (lambda: bits(1, 1, 70, 70, 0.0), (1, 70, 2), 70, 2, (16,), {}),
    "no-keys": (lambda: bits(1, 1, 7, 0), (1, 7, 2), 0, 2, (16,), {}),
}
BACKENDS = [("reference", torch.float32), ("reference", torch.bfloat16)]
BACKENDS += [("triton", dtype) for dtype in TRITON_DTYPES]
ON_HOPPER = [
    pytest.param("hopper", dtype, marks=[pytest.mark.gpu, needs_hopper])
    for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("backend", "dtype"), [*BACKENDS, *ON_HOPPER])
@pytest.mark.parametrize("case", CASES)
def test_attention_sees_what_the_mask_shows(case, backend, dtype):
    make, shape, keys, heads_kv, dims, options = CASES[case]
    torch.manual_seed(0)
    mask, seen = make()
    q, k, v = inputs(shape, keys, heads_kv, *dims, dtype=dtype)
    options = dict(options)
    if backend == "hopper":  # which has no kernel for a mask and slopes
        options.pop("slopes", None)
    for name in {"sinks", "slopes"} & options.keys():
        options[name] = torch.linspace(0.1, 0.6, shape[2], device=DEVICE)
    if "sinks" in options:
        options["sinks"].requires_grad_()
    holds(mask, seen, q, k, v, backend, case, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), [BACKENDS[0], *ON_HOPPER])
def test_random_masks(backend, dtype):
    for seed in range(200):
        mask, seen = random_case(seed)
        batch, heads, queries, keys = seen.shape
        shape = max(2, batch), queries, max(2, heads)
        dim = (16, 64, 128)[seed % 3] if backend == "hopper" else 16
        q, k, v = inputs(shape, keys, 1 + seed % 2, dim, dtype=dtype, seed=seed)
        holds(mask, seen, q, k, v, backend, f"seed {seed}")


@on_hopper_gpu
@pytest.mark.parametrize("dims", ((64,), (128,), (104, 72), (192, 128), (256,)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_each_hopper_kernel_sees_what_the_mask_shows(dims, dtype):
    """Also gradients beyond 128 columns, which Triton computes."""
    for sizes, heads_kv in (((1, 1), 4), ((2, 4), 2), ((1, 4), 1)):
        mask, seen = bits(*sizes, 300, 417, 0.5)
        blocks = masks.blocks(torch.rand(1, 1, 3, 7).argsort(-1) < 4, seqlen_q=300, seqlen_k=417)
        for each, of in ((mask, seen), (blocks, blocks.to_bool()), (blocks | mask, None)):
            q, k, v = inputs((2, 300, 4), 417, heads_kv, *dims, dtype=dtype)
            of = each.to_bool() if of is None else of
            holds(each, of, q, k, v, "hopper", f"{dims} {sizes}", softcap=3.0 * (heads_kv == 1))


@pytest.mark.parametrize(
    ("backend", "dtype", "dims"),
    [
        *((*of, (16,)) for of in BACKENDS),
        *(
            pytest.param(*of.values, dims, marks=of.marks)
            for of in ON_HOPPER
            for dims in ((64,), (128,), (192, 128), (256,))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("keys", (1, 65))
def test_keys_past_the_end_have_no_influence(keys, backend, dtype, dims):
    """In the blocks that see all keys exp(0 - lse) of those past the end is infinite."""
    seen = torch.ones(1, 1, 130, keys, dtype=torch.bool)
    q, k, v = inputs((1, 130, 1), keys, 1, *dims, dtype=dtype)
    with torch.no_grad():
        q[..., 0], k[..., 0] = 32.0, -4.0 * math.sqrt(dims[0])  # a score of -128
    holds(masks.from_bool(seen), seen, q, k, v, backend, f"{keys} keys")


@on_hopper_gpu
@pytest.mark.parametrize("dim", (64, 128))
def test_deterministic_gradients_of_hopper_have_the_same_bits(dim):
    mask, _ = bits(2, 4, 1000, 1100)
    mask = mask | masks.window(1000, 300, 0, seqlen_k=1100)
    q, k, v = inputs((2, 1000, 4), 1100, 2, dim, dtype=torch.bfloat16)
    attend = partial(flash_attn_func, mask=mask.to(DEVICE), backend="hopper", deterministic=True)
    first = None
    for _ in range(20):
        found = torch.autograd.grad(attend(q, k, v).float().square().sum(), (q, k, v))
        first = first or found
        assert all(map(torch.equal, found, first))


@pytest.mark.parametrize(("backend", "dtype"), [*BACKENDS[1:], *ON_HOPPER])
def test_hidden_keys_have_no_influence_and_no_gradient(backend, dtype):
    """Keys that a head's block of queries does not see may be NaN for it; keys that nobody sees
    have gradients that are exactly 0."""
    seen = torch.zeros(1, 2, 256, 256, dtype=torch.bool)
    seen[:, 0, :, :64] = True
    seen[:, 1, :, 128:192] = True
    seen[:, :, 200, 10:20] = True  # head 1 sees them in one row of its second block
    attend = partial(flash_attn_func, mask=masks.from_bool(seen).to(DEVICE), backend=backend)
    q, k, v = inputs((1, 256, 2), 256, 1, 16, dtype=dtype)
    with torch.no_grad():
        for x in (k, v):
            x[:, :64] = math.nan
    out = attend(q, k, v)
    assert out[:, :, 0].isnan().all()
    assert out[:, :128, 1].isfinite().all()
    q, k, v = inputs((1, 256, 2), 256, 1, 16, dtype=dtype)
    gradients = torch.autograd.grad(attend(q, k, v).float().square().sum(), (k, v))
    nobody = ~seen.any((0, 1, 2))
    for x in gradients:
        assert torch.count_nonzero(x[:, nobody]) == 0
        assert torch.count_nonzero(x[:, ~nobody]) > 0


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS[1:])
@pytest.mark.parametrize(
    ("value", "deterministic"), ((math.nan, False), (math.nan, True), (-math.inf, False))
)
def test_what_a_key_holds_that_no_row_sees_reaches_nothing(value, deterministic, backend, dtype):
    """Keys inside partial blocks, of each kind of them: between visible ones, at the end, and in a
    block of which one row sees one key."""
    seen = torch.rand(1, 2, 200, 330, generator=torch.manual_seed(1)) < 0.5
    seen[:, 1, :128, 64:] = False
    seen[:, 1, 100, 140] = True
    hidden = torch.zeros(330, dtype=torch.bool)
    hidden[[3, 40, 63, 64, 130, 139, 141, *range(300, 330)]] = True
    seen[..., hidden] = False
    attend = partial(flash_attn_func, mask=masks.from_bool(seen).to(DEVICE), backend=backend)
    found = []
    for held in (0.0, value):
        q, k, v = inputs((1, 200, 2), 330, 1, 32, dtype=dtype)
        with torch.no_grad():
            k[:, hidden], v[:, hidden] = held, held
        out, lse = attend(q, k, v, deterministic=deterministic, return_lse=True)
        loss = out.float().square().sum() + lse.sum()
        found.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    assert all(x.isfinite().all() for x in found[0])
    for name, without, with_value in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        assert torch.equal(without, with_value), name
    for gradient in found[1][3:]:
        assert torch.count_nonzero(gradient[:, hidden]) == 0


def test_a_mask_is_the_same_as_arguments_that_hide_the_same():
    q, k, v = inputs((2, 150, 4), 150, 2, 32)
    window = masks.window(150, 40, 0).to(DEVICE)
    wanted = flash_attn_func(q, k, v, window_size=(40, 0))
    torch.testing.assert_close(flash_attn_func(q, k, v, mask=window), wanted)
    qkv = torch.cat([q, k, v], 2)
    packed = flashattn3.flash_attn_qkvpacked_func(qkv, num_heads_q=4, mask=window)
    torch.testing.assert_close(packed, wanted)
    packed = flashattn3.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), mask=window)
    torch.testing.assert_close(packed, wanted)
    out, lse = flashattn3.flash_attn_forward(q.detach(), k.detach(), v.detach(), mask=window)
    torch.testing.assert_close(out, wanted)
    dout = torch.ones_like(out)
    given = (x.detach() for x in (q, k, v))
    found = flashattn3.flash_attn_backward(dout, *given, out, lse, mask=window)
    for x, of in zip(found, torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(x, of)
    halves = [x.detach().to(torch.bfloat16) for x in (q, k, v)]
    # Backends differ in 8 bits by more than the bounds, and one without masks takes the first call.
    attend = partial(flash_attn_fp8_func, *halves, backend="reference")
    wanted, found = attend(window_size=(40, 0)), attend(mask=window)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0.016)


def loss(q, k, v, mask):
    return flash_attn_func(q, k, v, mask=mask).square().sum()


@pytest.mark.filterwarnings("ignore:(There is a perf|torch.searchsorted)")  # in vmap
def test_a_mask_goes_through_checkpoints_and_transforms():
    q, k, v = inputs((1, 100, 2), 100, 1, 16)
    mask = masks.documents([60, 40], causal=True).to(DEVICE)
    wanted = torch.autograd.grad(loss(q, k, v, mask), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(loss, q, k, v, mask, use_reentrant=False)
    found = torch.autograd.grad(again, (q, k, v))
    of_func = torch.func.grad(loss, argnums=(0, 1, 2))(q.detach(), k.detach(), v.detach(), mask)
    for x, *others in zip(wanted, found, of_func, strict=True):
        for other in others:
            torch.testing.assert_close(other, x)
    stacked = [torch.stack([x.detach(), 2 * x.detach()]) for x in (q, k, v)]
    mapped = torch.vmap(loss, in_dims=(0, 0, 0, None))(*stacked, mask)
    torch.testing.assert_close(mapped[0], loss(q, k, v, mask))
    lengths = torch.tensor([[30, 70], [60, 40]], device=DEVICE)
    mapped = torch.vmap(lambda x: loss(q, k, v, masks.documents(x, seqlen=100, causal=True)))
    torch.testing.assert_close(mapped(lengths)[1], loss(q, k, v, mask))


def layer(q, k, v, lengths, mask):
    """Attention with a mask that is built and combined in compiled code, and one that is given."""
    built = masks.documents(lengths, seqlen=q.shape[1], causal=True)
    built &= mask
    built |= (mask & masks.window(q.shape[1], 0, 0, device=DEVICE)) | mask.inverse()
    out = flash_attn_func(q, k, v, mask=built) + flash_attn_func(q, k, v, mask=mask)
    return out + built.density, built


@pytest.mark.slow
def test_compiled_code_takes_builds_and_returns_masks():
    q, k, v = inputs((1, 100, 2), 100, 1, 16)
    mask = masks.prefix_lm([10], 100).to(DEVICE)
    arguments = q, k, v, torch.tensor([60, 40], device=DEVICE), mask
    wanted, of_layer = layer(*arguments)
    found, built = torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(built.to_bool(), of_layer.to_bool())
    torch.testing.assert_close(found, wanted)
    of = torch.autograd.grad(wanted.sum(), (q, k, v))
    for x, y in zip(torch.autograd.grad(found.sum(), (q, k, v)), of, strict=True):
        torch.testing.assert_close(x, y)


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return flash_attn_func(q, k, v, mask=mask)


@pytest.mark.slow
def test_an_exported_program_takes_another_mask():
    q, k, v = (x.detach() for x in inputs((1, 100, 2), 100, 1, 16))
    first, second = (masks.documents(x, causal=True).to(DEVICE) for x in ([60, 40], [10, 90]))
    program = torch.export.export(Attention(), (q, k, v, first)).module()
    for mask in (first, second):
        torch.testing.assert_close(program(q, k, v, mask), flash_attn_func(q, k, v, mask=mask))


CAUSAL = masks.window(64, -1, 0)
ERRORS = (
    ({"mask": torch.ones(64, 64).bool()}, r"mask must be a flashattn3.masks.Mask \(masks"),
    ({"mask": masks.window(63, 1)}, "mask.seqlen_q must be 64 as q's, got 63"),
    ({"mask": masks.window(64, 1, seqlen_k=65)}, "mask.seqlen_k must be 64 as k's, got 65"),
    ({"mask": masks.prefix_lm([1, 2, 3], 64)}, "mask.batch must be 2 as q's, or 1, got 3"),
    ({"mask": masks.from_bool(torch.ones(1, 3, 64, 64).bool())}, "mask.heads must be 4 as q's"),
    ({"mask": masks.window(64, 1, device="meta")}, "mask.device must be cpu as q's"),
    ({"mask": CAUSAL, "causal": True}, "causal must be False beside mask.*masks.documents"),
    ({"mask": CAUSAL, "window_size": (3, 0)}, r"window_size must be \(-1, -1\).*masks.window"),
    ({"mask": CAUSAL, "bias": torch.zeros(1, 1, 64, 64)}, "bias must be None beside mask"),
)


@pytest.mark.parametrize(("options", "message"), ERRORS, ids=[x[:25] for _, x in ERRORS])
def test_errors_name_the_argument(options, message):
    q, k, v = (x.detach().cpu() for x in inputs((2, 64, 4), 64, 2, 16))
    with pytest.raises((TypeError, ValueError), match=f"flash_attn_func: {message}"):
        flash_attn_func(q, k, v, **options)


def test_varlen_calls_refuse_a_mask_by_name():
    q = torch.zeros(64, 2, 16)
    edges = torch.tensor([0, 64], dtype=torch.int32)
    message = r"flash_attn_varlen_func: mask must be None.*masks.documents\(lengths\)"
    with pytest.raises(ValueError, match=message):
        flashattn3.flash_attn_varlen_func(q, q, q, edges, edges, 64, 64, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"flash_attn_forward: mask must be None with cu_seqlens"):
        lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
        lengths |= {"max_seqlen_q": 64, "max_seqlen_k": 64}
        flashattn3.flash_attn_forward(q, q, q, **lengths, mask=CAUSAL)


def test_explain_shows_the_mask():
    q, k, v = (x.detach() for x in inputs((2, 64, 4), 64, 2, 16))
    mask = CAUSAL.to(DEVICE)
    explained = flashattn3.explain(q, k, v, mask=mask)
    assert explained.config["mask"] == "0 full and 1 partial of 1 blocks, 0.508 visible"
