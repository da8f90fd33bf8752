"""The gradient of a call that quantizes to 8 bits: that of attention at the quantized values,
passed straight through the rounding to the 16-bit tensors (the straight-through estimator, Bengio
et al., arXiv 1308.3432).

The forward saves the 8-bit tensors with their descales, out and lse. The backward widens them to 16
bits and runs the backward of 16 bits; the rotation of q and k is undone in their gradients. The
mean of k, which no probability depends on, takes no part in it, except in the gradient of an lse.

Where tensor cores multiply probabilities of 8 bits, out and lse carry their rounding, which the
sums of many keys average out and those of few do not. Rows that see few keys are computed again in
16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..call.block_scaled import BlockScaled, lse_with_mean
from ..call.fields import Options, score_scale_of
from ..call.hadamard import rotate_rows_back
from ..call.operands import Scaled, Tensors, changes_scores, flat, with_sides
from ..call.scores import refuse_gradient_of_slopes
from ..call.token_positions import of_sequences, token_positions
from ..errors import expect
from ..modes import (
    has_dual_level,
    inputs_apart,
    is_traced,
    is_transformed,
    needs_gradient,
    refuse_gradients,
    without_autocast,
)
from .derivative import BIAS, by_tensor, gradient_of, or_zeros
from .doors import attend
from .operators import forward_watched, plan_of, returned

if TYPE_CHECKING:
    from ..masks.mask import Mask

# Rows that see as many keys at most are computed again. On an H100 the largest error of a gradient
# over that of torch in bfloat16 is 2 to 4 from 70 to 128 keys, and from 512 on 0.4 to 1.6; the rule
# allows 3.
FEW_KEYS = 512
# Number of arguments of the autograd function after those of Tensors.
_NUM_OTHERS = 2


def attend_differentiably(
    tensors: Tensors, options: Options, quantized: Callable[[Tensors], Tensors]
) -> Tensor | tuple[Tensor, ...]:
    """What the call returns. tensors: of 16 bits. options: of the call in 8 bits. quantized: the
    call with q, k and v of 8 bits."""
    if not is_traced():
        # Refuses what has no gradient before anything runs.
        plan_of(tensors, _kept_of_16_bits(options))
        return returned(_apply(*tensors, options, quantized), options)
    given = inputs_apart(tensors)
    return returned(_AttentionOfQuantized.apply(*given, options, quantized), options)


def attend_scaled(
    tensors: Tensors,
    options: Options,
    sides: tuple[BlockScaled, BlockScaled, BlockScaled],
    mask: Mask | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``attend`` of 8 bits, differentiably where one of the sides has a gradient. tensors: of the
    sides, normalised."""
    q, k, v = sides
    given = q.gradient, k.gradient, v.gradient
    if not needs_gradient(given):
        return attend(tensors, options, mask=mask)
    if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
        refuse_gradients(options.function, **dict(zip("qkv", given, strict=True)))
    refuse_gradient_of_slopes(options.function, tensors.alibi_slopes)
    dtype = next(x.dtype for x in given if x is not None)
    for name, x in zip("qkv", given, strict=True):
        if x is not None:
            what, wanted = f"{name}.gradient.dtype", f"{dtype} as that of the other tensors"
            expect(x.dtype == dtype, options.function, what, wanted, x.dtype)
    sources = [
        x.data.new_zeros((), dtype=dtype).expand(x.shape) if x.gradient is None else x.gradient
        for x in sides
    ]
    eight = tensors.q, tensors.k, tensors.v
    quantized = partial(_with_8_bits, eight)
    return attend_differentiably(with_sides(tensors, *sources), options, quantized)


def _with_8_bits(eight: tuple[Scaled, Scaled, Scaled], tensors: Tensors) -> Tensors:
    return with_sides(tensors, *eight)


def _of_16_bits(options: Options) -> Options:
    """The options of the backward."""
    return options._replace(
        out_dtype=None, return_lse=False, return_max_logit=False, use_fast_accum=False
    )


_kept_of_16_bits = lru_cache(maxsize=4096)(_of_16_bits)


class _AttentionOfQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *values, options, quantized = arguments
        tensors = Tensors(*values)
        ctx.set_materialize_grads(False)
        call = quantized(tensors)
        k = call.k
        call = with_sides(call, call.q, k._replace(mean=None), call.v)
        out, lse, *max_logit = attend(call, options._replace(return_lse=True))
        ctx.options, ctx.dtype = options, tensors.q.dtype
        sides = (call.q, tensors.q), (call.k, tensors.k), (call.v, tensors.v)
        ctx.sides = [(of.block, x.shape) for of, x in sides]
        ctx.hadamard, ctx.has_codes = call.q.hadamard, call.v.layout == "permuted"
        stored = (x for side in (call.q, call.k, call.v) for x in (side.data, side.descale))
        ctx.save_for_backward(*stored, k.mean, lse, out, *values[3:])
        if max_logit:
            ctx.mark_non_differentiable(*max_logit)
        if options.return_lse and k.mean is not None and call.q.descale is not None:
            lse = lse_with_mean(
                lse,
                BlockScaled(*call.q[:4], tensors.cu_seqlens_q),
                k.mean,
                score_scale_of(options, tensors.q.shape[-1]).softmax_scale,
            )
        return out, lse, *max_logit

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        if dout is None and dlse is None:
            return (None,) * (len(Tensors._fields) + _NUM_OTHERS)
        saved = ctx.saved_tensors  # once: a checkpoint lets nothing be unpacked twice
        with without_autocast(saved[0].device.type):  # the forward's casts are in what is saved
            found = _gradients(ctx, saved, dout, dlse)
        return (*found, *(None,) * (len(Tensors._fields) + _NUM_OTHERS - len(found)))


# As doors._apply.
_apply = super(torch.autograd.Function, _AttentionOfQuantized).apply


def _gradients(
    ctx, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors of ``Tensors``, in their order."""
    options = ctx.options
    *stored, mean, lse, out = saved[:9]
    edges_q, edges_k, *rest = saved[9:]
    sides = [
        _widened(data, descale, *side, edges, ctx.dtype)
        for side, data, descale, edges in zip(
            ctx.sides, stored[::2], stored[1::2], (edges_q, edges_k, edges_k), strict=True
        )
    ]
    tensors = Tensors(*sides, edges_q, edges_k, *rest)
    with_dbias = ctx.needs_input_grad[BIAS : BIAS + 1] if changes_scores(tensors) else ()
    out = out.to(ctx.dtype)
    dout = or_zeros(dout, out).to(ctx.dtype)
    of_16_bits, of_lse = _of_16_bits(options), dlse
    if ctx.has_codes:
        out, lse, of_lse = _with_exact_rows(tensors, of_16_bits, out, lse, dout, dlse)
    given = dout, of_lse, out, lse, flat(tensors, bool(with_dbias)), of_16_bits
    dq, dk, *others = gradient_of(*given, *with_dbias)
    if ctx.hadamard:
        dq, dk = rotate_rows_back(dq), rotate_rows_back(dk)
    if dlse is not None and mean is not None:
        scale = score_scale_of(options, sides[0].shape[-1]).softmax_scale
        dlse = dlse.where(lse > -math.inf, 0.0)  # a row without keys has gradient 0
        dq = _with_gradient_of_mean(dq, dlse, mean, scale, edges_q)
    return by_tensor((dq, dk, *others), *tensors)


def _with_exact_rows(
    tensors: Tensors,
    options: Options,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and dlse for the backward, computed again where rows see few keys: tensors of all
    rows, or the first of a causal call. The latter's out stays; their sums of dout * out, which
    alone the backward needs, are corrected through dlse, from which it subtracts them."""
    q, k, v = tensors.q, tensors.k, tensors.v
    again = options._replace(return_lse=True)
    sees_all = not options.causal and options.window_left < 0 and options.window_right < 0
    plain = tensors.cu_seqlens_q is None and tensors.mask_entries_q is None
    if plain and sees_all and k.shape[1] > FEW_KEYS:
        return out, lse, dlse
    keys_before = k.shape[1] - q.shape[1]  # of the first row
    count = min(FEW_KEYS - keys_before, q.shape[1])
    if not (plain and options.causal and options.window_left < 0 and k.shape[1] > FEW_KEYS):
        return *_computed(tensors, again), dlse
    if count <= 0:
        return out, lse, dlse
    first = Tensors(
        q[:, :count],
        k[:, : count + keys_before],
        v[:, : count + keys_before],
        sinks=tensors.sinks,
        alibi_slopes=tensors.alibi_slopes,
        bias=None if tensors.bias is None else tensors.bias[..., :count, : count + keys_before],
    )
    exact, exact_lse = _computed(first, again)
    lse, dlse = lse.clone(), torch.zeros_like(lse) if dlse is None else dlse.clone()
    lse[..., :count] = exact_lse
    moved = (dout[:, :count].float() * (out[:, :count].float() - exact.float())).sum(-1)
    dlse[..., :count] += moved.transpose(1, 2)
    return out, lse, dlse


def _computed(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """out and lse. torch.compile refuses a backward that reads all that ``attend`` checks."""
    if torch.compiler.is_compiling():
        return forward_watched(tensors, options)[:2]
    return attend(tensors, options)


def _widened(
    data: Tensor,
    descale: Tensor | None,
    block: int | None,
    shape: torch.Size,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The values of 8 bits, rotated as they are and without the mean, of the shape."""
    if descale is None:  # there are no tokens
        return data.new_zeros(shape, dtype=dtype)
    from ..quantization.dispatch import dequantize  # its custom operators import Triton

    return dequantize(data, descale, block, cu_seqlens, shape, dtype)


def _with_gradient_of_mean(
    dq: Tensor, dlse: Tensor, mean: Tensor, softmax_scale: float, cu_seqlens_q: Tensor | None
) -> Tensor:
    """Add what lse_with_mean adds to the gradient of q: mean * softmax_scale * dlse."""
    of_rows = of_sequences(mean, token_positions(dq.shape[-3], dq.device, cu_seqlens_q))
    group = dq.shape[-2] // mean.shape[-2]
    shift = of_rows.repeat_interleave(group, -2) * (
        softmax_scale * dlse.transpose(-1, -2)[..., None]
    )
    return (dq + shift).to(dq.dtype)
