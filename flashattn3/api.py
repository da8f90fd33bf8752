"""The public functions: signatures and documentation. Names, order and defaults follow the
FlashAttention-3 interface; the packed forms other than qkvpacked are FlashAttention-2's.

``public`` (call/public.py) makes the functions: it reads the options by their fields and passes
them on to the form below that takes the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .call.arguments import expect_strided, integer, length
from .call.block_scaled import BlockScaled
from .call.fields import Options
from .call.operands import (
    NO_DESCALES,
    NO_SCORES,
    Tensors,
    check_tensor_types,
    normalised,
    with_keys_in_rows,
)
from .call.public import public
from .errors import expect, shown, value_error
from .explanation import Explanation, explained
from .masks.arguments_of_calls import call_tensors
from .masks.mask import Mask
from .run.doors import attend
from .run.passes import backward_pass, forward_pass
from .run.quantized import Scheme, attend_quantized
from .run.quantized_gradient import attend_scaled
from .run.scaled import attend_8_bits_at_once


def _dense(options: Options, q, k, v, descales=NO_DESCALES, scores=None, mask=None):
    if scores is mask is None:
        if type(q) is BlockScaled and descales[0] is descales[1] is descales[2] is None:
            found = attend_8_bits_at_once(options, q, k, v)
            if found is not None:
                return found
        tensors = Tensors(q, k, v)
    else:
        lists = () if mask is None else call_tensors(options.function, mask, q, k)
        tensors = Tensors(q, k, v, None, None, None, None, *(scores or NO_SCORES), *lists)
    tensors = normalised(options.function, tensors, descales)
    if type(q) is BlockScaled:
        return attend_scaled(tensors, options, (q, k, v), mask=mask)
    return attend(tensors, options, mask=mask)


def _varlen(options: Options, q, k, v, lengths, descales=NO_DESCALES, scores=None):
    tensors = Tensors(q, k, v, *lengths, *(scores or NO_SCORES))
    tensors, options = with_keys_in_rows(tensors, options)
    tensors = normalised(options.function, tensors, descales)
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        check_tensor_types(options.function, tensors, varlen=True)
    if type(q) is BlockScaled:
        return attend_scaled(tensors, options, (q, k, v))
    return attend(tensors, options)


def _qkv(options: Options, qkv, num_heads_q, descales, scores, mask):
    parts = _unpacked(options.function, qkv, num_heads_q)
    return _dense(options, *parts, descales, scores, mask)


def _kv(options: Options, q, kv, scores, mask):
    axes = "(batch, seqlen_k, 2, num_heads_kv, head_dim)"
    parts = _parts(options.function, "kv", kv, axes)
    return _dense(options, q, *parts, scores=scores, mask=mask)


def _varlen_qkv(options: Options, qkv, cu_seqlens, max_seqlen, scores):
    function = options.function
    parts = _parts(function, "qkv", qkv, "(total, 3, heads, head_dim)")
    edges = _tensor(function, "cu_seqlens", cu_seqlens)
    longest = length(function, "max_seqlen_q", max_seqlen)
    options = options._replace(max_seqlen_q=longest, max_seqlen_k=longest)
    return _varlen(options, *parts, (edges, edges, None, None), scores=scores)


def _varlen_kv(options: Options, q, kv, cu_seqlens_q, cu_seqlens_k, scores):
    function = options.function
    parts = _parts(function, "kv", kv, "(total_k, 2, num_heads_kv, head_dim)")
    edges_q = _tensor(function, "cu_seqlens_q", cu_seqlens_q)
    edges_k = _tensor(function, "cu_seqlens_k", cu_seqlens_k)
    return _varlen(options, q, *parts, (edges_q, edges_k, None, None), scores=scores)


def _quantized(options: Options, q, k, v, block, hadamard, qk_dtype, smooth_k, scores, mask):
    scheme = Scheme(block, hadamard, qk_dtype, smooth_k)
    tensors = _tensors(options, q, k, v, scores=scores, mask=mask)
    return attend_quantized(options, tensors, scheme, varlen=False)


def _varlen_quantized(
    options: Options, q, k, v, lengths, block, hadamard, qk_dtype, smooth_k, scores
):
    scheme = Scheme(block, hadamard, qk_dtype, smooth_k)
    tensors = _tensors(options, q, k, v, lengths, scores)
    return attend_quantized(options, tensors, scheme, varlen=True)


def _forward(options: Options, q, k, v, lengths, descales, scores, mask):
    tensors = _tensors(options, q, k, v, lengths, scores, mask)
    return forward_pass(tensors, options, descales)


def _backward(options: Options, dout, q, k, v, out, lse, lengths, dlse, dq, dk, dv, scores, mask):
    tensors = _tensors(options, q, k, v, lengths, scores, mask)
    return backward_pass(tensors, options, dout, out, lse, dlse, (dq, dk, dv))


def _explained(
    options: Options, q, k, v, lengths, max_seqlen_q, max_seqlen_k, descales, device, scores, mask
):
    function, varlen = options.function, lengths[0] is not None
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    options = options._replace(**{name: length(function, name, x) for name, x in longest.items()})
    tensors = _tensors(options, q, k, v, lengths, scores, mask)
    if varlen:
        tensors, options = with_keys_in_rows(tensors, options)
    else:
        for name, value in {"cu_seqlens_k": lengths[1], **longest}.items():
            expect(value is None, function, name, "None without cu_seqlens_q", shown(value))
    tensors = normalised(function, tensors, descales)
    return explained(options, tensors, varlen, device)


def _tensors(options: Options, q, k, v, lengths=(None,) * 4, scores=None, mask=None) -> Tensors:
    """lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k."""
    of_mask = call_tensors(options.function, mask, q, k)
    return Tensors(q, k, v, *lengths, *(scores or NO_SCORES), *of_mask)


def _unpacked(function: str, qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    expect_strided(function, "qkv", qkv)
    if num_heads_q is None:
        if qkv.ndim != 5 or qkv.shape[2] != 3:
            wanted = "(batch, seqlen, 3, heads, head_dim) without num_heads_q"
            raise value_error(function, "qkv.shape", wanted, tuple(qkv.shape))
        return qkv.unbind(dim=2)
    num_heads_q = integer(function, "num_heads_q", num_heads_q)
    if qkv.ndim == 5:
        raise value_error(function, "num_heads_q", "None where qkv has five axes", num_heads_q)
    if qkv.ndim != 4:
        wanted = "(batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with num_heads_q"
        raise value_error(function, "qkv.shape", wanted, tuple(qkv.shape))
    rest = qkv.shape[2] - num_heads_q
    if num_heads_q < 1 or rest < 2 or rest % 2:
        wanted = f"at least 1 and leave an even number of qkv's {qkv.shape[2]} heads for k and v"
        raise value_error(function, "num_heads_q", wanted, num_heads_q)
    return qkv.split((num_heads_q, rest // 2, rest // 2), dim=2)


def _parts(function: str, name: str, packed: Tensor, axes: str) -> tuple[Tensor, ...]:
    """The views of q, k and v, or of k and v, along the third axis from behind.

    axes: those wanted, in words.
    """
    packed, words = _tensor(function, name, packed), axes.split(", ")
    fits = packed.ndim == len(words) and str(packed.shape[-3]) == words[-3]
    expect(fits, function, f"{name}.shape", axes, tuple(packed.shape))
    return packed.unbind(-3)


def _tensor(function: str, name: str, value: object) -> Tensor:
    expect_strided(function, name, value)
    return value


@public(_dense)
def flash_attn_func(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
    split_tokens: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, softmax(softmax_scale * q @ k.T) @ v, without ever storing the scores.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16, bfloat16, float8_e4m3fn or int8;
            float32 and float64 run on the reference backend. Any strides; if the last one is not 1
            the tensor is copied. q, k and v may instead all be ``BlockScaled``, from
            ``quantize_block_fp8``: q and k rotated alike, v not. k may have a mean, but not with
            softcap.
        k: (batch, seqlen_k, num_heads_kv, head_dim). num_heads_q must be a multiple of
            num_heads_kv: query head i reads key-value head i // (num_heads_q // num_heads_kv).
            In q's dtype.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v); head_dim_v may differ from head_dim. In q's
            dtype, where that is int8 in float8_e4m3fn.
        softmax_scale: 0, or of a magnitude between 2**-100 and 2**100 (2**900 in float64); None
            stands for head_dim ** -0.5.
        causal: query i sees the keys up to i + seqlen_k - seqlen_q (aligned to the bottom right).
        q_descale, k_descale, v_descale: float32, for 8-bit inputs: a stored value times its descale
            is the real value; None stands for 1. (batch, num_heads_kv) as in FlashAttention-3,
            q_descale as well; or (batch, num_heads_kv, ceil(seqlen / block)) for blocks of 64, 128
            or 256 tokens. q_descale may also have num_heads_q heads.
        window_size: (left, right) keys visible on each side of that diagonal, inclusive; a
            negative number or None is open. With causal the right side is 0.
        softcap: if positive, scores become softcap * tanh(score / softcap) before the mask.
        num_splits: number of KV splits, at most 256; the partial results are combined exactly. 0
            or None: chosen, so that few queries of many keys occupy every SM; a row's bits then
            depend on the batch and the lengths. 1: none. A hint: on Hopper any other number gives
            every SM an equal share of the keys.
        pack_gqa: True asks for the packed layout of grouped queries, False for the other. A hint.
        deterministic: gradients are bitwise the same in every run; also asked for by
            torch.use_deterministic_algorithms(True).
        sm_margin: number of streaming multiprocessors to leave free. A hint.
        return_attn_probs: FlashAttention-3's name for return_lse.
        return_lse: also return the log-sum-exp of every row.
        backend: name of the only backend that may run this call. None: that of ``use_backend``,
            else of FLASHATTN3_BACKEND, else the first of hopper, triton and reference that takes
            the call.
        out_dtype: with 8-bit inputs bfloat16 (None), float16 or, on the reference backend,
            float32; with other inputs None or q's dtype.
        use_fast_accum: for 8-bit inputs on the Hopper backend. False: out leaves the tensor cores'
            accumulators for float32 every 768 keys. True: out stays in them, which is faster
            beyond 768 keys and drops low bits: where V's values share one sign, out loses
            about n * 2**-16 of itself over n keys (V = 1, 4096 keys: 1 to 12 % by the tests), and
            light keys vanish beside a heavy one. Other backends and 16-bit inputs accumulate in
            float32 either way. A hint.
        sinks: (num_heads_q,), float32 or q's dtype: one more logit of each row, in natural units,
            which takes weight and has no value: out = P v with P = exp(score - lse) and lse =
            log(sum(exp(scores)) + exp(sink)). s_aux is another name of it. Not with k that has a
            mean.
        alibi_slopes: float32 (num_heads_q,) or (batch, num_heads_q): slope * |i + seqlen_k -
            seqlen_q - j| is subtracted from the score of query i and key j, after softcap (ALiBi).
            It has no gradient.
        bias: (batch or 1, num_heads_q or 1, seqlen_q, seqlen_k) in q's dtype, with 8-bit inputs of
            16 bits or float32, or where these have a gradient in its dtype; dense calls only: added
            to the scores, after slopes and before the mask. If its last stride is not 1 it is
            copied.
        return_max_logit: also return, last, the largest score that any query sees.
        mask: a ``flashattn3.masks.Mask`` of these lengths, for all batches or heads or for each
            query head: all that a query sees, so causal, window_size and bias are not beside it. It
            is built once for all layers, and dense calls take it.
        split_tokens: None, or a multiple of 128, beside num_splits 0: keys are cut into spans of as
            many tokens from the sequence's first key on, and joined in their order, in one kernel
            and one tile for all calls, so the bits of a row of out and lse depend on its query, its
            keys and this number alone: neither on the batch nor on seqlen_q. Not for 8 bits, nor
            with slopes, bias, mask, return_max_logit or seqused_q. Gradients promise nothing.
        qv, attention_chunk: not supported yet, an error if given.
        FlashAttention-2's keywords dropout_p and block_table are taken with the values 0 and None.

        Numbers and bools may be Python's, numpy's or 0-d tensors; one on a GPU is read, which waits
        for the device. A hint, but for use_fast_accum, changes a result by rounding at most: a
        backend that has no use for it runs without it, and ``explain`` says so.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v) in q's dtype, for 8-bit inputs in out_dtype;
        with return_lse also lse (batch, num_heads_q, seqlen_q), natural logarithm, float32 (float64
        for float64 inputs). A row that sees no key has out 0, lse -inf (its sink, if there is one)
        and gradient 0. Both are differentiable with respect to q, k, v, sinks and bias, unless q
        has 8 bits: in reverse mode and once, with torch.func's grad, vjp, jacrev and vmap too.
        With return_max_logit also max_logit (num_heads_q,) in lse's dtype, over batch and queries,
        after softcap, slopes and bias, without sinks; -inf where no key is seen. It has no
        gradient.

    Raises:
        TypeError, ValueError: an argument is illegal.
        UnsupportedError: the call is legal, but no backend (or not the named one) takes it; or it
            is of 8 bits and would need a gradient.

    Source: Dao et al., FlashAttention-2 (arXiv 2307.08691); Shah et al., FlashAttention-3 (arXiv
        2407.08608).
    """


@public(_varlen)
def flash_attn_varlen_func(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    split_tokens: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention over sequences of different lengths, packed one after another.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k, v: (total_k, num_heads_kv, head_dim) and (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,) on q's device, from 0, non-decreasing:
            sequence i holds the rows cu_seqlens[i] up to cu_seqlens[i + 1]. cu_seqlens_k may be
            None: k and v then have the axes (batch, seqlen_k, ·, ·), of which seqused_k counts
            (None: all).
        max_seqlen_q, max_seqlen_k: at least the longest sequence, an int or a 0-d integer tensor.
            None, or a tensor on a GPU, which is not read, since that would wait for the device: the
            number of rows stands in, at the price of a larger grid.
        seqused_q, seqused_k: int32 (batch,), rows of each sequence that count, from its beginning.
        q_descale, k_descale, v_descale: (batch, num_heads_kv), or one for each block of each
            sequence, (batch, num_heads_kv, ceil(max_seqlen / block)). BlockScaled q, k and v hold
            the cu_seqlens of the call.
        All other arguments are those of ``flash_attn_func``.

    Returns:
        out (total_q, num_heads_q, head_dim_v); with return_lse also lse (num_heads_q, total_q),
        float32, of float64 inputs float64. Rows outside the sequences have out 0, lse -inf and
        gradient 0.

    Raises:
        TypeError, ValueError, UnsupportedError: as ``flash_attn_func``. The values of cu_seqlens
            and seqused are checked on a CPU, elsewhere only in a process started with
            FLASHATTN3_CHECK=1, because that reads them on the host; without it wrong values give
            wrong numbers but are never used to read or write outside the tensors.
    """


@public(_qkv)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_attn_func`` for queries, keys and values in one tensor, viewed and never copied.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_kv,
            head_dim) with num_heads_q given: query heads first, then keys, then values.
        num_heads_q: query heads of the four-dimensional form; None for the five-dimensional one.
        All other arguments, the result and the errors are those of ``flash_attn_func``.
    """


@public(_kv)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_attn_func`` for keys and values in one tensor, viewed and never copied.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        kv: (batch, seqlen_k, 2, num_heads_kv, head_dim).
        dropout_p, alibi_slopes: at FlashAttention-2's places; dropout_p must be 0.
        All other arguments, the result and the errors are those of ``flash_attn_func``.
    """


@public(_varlen_qkv)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_attn_varlen_func`` for queries, keys and values in one tensor, never copied.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens, max_seqlen: of queries and keys, as for ``flash_attn_varlen_func``.
        dropout_p, alibi_slopes: at FlashAttention-2's places; dropout_p must be 0.
        All other arguments, the result and the errors are those of ``flash_attn_varlen_func``.
    """


@public(_varlen_kv)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_attn_varlen_func`` for keys and values in one tensor, viewed and never copied.

    Args:
        q: (total_q, num_heads_q, head_dim).
        kv: (total_k, 2, num_heads_kv, head_dim).
        dropout_p, alibi_slopes: at FlashAttention-2's places; dropout_p must be 0.
        All other arguments, the result and the errors are those of ``flash_attn_varlen_func``.
    """


@public(_quantized)
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
    use_fast_accum: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention in 8 bits on 16-bit tensors: quantizes q, k, v in blocks and attends, in one call.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16 or bfloat16.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim) and (batch, seqlen_k, num_heads_kv,
            head_dim_v), in q's dtype.
        block: tokens of a head that share a scale: 64, 128 or 256.
        hadamard: rotate q and k first, which spreads outliers over the head dim; head_dim must
            then be a power of two.
        qk_dtype: of quantized q and k, torch.int8 or torch.float8_e4m3fn; v becomes float8_e4m3fn.
            None: int8 with hadamard and head dims up to 128, else float8_e4m3fn
            (``call.dtypes.best_qk_dtype`` says why).
        smooth_k: subtract from k, before it is rotated, a vector for each head near its mean. No
            probability changes, and scores are finer where the keys have a large component in
            common. Not with softcap or sinks.
        out_dtype: float16, bfloat16 or, on the reference backend, float32; None stands for q's.
        All other arguments are those of ``flash_attn_func``.

    Returns: what ``flash_attn_func`` does, in out_dtype.

    The gradient is that of attention at the quantized values, computed in 16 bits and passed
    straight through the rounding: it does not know what rounding does to the loss, which limits
    how far coarse scales can be trained. 8-bit q, k and v are saved for it, with out and lse.

    Raises: what ``flash_attn_func`` does; UnsupportedError for a gradient inside torch.func's
        transforms.

    Sources: Shah et al., FlashAttention-3 (arXiv 2407.08608), section 3.3; the straight-through
    estimator: Bengio et al. (arXiv 1308.3432).
    """


@public(_varlen_quantized)
def flash_attn_varlen_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    *,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
    use_fast_accum: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_attn_fp8_func`` over sequences of different lengths, packed one after another.

    Rows beyond seqused are masked, but they enter the largest value of their block and the vector
    of smooth_k (one for each sequence and head). A value there that is not finite makes its int8
    block NaN.

    Args: q (total_q, num_heads_q, head_dim), k and v (total_k, num_heads_kv, ·), of 16 bits; the
        others are those of ``flash_attn_varlen_func`` and ``flash_attn_fp8_func``, as are the
        results and the errors.
    """


@public(_explained)
def explain(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    device: torch.device | str | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
    split_tokens: int | None = None,
) -> Explanation:
    """Say how a call with these arguments would run. Nothing is launched.

    Args: those of ``flash_attn_func``; with cu_seqlens_q those of ``flash_attn_varlen_func``. The
        tensors may lie on the meta device, where they take no memory.
        device: where the call of meta tensors would run; None stands for the current GPU, or the
            CPU where there is none.

    Raises: what the call would raise.
    """


@public(_forward)
def flash_attn_forward(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int | None = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
    split_tokens: int | None = None,
) -> tuple[Tensor, ...]:
    """The forward pass alone, without autograd: for parts of attention that the caller joins.

    Two parts (out_a, lse_a) and (out_b, lse_b) over different keys join to lse = logaddexp(lse_a,
    lse_b) and out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b. ``flash_attn_combine``
    joins any number, with lse as (batch, seqlen_q, num_heads_q). ``flash_attn_backward`` takes the
    joined out and lse with each part's keys. lse has the sinks, so pass them to one part alone.

    Args:
        q, k, v and all others: as in ``flash_attn_func``, and with cu_seqlens_q as in
            ``flash_attn_varlen_func``. Autocast does not apply.

    Returns:
        out and lse, as these functions do with return_lse, and max_logit with return_max_logit.

    Raises:
        UnsupportedError: also where q, k or v requires a gradient and grad mode is on: pass
            detached tensors, or call it under torch.no_grad() or in a torch.autograd.Function.
        Others as ``flash_attn_func``.

    Source: Liu et al., Ring Attention (arXiv 2310.01889).
    """


@public(_backward)
def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
) -> tuple[Tensor, ...]:
    """The backward pass alone, without autograd, from out and lse that are given.

    With out and lse of the whole attention and k and v of one part, the results are this part's
    dk and dv and its share of dq: the shares of all parts add up.

    Args:
        dout, out: in q's shape with v's head dim, in q's dtype, any strides.
        q, k, v and the options: those of the forward pass.
        lse: (batch, num_heads_q, seqlen_q), or (num_heads_q, total_q) with cu_seqlens_q, natural
            logarithm, float32 (float64 for float64 inputs).
        dlse: the gradient with respect to lse, in its shape and dtype; None: 0.
        dq, dk, dv: tensors that the gradients are added to, in place: in the shapes of q, k and v,
            float32 (float64 for float64 inputs). Each addend was rounded to q's dtype, the sum was
            not. None: a new tensor in q's dtype.

    Returns:
        dq, dk and dv: the given tensors, or new ones. Then dsinks (num_heads_q,) of a call with
        sinks and dbias of one with a bias, in their shapes and dtypes. With lse of the whole
        attention every part of the keys has all of dsinks: pass sinks to one of them.

    Raises:
        TypeError, ValueError: an argument is illegal; nothing has been added then.
        UnsupportedError: q, k and v have 8 bits, or as ``flash_attn_forward``.
    """
