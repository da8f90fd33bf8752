"""torch's operators of flash attention, computed by flashattn3, which ``register`` puts in place of
torch's kernels. A function raises ``NotTaken`` for arguments that it does not take."""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..call.fields import Options
from ..call.operands import Tensors
from ..call.selection import backend_in_force
from ..run.operators import backward_of
from .one_pass import written_to
from .paged import attend_to_pages


class NotTaken(Exception):
    """torch's own kernel has to compute the call."""


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _flash_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """query (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cum_seq_q."""
    if dropout_p or return_debug_mask or alibi_slopes is not None:
        raise NotTaken
    if cum_seq_q is None and not (seqused_k is block_table is None):
        raise NotTaken
    options = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": _window(window_size_left, window_size_right),
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "num_splits": num_splits,
        "return_lse": True,
    }
    if block_table is not None:
        edges = block_table, cum_seq_q, max_q, cum_seq_k, seqused_k
        out, lse = attend_to_pages("varlen_attn", query, key, value, *edges, **options)
    elif cum_seq_q is None:
        out, lse = flash_attn_func(query, key, value, **options)
    else:
        lengths = cum_seq_q, cum_seq_k, max_q, max_k, None, seqused_k
        out, lse = flash_attn_varlen_func(query, key, value, *lengths, **options)
    return (_as_strided_like(out, query), lse, *_random_state(query), out.new_empty(0))


def _flash_forward_into(out, *arguments, **options):
    result, lse, *_ = _flash_forward(*arguments, **options)
    written_to("varlen_attn_out", out, result)
    return lse


def _flash_backward(grad_out, query, key, value, *arguments, **options):
    gradients = _gradients(grad_out, query, key, value, *arguments, **options)
    return tuple(map(_as_strided_like, gradients, (query, key, value)))


def _gradients(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    if dropout_p:
        raise NotTaken
    function = "aten::_flash_attention_backward"
    left, right = _window(window_size_left, window_size_right)
    options = Options(
        max_seqlen_q=None if cum_seq_q is None else max_q,
        max_seqlen_k=None if cum_seq_q is None else max_k,
        softmax_scale=scale,
        causal=is_causal,
        window_left=left,
        window_right=right,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        backend=backend_in_force(function, "backend", None),
        function=function,
    )
    tensors = Tensors(query, key, value, cum_seq_q, cum_seq_k)
    return backward_of(grad_out, None, out, logsumexp, tensors, options)


def _sdpa_forward(query, key, value, *arguments, **options):
    """query (batch, heads, seqlen, head_dim)."""
    return _dense_forward(query, key, value, (None, None, None), *arguments, **options)


def _sdpa_forward_quantized(
    query, key, value, q_descale, k_descale, v_descale, *arguments, **options
):
    descales = q_descale, k_descale, v_descale
    return _dense_forward(query, key, value, descales, *arguments, **options)


def _dense_forward(
    query,
    key,
    value,
    descales,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    lengths = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    flags = dropout_p, is_causal, return_debug_mask
    of_call = None, None, *lengths, *flags, *descales
    out, lse, *rest = _flash_forward(q, k, v, *of_call, scale=scale)
    return (out.transpose(1, 2), lse, None, None, *lengths, *rest)


def _sdpa_backward(*arguments, scale=None):
    gradients = _dense_gradients(*arguments, scale=scale)
    return tuple(map(_as_strided_like, gradients, arguments[1:4]))


def _dense_gradients(grad_out, query, key, value, out, logsumexp, *arguments, scale):
    """As _gradients, with (batch, heads, seqlen, head_dim); cum_seq_q and cum_seq_k, which are
    undefined tensors here, are not read."""
    transposed = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _gradients(*transposed, logsumexp, None, None, *arguments[2:], scale=scale)
    return tuple(x.transpose(1, 2) for x in gradients)


def _cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if attn_mask is not None or (is_causal and query.shape[2] != key.shape[2]):
        raise NotTaken
    out, lse, *_ = _sdpa_forward(query, key, value, dropout_p, is_causal, scale=scale)
    # lse in the layout of (batch, seqlen, heads), as torch's kernel has it.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(grad_out, query, key, *arguments, attn_mask=None, scale=None):
    *saved, dropout_p, is_causal = arguments
    if attn_mask is not None or (is_causal and query.shape[2] != key.shape[2]):
        raise NotTaken
    rest = None, None, query.shape[2], key.shape[2], dropout_p, is_causal, None, None
    return _dense_gradients(grad_out, query, key, *saved, *rest, scale=scale)


def _as_strided_like(result: Tensor, source: Tensor) -> Tensor:
    """The result in the layout of ``torch.empty_like(source)``, which compiled code expects."""
    if result.stride() == source.stride() or result.shape != source.shape:
        return result
    wanted = torch.empty_like(source, device="meta").stride()
    if result.stride() == wanted:
        return result
    laid_out = torch.empty_strided(result.shape, wanted, dtype=result.dtype, device=result.device)
    return laid_out.copy_(result)


def _random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout, of the shapes that torch's own FlashAttention-3 provider has."""
    zeros = [torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())]
    return zeros[0], zeros[1]


OPERATORS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward.quantized": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention.quantized": _sdpa_forward_quantized,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
# The two operators behind F.scaled_dot_product_attention on a CPU.
CPU_OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
