"""The two passes as functions of their own: parts that are joined are the whole."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from helpers import EVERY_BACKEND
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn3 import (
    UnsupportedError,
    flash_attn_backward,
    flash_attn_forward,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flashattn3.quantization import quantize_block_fp8

HEADS, KV_HEADS, DIM = 4, 2, 16
# Triton's interpreter takes seconds for a call.
BACKENDS = tuple(
    pytest.param("triton", marks=pytest.mark.slow) if backend == "triton" else backend
    for backend in EVERY_BACKEND
)
OPTIONS = {"softcap": 9.0, "softmax_scale": 0.3}


def tensors(device, dtype, lead, seqlen_q, seqlen_k):
    """q, k, v and dout."""
    torch.manual_seed(0)
    shapes = [(*lead, seqlen_q, HEADS, DIM)] + [(*lead, seqlen_k, KV_HEADS, DIM)] * 2
    return [torch.randn(shape, device=device, dtype=dtype) for shape in (*shapes, shapes[0])]


def whole(function, q, k, v, dout, *lengths, **options):
    """out, lse, dq, dk and dv of the differentiable function in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves, *lengths, return_lse=True, backend="reference", **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())


def cumulative(device, *lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class Part:
    """Some keys of the whole, of all sequences: their rows, and how the queries see them."""

    def __init__(self, rows, **options):
        self.rows, self.options = rows, options

    def of(self, x):
        return x[..., self.rows, :, :]


def ring(q, k, v, dout, parts, **options):
    """out, lse, dq, dk and dv of parts of the keys, each computed by itself."""
    found = [
        flash_attn_forward(q, part.of(k), part.of(v), **part.options, **options) for part in parts
    ]
    outs, lses = (torch.stack(x) for x in zip(*found, strict=True))
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0.0).transpose(-1, -2).unsqueeze(-1)
    out = (weights * outs.float()).sum(0).to(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (q, k, v))
    for part in parts:
        sides = q, part.of(k), part.of(v)
        gradients = flash_attn_backward(dout, *sides, out, lse, dq=dq, **part.options, **options)
        assert gradients[0] is dq and gradients[1].dtype == q.dtype
        dk[..., part.rows, :, :], dv[..., part.rows, :, :] = (x.float() for x in gradients[1:])
    return out, lse, dq, dk, dv


def assert_close(found, wanted, dtype):
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert torch.equal(x == -math.inf, y == -math.inf), name
        difference = (x.double() - y).masked_fill(y == -math.inf, 0.0).norm()
        assert difference <= bound * y[y > -math.inf].norm(), (name, difference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_joined_by_lse_are_the_whole(backend, device):
    dtype = torch.float32 if backend == "reference" else torch.float16
    inputs = tensors(device, dtype, (2,), 20, 33)
    wanted = whole(flash_attn_func, *inputs, causal=True, **OPTIONS)
    parts = [Part(slice(0, 13)), Part(slice(13, 33), causal=True)]
    assert_close(ring(*inputs, parts, backend=backend, **OPTIONS), wanted, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_varlen_parts_joined_by_lse_are_the_whole(backend, device):
    """The second sequence has no query, the third no key: lse -inf in both parts."""
    dtype = torch.float32 if backend == "reference" else torch.float16
    inputs = tensors(device, dtype, (), 20, 25)
    of_q = cumulative(device, 9, 0, 4, 7)
    all_keys = cumulative(device, 12, 3, 0, 10)
    wanted = whole(flash_attn_varlen_func, *inputs, of_q, all_keys, 9, 12, causal=True, **OPTIONS)
    early = {"cu_seqlens_k": cumulative(device, 3, 3, 0, 3), "max_seqlen_k": 3}
    own = {"cu_seqlens_k": cumulative(device, 9, 0, 0, 7), "max_seqlen_k": 9, "causal": True}
    parts = [
        Part([*range(0, 3), *range(12, 15), *range(15, 18)], **early),
        Part([*range(3, 12), *range(18, 25)], **own),
    ]
    options = {"cu_seqlens_q": of_q, "max_seqlen_q": 9, "backend": backend, **OPTIONS}
    assert_close(ring(*inputs, parts, **options), wanted, dtype)


def test_dense_keys_with_seqused_k():
    """cu_seqlens_k is None: dk and dv have k's shape."""
    q, k, v, dout = tensors("cpu", torch.float64, (2,), 5, 9)
    rows, used = q.flatten(0, 1), torch.tensor([9, 4], dtype=torch.int32)
    options = {"cu_seqlens_q": cumulative("cpu", 5, 5), "seqused_k": used, "max_seqlen_q": 5}
    out, lse = flash_attn_forward(rows, k, v, **options)
    _, dk, dv = flash_attn_backward(dout.flatten(0, 1), rows, k, v, out, lse, **options)
    for i in range(2):
        keys = (x[i : i + 1, : used[i]] for x in (k, v))
        wanted = whole(flash_attn_func, q[i : i + 1], *keys, dout[i : i + 1])
        for x, y in ((out.view(q.shape), wanted[0]), (dk, wanted[3]), (dv, wanted[4])):
            torch.testing.assert_close(x[i : i + 1, : y.shape[1]], y)
    assert dk.shape == k.shape and not dk[1, 4:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_autograd_bit_for_bit_in_any_layout(backend, device):
    """lse as (batch, seqlen, heads), dout expanded, out with the heads first; dlse too."""
    dtype = torch.float32 if backend == "reference" else torch.float16
    q, k, v, dout = tensors(device, dtype, (2,), 20, 33)
    dout = dout[:, :1].expand(q.shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"backend": backend, "deterministic": True, "window_size": (7, 2)}
    out, lse = flash_attn_func(*leaves, return_lse=True, **options)
    dlse = torch.randn_like(lse)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    with torch.no_grad():
        given = (
            out.transpose(1, 2).contiguous().transpose(1, 2),
            lse.transpose(1, 2).contiguous().transpose(1, 2),
        )
        found = flash_attn_backward(dout, *leaves, *given, dlse=dlse, **options)
        sums = [torch.full(x.shape, 2.0, device=device) for x in leaves]
        named = dict(zip(("dq", "dk", "dv"), sums, strict=True))
        added = flash_attn_backward(dout, *leaves, *given, dlse=dlse, **options, **named)
    for x, y, z, given in zip(found, wanted, added, sums, strict=True):
        assert torch.equal(x, y) and z is given and torch.equal(z, 2 + y.float())


def both(q, k, v, dout):
    out, lse = flash_attn_forward(q, k, v, causal=True)
    return flash_attn_backward(dout, q, k, v, out, lse, causal=True, dv=torch.zeros_like(v))


@pytest.mark.slow
def test_compiled():
    inputs = tensors("cpu", torch.float32, (2,), 20, 33)
    run = torch.compile(both, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(run(*inputs), both(*inputs), strict=True):
        assert torch.equal(found, wanted)


def test_tensors_without_data():
    inputs = tensors("cpu", torch.float32, (2,), 20, 33)
    shapes = [x.shape for x in inputs[:3]]
    with FakeTensorMode() as mode:
        assert [x.shape for x in both(*map(mode.from_tensor, inputs))] == shapes
    assert [x.shape for x in both(*(x.to("meta") for x in inputs))] == shapes


def test_no_gradient_is_lost_in_silence():
    q, k, v, dout = tensors("cpu", torch.float32, (2,), 4, 4)
    out, lse = flash_attn_forward(q, k, v)
    message = r"{}\.requires_grad must be False, got True: it computes one pass"
    with pytest.raises(UnsupportedError, match="flash_attn_forward: " + message.format("k")):
        flash_attn_forward(q, k.requires_grad_(), v)
    k = k.detach()
    with pytest.raises(UnsupportedError, match="flash_attn_backward: " + message.format("dout")):
        flash_attn_backward(dout.requires_grad_(), q, k, v, out, lse)
    with torch.no_grad():
        assert not flash_attn_forward(q.requires_grad_(), k, v)[0].requires_grad


ERRORS = (
    ({"dout": (2, 4, 4, 8)}, r"dout\.shape must be \(2, 4, 4, 16\), got \(2, 4, 4, 8\)"),
    ({"dout": torch.float64}, r"dout\.dtype must be torch\.float32, got torch\.float64"),
    ({"out": (2, 4, 16)}, r"out\.shape must be \(2, 4, 4, 16\), got \(2, 4, 16\)"),
    ({"lse": (2, 4)}, r"lse\.shape must be \(2, 4, 4\), got \(2, 4\)"),
    ({"lse": torch.float16}, r"lse\.dtype must be torch\.float32, got torch\.float16"),
    ({"dlse": (1, 4, 4)}, r"dlse\.shape must be \(2, 4, 4\), got \(1, 4, 4\)"),
    ({"lse": "no tensor"}, r"lse must be a torch\.Tensor, got 'no tensor' \(str\)"),
    ({"dk": (2, 4, 4, 16)}, r"dk\.shape must be \(2, 6, 2, 16\), got \(2, 4, 4, 16\)"),
    ({"dq": torch.bfloat16}, r"dq\.dtype must be torch\.float32, got torch\.bfloat16"),
    ({"dv": torch.device("meta")}, r"dv\.device must be cpu as q's, got meta"),
    ({"dq": torch.zeros(1).expand(2, 4, 4, 16)}, r"dq\.stride must be without a stride of 0"),
    ({"q": (4, 16)}, r"q\.shape must be \(batch, seqlen, heads, head_dim\), got \(4, 16\)"),
    ({"max_seqlen_q": 4}, r"max_seqlen_q must be None without cu_seqlens_q, got 4 \(int\)"),
)


@pytest.mark.parametrize(("changed", "message"), ERRORS)
def test_errors(changed, message):
    q, k, v, dout = tensors("cpu", torch.float32, (2,), 4, 6)
    out, lse = flash_attn_forward(q, k, v)
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": lse.clone()}
    sums = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    arguments |= sums
    for name, change in changed.items():
        if isinstance(change, tuple):
            arguments[name] = torch.zeros(change)
        elif isinstance(change, (torch.dtype, torch.device)):
            arguments[name] = arguments[name].to(change)
        else:
            arguments[name] = change
    with pytest.raises((TypeError, ValueError), match=f"flash_attn_backward: {message}"):
        flash_attn_backward(**arguments)
    assert not any(x.any() for x in sums.values())


def test_8_bits():
    """The forward takes them, with the mean that k lacks in lse; the backward refuses them."""
    q, k, v, dout = tensors("cpu", torch.float32, (1,), 8, 8)
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    scaled = [quantize_block_fp8(x, kind=kind) for x, kind in ((q, "q"), (k, "k"), (v, "v"))]
    out, lse = flash_attn_forward(*scaled)
    wanted = flash_attn_func(*scaled, return_lse=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    with pytest.raises(UnsupportedError, match=r"q\.dtype must be of 16 bits or more"):
        flash_attn_backward(dout, *scaled, out, lse)
