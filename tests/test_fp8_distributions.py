"""8-bit attention of data that trained models have, on every backend, held to the bounds of
flashattn3_bench.checking.distributions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import EVERY_BACKEND, GPU, needs_hopper

from flashattn3 import flash_attn_fp8_func, flash_attn_func, quantize_block_fp8
from flashattn3.call.dtypes import EIGHT_BIT, FP8
from flashattn3.call.operands import Tensors
from flashattn3_bench.checking import FP8_OF_16_BIT, attention
from flashattn3_bench.checking.distributions import (
    Bounds,
    DistributionCase,
    Errors,
    Inputs,
    allowance,
    attend,
    cases,
    compare,
    heavy_probability,
    reference,
)

HEAD_DIMS = (64, 128, 256) if GPU else (64,)
LENGTHS = (
    *((1024, 2048, 4096, 8192) if GPU else (256, pytest.param(2048, marks=pytest.mark.slow))),
    pytest.param(32768, marks=pytest.mark.gpu),
    pytest.param(131072, marks=pytest.mark.gpu),
)
# Where the errors of all positions are below this, their ratio says nothing.
SMALL_ERROR = 0.01
POSITION_FACTOR = 2.0


def family(case: DistributionCase) -> str:
    """The name, of heavy keys without the position."""
    return case.name.replace(f"-{case.position}-", "-") if "heavy" in case.name else case.name


def members(name: str, seqlen_k: int, head_dim: int) -> list[DistributionCase]:
    return [case for case in cases((seqlen_k,), (head_dim,)) if family(case) == name]


FAMILIES = tuple(dict.fromkeys(map(family, cases((1024,), (64,)))))


def run(inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attn_func(*inputs, return_lse=True, backend=backend, out_dtype=torch.float16)


def everywhere(*names: str):
    """Parametrizes a test over families, lengths, head dims, dtypes of q and k, and backends."""

    def decorate(test):
        for argument, values in (
            ("backend", EVERY_BACKEND),
            ("dtype", EIGHT_BIT),
            ("head_dim", HEAD_DIMS),
            ("seqlen_k", LENGTHS),
            ("name", names),
        ):
            test = pytest.mark.parametrize(argument, values)(test)
        return test

    return decorate


def is_swept(name, seqlen_k, dtype, **_) -> bool:
    """On a CPU 2048 keys take seconds: of one dtype they are enough. Of a heavy key's four options
    each dtype has every three together: e4m3 where an even number is the second, int8 where an odd
    one is."""
    if seqlen_k > 256 and dtype != FP8:
        return True
    seconds = sum(option in name for option in ("p0.9", "noise", "heavy0", "v0.5"))
    return "heavy-" in name and seconds % 2 != (dtype != FP8)


@pytest.mark.interpreted(
    quick=lambda name, dtype, backend, **_: (
        backend != "triton" or dtype == FP8 or "heavy" not in name
    ),
    sweep=is_swept,
)
@everywhere(*FAMILIES)
def test_every_distribution(name, seqlen_k, head_dim, dtype, backend, device):
    """Each case within its bounds; a heavy key wherever it stands within twice the least error."""
    broken, errors = [], []
    for case in members(name, seqlen_k, head_dim):
        inputs = case.build(device, dtype)
        wanted = reference(inputs)
        found, allowed = compare(run(inputs, backend), wanted), allowance(inputs, wanted)
        errors.append(found.error)
        broken += [f"{case.id}: {miss}" for miss in case.misses(found, allowed)]
    if max(errors) > POSITION_FACTOR * max(min(errors), SMALL_ERROR):
        broken.append(f"{name}: errors by position {errors}")
    assert not broken, "\n".join([backend, *broken])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_a_head_with_v_descale_0_is_0(dtype, backend, device):
    """As blocks, and as FlashAttention-3's descale of a head."""
    (case,) = members("v-descale-zero", 300, 64)
    inputs = case.build(device, dtype)
    out, _ = run(inputs, backend)
    assert (out[:, :, 0] == 0).all() and (out[:, :, 1] != 0).any()
    descales = {
        f"{side}_descale": torch.tensor([[factor, 1.0]], device=device)
        for side, factor in (("q", 1.0), ("k", 1.0), ("v", 0.0))
    }
    data = (x.in_rows().data for x in inputs[:3])
    out = flash_attn_func(*data, 1e-3, **descales, backend=backend)
    assert (out[:, :, 0] == 0).all() and (out[:, :, 1] != 0).any()


OF_16_BIT = ("ones", "mean-1", "zero-first-half", "zero-last-half")
OF_16_BIT += tuple(name for name in FAMILIES if name.startswith("sink"))


@pytest.mark.interpreted(sweep=is_swept)
@everywhere(*OF_16_BIT)
def test_16_bit_tensors(name, seqlen_k, head_dim, dtype, backend, device):
    """Against the attention of the 16-bit tensors. A bias may be that of the quantization of q, k
    and v and, besides, what ``test_every_distribution`` allows the kernel; an error the documented
    one."""
    (case,) = members(name, seqlen_k, head_dim)
    q, k, v = (x.bfloat16() for x in case.tensors(device))
    wanted = attention(Tensors(q, k, v), softmax_scale=head_dim**-0.5)
    how = {"hadamard": True, "dtype": dtype}
    quantized = Inputs(
        quantize_block_fp8(q, kind="q", **how),
        quantize_block_fp8(k, kind="k", **how),
        quantize_block_fp8(v, kind="v"),
        head_dim**-0.5,
    )
    exact = compare(reference(quantized), wanted)
    how = {"qk_dtype": dtype, "return_lse": True, "backend": backend, "out_dtype": torch.float16}
    found = compare(flash_attn_fp8_func(q, k, v, **how), wanted)
    bias = case.bounds.bias + abs(exact.bias)
    bounds = Bounds(error=FP8_OF_16_BIT.rmse, bias=bias)
    broken = replace(case, bounds=bounds).misses(found, exact)
    assert not broken, f"{case.id}: {broken}"


@needs_hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_fast_accumulation_loses_what_is_documented(dtype, head_dim, device):
    """V = 1: 4096 values of one sign, whose sum WGMMA's accumulators cut off."""
    (case,) = members("ones", 4096, head_dim)
    inputs = case.build(device, dtype)
    wanted = reference(inputs)

    def bias(fast: bool) -> float:
        how = {"return_lse": True, "backend": "hopper", "out_dtype": torch.float16}
        found = flash_attn_func(*inputs, use_fast_accum=fast, **how)
        return compare(found, wanted).bias

    assert -0.12 <= bias(True) <= -0.01
    assert abs(bias(False)) < 0.01


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_heavy_keys_have_the_probability_that_they_are_named_for(dtype):
    for case in cases((256,), (64,)):
        if "heavy" in case.name:
            inputs = case.build("cpu", dtype)
            p = float(case.name.split("-")[1].removeprefix("p"))
            assert heavy_probability(case, inputs, reference(inputs)[1]) == pytest.approx(
                p, abs=0.02
            )


@pytest.mark.parametrize("name", ["heavy-p0.5-same-heavy0-v0.0", "sink-2^13"])
def test_weights_that_are_dropped_break_the_bounds(name):
    case = members(name, 8192, 64)[0]
    inputs = case.build("cpu", FP8)
    wanted, nothing = reference(inputs), Errors(0.0, 0.0, 0.0, 0.0)
    dropped = attend(inputs, lambda p: p.where(p >= 2.0**-12, 0.0))
    broken = case.misses(compare(dropped, wanted), nothing)
    assert [miss.split()[0] for miss in broken if "bias" not in miss] == ["error", "lse"]
    assert case.misses(compare(wanted, wanted), nothing) == []


def test_a_bound_is_that_of_the_case_or_of_honest():
    (case,) = members("ones", 1024, 64)
    right = Errors(0.0, 0.0, 0.0, 0.0)
    assert case.misses(right._replace(bias=-0.02), right) == ["bias 0.02 > 0.01"]
    assert case.misses(right._replace(bias=-0.02), right._replace(bias=0.02)) == []
    assert case.misses(right._replace(bias=float("nan")), right) == ["bias nan > 0.01"]


def test_the_two_halves_and_the_descales_are_as_named():
    for name, halves in (("zero-first-half", (True, False)), ("zero-last-half", (False, True))):
        (case,) = members(name, 256, 64)
        v = case.build("cpu", FP8).v.dequantize()
        assert tuple(bool((half == 0).all()) for half in v.split(128, dim=1)) == halves
    (signs,) = members("v-descale-signs", 512, 64)
    found = signs.build("cpu", FP8).v.descale.sign().tolist()
    assert found == [[[1.0, -1.0, 1.0, -1.0], [-1.0] * 4]]
