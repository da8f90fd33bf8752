"""Function transforms, forward-mode differentiation, tensors without data, default devices, and
what torch.compile must not break on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from flashattn3 import (
    UnsupportedError,
    append_kvcache,
    flash_attn_combine,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    masks,
    quantize_block_fp8,
    use_backend,
)
from flashattn3.call.hadamard import _kept, signs
from flashattn3.call.sign_bits import SIGN_SEED

EDGES_Q, EDGES_K = (torch.tensor(x, dtype=torch.int32) for x in ((0, 3, 5), (0, 1, 4)))


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(q, k, v):
    return flash_attn_func(q, k, v, causal=True, softcap=3.0, return_lse=True)


def varlen(q, k, v):
    return flash_attn_varlen_func(q, k, v, EDGES_Q, EDGES_K, 3, 3, return_lse=True)


def operands(call, lead=()):
    rows = (5, 4) if call is varlen else (2, 5, 2, 4)
    q_rows, k_rows = (rows[:1], rows[1:]) if call is varlen else (rows[:2], rows[2:])
    shapes = (*q_rows, 4, 3), (*k_rows, 2, 3), (*k_rows, 2, 2)
    return [normal(*lead, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def loss(call):
    def of_operands(q, k, v):
        out, lse = call(q, k, v)
        return out.square().sum() + lse.exp().sum()

    return of_operands


def wanted_gradients(call, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(call)(*leaves), leaves)


both = pytest.mark.parametrize("call", [dense, varlen])


@both
def test_torch_func(call):
    """grad, vjp, jacrev, and vmap over gradients."""
    tensors = operands(call)
    wanted = wanted_gradients(call, tensors)
    gradients = torch.func.grad(loss(call), argnums=(0, 1, 2))
    torch.testing.assert_close(gradients(*tensors), wanted)
    value, pullback = torch.func.vjp(loss(call), *tensors)
    torch.testing.assert_close(pullback(torch.ones_like(value)), wanted)

    def out_of(q):
        return call(q, *tensors[1:])[0]

    wanted = torch.autograd.functional.jacobian(out_of, tensors[0])
    torch.testing.assert_close(torch.func.jacrev(out_of)(tensors[0]), wanted)
    tensors = operands(call, lead=(3,))
    wanted = [wanted_gradients(call, entry) for entry in zip(*tensors, strict=True)]
    found = torch.func.vmap(gradients)(*tensors)
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))


def test_vmap_over_no_entries():
    found = torch.func.vmap(dense)(*operands(dense, lead=(0,)))
    assert [x.shape for x in found] == [(0, 2, 5, 4, 2), (0, 2, 4, 5)]


@both
@pytest.mark.parametrize("results", [(0,), (1,), (0, 1)], ids=["out", "lse", "both"])
def test_batched_gradients(call, results):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them."""
    tensors = [x.requires_grad_() for x in operands(call)]
    found = [call(*tensors)[i] for i in results]
    gradients = [normal(3, *x.shape, seed=9) for x in found]
    batched = torch.autograd.grad(
        found, tensors, gradients, is_grads_batched=True, retain_graph=True
    )
    for i in range(3):
        one = [x[i] for x in gradients]
        wanted = torch.autograd.grad(found, tensors, one, retain_graph=True)
        torch.testing.assert_close([x[i] for x in batched], list(wanted))


@both
def test_vmap_over_some_arguments_and_other_axes(call):
    q, (_, k, v) = operands(call, lead=(3,))[0], operands(call)
    found = torch.func.vmap(call, in_dims=(1, None, None), out_dims=1)(q.movedim(0, 1), k, v)
    wanted = [call(entry, k, v) for entry in q]
    for x, entries in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(entries, 1))


@both
def test_gradients_of_vmap(call):
    tensors = [x.requires_grad_() for x in operands(call, lead=(3,))]
    found = torch.autograd.grad(loss(torch.func.vmap(call))(*tensors), tensors)
    wanted = torch.autograd.grad(sum(map(loss(call), *tensors)), tensors)
    torch.testing.assert_close(found, wanted)


REFUSED = "^flash_attn_func: forward-mode differentiation .* is not supported"


@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused_and_never_zero(argument, requires_grad):
    tensors = [x.requires_grad_(requires_grad) for x in operands(dense)]

    def of_one(x):
        return dense(*tensors[:argument], x, *tensors[argument + 1 :])[0]

    x = tensors[argument]
    with pytest.raises(UnsupportedError, match=REFUSED):
        torch.func.jvp(of_one, (x,), (x,))
    with pytest.raises(UnsupportedError, match=REFUSED):
        torch.func.jacfwd(of_one)(x)
    with forward_ad.dual_level():
        tensors[argument] = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(UnsupportedError, match=REFUSED):
            dense(*tensors)
        tensors[argument - 1] = torch.nn.Parameter(tensors[argument - 1].detach())
        with torch.no_grad(), pytest.raises(UnsupportedError, match=REFUSED):
            dense(*tensors)
        assert dense(*operands(dense))[0].any()


CACHE = normal(2, 8, 2, 16, dtype=torch.float16)
# Functions of one tensor (2, 8, 2, 16) that have no tangents.
WITHOUT_TANGENTS = {
    "cached": lambda x: flash_attn_with_kvcache(x, CACHE, CACHE),
    "append": lambda x: append_kvcache(x, x, CACHE.clone(), CACHE.clone(), cache_seqlens=0),
    "combine": lambda x: flash_attn_combine(x[None].float(), x[None, ..., 0].float()),
    "8 bits": lambda x: flash_attn_fp8_func(x, x, x),
    "quantize": lambda x: quantize_block_fp8(x).data.float(),
}


@pytest.mark.parametrize("name", WITHOUT_TANGENTS)
def test_cached_calls_and_8_bits_refuse_tangents(name):
    function, x = WITHOUT_TANGENTS[name], CACHE * 2
    with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
        torch.func.jvp(function, (x,), (x,))
    with forward_ad.dual_level():
        function(x)
        with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
            function(forward_ad.make_dual(x, x))
    if name in ("8 bits", "quantize"):
        with pytest.raises(UnsupportedError, match="there is no gradient through FP8"):
            torch.func.grad(lambda x: function(x).float().sum())(x)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_without_data_give_results_without_data(requires_grad):
    qkv = torch.randn(2, 5, 3, 4, 16, device="meta", requires_grad=requires_grad)
    q, k, v = qkv.unbind(2)
    for out, lse in (
        flash_attn_func(q, k, v, causal=True, return_lse=True),
        flash_attn_qkvpacked_func(qkv, return_lse=True),
    ):
        assert (out.shape, lse.shape) == ((2, 5, 4, 16), (2, 4, 5))
        assert out.is_meta and lse.is_meta and out.requires_grad == requires_grad
    with torch.autocast("cpu"):
        out = flash_attn_func(q, k, v)
        if requires_grad:
            assert torch.autograd.grad(out.sum(), qkv)[0].is_meta
    edges, rows = torch.empty(3, dtype=torch.int32, device="meta"), qkv.flatten(0, 1).unbind(1)
    longest = torch.tensor(5, device="meta")
    out = flash_attn_varlen_func(*rows, edges, edges, longest, 5)
    masked = flash_attn_func(q, k, v, mask=masks.window(5, 2, device="meta"))
    assert (out.shape, masked.shape) == ((10, 4, 16), (2, 5, 4, 16))
    if requires_grad:
        assert torch.autograd.grad(out.sum() + masked.sum(), qkv)[0].is_meta
    with torch.no_grad():
        half = q.half()
        assert flash_attn_fp8_func(half, half, half).is_meta


@pytest.mark.parametrize("head_dim", [1, 16, 64, 128, 256, 1024])
def test_the_signs_are_those_of_torchs_generator(head_dim):
    """Quantized bytes of earlier versions stay what they are."""
    generator = torch.Generator().manual_seed(SIGN_SEED + head_dim)
    wanted = torch.randint(0, 2, (head_dim,), generator=generator).mul(2).sub(1).float()
    assert torch.equal(signs(head_dim, torch.device("cpu")), wanted)


class Rotated(torch.nn.Module):
    def forward(self, x):
        return quantize_block_fp8(x, hadamard=True).dequantize()


rotated = Rotated()


def under_fake_tensors(x):
    with FakeTensorMode() as mode:
        y = mode.from_tensor(x)
        return flash_attn_fp8_func(y, y, y)


def under_default_device(x):
    with torch.device("meta"):
        return rotated(x)


# Calls that make the signs under a mode, none of which may keep its tensors.
FIRST_CALLS = {
    "fake": under_fake_tensors,
    "default device": under_default_device,
    "inference": torch.inference_mode()(rotated.forward),
    "make_fx": lambda x: make_fx(rotated, tracing_mode="fake")(x),
    "vmap": lambda x: torch.func.vmap(rotated)(torch.stack((x, x))),
    "export": lambda x: torch.export.export(rotated, (x,), strict=False),
}


@pytest.mark.parametrize("first", FIRST_CALLS)
def test_the_signs_outlive_every_mode(first):
    x = normal(1, 8, 2, 16).half()
    wanted = flash_attn_fp8_func(x, x, x)
    _kept.clear()
    FIRST_CALLS[first](x)
    assert torch.equal(flash_attn_fp8_func(x, x, x), wanted)
    weight = torch.ones(1, requires_grad=True)
    (signs(16, x.device) * weight).sum().backward()  # no inference tensor


def test_a_gradient_runs_on_the_backend_of_its_forward():
    q = normal(1, 4, 2, 16, dtype=torch.float32).requires_grad_()
    out = flash_attn_func(q, q, q)
    with use_backend("triton"):  # takes no float32
        out.sum().backward()
    assert q.grad.any()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.xfail(
    torch.__version__ < "2.10", reason="torch 2.9 does not trace Tensor.item()", strict=True
)
@pytest.mark.parametrize("scalar", [torch.tensor, np.int64])
def test_compiled_with_a_length_in_a_scalar_of_torch_or_numpy(scalar, fresh_dynamo):
    tensors = operands(varlen)

    def run(q, k, v, longest):
        return flash_attn_varlen_func(q, k, v, EDGES_Q, EDGES_K, longest, longest)

    for longest in (3, 4):
        longest = scalar(longest)
        torch.testing.assert_close(compiled(run)(*tensors, longest), run(*tensors, longest))


def test_compiled_with_a_length_that_the_graph_computes(fresh_dynamo):
    tensors = operands(varlen)

    def run(q, k, v, edges):
        longest = edges.diff().max().item()
        return flash_attn_varlen_func(q, k, v, EDGES_Q, edges, longest + 4, longest)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.testing.assert_close(compiled(run)(*tensors, EDGES_K), run(*tensors, EDGES_K))


@pytest.mark.xfail(
    torch.__version__ < "2.9", reason="torch 2.8 does not trace methods of NamedTuple", strict=True
)
def test_compiled_fp8_with_the_mean_of_keys_in_the_lse(fresh_dynamo):
    x = normal(1, 8, 2, 16).half() + 1

    def run(x):
        return flash_attn_fp8_func(x, x, x, smooth_k=True, return_lse=True)

    torch.testing.assert_close(compiled(run)(x), run(x))


def test_compiled_with_use_backend_inside(fresh_dynamo):
    q = normal(1, 4, 2, 16, dtype=torch.float16)

    def run(q, name):
        with use_backend(name):
            return flash_attn_func(q, q, q) + 1

    assert torch.equal(compiled(run)(q, "reference"), run(q, "reference"))
    with pytest.raises(UnsupportedError, match="got 'hopper'"), use_backend("triton"):
        compiled(run)(q, "hopper")
    assert torch.equal(compiled(lambda q: flash_attn_func(q, q, q))(q), flash_attn_func(q, q, q))
