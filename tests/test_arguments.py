"""Arguments that tests/test_odd_calls.py does not generate: forms that are legal, sentences of more
than one argument, hints."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import H100, WITHOUT_HOPPER, described, ints, library_double, run_python

from flashattn3 import (
    available_backends,
    explain,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    quantize_block_fp8,
)
from flashattn3.backends.device import describe_device
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.registry import BACKENDS, TRITON
from flashattn3.call.block_scaled import BlockScaled
from flashattn3.call.dtypes import EIGHT_BIT, FP8
from flashattn3.call.fields import _warn_of_zero_scale
from flashattn3.call.operands import Tensors
from flashattn3.quantization import torch_operations
from flashattn3.run.planner import choose


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ROWS, EDGES = normal(20, 2, 16), ints(0, 5, 12, 20)
HALF = ROWS.half()


def varlen(rows=ROWS, function=flash_attn_varlen_func, **changes):
    arguments = {"cu_seqlens_q": EDGES, "cu_seqlens_k": EDGES}
    arguments |= {"max_seqlen_q": 8, "max_seqlen_k": 8}
    return function(rows, rows, rows, **{**arguments, **changes})


def dense(rows=ROWS, function=flash_attn_func, **changes):
    x = rows.unflatten(0, (2, 10))
    return function(x, x, x, **changes)


def test_scalars_of_numpy_and_torch_are_taken():
    qkv = normal(1, 6, 8, 16)
    wanted = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=1, num_heads_q=np.int64(4)), wanted)
    wanted = dense(HALF, flash_attn_fp8_func, block=64, hadamard=False)
    found = dense(HALF, flash_attn_fp8_func, block=np.int64(64), hadamard=np.bool_(False))
    assert torch.equal(found, wanted)
    assert (
        quantize_block_fp8(normal(1, 8, 2, 16), block=torch.tensor(64), hadamard=1).hadamard is True
    )


def sentence_of(call, **changes) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**changes)
    return str(caught.value)


X = normal(200, 2, 16)
RAGGED = {"cu_seqlens": ints(0, 50, 200), "max_seqlen": 150}


def test_slots_of_no_key_are_taken():
    q, v = normal(1, 4, 2, 16), normal(1, 0, 2, 16)
    scaled = (
        quantize_block_fp8(q),
        quantize_block_fp8(v, kind="k"),
        quantize_block_fp8(v, kind="v", layout="permuted"),
    )
    assert not flash_attn_func(*scaled).any()


@pytest.mark.parametrize("eight", EIGHT_BIT)
@pytest.mark.parametrize("max_seqlen", [0, 3, 64])
def test_a_length_that_is_too_small_never_leaves_the_tensors(max_seqlen, eight):
    """On a GPU nobody reads the lengths; an index out of bounds would lose the CUDA context."""
    data, descale = torch_operations.quantize(X, 64, False, RAGGED["cu_seqlens"], max_seqlen, eight)
    assert data.shape == X.shape and descale.shape == (2, 2, -(-max_seqlen // 64))
    scaled = BlockScaled(data, descale, 64, cu_seqlens=RAGGED["cu_seqlens"])
    assert scaled.dequantize().shape == X.shape


MISFITS = [
    ({"q": HALF[:8, :, :0], "k": HALF[:8, :, :0]}, "q.shape[-1] must be at least 1, got 0"),
    ({"k": HALF[:8, :0], "v": HALF[:8, :0]}, "k.shape[-2] must be at least 1 head, got 0"),
    ({"q": normal(8, 3, 16).half()}, "q.shape[-2] must be a multiple of k's 2 heads, got 3"),
]


@pytest.mark.parametrize(("wrong", "sentence"), MISFITS, ids=[text for _, text in MISFITS])
def test_tensors_that_do_not_fit_together_reach_no_backend(wrong, sentence, monkeypatch):
    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "prepare", lambda *_: pytest.fail("was reached"))
    given = {name: x[None] for name, x in (dict.fromkeys("qkv", HALF[:8]) | wrong).items()}
    assert sentence_of(flash_attn_func, **given) == f"flash_attn_func: {sentence}"


def test_words_that_turn_checking_on():
    words = {"1": True, "true": True, "ON": True, "0": False, "": False}
    code = f"""
import os
from importlib import reload
from flashattn3.call import value_checks
for word in {list(words)}:
    os.environ["FLASHATTN3_CHECK"] = word
    print(reload(value_checks).CHECKED)"""
    assert run_python(code).split() == list(map(str, words.values()))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_number_with_a_gradient_is_refused(name):
    """The gradient of a learned scale would be lost."""
    learned = torch.tensor(0.5, requires_grad=True)
    assert f"{name}.requires_grad must be False, got True" in sentence_of(dense, **{name: learned})
    with torch.no_grad():
        assert torch.equal(dense(**{name: learned}), dense(**{name: 0.5}))


def test_a_softmax_scale_of_zero_warns_once():
    """FlashAttention-2 has dropout_p at its place."""
    _warn_of_zero_scale.cache_clear()
    with pytest.warns(UserWarning, match="^flash_attn_func: softmax_scale is 0, .*dropout_p"):
        dense(softmax_scale=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dense(softmax_scale=0.0)
        dense(softmax_scale=0.1)


def test_the_order_of_flash_attention_2_is_explained():
    x = normal(1, 8, 2, 16)
    for call in (
        lambda: flash_attn_func(x, x, x, 0.0, None, True),
        lambda: flash_attn_func(x, x, x, 0.0, None),
    ):
        assert "FlashAttention-2 has dropout_p, softmax_scale and causal" in sentence_of(call)
    lengths = EDGES, EDGES, 8, 8
    found = sentence_of(lambda: flash_attn_varlen_func(*[ROWS] * 3, *lengths, 0.0, None, True))
    assert "softmax_scale must be a float, got True (bool); pass softmax_scale and causal" in found


def test_dense_keys_need_no_cu_seqlens():
    """As in a cache with room for more: seqused_k says how much of it counts."""
    keys = normal(3, 9, 2, 16, seed=1).requires_grad_()
    values, used = normal(3, 9, 2, 24, seed=2), ints(9, 4, 0)
    rows = EDGES, ints(0, 9, 18, 27), 8, 9
    wanted, wanted_lse = flash_attn_varlen_func(
        ROWS, keys.flatten(0, 1), values.flatten(0, 1), *rows, seqused_k=used, return_lse=True
    )
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), keys)
    for longest in (9, 1000, None):
        found, lse = flash_attn_varlen_func(
            ROWS, keys, values, EDGES, None, 8, longest, seqused_k=used, return_lse=True
        )
        (gradient,) = torch.autograd.grad(found.sum(), keys)
        assert torch.equal(found, wanted) and torch.equal(lse, wanted_lse)
        assert torch.equal(gradient, wanted_gradient)
    axes = "(batch, seqlen_k, heads, head_dim) where cu_seqlens_k is None"
    assert sentence_of(varlen, cu_seqlens_k=None).endswith(
        f"k.shape must be {axes}, got (20, 2, 16)"
    )
    wrong = {"q": ROWS, "k": keys[:2], "v": values[:2], "cu_seqlens_q": EDGES}
    wrong |= {"cu_seqlens_k": None, "max_seqlen_q": 8, "max_seqlen_k": 9}
    assert sentence_of(flash_attn_varlen_func, **wrong).endswith(
        "k.shape[0] must be 3 (batch), got 2"
    )


@pytest.mark.parametrize("device", ["cuda:1", "cuda:200", "cuda:1000"])
def test_a_device_beyond_the_only_gpu_is_named(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wanted = "one of this machine's 1 GPUs or a CPU"
    sentence = f"available_backends: device must be {wanted}, got '{device}' (str)"
    assert sentence_of(available_backends, device=device) == sentence


def test_a_quantized_tensor_acts_like_one():
    scaled = quantize_block_fp8(X, smooth=True, kind="k", **RAGGED)
    assert (scaled.device, scaled.dtype, scaled.shape) == (X.device, FP8, X.shape)
    assert scaled == scaled and scaled != quantize_block_fp8(X, smooth=True, kind="k", **RAGGED)
    assert len({scaled, scaled}) == 1
    assert scaled.to("cpu") is scaled
    moved = scaled.to("meta")
    places = {x.device.type for x in (moved.data, moved.descale, moved.cu_seqlens, moved.mean)}
    assert places == {"meta"} and moved.device.type == "meta"
    assert (moved.block, moved.shape, moved.layout) == (scaled.block, scaled.shape, scaled.layout)
    assert "BlockScaled.to: device must be" in sentence_of(lambda: scaled.to(torch.float16))
    for name in ("data", "descale", "mean", "cu_seqlens"):
        given = {"data": X, "descale": X, "block": 64, name: [1.0]}
        sentence = f"BlockScaled: {name} must be a torch.Tensor, got [1.0] (list)"
        assert sentence_of(BlockScaled, **given) == sentence


HINTS = {"pack_gqa": True, "sm_margin": 8, "num_splits": 4, "use_fast_accum": True}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("hint", HINTS)
def test_hints_change_no_result_and_no_backend(hint, backend, device):
    x = HALF.unflatten(0, (2, 10)).to(device)
    given = {hint: HINTS[hint]}
    found = flash_attn_func(x, x, x, backend=backend, **given)
    torch.testing.assert_close(found, flash_attn_func(x, x, x, backend=backend), atol=2e-3, rtol=0)
    explained = explain(x, x, x, backend=backend, **given)
    assert explained.backend == backend
    used = {"num_splits"} if backend == "reference" else {"num_splits", "pack_gqa"}
    assert set(explained.unused_hints) == {hint} - used
    assert all(f"{name} has no effect: " in str(explained) for name in explained.unused_hints)
    assert not explain(x, x, x, backend=backend).unused_hints


@pytest.mark.parametrize("hint", HINTS)
def test_hints_keep_a_call_on_hopper(hint):
    hopper = HopperBackend(library=library_double, only_measured=False)
    q = torch.empty(1, 4096, 8, 128, device="meta", dtype=torch.float16)
    problem = described(Tensors(q, q, q), **{hint: HINTS[hint]})
    found = choose(problem, H100, (hopper, *WITHOUT_HOPPER))
    assert found.backend is hopper
    assert set(found.unused_hints) == {hint} - {"sm_margin"}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("eight", EIGHT_BIT)
def test_fast_accumulation_changes_no_bit_of_a_backend_that_adds_in_float32(eight, backend, device):
    rows, edges = HALF.to(device), EDGES.to(device)
    x = rows.unflatten(0, (2, 10))
    qkv = (x.to(eight), x.to(eight), x.to(FP8))
    given = {"backend": backend, "out_dtype": torch.float16, "return_lse": True}
    found = flash_attn_func(*qkv, **given, use_fast_accum=True)
    assert all(map(torch.equal, found, flash_attn_func(*qkv, **given)))
    explained = explain(*qkv, backend=backend, out_dtype=torch.float16, use_fast_accum=True)
    assert set(explained.unused_hints) == {"use_fast_accum"}
    dense_given = {"backend": backend, "qk_dtype": eight}
    varlen_given = {**dense_given, "cu_seqlens_q": edges, "cu_seqlens_k": edges}
    for call, function, given in (
        (dense, flash_attn_fp8_func, dense_given),
        (varlen, flash_attn_varlen_fp8_func, varlen_given),
    ):
        found = call(rows, function, use_fast_accum=True, **given)
        assert torch.equal(found, call(rows, function, **given))


def test_the_interpreter_declines_bfloat16():
    x = HALF.unflatten(0, (2, 10)).bfloat16()
    info = describe_device(x.device)._replace(interpreted=True)
    problem = described(Tensors(x, x, x))
    assert "bfloat16" in TRITON.decline_reason(problem, info)
    assert TRITON.decline_reason(replace(problem, dtype=torch.float16), info) is None
