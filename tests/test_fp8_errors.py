"""Every illegal FP8 call is met with its exact sentence; legal ones get the plan they should."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import GPUS, H100, L4, RTX3090, RTX5090, WITHOUT_HOPPER, described

from flashattn3 import (
    UnsupportedError,
    explain,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    quantize_block_fp8,
)
from flashattn3.call.descales import BLOCKS, Descales
from flashattn3.call.dtypes import EIGHT_BIT, FP8, INT8, OUT_DTYPES
from flashattn3.call.operands import Scaled, Tensors, normalised
from flashattn3.run.planner import choose

EDGES = torch.tensor([0, 70, 200], dtype=torch.int32)


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def fp8(*shape):
    return half(*shape).to(FP8)


def int8(*shape):
    return half(*shape).to(INT8)


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def raw(function=flash_attn_func, **changes):
    arguments = {"q": fp8(2, 200, 4, 16), "k": fp8(2, 200, 2, 16), "v": fp8(2, 200, 2, 16)}
    return lambda: function(**{**arguments, **changes})


@cache
def scaled_zeros(*shape, **options):
    """Many calls share them: the tests are collected before the interpreter is made quick."""
    return quantize_block_fp8(half(*shape), **options)


def scaled(x, **options):
    return scaled_zeros(*x.shape, **options)


def blocks(**changes):
    q, k = half(2, 200, 4, 16), half(2, 200, 2, 16)
    arguments = {"q": scaled(q), "k": scaled(k, kind="k"), "v": scaled(k, kind="v")}
    return lambda: flash_attn_func(**{**arguments, **changes})


def varlen(edges=EDGES, longest=130, **changes):
    x, of = half(200, 2, 16), {"cu_seqlens": edges, "max_seqlen": 130}
    arguments = {side: scaled(x, kind=side, **of) for side in "qkv"}
    arguments |= {"cu_seqlens_q": EDGES, "cu_seqlens_k": EDGES}
    arguments |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: flash_attn_varlen_func(**{**arguments, **changes})


RAGGED_Q = scaled(half(200, 2, 16), cu_seqlens=EDGES, max_seqlen=130, block=64)


def with_mean(side, shape=(2, 2, 16), **options):
    x = scaled(half(2, 200, 2, 16), kind=side)
    return {side: replace(x, mean=ones(*shape, **options))}


def sixteen(function=flash_attn_fp8_func, **changes):
    arguments = {side: half(1, 8, 2, 48) for side in "qkv"} | {"hadamard": False}
    return lambda: function(**{**arguments, **changes})


IMPLIED = f"one of [1, 2, 4] (1, or blocks of one of {BLOCKS} for 200 tokens)"
VALUE_ERRORS = [
    (
        raw(**{side: int8(2, 200, 2, 16) for side in "qkv"}),
        f"v.dtype must be {FP8} where q is {INT8}, got {INT8}",
    ),
    (
        raw(q=int8(2, 200, 4, 16), k=int8(2, 200, 2, 16), q_descale=ones(2, 3)),
        "q_descale.shape[1] must be 2 (k's heads) or 4 (q's), got 3",
    ),
    (
        raw(q=int8(2, 200, 4, 16), k=int8(2, 200, 2, 16), out_dtype=INT8),
        f"out_dtype must be None or one of {OUT_DTYPES}, got {INT8}",
    ),
    (
        raw(**{side: half(2, 200, 2, 16) for side in "qkv"}, v_descale=ones(2, 2)),
        "v_descale must be None where q is torch.float16, got a tensor",
    ),
    (
        raw(**{side: half(2, 200, 2, 16) for side in "qkv"}, out_dtype=torch.bfloat16),
        "out_dtype must be None or torch.float16 as q's, got torch.bfloat16",
    ),
    (raw(k_descale=ones(2, 4)), "k_descale.shape[1] must be 2 (k's heads), got 4"),
    (raw(q_descale=ones(2, 3)), "q_descale.shape[1] must be 2 (k's heads) or 4 (q's), got 3"),
    (raw(q_descale=ones(2, 4, 3)), f"q_descale.shape[2] must be {IMPLIED}, got 3"),
    (raw(v_descale=ones(2, 2, 0)), f"v_descale.shape[2] must be {IMPLIED}, got 0"),
    (
        blocks(q_descale=ones(2, 2)),
        "q_descale must be None where q is BlockScaled, "
        "got Tensor of shape (2, 2) and dtype torch.float32",
    ),
    (
        blocks(k=scaled(half(2, 200, 2, 16), kind="k", hadamard=True)),
        "k.hadamard must be False as q's, got True",
    ),
    (
        blocks(k=scaled(half(2, 200, 2, 16), kind="k", dtype=INT8)),
        f"k.dtype must be {FP8} as q's, got {INT8}",
    ),
    (
        blocks(v=replace(scaled(half(2, 200, 2, 16)), hadamard=True)),
        "v.hadamard must be False: out would stay rotated, got True",
    ),
    (
        blocks(k=replace(scaled(half(2, 200, 2, 16)), layout="permuted")),
        "k.layout must be one of ('rows',), got permuted",
    ),
    (
        blocks(v=replace(scaled(half(2, 200, 2, 16)), layout="permuted")),
        "v.shape must be (batch, heads, keys / 16, columns, 16), got (2, 200, 2, 16)",
    ),
    (blocks(k=scaled(half(2, 100, 2, 16))), "v.shape[-3] must be 100 (k's seqlen), got 200"),
    (
        blocks(v=replace(scaled(half(2, 200, 2, 16)), block=64)),
        "v_descale.shape[2] must be 4 (blocks of 64 tokens), got 2",
    ),
    (
        blocks(v=replace(scaled(half(2, 200, 2, 16)), block=100)),
        f"v_block must be one of {BLOCKS}, got 100",
    ),
    (
        blocks(v=replace(scaled(half(2, 200, 2, 16)), cu_seqlens=EDGES)),
        "v.cu_seqlens must be None, got a tensor",
    ),
    (
        blocks(q=replace(scaled(half(2, 200, 4, 16)), mean=ones(2, 4, 16))),
        "q.mean must be None: it would change weights, got a tensor",
    ),
    (
        blocks(**with_mean("k"), softcap=20.0),
        "softcap must be 0 where k has a mean: capped scores do not all move alike, got 20.0",
    ),
    (
        blocks(**with_mean("k", (2, 1, 16))),
        "k.mean.shape must be (2, 2, 16) (batch, heads, head_dim), got (2, 1, 16)",
    ),
    (blocks(**with_mean("v")), "v.mean must be None: out would lack it, got a tensor"),
    (
        blocks(**with_mean("k", dtype=torch.float16)),
        "k.mean.dtype must be torch.float32, got torch.float16",
    ),
    (blocks(**with_mean("k", device="meta")), "k.mean.device must be cpu as q's, got meta"),
]
# 129 rows in blocks of 64, taken for blocks of 128 of 257 rows.
FEW_ROWS = {side: fp8(129, 2, 16) for side in "qkv"}
FEW_ROWS |= {f"{side}_descale": ones(1, 2, 3) for side in "qkv"}
FEW_ROWS |= {f"cu_seqlens_{side}": torch.tensor([0, 129], dtype=torch.int32) for side in "qk"}
VARLEN_ERRORS = [
    (
        lambda: flash_attn_varlen_func(**FEW_ROWS, max_seqlen_q=257, max_seqlen_k=257),
        "max_seqlen_q must be at most 129, the number of rows, where q_descale has 3 blocks, "
        "got 257",
    ),
    (varlen(k=scaled(half(1, 200, 2, 16))), "k.cu_seqlens must be the call's, got None"),
    (varlen(EDGES[:2]), "q.cu_seqlens.shape must be (3,) as the call's, got (2,)"),
    (
        varlen(q=replace(RAGGED_Q, cu_seqlens=EDGES.to("meta"))),
        "q.cu_seqlens.device must be cpu as the call's, got meta",
    ),
    (
        varlen(q=RAGGED_Q, longest=200),
        "q_descale.shape[2] must be at least 4 (blocks of 64 tokens), got 3",
    ),
    (
        varlen(k=replace(RAGGED_Q, mean=ones(1, 2, 16))),
        "k.mean.shape must be (2, 2, 16) (batch, heads, head_dim), got (1, 2, 16)",
    ),
    (
        lambda: flash_attn_varlen_func(
            *[fp8(200, 2, 16)] * 3, EDGES, EDGES, 130, 130, v_descale=ones(2, 2, 4)
        ),
        f"v_descale.shape[2] must be one of [1, 2, 3] (1, or blocks of one of {BLOCKS} for 130 "
        "tokens), got 4",
    ),
]
FP8_ERRORS = [
    (
        sixteen(**{side: half(1, 8, 2, 48).float() for side in "qkv"}),
        "q.dtype must be one of (torch.float16, torch.bfloat16), got torch.float32",
    ),
    (
        sixteen(smooth_k=True, softcap=5.0),
        "softcap must be 0 with smooth_k=True: capped scores do not all move alike, got 5.0",
    ),
    (sixteen(hadamard=True), "q.shape[-1] must be a power of two with hadamard=True, got 48"),
    (sixteen(q=half(8, 2, 48)), "q.shape must be (batch, seqlen, heads, head_dim), got (8, 2, 48)"),
    (
        sixteen(v=half(1, 8, 2, 48).bfloat16()),
        "v.dtype must be torch.float16 as q's, got torch.bfloat16",
    ),
]
TYPE_ERRORS = [
    (
        raw(k=scaled(half(2, 200, 2, 16))),
        f"q must be BlockScaled as k or v is, got Tensor of shape (2, 200, 4, 16) and dtype {FP8}",
    ),
    (
        blocks(v=fp8(2, 200, 2, 16)),
        f"v must be BlockScaled as q is, got Tensor of shape (2, 200, 2, 16) and dtype {FP8}",
    ),
]
ILLEGAL = [
    (error, f"{function}: {sentence}", call)
    for error, function, table in (
        (ValueError, "flash_attn_func", VALUE_ERRORS),
        (ValueError, "flash_attn_varlen_func", VARLEN_ERRORS),
        (ValueError, "flash_attn_fp8_func", FP8_ERRORS),
        (TypeError, "flash_attn_func", TYPE_ERRORS),
    )
    for call, sentence in table
]


@pytest.mark.parametrize(
    ("error", "sentence", "call"), ILLEGAL, ids=[s[:70] for _, s, _ in ILLEGAL]
)
def test_illegal_input_gets_its_sentence(error, sentence, call):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == sentence
    assert type(caught.value) is error


@pytest.mark.parametrize("call", [raw, blocks], ids=["raw", "blocks"])
def test_what_nothing_supports_is_refused(call):
    with pytest.raises(UnsupportedError, match=r"qv must be None, got .* is not supported yet"):
        call(qv=half(2, 200, 4, 16))()


def test_a_length_on_the_gpu_does_not_tell_the_block():
    """There max_seqlen is not read, so only descales for whole sequences are clear."""
    q, k, v = [fp8(200, 2, 16)] * 3
    tensors = Tensors(q, Scaled(k, ones(2, 2, 3)), v, EDGES, EDGES)
    with pytest.raises(ValueError) as caught:
        described(tensors)
    sentence = "max_seqlen_k must be an int where k_descale is per block, got None"
    assert str(caught.value) == f"flash_attn_func: {sentence}"
    whole = normalised("", Tensors(q, k, v, EDGES, EDGES), (None, ones(2, 2), None))
    assert described(whole).k.descales == Descales(200, 2, 1, (2, 1, 1))


def test_contents_of_cu_seqlens_are_compared():
    x = half(9, 2, 16)
    edges, others = (torch.tensor(e, dtype=torch.int32) for e in ((0, 4, 9), (0, 5, 9)))
    of = {"cu_seqlens": edges, "max_seqlen": 5}
    scaled = [quantize_block_fp8(x, kind=kind, **of) for kind in "qkv"]
    for given in (edges, edges.clone()):
        assert flash_attn_varlen_func(*scaled, given, given, 5, 5).shape[0] == 9
    sentence = r"q\.cu_seqlens must be \[0, 5, 9\] as the call's, got \[0, 4, 9\]"
    with pytest.raises(ValueError, match=f"^flash_attn_varlen_func: {sentence}$"):
        flash_attn_varlen_func(*scaled, others, others, 5, 5)


def problem(block=128, seqlen=4096, dtype=FP8, **options):
    q = torch.empty(1, seqlen, 8, 64, device="meta", dtype=dtype)
    descale = torch.empty(1, 8, -(-seqlen // block), device="meta")
    tensors = Tensors(*(Scaled(x, descale, block) for x in (q, q, q.to(FP8))))
    return described(tensors, **options)


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_triton_takes_8_bits_on_every_gpu(chip, dtype):
    """e4m3 is multiplied as it is from 8.9 on, where Triton compiles for the chip itself."""
    found = choose(problem(dtype=dtype), chip, WITHOUT_HOPPER)
    assert found.backend.name == "triton"
    assert found.launch.config.native_fp8 == (chip in (L4, H100, RTX5090))
    assert found.launch.config.tiles.forward.block_n <= 128


def test_a_key_tile_lies_within_one_block():
    chip = RTX3090._replace(shared_memory_bytes=99 * 1024)
    for block, masked in itertools.product(BLOCKS, (False, True)):
        found = choose(problem(block, causal=masked), chip, WITHOUT_HOPPER).launch.config
        assert block % found.tiles.forward.block_n == 0
    assert choose(problem(5000), chip, WITHOUT_HOPPER).launch.config.tiles.forward.block_n == 64


def test_explain_takes_every_form():
    q = half(1, 70, 2, 64)
    of_blocks = explain(*(quantize_block_fp8(q, kind=kind) for kind in "qkv"), causal=True)
    of_raw = explain(*[q.to(FP8)] * 3, q_descale=ones(1, 2), causal=True, out_dtype=torch.float16)
    of_int8 = explain(*[q.to(INT8)] * 2, q.to(FP8), k_descale=ones(1, 2), causal=True)
    assert of_blocks.backend == of_raw.backend == of_int8.backend
    with pytest.raises(ValueError, match=r"q_descale\.shape\[1\] must be 2 "):
        explain(*[q.to(FP8)] * 3, q_descale=ones(1, 3))
