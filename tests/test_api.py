"""The public functions: choosing a backend, the packed forms, what is returned, environment
variables."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import GPU, run_python

import flashattn3
from flashattn3 import (
    UnsupportedError,
    available_backends,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    use_backend,
)


def tokens(*shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, dtype)


def test_signatures_are_those_of_the_contract():
    def signature(function) -> str:
        parameters = inspect.signature(function).parameters.values()
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        return str(inspect.Signature(bare))[1:-1]

    shared = (
        "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
        "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=0, "
        "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False, *, "
        "return_lse=False, backend=None, out_dtype=None, use_fast_accum=False, "
        "sinks=None, alibi_slopes=None, bias=None, return_max_logit=False"
    )
    lengths = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    lengths += ", seqused_q=None, seqused_k=None"
    assert signature(flash_attn_func) == f"q, k, v, {shared}, mask=None, split_tokens=None"
    assert signature(flash_attn_varlen_func) == f"q, k, v, {lengths}, {shared}, split_tokens=None"


def test_everything_exported_is_there_and_documented():
    for name in flashattn3.__all__:
        assert getattr(flashattn3, name).__doc__, name
    assert flashattn3.__version__


def test_use_backend_holds_within_its_block(device):
    q, half = tokens(1, 4, 2, 16), tokens(1, 4, 2, 16, dtype=torch.float16, device=device)
    with use_backend("reference"):
        declined = flashattn3.explain(half, half, half).declined
        assert set(declined) == {"hopper", "triton"}
        assert declined["triton"] == "backend='reference' was asked for"
        with use_backend("triton"):
            with pytest.raises(UnsupportedError, match="got 'triton'"):
                flash_attn_func(q, q, q)  # float32: never falls back
            assert flash_attn_func(q, q, q, backend="reference").shape == q.shape
        flash_attn_func(q, q, q)
    with pytest.raises(RuntimeError, match="inside"), use_backend("triton"):
        raise RuntimeError("inside")
    assert flash_attn_func(q, q, q).shape == q.shape


def test_backend_from_the_environment():
    code = """
import torch, flashattn3
q = torch.randn(1, 4, 2, 16)
try:
    flashattn3.flash_attn_func(q, q, q)
    print("ran")
except flashattn3.UnsupportedError as error:
    print(error)
print(flashattn3.flash_attn_func(q, q, q, backend="reference").shape[1])"""
    first, second = run_python(code, FLASHATTN3_BACKEND="triton").splitlines()
    assert first.startswith(
        "flash_attn_func: backend must be one that takes this problem, got 'triton'"
    )
    assert second == "4"
    assert run_python(code, FLASHATTN3_BACKEND="").splitlines() == ["ran", "4"]


def test_available_backends():
    assert "reference" in available_backends("cpu")
    assert available_backends() == available_backends("cuda" if GPU else "cpu")
    capability = torch.cuda.get_device_capability() if GPU else (0, 0)
    if capability >= (8, 0):
        found = available_backends("cuda")  # hopper where its kernels were compiled
        assert found in (["triton", "reference"], ["hopper", "triton", "reference"])
        assert capability == (9, 0) or "hopper" not in found
    else:
        code = "import flashattn3; print(flashattn3.available_backends('cpu'))"
        assert run_python(code, TRITON_INTERPRET=None).strip() == "['reference']"


def test_packed_qkv(device):
    """qkv has five axes, or four, with fewer heads of k and v."""
    qkv = tokens(2, 9, 3, 4, 16, device=device)
    options = {"causal": True, "window_size": (3, 0), "softcap": 2.0}
    found = flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(found, flash_attn_func(*qkv.unbind(2), **options))

    qkv = tokens(2, 9, 8, 16, device=device).requires_grad_()
    found, lse = flash_attn_qkvpacked_func(qkv, 0.3, num_heads_q=4, return_lse=True)
    wanted, wanted_lse = flash_attn_func(*qkv.split((4, 2, 2), 2), 0.3, return_lse=True)
    assert torch.equal(found, wanted) and torch.equal(lse, wanted_lse)
    assert torch.equal(*(torch.autograd.grad(x.sum(), qkv)[0] for x in (found, wanted)))


def test_packed_forms_of_flash_attention_2(device):
    """Its order: dropout_p stands before softmax_scale."""
    q, kv = tokens(2, 9, 4, 16, device=device), tokens(2, 7, 2, 2, 16, device=device)
    kv.requires_grad_()
    wanted, wanted_lse = flash_attn_func(q, *kv.unbind(2), 0.3, causal=True, return_lse=True)
    found, lse = flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True, return_attn_probs=True)
    assert torch.equal(found, wanted) and torch.equal(lse, wanted_lse)
    assert torch.equal(*(torch.autograd.grad(x.sum(), kv)[0] for x in (found, wanted)))

    edges_q, edges_k = cumulative(9, 9, device=device), cumulative(7, 7, device=device)
    rows = q.flatten(0, 1), kv.flatten(0, 1)
    lengths = edges_q, edges_k, 9, 7
    found = flash_attn_varlen_kvpacked_func(*rows, *lengths, 0.0, 0.3, True)
    unpacked = rows[0], *rows[1].unbind(1)
    same = flash_attn_varlen_func(*unpacked, *lengths, softmax_scale=0.3, causal=True)
    assert torch.equal(found, same)
    torch.testing.assert_close(found.unflatten(0, (2, 9)), wanted)

    qkv = tokens(12, 3, 2, 16, device=device)
    edges = cumulative(5, 7, device=device)
    found = flash_attn_varlen_qkvpacked_func(qkv, edges, 7, 0.0, 0.3, True, (3, 0))
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0)}
    wanted = flash_attn_varlen_func(*qkv.unbind(1), edges, edges, 7, 7, **options)
    assert torch.equal(found, wanted)


def cumulative(*lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
