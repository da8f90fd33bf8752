"""Calls as libraries make them that were written for FlashAttention-2 and -3: the names that they
import, the places and keywords of the arguments, what they read of the results.

Each function imports as its library does and yields (name, found, wanted), the latter in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

SCALE = 0.2
HEADS, KV_HEADS, DIM = 4, 2, 64
Found = Iterator[tuple[str, Tensor, Tensor]]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float = SCALE) -> Tensor:
    """Attention (batch, seqlen, heads, head_dim) in float64, causal to the bottom right."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    visible = visible.tril(k.shape[2] - q.shape[2]) if causal else visible
    options = {"attn_mask": visible, "scale": scale}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    return out.transpose(1, 2)


def exact_varlen(q, k, v, cu_q: list[int], cu_k: list[int], causal: bool) -> Tensor:
    spans = zip(pairwise(cu_q), pairwise(cu_k), strict=True)
    return torch.cat(
        [exact(q[None, a:b], k[None, c:d], v[None, c:d], causal)[0] for (a, b), (c, d) in spans]
    )


def problem(like: Tensor, *lead: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of one length."""
    torch.manual_seed(0)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    return tuple(torch.randn(*lead, h, DIM).to(like) for h in heads)


def with_gradients(function: Callable, q, k, v, dout) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, dout.double())


def edges(like: Tensor, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def joined(out, lse, block_out, block_lse) -> tuple[Tensor, Tensor]:
    """As ring attention adds a part, out in float32 and lse (batch, seqlen, heads, 1)."""
    block_out, block_lse = block_out.float(), block_lse.transpose(-2, -1).unsqueeze(-1)
    if out is None:
        return block_out, block_lse
    out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - torch.nn.functional.logsigmoid(lse - block_lse)


def ring(q, k, v, dout, forward: Callable, backward: Callable) -> tuple:
    """The second of two ranks: its own keys with the causal mask, then all keys of the first.

    forward(q, k, v, causal) → out, lse; backward(dout, q, k, v, out, lse, buffers, causal).
    """
    half = k.shape[1] // 2
    parts = [(slice(half, None), True), (slice(0, half), False)]
    out = lse = None
    for keys, causal in parts:
        out, lse = joined(out, lse, *forward(q, k[:, keys], v[:, keys], causal))
    out, lse = out.to(q.dtype), lse.squeeze(-1).transpose(1, 2)
    sums = [torch.zeros(x.shape, device=x.device) for x in (q, k, v)]
    for keys, causal in parts:
        buffers = [torch.full_like(x, math.nan) for x in (q, k[:, keys], v[:, keys])]
        backward(dout, q, k[:, keys], v[:, keys], out, lse, buffers, causal)
        for whole, part, where in zip(sums, buffers, (slice(None), keys, keys), strict=True):
            whole[:, where] += part
    return out, *sums


def ring_problem(like: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs and exact results of ``ring``: the second half of the queries."""
    q, k, v, dout = problem(like, 2, 64)
    inputs = q[:, 32:], k, v, dout[:, 32:]
    out, gradients = with_gradients(partial(exact, causal=True), *inputs)
    return inputs, (out, *gradients)


def compare(name: str, found: tuple, wanted: tuple) -> Found:
    for part, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=False):
        yield f"{name} {part}", x, y


def yunchang(like: Tensor) -> Found:
    import flash_attn
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    assert not flash_attn.__version__ <= "2.6.3"

    def forward(q, k, v, causal):
        block_out, block_lse, _, _ = _flash_attn_forward(
            q, k, v, dropout_p=0.0, softmax_scale=SCALE, causal=causal, window_size_left=-1,
            window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return block_out, block_lse

    def backward(dout, q, k, v, out, lse, buffers, causal):
        options = 0.0, SCALE, causal, -1, -1, 0.0, None, False, None
        _flash_attn_backward(dout, q, k, v, out, lse, *buffers, *options)

    inputs, wanted = ring_problem(like)
    yield from compare("yunchang, FlashAttention-2", ring(*inputs, forward, backward), wanted)


def yunchang_hopper(like: Tensor) -> Found:
    from flash_attn_interface import _flash_attn_backward as flash_attn_func_hopper_backward
    from flash_attn_interface import _flash_attn_forward as flash_attn_forward_hopper
    from flash_attn_interface import flash_attn_func as flash3_attn_func

    nothing = (
        *("k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new"),
        *("seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx"),
        *("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale"),
        *("v_descale", "scheduler_metadata", "pack_gqa"),
    )
    shared = {"softmax_scale": SCALE, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    q, k, v, dout = problem(like, 2, 64)
    out, softmax_lse, *_ = flash_attn_forward_hopper(
        q=q, k=k, v=v, **dict.fromkeys(nothing), **shared, attention_chunk=0,
        rotary_interleaved=True, num_splits=0, sm_margin=0,
    )  # fmt: skip
    buffers = {"dq": q, "dk": k, "dv": v}
    gradients = {name: torch.full_like(x, math.nan) for name, x in buffers.items()}
    nothing = "cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k"
    flash_attn_func_hopper_backward(
        dout, q, k, v, out, softmax_lse, **dict.fromkeys(nothing), **gradients, **shared,
        deterministic=False, sm_margin=0,
    )  # fmt: skip
    wanted, of = with_gradients(partial(exact, causal=False), q, k, v, dout)
    yield from compare("yunchang, FlashAttention-3", (out, *gradients.values()), (wanted, *of))
    yield "yunchang, flash3_attn_func", flash3_attn_func(q, k, v, SCALE), wanted


def deepspeed(like: Tensor) -> Found:
    """FPDT calls the passes as FlashAttention-2 had them up to 2.6: a pair, eight values."""
    import flash_attn
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    assert flash_attn.__version__ >= "2.6.0"
    softcap_on = {"softcap": 0.0, "alibi_slopes": None}

    def forward(q, k, v, causal):
        block_out, _, _, _, _, block_lse, _, _ = _flash_attn_forward(
            q, k, v, 0.0, SCALE, causal=causal, window_size=(-1, -1), **softcap_on,
            return_softmax=False,
        )  # fmt: skip
        return block_out, block_lse

    def backward(dout, q, k, v, out, lse, buffers, causal):
        _flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), *buffers, 0.0, SCALE, causal, (-1, -1),
            **softcap_on, deterministic=False, rng_state=None,
        )  # fmt: skip

    inputs, wanted = ring_problem(like)
    yield from compare("DeepSpeed FPDT", ring(*inputs, forward, backward), wanted)


def transformer_engine(like: Tensor) -> Found:
    """Context parallelism, packed sequences ("thd") and dense ones."""
    from flash_attn.flash_attn_interface import _flash_attn_backward as _flash_attn_bwd
    from flash_attn.flash_attn_interface import _flash_attn_forward as _flash_attn_fwd
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward as _varlen_bwd
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as _varlen_fwd
    from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    cu = edges(like, [0, 20, 64])
    shared = {"softmax_scale": SCALE, "dropout_p": 0.0, "alibi_slopes": None, "softcap": 0.0}
    sides = {"window_size_left": -1, "window_size_right": 0}
    packed, dense = problem(like, 64), problem(like, 2, 64)
    of_packed = partial(exact_varlen, cu_q=[0, 20, 64], cu_k=[0, 20, 64], causal=True)
    of_dense = partial(exact, causal=True)
    for name, tensors, lengths, fwd, bwd, function in (
        ("thd", packed, (cu, cu, 44, 44), _varlen_fwd, _varlen_bwd, of_packed),
        ("bshd", dense, (), _flash_attn_fwd, _flash_attn_bwd, of_dense),
    ):
        q, k, v, dout = tensors
        options = shared | sides | {"return_softmax": False}
        options |= {"block_table": None} if lengths else {}
        fa_outputs = fwd(q, k, v, *lengths, causal=True, **options)
        out, lse, rng_state = fa_outputs[0], fa_outputs[1], fa_outputs[3]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        options = shared | sides | {"deterministic": False, "rng_state": rng_state}
        bwd(dout, q, k, v, out, lse, *gradients, *lengths, causal=True, **options)
        wanted, of = with_gradients(function, q, k, v, dout)
        yield from compare(f"TransformerEngine {name}", (out, *gradients), (wanted, *of))
    options = {"softmax_scale": SCALE, "causal": True, "window_size": (-1, 0)}
    options |= {"alibi_slopes": None, "deterministic": False}
    q, k, v, _ = dense
    yield "TransformerEngine", flash_attn_func(q, k, v, 0.0, **options), of_dense(q, k, v)
    q, k, v, _ = packed
    pool_k, pool_v = torch.randn(2, 4, 16, KV_HEADS, DIM).to(like)
    table, cu_k = edges(like, [[2, 0], [3, 1]]), edges(like, [0, 20, 51])
    found = flash_attn_varlen_func(
        q[:5], pool_k, pool_v, edges(like, [0, 1, 5]), cu_k, 4, 31, 0.0,
        **options, block_table=table,
    )  # fmt: skip
    keys = [
        torch.cat([x[i].flatten(0, 1)[:n] for i, n in zip(table.long(), (20, 31), strict=True)])
        for x in (pool_k, pool_v)
    ]
    wanted = exact_varlen(q[:5], *keys, [0, 1, 5], [0, 20, 51], True)
    yield "TransformerEngine block_table", found, wanted


def transformer_engine_hopper(like: Tensor) -> Found:
    from flash_attn_3.flash_attn_interface import _flash_attn_backward as _flash_attn_bwd_v3
    from flash_attn_3.flash_attn_interface import _flash_attn_forward as _flash_attn_fwd_v3
    from flash_attn_3.flash_attn_interface import flash_attn_func as flash_attn_func_v3

    cu = edges(like, [0, 20, 64])
    packed, dense = problem(like, 64), problem(like, 2, 64)
    of_packed = partial(exact_varlen, cu_q=[0, 20, 64], cu_k=[0, 20, 64], causal=True)
    of_dense = partial(exact, causal=True)
    for name, (q, k, v, dout), edges_of_both, longest, function in (
        ("thd", packed, (cu, cu), 44, of_packed),
        ("bshd", dense, (None, None), 64, of_dense),
    ):
        places = (*(None,) * 4, *edges_of_both, *(None,) * 3, longest, longest, *(None,) * 9)
        options = {"softmax_scale": SCALE, "window_size": (-1, 0)}
        out, lse = _flash_attn_fwd_v3(q, k, v, *places, causal=True, num_splits=1, **options)[:2]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        places = (*edges_of_both, None, None, longest, longest, *gradients)
        options["deterministic"] = False
        _flash_attn_bwd_v3(dout, q, k, v, out, lse, *places, causal=True, **options)
        wanted, of = with_gradients(function, q, k, v, dout)
        yield from compare(f"TransformerEngine FA3 {name}", (out, *gradients), (wanted, *of))
    q, k, v, _ = dense
    options = {"window_size": (-1, 0), "num_splits": 1, "deterministic": False}
    found = flash_attn_func_v3(q, k, v, softmax_scale=SCALE, causal=True, **options)
    yield "TransformerEngine FA3", found, of_dense(q, k, v)


def megatron(like: Tensor) -> Found:
    """Megatron-LM: decode steps and prompts of dynamic batches, static decode with new keys."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    from flash_attn_3.flash_attn_interface import _flash_attn_forward
    from flash_attn_3.flash_attn_interface import (
        flash_attn_with_kvcache as flash_attn3_with_kvcache,
    )

    q, k, v, _ = problem(like, 2, 40)
    pages = [x.reshape(2 * 5, 8, KV_HEADS, DIM) for x in (k, v)]
    table, used = edges(like, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]), edges(like, [33, 40])
    keys = [torch.cat([x[0, :33], x[1]]) for x in (k, v)]
    args = {"q": q[:, :1], "k_cache": pages[0], "v_cache": pages[1], "softmax_scale": SCALE}
    args |= {"cache_seqlens": used, "causal": True}
    wanted = exact_varlen(q[:, 0], *keys, [0, 1, 2], [0, 33, 73], True).unsqueeze(1)
    yield "Megatron decode FA3", flash_attn3_with_kvcache(**args, page_table=table), wanted
    yield "Megatron decode FA2", flash_attn_with_kvcache(**args, block_table=table), wanted
    rows, cu_q = q.flatten(0, 1)[:7], edges(like, [0, 4, 7])
    wanted = exact_varlen(rows, *keys, [0, 4, 7], [0, 33, 73], True)
    found, *_ = _flash_attn_forward(
        q=rows, k=pages[0], v=pages[1], k_new=None, v_new=None, qv=None, out=None,
        cu_seqlens_q=cu_q, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
        seqused_k=used, max_seqlen_q=4, max_seqlen_k=40, page_table=table, kv_batch_idx=None,
        leftpad_k=None, softmax_scale=SCALE, causal=True, window_size=(-1, -1), num_splits=0,
    )  # fmt: skip
    yield "Megatron prompt FA3", found, wanted
    cu_k, lengths = edges(like, [0, 33, 73]), (4, 40)
    found = flash_attn_varlen_func(
        rows, *pages, cu_q, cu_k, *lengths, softmax_scale=SCALE, causal=True, block_table=table
    )
    yield "Megatron prompt FA2", found, wanted
    caches = [x.clone() for x in (k, v)]
    new = {"k": k[:, 20:21], "v": v[:, 20:21], "cache_seqlens": edges(like, [20, 20])}
    found = flash_attn_with_kvcache(
        q=q[:, 20:21], k_cache=caches[0], v_cache=caches[1], **new, rotary_cos=None,
        rotary_sin=None, rotary_interleaved=False, softmax_scale=SCALE,
    )  # fmt: skip
    yield "Megatron static", found, exact(q[:, 20:21], k[:, :21], v[:, :21], True)


def diffusers(like: Tensor) -> Found:
    """Context parallelism: the joined parts, and FA3's function with its log-sum-exp."""
    from flash_attn import flash_attn_func
    from flash_attn.flash_attn_interface import (
        _wrapped_flash_attn_backward,
        _wrapped_flash_attn_forward,
    )
    from flash_attn_interface import flash_attn_func as flash_attn_3_func

    def forward(q, k, v, causal):
        options = 0.0, SCALE, causal, -1, -1, 0.0, None, False
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.set_grad_enabled(True):  # within the forward of an autograd.Function
            out, lse, _s_dmask, _rng_state = _wrapped_flash_attn_forward(*leaves, *options)
        return out, lse

    def backward(dout, q, k, v, out, lse, buffers, causal):
        options = 0.0, SCALE, causal, -1, -1, 0.0, None, False, None
        _wrapped_flash_attn_backward(dout, q, k, v, out, lse, *buffers, *options)

    inputs, wanted = ring_problem(like)
    yield from compare("diffusers ring", ring(*inputs, forward, backward), wanted)
    q, k, v, _ = problem(like, 2, 64)
    options = {"softmax_scale": SCALE, "causal": True, "return_attn_probs": True}
    out, lse, s_dmask = flash_attn_func(q=q, k=k, v=v, dropout_p=0.0, **options)
    assert s_dmask is None and lse.shape == (2, HEADS, 64)
    yield "diffusers", out, exact(q, k, v, True)
    descales = dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale"))
    out, lse, *_ = flash_attn_3_func(q=q, k=k, v=v, **options, **descales)
    yield "diffusers FA3", out, exact(q, k, v, True)


def verl(like: Tensor) -> Found:
    """Padding is removed, sequences attend, padding comes back; rotary of packed sequences."""
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.layers.rotary import apply_rotary_emb

    torch.manual_seed(0)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], device=like.device)
    x = torch.randn(2, 5, HEADS, DIM).to(like)
    rows, indices, cu_seqlens, longest, *_ = unpad_input(x, mask)
    again = index_first_axis(x.flatten(0, 1), indices)
    yield "verl index_first_axis", again, rows
    angles = torch.outer(torch.arange(8.0), 100.0 ** -(torch.arange(32) / 32)).to(like.device)
    turned = apply_rotary_emb(rows, angles.cos(), angles.sin(), cu_seqlens=cu_seqlens)
    found = flash_attn_varlen_func(
        turned, rows, rows, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=SCALE
    )
    position = torch.tensor([0, 1, 2, 0, 1, 2, 3], device=like.device)
    angles = angles[position, None].double()
    first, second = rows.double().chunk(2, -1)
    pair = (
        first * angles.cos() - second * angles.sin(),
        first * angles.sin() + second * angles.cos(),
    )
    wanted = exact_varlen(torch.cat(pair, -1), rows, rows, [0, 3, 7], [0, 3, 7], False)
    padded = torch.zeros(2, 5, HEADS, DIM, dtype=torch.float64, device=like.device)
    padded[mask.bool()] = wanted
    yield "verl", pad_input(found, indices, batch=2, seqlen=5), padded


CALLERS = (
    *(yunchang, yunchang_hopper, deepspeed, transformer_engine, transformer_engine_hopper),
    *(megatron, diffusers, verl),
)


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative error, of the norm."""
    wanted = wanted.double()
    return ((found.double() - wanted).norm() / wanted.norm()).item()
