"""Block quantization: what comes back, at every edge; the rotation keeps scores."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers import GPU, SIXTEEN_BIT, on_hopper_gpu
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashattn3 import UnsupportedError, flash_attn_varlen_fp8_func
from flashattn3.backends.triton.kernels.quantize import to_e4m3, to_int8
from flashattn3.call import permuted_v
from flashattn3.call.block_scaled import BlockScaled
from flashattn3.call.dtypes import EIGHT_BIT, FP8, INT8
from flashattn3.call.hadamard import rotate, rotate_back
from flashattn3.quantization import (
    dispatch,
    quantize_block_fp8,
    quantize_qkv,
    smoothing,
    torch_operations,
    triton_launch,
)

LARGEST = {FP8: 448, INT8: 127}
of_both = pytest.mark.parametrize("eight", EIGHT_BIT)
interpreted = pytest.mark.skipif(GPU, reason="runs in Triton's interpreter, on the CPU")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close_by_block(x, quantized: BlockScaled):
    """Half a step: of e4m3's three mantissa bits, of its smallest ones near 0, or of int8's."""
    descale = quantized.token_descale()[..., None]
    found = quantized.data.float() * descale
    e4m3 = quantized.data.dtype == FP8
    bound = (x.abs() / 16).maximum(descale * 2.0**-10) if e4m3 else descale / 2 + x.abs() * 1e-6
    bound = bound * (1 + 1e-6)
    assert ((found - x).abs() <= bound).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from((64, 128, 256)),
    st.integers(-20, 20),
    st.sampled_from(EIGHT_BIT),
)
def test_every_element_comes_back_within_half_a_step(batch, seqlen, heads, block, magnitude, eight):
    x = normal(batch, seqlen, heads, 8, seed=seqlen) * 2.0**magnitude
    quantized = quantize_block_fp8(x, block=block, dtype=eight)
    assert quantized.data.dtype == eight
    assert quantized.descale.shape == (batch, heads, -(-seqlen // block))
    assert_close_by_block(x, quantized)
    # The largest element of each block is one of the type's largest.
    assert (quantized.data.float().abs().amax() == LARGEST[eight]).all()


@of_both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_gives_the_tensor_back_in_any_type(dtype, eight):
    x = normal(2, 130, 3, 64, dtype=dtype)
    for hadamard in (False, True):
        back = quantize_block_fp8(x, hadamard=hadamard, dtype=eight).dequantize(dtype)
        assert back.dtype == dtype and back.shape == x.shape
        assert (back - x).float().pow(2).mean().sqrt() < 0.03


@of_both
def test_the_largest_numbers_of_float32_stay_finite(eight):
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor(largest) * torch.linspace(1, 1 - 2**-20, 64)
    x = torch.cat((numbers, -numbers)).view(2, 64, 1, 1)
    quantized = quantize_block_fp8(x.view(128, 1, 1, 1), dtype=eight)
    torch.testing.assert_close(quantized.dequantize().flatten(), x.flatten(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_dim", [1, 2, 64, 128, 256])
def test_the_rotation_is_orthogonal(head_dim):
    x, y = normal(5, head_dim).double(), normal(7, head_dim, seed=1).double()
    torch.testing.assert_close(rotate_back(rotate(x)), x)
    torch.testing.assert_close(rotate(x) @ rotate(y).T, x @ y.T)


def test_the_rotation_spreads_an_outlier():
    x = torch.zeros(1, 1, 1, 128)
    x[..., 17] = 100.0
    assert (rotate(x).abs() == rotate(x).abs().max()).all()


ILLEGAL = [
    ({"smooth": True}, ValueError, "smooth must be False for kind 'q', got True"),
    ({"smooth": True, "kind": "v"}, ValueError, "smooth must be False for kind 'v', got True"),
    (
        {"x": torch.zeros(1, 2, 3, 96), "hadamard": True},
        ValueError,
        r"x.shape\[-1\] must be a power of two",
    ),
    ({"layout": "permuted"}, ValueError, "layout must be 'rows' or None for kind 'q'"),
    (
        {"x": torch.zeros(1, 2, 3, 264), "kind": "v", "layout": "permuted"},
        ValueError,
        r"x.shape\[-1\] must be at most 256",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), ILLEGAL, ids=lambda x: str(x)[:20])
def test_illegal_arguments_are_met_by_a_sentence(changes, error, text):
    arguments = {"x": torch.zeros(1, 2, 3, 4), **changes}
    with pytest.raises(error, match=f"quantize_block_fp8: {text}"):
        quantize_block_fp8(arguments.pop("x"), **arguments)


def bits(data):
    return data.view(torch.uint8)


def varlen(lengths, before=0, behind=0):
    """cu_seqlens, and the tokens of a tensor with some of no sequence before and behind."""
    edges = torch.tensor([before, *lengths]).cumsum(0).int()
    return edges, int(edges[-1]) + behind


def spoiled(x):
    """x with every value that is not finite, blocks of zeros and ends of the range."""
    x = x.clone()
    last = x.shape[-1] - 1
    x[..., :64, 0, :] = 0
    if x.ndim == 4 and x.shape[1] > 75:
        x[0, 70, 0, 0], x[0, 71, 0, last] = float("nan"), float("inf")
        x[-1, 72, -1, 0], x[-1, 73, -1, 0] = -float("inf"), -float("nan")
        x[-1, 5, -1, last] = torch.finfo(x.dtype).max
    return x


def defined(x, block, eight):
    """Data and descales of a sequence, float32 (tokens, heads, columns): one rounded division for
    each of descale and factor, one rounded product."""
    largest, data, descales = np.float32(LARGEST[eight]), [], []
    for part in (x[i : i + block] for i in range(0, len(x), block)):
        finite = np.isfinite(part)
        amax = np.abs(np.where(finite, part, 0)).max((0, 2)).clip(largest * np.float32(2.0**-126))
        descale, scaled = amax / largest, part * (largest / amax)[:, None]
        scaled = np.where(finite, scaled, np.nan)
        if eight == INT8:  # which has no NaN
            spoilt = ~finite.all((0, 2))
            descale = np.where(spoilt, np.nan, descale)
            scaled = np.rint(np.where(spoilt[:, None], 0, scaled))
        data.append(scaled.clip(-largest, largest))
        descales.append(descale)
    return torch.from_numpy(np.concatenate(data)).to(eight), torch.from_numpy(
        np.stack(descales, -1)
    )


def with_one(odd):
    def change(x):
        x[70, 1, 5] = odd
        return x

    return change


NUMBERS = torch.arange(405)[:, None, None]  # of the tokens
CONTENTS = {
    "plain": lambda x: x,
    "blocks of other sizes": lambda x: x * 10.0 ** (NUMBERS // 32 - 6) * torch.tensor([[1], [9]]),
    "tiny": lambda x: 2.0 ** (-116 - 3 * (NUMBERS // 32)).expand_as(x).double().float(),
    "zeros": torch.zeros_like,
    "largest": lambda x: torch.finfo(x.dtype).max * x.sign() * (1 - NUMBERS * 2.0**-24),
    **{str(odd): with_one(odd) for odd in (float("nan"), float("inf"), float("-inf"))},
}


@of_both
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", CONTENTS)
def test_the_definition_in_numpy(name, hadamard, smooth, eight):
    """Each sequence by itself, as in a dense batch; tokens of none change nothing."""
    if name == "largest" and (hadamard or smooth):
        pytest.skip("sums of these leave float32")
    lengths = (1, 0, 63, 64, 65, 200)
    edges, total = varlen(lengths, before=5, behind=7)
    x = CONTENTS[name](normal(total, 2, 16))
    x[:5], x[-7:] = 1e3, float("nan")
    mean = normal(len(lengths), 2, 16, seed=1) if smooth else None
    data, descale = torch_operations.quantize(x, 64, hadamard, edges, 200, eight, mean)
    assert descale.shape == (6, 2, 4)
    for i, (begin, end) in enumerate(pairwise(edges.tolist())):
        part = x[begin:end] - mean[i] if smooth else x[begin:end]
        part = rotate(part) if hadamard else part
        blocks = -(-len(part) // 64)
        assert (descale[i, :, blocks:] == 2.0**-126).all()
        if blocks:
            wanted = defined(part.numpy(), 64, eight)
            assert_same((data[begin:end], descale[i, :, :blocks]), wanted)
            how = (64, hadamard, None, None, eight, None if mean is None else mean[i, None])
            dense = torch_operations.quantize(x[None, begin:end], *how)
            assert_same((dense[0][0], dense[1][0]), wanted)


def test_the_slots_are_those_of_the_matrix_product():
    """As the e4m3 operand wants them: four neighbours are a thread's keys of the product before."""
    permuted_key = {}
    for t in range(4):
        for i, key in enumerate((2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)):
            permuted_key[key], permuted_key[16 + key] = 4 * t + i, 16 + 4 * t + i
    assert permuted_v.permuted_position(torch.arange(96)).tolist() == [
        start + permuted_key[key] for start in (0, 32, 64) for key in range(32)
    ]


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "columns"), [(1, 8, 64), (65, 96, 128), (96, 256, 256)]
)
def test_rows_to_slots(seqlen, head_dim, columns):
    v = normal(2, seqlen, 3, head_dim).to(torch.float8_e4m3fn)
    data = permuted_v.permute_v(v, None)
    num_permuted_keys = -(-seqlen // 32) * 32
    assert data.shape == (2, 3, num_permuted_keys // 16, columns, 16) and data.is_contiguous()
    found = data.float()
    for token in range(seqlen):
        permuted_key = int(permuted_v.permuted_position(torch.tensor(token)))
        assert torch.equal(
            found[:, :, permuted_key // 16, :head_dim, permuted_key % 16], v[:, token].float()
        )
    assert found.double().abs().sum() == v.double().abs().sum()  # the others are 0
    assert torch.equal(bits(permuted_v.unpermute_v(data, v.shape, None)), bits(v))


def test_ragged_rows_to_slots():
    lengths = (1, 0, 31, 32, 33, 64, 5)
    edges, total = varlen(lengths, before=2, behind=4)
    v = normal(total, 2, 40).to(torch.float8_e4m3fn)
    data = permuted_v.permute_v(v, edges)
    assert data.shape == (2, 2 * (total // 32 + len(lengths)), 64, 16)
    for i, length in enumerate(lengths):
        if length == 0:
            continue
        begin = int(edges[i])
        part = permuted_v.permute_v(v[None, begin : begin + length], None)[0]
        first = 2 * (begin // 32 + i)
        assert torch.equal(bits(data[:, first : first + part.shape[1]]), bits(part))
    back = permuted_v.unpermute_v(data, v.shape, edges)
    assert torch.equal(bits(back[2:-4]), bits(v[2:-4])) and (bits(back[:2]) == 0).all()


def test_slots_stand_for_the_same_numbers():
    edges, total = varlen((1, 0, 63, 100))
    for x, options in (
        (normal(2, 130, 3, 40), {}),
        (normal(total, 3, 40), {"cu_seqlens": edges, "max_seqlen": 100}),
    ):
        rows = quantize_block_fp8(x, block=64, kind="v", layout="rows", **options)
        mixed = quantize_block_fp8(x, block=64, kind="v", layout="permuted", **options)
        assert (rows.layout, mixed.layout) == ("rows", "permuted")
        assert rows.shape == mixed.shape == x.shape
        assert torch.equal(rows.descale, mixed.descale)
        assert torch.equal(rows.token_descale(), mixed.token_descale())
        assert rows.in_rows() is rows and mixed.in_rows().layout == "rows"
        assert torch.equal(bits(mixed.in_rows().data), bits(rows.data))
        assert torch.equal(mixed.dequantize(), rows.dequantize())


def test_slots_need_the_shape_of_their_rows():
    data, descale = torch.zeros(1, 1, 2, 64, 16).to(torch.float8_e4m3fn), torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match="BlockScaled: shape must be given with layout 'permuted'"):
        BlockScaled(data, descale, 64, layout="permuted")
    with pytest.raises(ValueError, match="BlockScaled: layout must be one of"):
        BlockScaled(data, descale, 64, layout="columns")


def test_a_gradient_is_refused_and_never_lost():
    """The residual of a layer would go on training without its attention."""
    x = normal(1, 8, 1, 8).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"^quantize_block_fp8: x\.requires_grad must be"):
        quantize_block_fp8(x, hadamard=True)
    with torch.no_grad():
        quantized = quantize_block_fp8(x, hadamard=True)
    assert not quantized.data.requires_grad and not quantized.descale.requires_grad


def assert_same(found, wanted, tokens=slice(None)):
    """data and descale, bit for bit; of data along its first axis. A NaN is like another."""
    assert found[0].dtype == wanted[0].dtype
    assert torch.equal(bits(found[0])[tokens], bits(wanted[0])[tokens])
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)


@interpreted
@of_both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "hadamard"),
    [(64, False), (64, True), (128, True), (40, False), (1, True), (8, True)],
)
def test_the_triton_kernel_gives_the_same_bytes(head_dim, hadamard, dtype, eight):
    """Of one token alone, a mean leaves zeros, of the sign that the definition gives them."""
    x = spoiled(normal(2, 150, 2, head_dim, dtype=dtype) * 3)
    x[1, 64:128, 0] = 2.0**-23 if dtype == torch.float16 else 2.0**-124
    cases = [(x, None)]
    for seqlen in (1, 100):
        x = spoiled(normal(2, seqlen, 2, head_dim, seed=seqlen, dtype=dtype) + 3)
        cases.append((x, smoothing.sample_mean(x, None, None)))
        assert (cases[-1][1] != 0).any()
    for x, mean in cases:
        how = (x, 64, hadamard, None, None, eight, mean)
        assert_same(triton_launch.quantize(*how), torch_operations.quantize(*how))


@interpreted
@of_both
@pytest.mark.parametrize("smooth", [False, True])
def test_the_triton_kernel_on_ragged_sequences(smooth, eight):
    edges, total = varlen((1, 0, 63, 64, 65, 100), before=2, behind=3)
    x = normal(total, 2, 64) + 1
    x[100], x[:2] = float("nan"), float("nan")
    mean = smoothing.sample_mean(x, edges, 100) if smooth else None
    wanted = torch_operations.quantize(x, 64, False, edges, 100, eight, mean)
    found = triton_launch.quantize(x, 64, False, edges, 100, eight, mean)
    assert_same(found, wanted, slice(2, -3))


@pytest.mark.gpu
@of_both
@pytest.mark.parametrize("hadamard", [False, True])
def test_triton_on_a_gpu_gives_the_same_bytes(hadamard, eight, device):
    x = spoiled(normal(2, 150, 2, 128, dtype=torch.bfloat16) * 3).to(device)
    wanted = torch_operations.quantize(x, 128, hadamard, None, None, eight)
    assert_same(triton_launch.quantize(x, 128, hadamard, None, None, eight), wanted)


def means_in_numpy(x):
    """float32 (heads, head_dim) of one sequence, float32 (tokens, heads, head_dim)."""
    chosen = range(len(x)) if len(x) <= 128 else [j * len(x) // 128 for j in range(128)]
    values = [np.where(np.isfinite(x[j]), x[j], np.float32(0)) for j in chosen]
    values += [np.zeros(x.shape[1:], np.float32)] * (128 - len(values))

    def total(terms):
        while (half := len(terms) // 2) > 0:
            terms = [terms[j] + terms[j + half] for j in range(half)]
        return terms[0]

    with np.errstate(all="ignore"):
        count, first = np.float32(len(chosen)), total(values)
        second = total([each * each for each in values])
        square, mean = first * first, first / count
        found = (square > np.float32(9) * (second - square / count)) & (np.abs(mean) < 2.0**100)
        return np.where(found, mean, np.float32(0))


def assert_means(found, wanted):
    """Bit for bit."""
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert np.array_equal(found.cpu().numpy().view(np.int32), np.stack(wanted).view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seqlen", [0, 1, 2, 100, 128, 129, 1000])
def test_the_means_in_numpy(seqlen, dtype):
    x = spoiled(normal(2, seqlen, 3, 16, seed=seqlen, dtype=dtype) + 0.3)
    wanted = [means_in_numpy(sequence) for sequence in x.float().numpy()]
    assert_means(smoothing.sample_mean(x, None, None), wanted)


SAMPLED = (0, 1, 2, 100, 128, 129, 1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [1, 40, 64, 128, 200, 256] if GPU else [1, 40])
def test_the_kernels_sample_the_same_mean(head_dim, dtype, device, poisoned_memory):
    """Triton's; where the Hopper kernels run, theirs too."""
    edges, total = varlen(SAMPLED, 3, 5)
    dense = [spoiled(normal(2, n, 3, head_dim, seed=n) + 0.3) for n in (100, 1000)]
    cases = [(x.to(dtype), None, None) for x in dense]
    cases.append(((normal(total, 2, head_dim) + 0.3).to(dtype), edges, 900))
    for x, cu_seqlens, max_seqlen in cases:
        wanted = smoothing.sample_mean(x, cu_seqlens, max_seqlen)
        there = (x.to(device), None if cu_seqlens is None else cu_seqlens.to(device), max_seqlen)
        assert_means(triton_launch.sample_mean(*there), wanted)
        assert_means(dispatch.sample_mean(*there), wanted)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 300)
)
@example([0, 1, 2, 100, 128, 129, 1000], 3, 1000)
@example([0, 0], 0, 1)
def test_a_ragged_batch_has_a_mean_for_each_sequence(lengths, around, max_seqlen):
    """Of the tokens that lie within the tensor and max_seqlen."""
    edges, total = varlen(lengths, around, around)
    x = normal(total, 2, 8, seed=total) + 0.3
    edges[-1] += 2 * around
    parts = [x[i:j][:max_seqlen].numpy() for i, j in pairwise(edges.tolist())]
    assert_means(
        smoothing.sample_mean(x, edges, max_seqlen), [means_in_numpy(part) for part in parts]
    )


def test_a_mean_is_taken_only_where_it_stands_out():
    x = normal(2, 1000, 8, 128)
    assert (smoothing.sample_mean(x, None, None) == 0).float().mean() > 0.98
    assert ((smoothing.sample_mean(x + 1, None, None) - 1).abs() < 0.5).all()
    x[:, 0] = 1e4  # of the sample
    assert (smoothing.sample_mean(x, None, None) == 0).all()


@of_both
@pytest.mark.parametrize("cut", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_smoothed_tensors_come_back_and_finer(hadamard, cut, eight):
    """Within a sixteenth of what differs from the mean, of a row, which the rotation mixes."""
    mean, ragged_options = 10 * normal(2, 1, 3, 32, seed=1), {}
    x = normal(2, 200, 3, 32) + mean
    if cut:
        x = torch.cat([x[0], x[1, :70]])
        ragged_options = {"cu_seqlens": torch.tensor([0, 200, 270]).int(), "max_seqlen": 200}
        mean = mean[:, 0].repeat_interleave(torch.tensor([200, 70]), 0)
    errors = []
    for smooth in (True, False):
        how = {"kind": "k", "hadamard": hadamard, "dtype": eight, "smooth": smooth}
        quantized = quantize_block_fp8(x, block=64, **how, **ragged_options)
        errors.append((quantized.dequantize() - x).norm(dim=-1))
        if smooth:
            assert quantized.mean.shape == (2, 3, 32)
            rest = (x - mean).norm(dim=-1) + 32**0.5  # the mean that is found is off by less than 1
            step = quantized.token_descale() * (0.5 if eight == INT8 else 2.0**-10)
            assert (errors[0] <= rest / 16 + step * 32**0.5).all()
    assert errors[0].mean() < 0.3 * errors[1].mean()


@pytest.mark.parametrize("dynamic", [False, True])
def test_smoothing_compiles(dynamic, device):
    edges, total = varlen((1, 0, 63, 200))
    how = {"kind": "k", "hadamard": True, "smooth": True}
    compiled = torch.compile(quantize_block_fp8, fullgraph=True, dynamic=dynamic, backend="eager")
    for x, options in (
        (normal(2, 130, 2, 16) + 1, {}),
        (normal(total, 2, 16) + 1, {"cu_seqlens": edges.to(device), "max_seqlen": 200}),
    ):
        x = x.to(device, torch.bfloat16)
        found, wanted = (run(x, **how, **options) for run in (compiled, quantize_block_fp8))
        assert torch.equal(found.mean, wanted.mean)
        assert_same((found.data, found.descale), (wanted.data, wanted.descale))


def test_data_is_contiguous_whatever_the_strides():
    """As the operators' fakes have it, by which a compiled graph reads the data."""
    x, edges = normal(2, 4, 70, 32).transpose(1, 2), torch.tensor([0, 70], dtype=torch.int32)
    for of, lengths in ((x, (None, None)), (x[0], (edges, 70)), (x[0], (edges[:1], 0))):
        data, _ = torch_operations.quantize(of, 64, False, *lengths, FP8)
        assert data.is_contiguous()


def slot_groups(data):
    """(..., heads, groups of 32 slots, bytes)"""
    return bits(data).unflatten(-3, (-1, 2)).flatten(-3)


def assert_same_slots(found, rows, edges):
    """In the groups of 32 slots that a sequence has; the others need not be written."""
    keys = torch.ones(rows.shape, device=rows.device).to(rows.dtype)
    used = slot_groups(permuted_v.permute_v(keys, edges)).amax(-1) > 0
    wanted = permuted_v.permute_v(rows, edges)
    assert found.shape == wanted.shape
    assert torch.equal(slot_groups(found)[used], slot_groups(wanted)[used])


def assert_hopper_gives_torchs_bytes(x, block, hadamard=False, edges=None, max_seqlen=None):
    """Those of torch on the GPU and on the CPU; of e4m3 that is not rotated, in slots too."""
    tokens = slice(None) if edges is None else slice(int(edges[0]), int(edges[-1]))
    batch = x.shape[0] if edges is None else edges.numel() - 1
    for eight, mean in (
        (INT8, normal(batch, *x.shape[-2:], dtype=torch.float32).to(x.device)),
        (FP8, normal(batch, *x.shape[-2:], dtype=torch.float32).to(x.device)),
        (INT8, None),
        (FP8, None),
    ):
        how = (block, hadamard, edges, max_seqlen)
        data, descale = dispatch.quantize(x, *how, "rows", eight, mean)
        for place in (x.device, torch.device("cpu")):
            cu_seqlens, there = (None if t is None else t.to(place) for t in (edges, mean))
            wanted = torch_operations.quantize(
                x.to(place), block, hadamard, cu_seqlens, max_seqlen, eight, there
            )
            assert_same((data.to(place), descale.to(place)), wanted, tokens)
    sampled = dispatch.sample_mean(x, edges, max_seqlen).cpu()
    assert torch.equal(bits(sampled), bits(smoothing.sample_mean(x.cpu(), cu_seqlens, max_seqlen)))
    if hadamard:
        return
    mixed = quantize_block_fp8(
        x, block=block, kind="v", layout="permuted", cu_seqlens=edges, max_seqlen=max_seqlen
    )
    assert torch.equal(mixed.descale, descale)
    assert_same_slots(mixed.data, data, edges)
    moved = torch.ops.flashattn3_hopper.permute_v(data, edges, max_seqlen or 0)
    assert_same_slots(moved, data, edges)
    padded = torch.nn.functional.pad(bits(data), (3, 2)).view(data.dtype)[..., 3:-2]
    moved = torch.ops.flashattn3_hopper.permute_v(padded, edges, max_seqlen or 0)
    assert_same_slots(moved, data, edges)


def assert_qkv_are_torchs_bytes(tensors, block, hadamard, eight, smooth, edges=None, longest=None):
    """quantize_qkv against torch on the CPU, one by one. smooth: k; edges, longest: of q and k."""
    found_edges = [None if e is None else e.to(tensors[0].device) for e in edges or (None, None)]
    (edges_q, edges_k), (longest_q, longest_k) = found_edges, longest or (None, None)
    found = quantize_qkv(
        *tensors,
        block=block,
        hadamard=hadamard,
        qk_dtype=eight,
        smooth_k=smooth,
        cu_seqlens_q=edges_q,
        cu_seqlens_k=edges_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )
    for x, scaled, kind in zip(tensors, found, "qkv", strict=True):
        cu_seqlens = None if edges is None else edges[kind != "q"]
        tokens = slice(None)
        if edges is not None:
            tokens = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
        rotated, dtype = (False, FP8) if kind == "v" else (hadamard, eight)
        longest, x = longest_q if kind == "q" else longest_k, x.cpu()
        mean = smoothing.sample_mean(x, cu_seqlens, longest) if smooth and kind == "k" else None
        assert (scaled.mean is None) == (mean is None)
        if mean is not None:
            assert torch.equal(bits(scaled.mean.cpu()), bits(mean))
        how = (block, rotated, cu_seqlens, longest, dtype, mean)
        data, descale = torch_operations.quantize(x, *how)
        assert (scaled.block, scaled.hadamard, scaled.shape) == (block, rotated, x.shape)
        if scaled.layout == "permuted":
            assert_same_slots(scaled.data.cpu(), data, cu_seqlens)
            torch.testing.assert_close(
                scaled.descale.cpu(), descale, rtol=0, atol=0, equal_nan=True
            )
        else:
            assert_same((scaled.data.cpu(), scaled.descale.cpu()), (data, descale), tokens)


@of_both
@pytest.mark.interpreted(
    quick=lambda tokens, hadamard, **_: hadamard == (tokens[0] < tokens[1]),
    # Each two of tokens, rotation and dtype meet without it.
    sweep=lambda tokens, hadamard, eight, **_: (
        (tokens[0] < tokens[1]) == (hadamard == (eight == INT8))
    ),
)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "columns"),  # of q and of k, but the columns of q and of v
    [
        ((300, 300), (2, 2), (128, 128)),
        ((70, 500), (6, 2), (64, 64)),
        ((513, 65), (4, 1), (256, 256)),
        ((200, 130), (2, 2), (64, 128)),
        ((1, 64), (3, 1), (8, 40)),
        ((0, 100), (2, 2), (64, 64)),
    ],
    ids=str,
)
def test_q_k_and_v_at_once(tokens, heads, columns, hadamard, eight, device, poisoned_memory):
    shapes = (
        (2, tokens[0], heads[0], columns[0]),
        (2, tokens[1], heads[1], columns[0]),
        (2, tokens[1], heads[1], columns[1]),
    )
    for dtype, block, smooth in (
        (torch.bfloat16, 128, False),
        (torch.float16, 64, False),
        (torch.bfloat16, 256, True),
    ):
        tensors = [normal(*shape, seed=len(shape), dtype=dtype) + 0.3 for shape in shapes]
        tensors = [spoiled(x).to(device) for x in tensors]
        assert_qkv_are_torchs_bytes(tensors, block, hadamard, eight, smooth)


@pytest.mark.parametrize("smooth", [False, True])
def test_a_ragged_batch_of_no_sequence(smooth, device):
    """Every token is of none."""
    edges = torch.zeros(1, dtype=torch.int32, device=device)
    x = normal(5, 2, 16, dtype=torch.bfloat16).to(device)
    for kind in "kv":
        how = {"kind": kind, "smooth": smooth and kind == "k", "cu_seqlens": edges, "max_seqlen": 3}
        quantized = quantize_block_fp8(x, **how)
        assert quantized.descale.shape == (0, 2, 1) and quantized.dequantize().shape == x.shape
    how = {"smooth_k": smooth, "return_lse": True}
    out, lse = flash_attn_varlen_fp8_func(x, x, x, edges, edges, 3, 3, **how)
    assert (out == 0).all() and (lse == -torch.inf).all()


@of_both
def test_ragged_q_k_and_v_at_once(eight, device, poisoned_memory):
    lengths = ((1, 0, 130, 64), (70, 5, 0, 257))
    edges, totals = zip(*(varlen(of, 3, 2) for of in lengths), strict=True)
    q, k, v = (
        normal(total, heads, 64, dtype=torch.bfloat16).to(device) + 0.3
        for total, heads in ((totals[0], 4), (totals[1], 2), (totals[1], 2))
    )
    for block, smooth in ((64, True), (256, False)):
        assert_qkv_are_torchs_bytes((q, k, v), block, True, eight, smooth, edges, (130, 257))


@on_hopper_gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize(
    ("hadamard", "head_dim"),
    [
        *((False, d) for d in (1, 7, 8, 40, 64, 96, 128, 192, 200, 256)),
        *((True, d) for d in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_hopper_on_every_head_dim(hadamard, head_dim, block, dtype, device, poisoned_memory):
    for seqlen in (3, 300) if hadamard else (1, 64, 333, 1024):
        x = spoiled(normal(2, seqlen, 3, head_dim, dtype=dtype) * 3).to(device)
        assert dispatch.on_hopper(x)
        assert_hopper_gives_torchs_bytes(x, block, hadamard)


@on_hopper_gpu
@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_hopper_on_ragged_sequences(head_dim, block, device, poisoned_memory):
    lengths = (1, 0, 31, 32, 33, 63, 64, 65, 500, 0, 257)
    for before, behind in ((0, 0), (5, 9)):
        edges, total = varlen(lengths, before, behind)
        x = normal(total, 2, head_dim, dtype=torch.bfloat16).to(device)
        for hadamard in (False,) if head_dim == 40 else (False, True):
            assert_hopper_gives_torchs_bytes(x, block, hadamard, edges.to(device), 500)


@on_hopper_gpu
@pytest.mark.parametrize("hadamard", [False, True])
def test_hopper_on_any_strides_and_addresses(hadamard, device):
    big = normal(2, 4, 200, 3, 72, dtype=torch.bfloat16).to(device)
    heads_first = big[:, 0, :, :, :64].transpose(1, 2).contiguous().transpose(1, 2)
    parts_of_rows, odd_address = big[:, 1, :, :, 8:72], big[:, 2, :, :, 1:65]
    expanded = big[:1, 3, :, :1, :64].expand(2, -1, 3, -1)
    columns_apart = normal(2, 200, 3, 128, dtype=torch.bfloat16).to(device)[..., ::2]
    odd_pitch = normal(2, 200, 3, 65, dtype=torch.bfloat16).to(device)[..., :64]
    for x in (heads_first, parts_of_rows, odd_address, expanded, columns_apart, odd_pitch):
        assert_hopper_gives_torchs_bytes(x, 128, hadamard)


@on_hopper_gpu
def test_hopper_on_denormals_and_the_whole_range(device):
    x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).view(1, 512, 1, 128)
    assert_hopper_gives_torchs_bytes(x.to(device), 64)
    assert_hopper_gives_torchs_bytes(x.view(torch.float16).to(device), 64)
    tiny = (normal(1, 256, 2, 128) * 2.0**-128).bfloat16().to(device)
    for hadamard in (False, True):
        assert_hopper_gives_torchs_bytes(tiny, 128, hadamard)


@on_hopper_gpu
def test_v_gets_slots_where_hopper_takes_it(device):
    v = normal(1, 100, 2, 64).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        assert quantize_block_fp8(v.to(dtype), kind="v").layout == "permuted"
        assert quantize_block_fp8(v.to(dtype), kind="k").layout == "rows"


@on_hopper_gpu
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": torch.zeros(1, 2, 3)}, "the number of axes must be 4, got 3"),
        ({"x": torch.zeros(1, 2, 3, 257).half()}, "head_dim must be 1 to 256"),
        ({"x": torch.zeros(1, 2, 3, 8)}, "dtype must be fp16 or bf16"),
        ({"signs": torch.zeros(9)}, "signs must be"),
        ({"signs": torch.zeros(8), "permuted": True}, "signs must be None for permuted"),
        ({"block": 100}, "64, 128 or 256"),
        ({"permuted": True, "int8": True}, "dtype must be e4m3 for permuted data"),
        ({"mean": torch.zeros(1, 3, 9)}, "mean must be"),
        ({"mean": torch.zeros(1, 3, 8).half()}, "mean must be"),
        ({"mean": torch.zeros(1, 3, 8), "permuted": True}, "mean must be None for permuted data"),
    ],
    ids=str,
)
def test_the_operator_refuses_what_it_cannot_do(changes, text, device):
    arguments = {"x": torch.zeros(1, 2, 3, 8).half(), "mean": None, "signs": None}
    arguments |= {"cu_seqlens": None, "block": 64, "max_seqlen": 0}
    arguments |= {"permuted": False, "int8": False, **changes}
    there = {
        name: given.to(device) if isinstance(given, torch.Tensor) else given
        for name, given in arguments.items()
    }
    with pytest.raises(RuntimeError, match=text):
        torch.ops.flashattn3_hopper.quantize(**there)


@on_hopper_gpu
def test_the_operator_takes_one_dtype_for_q_k_and_v(device):
    q = torch.zeros(1, 2, 3, 8, device=device).half()
    with pytest.raises(RuntimeError, match="dtypes of q, k and v must be equal"):
        torch.ops.flashattn3_hopper.quantize_qkv(
            q, q.bfloat16(), q, None, None, None, None, 64, 0, 0, False
        )


@triton.jit
def convert(source, target, COUNT: tl.constexpr, INT8: tl.constexpr):
    token_positions = tl.arange(0, COUNT) + tl.program_id(0) * COUNT
    x = tl.load(source + token_positions)
    tl.store(target + token_positions, to_int8(x) if INT8 else to_e4m3(x))


@interpreted
@of_both
def test_the_conversion_rounds_as_torch_does(eight):
    """Numbers of the whole range and of that near 0, those halfway, and the next to these."""
    if eight == FP8:
        halfway = torch.arange(126, dtype=torch.uint8).view(FP8).float()
        halfway = (halfway[1:] + halfway[:-1]) / 2
        x = [torch.linspace(-448, 448, 2**16), torch.linspace(-0.05, 0.05, 2**16)]
        x += [halfway, -halfway, torch.tensor([0.0, -0.0, float("nan")])]
    else:
        halfway = torch.arange(-127.0, 127.0) + 0.5
        around = [torch.nextafter(halfway, torch.tensor(to)) for to in (-200.0, 200.0)]
        x = [torch.linspace(-127, 127, 2**16), halfway, *around, torch.tensor([-0.0, 1e-40])]
    x = torch.cat(x)
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    found = torch.empty(len(x), dtype=torch.uint8)
    convert[(len(x) // 1024,)](x, found, COUNT=1024, INT8=eight == INT8)
    wanted = x.round() if eight == INT8 else x
    assert torch.equal(found, bits(wanted.to(eight)))


@pytest.mark.parametrize("kind", [list, tuple])
def test_results_of_a_custom_op_share_no_memory(kind):
    """Views of one allocation, as descales that the Hopper library makes together are."""
    both, nothing = torch.arange(6.0), torch.empty(0)
    given = kind((torch.ones(2), both[:2].view(1, 2), both[2:].view(2, 2), nothing, nothing))
    found = dispatch.in_own_memory(lambda: given)()
    assert type(found) is kind
    assert all(map(torch.equal, found, given))
    full = [x.untyped_storage().data_ptr() for x in found if x.numel()]
    assert len(set(full)) == len(full) == 3
