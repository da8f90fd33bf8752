"""FP8 calls whose arguments contradict each other are refused; legal ones get their plan."""

from __future__ import annotations

import itertools
import re
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
from flashattn3.call.dtypes import EIGHT_BIT, FP8, INT8
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


def varlen():
    """The longest sequence is said to have more blocks of 64 tokens than q has descales."""
    x, of = half(200, 2, 16), {"cu_seqlens": EDGES, "max_seqlen": 130}
    arguments = {side: scaled(x, kind=side, **of) for side in "kv"} | {
        "q": scaled(x, **of, block=64)
    }
    lengths = {"max_seqlen_q": 200, "max_seqlen_k": 200}
    return flash_attn_varlen_func(**arguments, cu_seqlens_q=EDGES, cu_seqlens_k=EDGES, **lengths)


def sixteen(**changes):
    arguments = {side: half(1, 8, 2, 48) for side in "qkv"} | {"hadamard": False}
    return lambda: flash_attn_fp8_func(**{**arguments, **changes})


OF_K = replace(scaled(half(2, 200, 2, 16), kind="k"), mean=ones(2, 2, 16))
# 129 rows in blocks of 64, taken for blocks of 128 of 257 rows.
FEW_ROWS = {side: fp8(129, 2, 16) for side in "qkv"}
FEW_ROWS |= {f"{side}_descale": ones(1, 2, 3) for side in "qkv"}
FEW_ROWS |= {f"cu_seqlens_{side}": torch.tensor([0, 129], dtype=torch.int32) for side in "qk"}
# What more than one argument says; test_odd_calls.py changes each by itself.
ILLEGAL = [
    (
        "flash_attn_func: softcap must be 0 where k has a mean",
        blocks(k=OF_K, softcap=20.0),
    ),
    (
        "flash_attn_varlen_func: max_seqlen_q must be at most 129, the number of rows, where "
        "q_descale has 3 blocks, got 257",
        lambda: flash_attn_varlen_func(**FEW_ROWS, max_seqlen_q=257, max_seqlen_k=257),
    ),
    (
        "flash_attn_varlen_func: q_descale.shape[2] must be at least 4 (blocks of 64 tokens)",
        varlen,
    ),
    (
        f"flash_attn_varlen_func: v_descale.shape[2] must be one of [1, 2, 3] (1, or blocks of one "
        f"of {BLOCKS} for 130 tokens), got 4",
        lambda: flash_attn_varlen_func(
            *[fp8(200, 2, 16)] * 3, EDGES, EDGES, 130, 130, v_descale=ones(2, 2, 4)
        ),
    ),
    (
        "flash_attn_fp8_func: softcap must be 0 with smooth_k=True",
        sixteen(smooth_k=True, softcap=5.0),
    ),
    (
        "flash_attn_fp8_func: q.shape[-1] must be a power of two with hadamard=True, got 48",
        sixteen(hadamard=True),
    ),
]


@pytest.mark.parametrize(("sentence", "call"), ILLEGAL, ids=[s[:70] for s, _ in ILLEGAL])
def test_illegal_input_gets_its_sentence(sentence, call):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        call()


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
    sentence = r"q\.cu_seqlens must be \[0, 5, 9\] as cu_seqlens_q's, got \[0, 4, 9\]"
    with pytest.raises(ValueError, match=f"^flash_attn_varlen_func: {sentence}$"):
        flash_attn_varlen_func(*scaled, others, others, 5, 5)


def problem(block=128, seqlen=4096, dtype=FP8, **options):
    q = torch.empty(1, seqlen, 8, 64, device="meta", dtype=dtype)
    descale = torch.empty(1, 8, -(-seqlen // block), device="meta")
    tensors = Tensors(*(Scaled(x, descale, block) for x in (q, q, q.to(FP8))))
    return described(tensors, **options)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("chip", GPUS)
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
