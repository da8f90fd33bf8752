"""rotate_and_quantize against RMSNorm, rotary embedding and quantization one after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import TRITON_DTYPES
from torch.utils.checkpoint import checkpoint

from flashattn3 import (
    BlockScaled,
    UnsupportedError,
    flash_attn_func,
    flash_attn_varlen_func,
    quantize_block_fp8,
    rotate_and_quantize,
)
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.integrations.rotary import apply_rotary
from flashattn3.quantization.embedding import Embedding, embedded
from flashattn3_bench.checking import GRADIENT_FACTOR, check

EDGES = (0, 33, 33, 150)


def tables(rotary_dim=48, positions=200, dtype=torch.float32, device="cpu"):
    frequency = 10000 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(positions), frequency)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def sides(dtype, device, dims=(64, 64), varlen=False, heads=(4, 2)):
    rows = (160,) if varlen else (2, 150)
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    generator = torch.Generator().manual_seed(len(rows))
    return [torch.randn(*rows, *s, generator=generator).to(device, dtype) for s in shapes]


# What a call has beside q, k and v.
CASES = {
    "plain": {},
    "rotary": {"rotary": {}},
    "interleaved, e4m3": {"rotary": {}, "rotary_interleaved": True, "qk_dtype": FP8},
    "all columns, 16 bits": {"rotary": {"rotary_dim": 64, "dtype": torch.bfloat16}, "block": 64},
    "odd dims": {"rotary": {"rotary_dim": 20}, "dims": (40, 24), "hadamard": False},
    "varlen": {"rotary": {}, "varlen": True},
    "positions": {"rotary": {}, "positions": True},
    "positions, varlen": {"rotary": {}, "varlen": True, "positions": True, "qk_dtype": INT8},
    "smooth": {"rotary": {}, "smooth_k": True},
    "norm": {"rotary": {}, "norm": True},
    "norm, interleaved": {"rotary": {}, "norm": True, "rotary_interleaved": True},
}


def arguments_of(how, dtype, device):
    """Take what describes inputs out of how: q, k and v, cos and sin, what a call names besides,
    and the lengths of sequences."""
    varlen, norm, positions = (how.pop(x, False) for x in ("varlen", "norm", "positions"))
    tensors = sides(dtype, device, how.pop("dims", (64, 64)), varlen)
    rotary = how.pop("rotary", None)
    rotation = (None, None) if rotary is None else tables(**rotary, device=device)
    rows, lengths, named = tensors[0].shape[:-2], {}, {}
    if varlen:
        edges = torch.tensor(EDGES, dtype=torch.int32, device=device)
        lengths = {"cu_seqlens": edges, "max_seqlen": 120}
    if positions:
        numbers = torch.arange(rows.numel(), device=device) * 7 % 200
        named["positions"] = numbers.int().view(rows)
    if norm:
        weight = torch.linspace(0.5, 2, tensors[0].shape[-1], device=device)
        named |= {"q_norm": weight, "k_norm": weight.clone()}
    return tensors, rotation, named, lengths


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_one_pass_gives_what_the_passes_give(name, dtype, device):
    """Bit for bit; with a norm, whose sum has another order, but for codes next to each other."""
    how = dict(CASES[name])
    (q, k, v), (cos, sin), named, lengths = arguments_of(how, dtype, device)
    norm, varlen = "q_norm" in named, bool(lengths)
    if norm:
        named |= {x: named[x].to(dtype) for x in ("q_norm", "k_norm")}
    weights, positions = (named.get("q_norm"), named.get("k_norm")), named.get("positions")
    found = rotate_and_quantize(q, k, v, cos, sin, **named, **lengths, **how)
    interleaved, smooth = how.pop("rotary_interleaved", False), how.pop("smooth_k", False)
    embedding = Embedding(*weights, cos, sin, positions, interleaved, 1e-6)
    eight, rotated = (
        how.pop("qk_dtype", INT8 if q.shape[-1] == 64 else FP8),
        how.get("hadamard", True),
    )
    how = {**lengths, "block": how.get("block", 128)}
    of_qk = {**how, "hadamard": rotated, "dtype": eight}
    edges = lengths.get("cu_seqlens")
    wide_q, wide_k = (
        embedded(x, w, embedding, edges) for x, w in zip((q, k), weights, strict=True)
    )
    wanted = (
        quantize_block_fp8(wide_q, kind="q", **of_qk),
        quantize_block_fp8(wide_k, kind="k", smooth=smooth, **of_qk),
        quantize_block_fp8(v, kind="v", **how),
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one.block, one.hadamard, one.shape) == (other.block, other.hadamard, other.shape)
        assert (one.mean is None) == (other.mean is None)
        assert one.mean is None or torch.equal(one.mean, other.mean)
        given = slice(None, EDGES[-1]) if varlen else slice(None)
        codes, of_passes = (x.in_rows().data[given].view(torch.uint8) for x in (one, other))
        if norm:
            torch.testing.assert_close(one.descale, other.descale, rtol=1e-6, atol=0)
            differ = codes.int().sub(of_passes.int()).abs()
            assert ((differ <= 1) | (differ >= 255)).all() and (differ > 0).float().mean() < 1e-3
        else:
            assert torch.equal(one.descale, other.descale) and torch.equal(codes, of_passes)


def test_the_rotation_is_that_of_rotary_embedding():
    """And attention of its results that of the passes in 16 bits."""
    q, k, v = sides(torch.float16, "cpu")
    cos, sin = tables()
    scaled = rotate_and_quantize(q, k, v, cos, sin)
    turned = [apply_rotary(x, cos, sin) for x in (q, k)]
    assert (scaled[0].dequantize() - turned[0]).abs().max() < 0.06
    out = flash_attn_func(*scaled, causal=True, out_dtype=torch.float16)
    assert (out - flash_attn_func(*turned, v, causal=True)).abs().max() < 0.15


def test_packed_and_strided_inputs_and_q_alone():
    q, k, v = sides(torch.float16, "cpu")
    cos, sin = tables()
    wanted = rotate_and_quantize(q, k, v, cos, sin)
    packed = torch.cat((q, k, v), 2)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    ways = {
        "packed": rotate_and_quantize(packed, None, None, cos, sin, num_heads_q=4),
        "strided": rotate_and_quantize(*transposed, cos, sin),
        "q": (rotate_and_quantize(q, None, None, cos, sin),),
    }
    compiled = torch.compile(
        lambda *x: [(y.data, y.descale) for y in rotate_and_quantize(*x)],
        fullgraph=True,
        backend="aot_eager",
    )
    for name, found in ways.items():
        for one, other in zip(found, wanted, strict=name != "q"):
            assert isinstance(one, BlockScaled)
            assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8)), name
            assert torch.equal(one.descale, other.descale), name
    for (data, descale), other in zip(compiled(q, k, v, cos, sin), wanted, strict=True):
        assert torch.equal(data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(descale, other.descale)


Q, K, V = sides(torch.float16, "cpu")
COS, SIN = tables(64)
TOKENS = [x.flatten(0, 1) for x in (Q, K, V)]
TWO = torch.tensor((0, 150, 300), dtype=torch.int32)
# Wrong in their metadata; tests/host_scaled_checks.py has them too.
WRONG = {
    "few positions": ((Q, K, V, COS[:99], SIN[:99]), {}, r"rotary_cos.shape\[0\] must be >= 150"),
    "sin": ((Q, K, V, COS, SIN[:, :16]), {}, r"rotary_sin.shape must be \(200, 32\)"),
    "sparse sin": ((Q, K, V, COS, SIN.to_sparse()), {}, "rotary_sin.layout must be torch.strided"),
    "sin's dtype": ((Q, K, V, COS, SIN.bfloat16()), {}, "rotary_sin.dtype must be one of"),
    "gradient of tables": (
        (Q, K, V, COS.clone().requires_grad_(), SIN), {}, r"rotary_cos\.requires_grad must",
    ),
    "positions' dtype": (
        (Q, K, V, COS, SIN), {"positions": torch.zeros(2, 150)}, "positions.dtype must be one of",
    ),
    "positions' shape": ((Q, K, V, COS, SIN), {"positions": torch.ones(150).int()}, "positions.sh"),
    "no tables": ((Q, K, V), {"positions": torch.ones(2, 150).int()}, "positions must be None"),
    "sin alone": ((Q, K, V, None, SIN), {}, "rotary_cos must be given with the other"),
    "wide tables": ((Q, K, V, *tables(66)), {}, r"rotary_cos.shape\[1\] must be between 1 and 32"),
    "head dim": (sides(torch.float16, "cpu", (40, 40)), {}, "a power of two with hadamard=True"),
    "norm's shape": ((Q, K, V), {"q_norm": torch.ones(32)}, r"q_norm.shape must be \(64,\)"),
    "norm's dtype": ((Q, K, V), {"k_norm": torch.ones(64).int()}, "k_norm.dtype must be one of"),
    "norm of no k": ((Q,), {"k_norm": torch.ones(64)}, "k_norm must be None without k"),
    "smooth q": ((Q,), {"smooth_k": True}, "smooth_k must be False without k"),
    "k alone": ((Q, K), {}, "v must be given with the other"),
    "packed heads": ((Q,), {"num_heads_q": 3}, "num_heads_q must be such that an even number of 4"),
    "no heads": ((Q,), {"num_heads_q": 0}, "num_heads_q must be such that an even number of 4"),
    "negative heads": ((Q,), {"num_heads_q": -1}, "num_heads_q must be such that an even number"),
    "packed k": ((Q, K, V), {"num_heads_q": 2}, "num_heads_q must be None with k and v, got 2"),
    "dtype": ((Q.float(), K, V), {}, "q.dtype must be one of"),
    "dtype of v": ((Q, K, V.float()), {}, "v.dtype must be one of"),
    "qk_dtype": ((Q, K, V), {"qk_dtype": torch.float16}, "qk_dtype must be one of"),
    "tokens": ((Q, K[:, :9], V), {}, r"k.shape must be \(2, 150, 2, 64\)"),
    "heads": ((Q[:, :, :3], K, V), {}, r"k.shape\[-2\] must be a divisor of 3, got 2"),
    "head dim of k": ((Q, K[..., :32], V), {}, r"k.shape must be \(2, 150, 2, 64\)"),
    "heads of v": ((Q, K, Q), {}, r"v.shape must be \(2, 150, 2, 64\)"),
    "block": ((Q, K, V), {"block": 32}, "block must be one of"),
    "edges' dtype": (
        TOKENS, {"cu_seqlens": TWO.long(), "max_seqlen": 150}, "cu_seqlens.dtype must be torch",
    ),
    "no max_seqlen": (TOKENS, {"cu_seqlens": TWO}, "max_seqlen must be given with cu_seqlens"),
    "max_seqlen": ((Q, K, V), {"max_seqlen": 4}, "max_seqlen must be given with cu_seqlens"),
}  # fmt: skip
WRONG_VALUES = {
    "positions": (
        (Q, K, V, COS, SIN), {"positions": torch.full((2, 150), 200)}, "between 0 and 199, rows of",
    ),
    "edges": (TOKENS, {"cu_seqlens": 2 * TWO, "max_seqlen": 400}, r"cu_seqlens\[-1\] must be <= 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG | WRONG_VALUES)
def test_wrong_arguments_are_named(name):
    arguments, named, sentence = (WRONG | WRONG_VALUES)[name]
    errors = TypeError, ValueError, UnsupportedError
    with pytest.raises(errors, match=f"^rotate_and_quantize: .*{sentence}"):
        rotate_and_quantize(*arguments, **named)


# What a differentiable call has beside q, k and v.
DIFFERENTIABLE = {
    "rotary": {"rotary": {}},
    "interleaved, varlen": {"rotary": {}, "rotary_interleaved": True, "varlen": True},
    "positions, mean": {"rotary": {}, "positions": True, "smooth_k": True},
    "norm": {"rotary": {}, "norm": True},
    "norm alone": {"norm": True, "block": 64},
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_the_pair(name, device):
    """Against float64: of attention at the quantized values, then of the embedding."""
    how, dtype = dict(DIFFERENTIABLE[name]), TRITON_DTYPES[-1]
    leaves, (cos, sin), named, lengths = arguments_of(how, dtype, device)
    edges, of_call, attend = lengths.get("cu_seqlens"), {}, flash_attn_func
    if lengths:  # tokens of no sequence have no gradient
        leaves, attend = [x[: EDGES[-1]] for x in leaves], flash_attn_varlen_func
        of_call = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
        of_call |= {"max_seqlen_q": 120, "max_seqlen_k": 120}
    weights = [named[x] for x in ("q_norm", "k_norm") if x in named]
    wanted_of = [x.requires_grad_() for x in (*leaves, *weights)]
    q, k, v = leaves
    scaled = rotate_and_quantize(q, k, v, cos, sin, **named, **lengths, **how)
    out = attend(*scaled, **of_call, causal=True, out_dtype=dtype)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    got = torch.autograd.grad(out, wanted_of, dout)

    attend = partial(attend, **of_call, causal=True)
    options = named.get("positions"), how.get("rotary_interleaved", False), 1e-6
    reference = of_the_passes(attend, scaled, wanted_of, dout, (cos, sin, *options), edges, True)
    baseline = of_the_passes(attend, scaled, wanted_of, dout, (cos, sin, *options), edges, False)
    names = "dq", "dk", "dv", "dq_norm", "dk_norm"
    for what, *tensors in zip(names, got, reference, baseline, strict=False):
        check(what, *tensors, GRADIENT_FACTOR, name)


def of_the_passes(attend, scaled, leaves, dout, options, edges, wide: bool) -> list[torch.Tensor]:
    """Gradients of the leaves: of attention at the quantized values, then of the embedding of q and
    k, in float64 or in the dtype of q."""
    dtype = torch.float64 if wide else leaves[0].dtype
    values = [x.dequantize().to(dtype).requires_grad_() for x in scaled]
    of_values = torch.autograd.grad(attend(*values), values, dout.to(dtype))
    if wide:
        leaves = [x.detach().double().requires_grad_() for x in leaves]
    weights = leaves[3:] or (None, None)
    embedding, of = Embedding(*weights, *options), torch.float64 if wide else torch.float32
    turned = [
        embedded(x, w, embedding, edges, of).to(dtype)
        for x, w in zip(leaves[:2], weights, strict=True)
    ]
    dq, dk, *of_weights = torch.autograd.grad(turned, [*leaves[:2], *leaves[3:]], of_values[:2])
    return [dq, dk, of_values[2], *of_weights]


def test_where_gradients_pass():
    plain = of_q, *others = [x[:1, :40] for x in (Q, K, V)]
    q, k, v = (x.clone().requires_grad_() for x in plain)
    scaled = rotate_and_quantize(q, k, v, COS, SIN)
    assert all(x.gradient.untyped_storage().nbytes() == 2 for x in scaled)
    (dq,) = torch.autograd.grad(flash_attn_func(*scaled).sum(), q)
    leaves = q, k, v, torch.ones(q.shape[-1], requires_grad=True)

    def layer(*x):
        norms = {"q_norm": x[3], "k_norm": x[3]}
        return flash_attn_func(*rotate_and_quantize(*x[:3], COS, SIN, **norms)).square().sum()

    for x in leaves[:3]:
        torch._dynamo.mark_dynamic(x, 1)  # an error where the graph is of this length alone
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found, wanted = (torch.autograd.grad(way(*leaves), leaves) for way in (compiled, layer))
    assert all(map(torch.equal, found, wanted))
    checkpointed = checkpoint(lambda *x: flash_attn_func(*rotate_and_quantize(*x, COS, SIN)),
                              q, k, v, use_reentrant=False)  # fmt: skip
    assert torch.equal(torch.autograd.grad(checkpointed.sum(), q)[0], dq)
    scaled = rotate_and_quantize(q, *others, COS, SIN)
    mixed = [
        quantize_block_fp8(x, kind=of, hadamard=of == "k", dtype=like.dtype)
        for of, x, like in zip("kv", others, scaled[1:], strict=True)
    ]
    assert torch.autograd.grad(flash_attn_func(scaled[0], *mixed).sum(), q)[0].any()
    with pytest.raises(UnsupportedError, match="there is no gradient through FP8; flash_attn_fp8"):
        torch.func.grad(lambda q: flash_attn_func(*rotate_and_quantize(q, *others)).sum())(of_q)
    positions, edges = torch.arange(40).view(1, 1, 40), torch.tensor([[0, 40]], dtype=torch.int32)
    mapped = (
        (lambda q: rotate_and_quantize(q), of_q[None]),
        (lambda x: rotate_and_quantize(of_q, None, None, COS, SIN, positions=x), positions),
        (lambda x: rotate_and_quantize(of_q[0], cu_seqlens=x, max_seqlen=40), edges),
    )
    for function, x in mapped:
        with pytest.raises(UnsupportedError, match="vmap is not supported"):
            torch.func.vmap(lambda x, function=function: function(x).data)(x)
    with pytest.raises(ValueError, match=r"gradient\.shape must be"):
        replace(scaled[0], gradient=of_q[:, :1])


def test_gradients_of_two_dtypes_are_refused_by_name():
    q, k, v = (x.requires_grad_() for x in sides(torch.float16, "cpu"))
    of_q, *_ = rotate_and_quantize(q, k, v)
    _, *of_keys = rotate_and_quantize(*(x.bfloat16() for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"k\.gradient\.dtype must be"):
        flash_attn_func(of_q, *of_keys)
