"""The gradient of a call that quantizes to 8 bits: that of attention at the quantized values,
passed straight through the rounding to the 16-bit tensors (the straight-through estimator, Bengio
et al., arXiv 1308.3432).

The forward saves the 8-bit tensors with their descales, out and lse. The backward widens them to 16
bits and runs the backward of 16 bits. The mean of k, which no probability depends on, takes no part
in it, except in the gradient of an lse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..call.block_scaled import BlockScaled, lse_with_mean
from ..call.fields import Options, score_scale_of
from ..call.operands import Tensors, changes_scores, flat, with_sides
from ..call.token_positions import of_sequences, token_positions
from ..modes import is_traced
from .derivative import BIAS, by_tensor, gradient_of, or_zeros
from .doors import attend
from .operators import plan_of, returned

# Of the arguments of the autograd function, after those of Tensors.
_NUM_OTHERS = 2


def attend_differentiably(
    tensors: Tensors, options: Options, quantized: Callable[[Tensors], Tensors]
) -> Tensor | tuple[Tensor, ...]:
    """What the call returns. tensors: of 16 bits. options: of the call in 8 bits. quantized: the
    call with q, k and v of 8 bits."""
    if not is_traced():
        plan_of(tensors, _of_16_bits(options))  # refuses what has no gradient before anything runs
    return returned(_AttentionOfQuantized.apply(*tensors, options, quantized), options)


def _of_16_bits(options: Options) -> Options:
    """The options of the backward."""
    return options._replace(
        out_dtype=None, return_lse=False, return_max_logit=False, use_fast_accum=False
    )


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
        ctx.sides = [(of.block, of.hadamard, x.shape) for of, x in sides]
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
        options = ctx.options
        if dout is None and dlse is None:
            return (None,) * (len(Tensors._fields) + _NUM_OTHERS)
        saved = ctx.saved_tensors  # once: a checkpoint lets nothing be unpacked twice
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
        given = dout, dlse, out, lse, flat(tensors, bool(with_dbias)), _of_16_bits(options)
        gradients = gradient_of(*given, *with_dbias)
        if dlse is not None and mean is not None:
            scale = score_scale_of(options, sides[0].shape[-1]).softmax_scale
            dq, *others = gradients
            gradients = _with_gradient_of_mean(dq, dlse, mean, scale, edges_q), *others
        found = by_tensor(gradients, *tensors)
        return (*found, *(None,) * (len(Tensors._fields) + _NUM_OTHERS - len(found)))


def _widened(
    data: Tensor,
    descale: Tensor | None,
    block: int | None,
    hadamard: bool,
    shape: torch.Size,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The values of 8 bits without the mean, of the shape."""
    if descale is None:  # there are no tokens
        return data.new_zeros(shape, dtype=dtype)
    from ..quantization.dispatch import dequantize  # its custom operators import Triton

    return dequantize(data, descale, block, hadamard, cu_seqlens, shape, dtype)


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
