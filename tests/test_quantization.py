"""Block quantization: what comes back, at every edge; the rotation keeps scores."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers import GPU
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn3.quantization import BlockScaled, quantize_block_fp8
from flashattn3.quantization.hadamard import rotate, rotate_back, signs
from flashattn3.triton_kernels.quantize import quantize_block, to_e4m3

interpreted = pytest.mark.skipif(GPU, reason="runs in Triton's interpreter, on the CPU")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close_by_block(x, quantized: BlockScaled):
    """e4m3: half a step of three mantissa bits, or of the smallest step near 0."""
    descale = quantized.token_descale()[..., None]
    found = quantized.data.float() * descale
    bound = (x.abs() / 16).maximum(descale * 2.0**-10) * (1 + 1e-6)
    assert ((found - x).abs() <= bound).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from((64, 128, 256)),
    st.integers(-20, 20),
)
def test_every_element_comes_back_within_half_a_step(batch, seqlen, heads, block, magnitude):
    x = normal(batch, seqlen, heads, 8, seed=seqlen) * 2.0**magnitude
    quantized = quantize_block_fp8(x, block=block)
    assert quantized.data.dtype == torch.float8_e4m3fn
    assert quantized.descale.shape == (batch, heads, -(-seqlen // block))
    assert_close_by_block(x, quantized)
    # The largest element of each block is one of e4m3's largest.
    assert (quantized.data.float().abs().amax() == 448).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_gives_the_tensor_back_in_any_type(dtype):
    x = normal(2, 130, 3, 64, dtype=dtype)
    for hadamard in (False, True):
        back = quantize_block_fp8(x, hadamard=hadamard).dequantize(dtype)
        assert back.dtype == dtype and back.shape == x.shape
        assert (back - x).float().pow(2).mean().sqrt() < 0.03


def test_blocks_do_not_see_each_other():
    x = normal(1, 256, 2, 16)
    x[:, 128:] *= 1e4
    x[:, :, 1] *= 1e-3
    assert_close_by_block(x, quantize_block_fp8(x, block=128))


def test_zeros_have_descale_1():
    quantized = quantize_block_fp8(torch.zeros(1, 65, 2, 8), block=64)
    assert (quantized.descale == 1).all() and (quantized.dequantize() == 0).all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_becomes_nan_and_leaves_the_scale_alone(odd):
    x = normal(1, 100, 1, 8)
    clean = quantize_block_fp8(x, block=64)
    x[0, 3, 0, 5] = odd
    x[0, 3, 0, 6] = 0.0
    found = quantize_block_fp8(x, block=64)
    assert found.dequantize()[0, 3, 0, 5].isnan()
    assert found.dequantize().isnan().sum() == 1
    assert (found.descale <= clean.descale).all() and (found.descale > 0).all()


def test_ragged_blocks_begin_with_their_sequence():
    lengths = (1, 0, 63, 64, 65, 200)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    x = normal(sum(lengths), 2, 16)
    for i, begin in enumerate(edges[:-1].tolist()):
        x[begin : edges[i + 1]] *= 10.0**i
    ragged = quantize_block_fp8(x, block=64, cu_seqlens=edges, max_seqlen=200)
    assert ragged.descale.shape == (6, 2, 4)
    assert_close_by_block(x, ragged)
    for i, length in enumerate(lengths):
        part = x[None, edges[i] : edges[i + 1]]
        dense = quantize_block_fp8(part, block=64)
        assert torch.equal(ragged.descale[i, :, : dense.descale.shape[2]], dense.descale[0])
        assert torch.equal(ragged.data[edges[i] : edges[i + 1]].float(), dense.data[0].float())
        assert (ragged.descale[i, :, -(-length // 64) :] == 1).all()


@pytest.mark.parametrize("head_dim", [1, 2, 64, 128, 256])
def test_the_rotation_is_orthogonal(head_dim):
    x, y = normal(5, head_dim).double(), normal(7, head_dim, seed=1).double()
    torch.testing.assert_close(rotate_back(rotate(x)), x)
    torch.testing.assert_close(rotate(x) @ rotate(y).T, x @ y.T)


def test_the_rotation_spreads_an_outlier():
    x = torch.zeros(1, 1, 1, 128)
    x[..., 17] = 100.0
    assert (rotate(x).abs() == rotate(x).abs().max()).all()


def outliers(*shape, seed):
    """The FlashAttention-3 paper's: N(0, 1) + N(0, 100) on one element of a thousand."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    hit = torch.rand(*shape, generator=generator) < 0.001
    return x + hit * 10 * torch.randn(*shape, generator=generator)


def test_rotation_and_blocks_lose_less_than_one_scale_for_a_head():
    q, k = outliers(1, 2048, 1, 64, seed=1), outliers(1, 2048, 1, 64, seed=2)
    truth = (q[0, :, 0].double() @ k[0, :, 0].double().T / 8).softmax(-1)

    def error(quantize):
        a, b = (quantize(x).dequantize()[0, :, 0].double() for x in (q, k))
        return ((a @ b.T / 8).softmax(-1) - truth).pow(2).mean().sqrt()

    per_block = error(lambda x: quantize_block_fp8(x, block=128))
    rotated = error(lambda x: quantize_block_fp8(x, block=128, hadamard=True))

    def per_head(x):
        descale = x.abs().amax() / 448
        data = (x / descale).to(torch.float8_e4m3fn)
        return BlockScaled(data, descale.expand(1, 1, 16), 128)

    assert per_block <= error(per_head)
    assert rotated < per_block


ILLEGAL = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor"),
    ({"x": torch.zeros(1, 2, 3, 4).double()}, TypeError, "x.dtype must be"),
    ({"x": torch.zeros(2, 3, 4)}, ValueError, "x.ndim must be 4, got 3"),
    ({"block": 100}, ValueError, "block must be one of"),
    ({"kind": "o"}, ValueError, "kind must be one of"),
    ({"kind": "v", "hadamard": True}, ValueError, "hadamard must be False for kind 'v'"),
    (
        {"x": torch.zeros(1, 2, 3, 96), "hadamard": True},
        ValueError,
        r"x.shape\[-1\] must be a power of two",
    ),
    ({"max_seqlen": 3}, ValueError, "max_seqlen must be given with cu_seqlens"),
]


@pytest.mark.parametrize(("changes", "error", "text"), ILLEGAL, ids=lambda x: str(x)[:20])
def test_illegal_arguments_are_met_by_a_sentence(changes, error, text):
    arguments = {"x": torch.zeros(1, 2, 3, 4), **changes}
    with pytest.raises(error, match=f"quantize_block_fp8: {text}"):
        quantize_block_fp8(arguments.pop("x"), **arguments)


def quantized_by_triton(x, block, hadamard, cu_seqlens=None, max_seqlen=None):
    """Bytes and descale of the Triton kernel, in the interpreter where there is no GPU."""
    heads, head_dim = x.shape[-2:]
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.numel() - 1, max_seqlen) if varlen else x.shape[:2]
    num_blocks = -(-seqlen // block)
    data = torch.zeros(x.shape, dtype=torch.uint8)
    descale = torch.empty(batch, heads, num_blocks)
    strides = (0, *x.stride()) if varlen else x.stride()
    quantize_block[(num_blocks * heads * batch,)](
        x,
        data,
        descale,
        signs(head_dim),
        cu_seqlens,
        *strides[:3],
        num_blocks,
        heads,
        seqlen,
        x.shape[0],
        BLOCK_T=block,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, 1 << (head_dim - 1).bit_length()),
        VARLEN=varlen,
        STAGES=head_dim.bit_length() - 1 if hadamard else 0,
    )
    return data, descale


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "hadamard"), [(64, False), (64, True), (128, True), (40, False)]
)
def test_the_triton_kernel_gives_the_same_bytes(head_dim, hadamard, dtype):
    x = normal(2, 150, 2, head_dim, dtype=dtype) * 3
    x[0, 10] = 0.0
    if not hadamard:
        x[0, 3, 1, 2], x[1, 7, 0, 5] = float("nan"), float("inf")
    wanted = quantize_block_fp8(x, block=64, hadamard=hadamard)
    data, descale = quantized_by_triton(x, 64, hadamard)
    torch.testing.assert_close(descale, wanted.descale, rtol=3e-7, atol=0)
    same = data == wanted.data.view(torch.uint8)
    # The order of the additions in the rotation may move an element that lies on an edge.
    assert same.all() if not hadamard else same.float().mean() > 0.999


@interpreted
def test_the_triton_kernel_on_ragged_sequences():
    lengths = (1, 0, 63, 64, 65, 100)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    x = normal(sum(lengths), 2, 64)
    wanted = quantize_block_fp8(x, block=64, cu_seqlens=edges, max_seqlen=100)
    data, descale = quantized_by_triton(x, 64, False, edges, 100)
    assert torch.equal(data, wanted.data.view(torch.uint8))
    assert torch.equal(descale, wanted.descale)


@triton.jit
def convert(source, target, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT) + tl.program_id(0) * COUNT
    tl.store(target + places, to_e4m3(tl.load(source + places)))


@interpreted
def test_the_conversion_rounds_as_torch_does():
    x = torch.cat([torch.linspace(-448, 448, 2**16), torch.linspace(-0.05, 0.05, 2**16)])
    halfway = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (halfway[1:] + halfway[:-1]) / 2
    edges = torch.cat([halfway, -halfway, torch.tensor([0.0, -0.0, float("nan")])])
    x = torch.cat([x, torch.nn.functional.pad(edges, (0, -len(edges) % 1024))])
    found = torch.empty(len(x), dtype=torch.uint8)
    convert[(len(x) // 1024,)](x, found, COUNT=1024)
    assert torch.equal(found, x.to(torch.float8_e4m3fn).view(torch.uint8))
