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
from functools import cache, lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import profiler

from ..call.block_scaled import BlockScaled, lse_with_mean
from ..call.fields import Options, score_scale_of
from ..call.hadamard import rotate_rows_back
from ..call.operands import Scaled, Tensors, changes_scores, flat, key_of, with_sides
from ..call.scores import refuse_gradient_of_slopes
from ..call.token_positions import of_sequences, token_positions
from ..errors import expect
from ..modes import (
    has_autocast,
    has_dual_level,
    inputs_apart,
    is_batched,
    is_plain,
    is_traced,
    is_transformed,
    needs_gradient,
    refuse_gradients,
    without_autocast,
)
from .derivative import BIAS, by_tensor, checked_saved, gradient_of, or_zeros
from .doors import attend
from .operators import forward_watched, have_data, launch_under

if TYPE_CHECKING:
    from ..backends.base import Launch
    from ..masks.mask import Mask

# Rows that see as many keys at most are computed again. On an H100 the largest error of a gradient
# over that of torch in bfloat16 is 2 to 4 from 70 to 128 keys, and from 512 on 0.4 to 1.6; the rule
# allows 3.
FEW_KEYS = 512
# Number of arguments of the autograd function after those of Tensors.
_NUM_OTHERS = 3


Sides = tuple[Scaled, Scaled, Scaled]


def attend_differentiably(
    tensors: Tensors, options: Options, quantized: Sides | Callable[[Tensors], Sides]
) -> Tensor | tuple[Tensor, ...]:
    """What the call returns. tensors: of 16 bits. options: of the call in 8 bits. quantized: q, k
    and v of 8 bits, or how the tensors become these."""
    if is_traced():
        given = inputs_apart(tensors)
        return _AttentionOfQuantized.apply(*given, options, quantized, None)
    # Refuses what has no gradient before anything runs.
    q, k, v = tensors.q, tensors.k, tensors.v
    key = _key_of_sides(q.shape, k.shape, v.shape, q.dtype, q.device)
    key = *key, *key_of(tensors[len(key) :])
    launch = launch_under(key, tensors, _kept_of_16_bits(options))
    return _apply(*tensors, options, quantized, launch)


@lru_cache(maxsize=4096)
def _key_of_sides(
    q: torch.Size, k: torch.Size, v: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[tuple, ...]:
    """``key_of`` of q, k and v as they are widened, of these shapes."""
    strides = (torch.empty(x, device="meta").stride() for x in (q, k, v))
    return tuple((x, of, dtype, device, True) for x, of in zip((q, k, v), strides, strict=True))


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
    of_q, of_k, of_v = given
    if of_q is None or of_k is None or of_v is None or not of_q.dtype == of_k.dtype == of_v.dtype:
        given = _sources(options.function, sides)
    quantized = tensors.q, tensors.k, tensors.v
    return attend_differentiably(with_sides(tensors, *given), options, quantized)


def _sources(function: str, sides: tuple[BlockScaled, ...]) -> list[Tensor]:
    """Where the gradients of the sides go. ValueError for gradients of several dtypes."""
    given = [x.gradient for x in sides]
    dtype = next(x.dtype for x in given if x is not None)
    for name, x in zip("qkv", given, strict=True):
        if x is not None:
            what, wanted = f"{name}.gradient.dtype", f"{dtype} as that of the other tensors"
            expect(x.dtype == dtype, function, what, wanted, x.dtype)
    return [
        side.data.new_zeros((), dtype=dtype).expand(side.shape) if x is None else x
        for side, x in zip(sides, given, strict=True)
    ]


def _of_16_bits(options: Options) -> Options:
    """The options of the backward."""
    return options._replace(
        out_dtype=None, return_lse=False, return_max_logit=False, use_fast_accum=False
    )


def _of_rows_again(options: Options) -> Options:
    """Those of rows that are computed again."""
    return _of_16_bits(options)._replace(return_lse=True)


_kept_of_16_bits = lru_cache(maxsize=4096)(_of_16_bits)
_kept_of_rows_again = lru_cache(maxsize=4096)(_of_rows_again)


class _AttentionOfQuantized(torch.autograd.Function):
    """Of ``Tensors``, what attend_differentiably gets, and the launch of 16 bits that computes the
    gradients; None: of a traced call."""

    @staticmethod
    def forward(ctx, *arguments):
        *values, options, quantized, launch = arguments
        tensors = Tensors(*values)
        ctx.set_materialize_grads(False)
        q, k, v = quantized if type(quantized) is tuple else quantized(tensors)
        mean = k.mean
        call = with_sides(tensors, q, k if mean is None else k._replace(mean=None), v)
        out, lse, *max_logit = attend(call, options._replace(return_lse=True))
        ctx.options, ctx.dtype, ctx.launch = options, values[0].dtype, launch
        ctx.blocks, ctx.v_shape = (q.block, k.block, v.block), values[2].shape
        ctx.hadamard, ctx.has_codes = q.hadamard, v.layout == "permuted"
        stored = q.data, q.descale, k.data, k.descale, v.data, v.descale
        ctx.save_for_backward(*stored, mean, lse, out, *values[3:])
        if max_logit:
            ctx.mark_non_differentiable(*max_logit)
        if not options.return_lse:
            return (out, *max_logit) if max_logit else out
        if mean is not None and q.descale is not None:
            lse = lse_with_mean(
                lse,
                BlockScaled(*q[:4], tensors.cu_seqlens_q),
                mean,
                score_scale_of(options, values[0].shape[-1]).softmax_scale,
            )
        return out, lse, *max_logit

    @staticmethod
    def backward(ctx, dout, *others):
        dlse = others[0] if ctx.options.return_lse else None
        num_inputs = len(Tensors._fields) + _NUM_OTHERS
        if dout is None and dlse is None:
            return (None,) * num_inputs
        saved = ctx.saved_tensors  # once: a checkpoint lets nothing be unpacked twice
        if has_autocast():
            with without_autocast(saved[0].device.type):  # the forward's casts are in what is saved
                found = _gradients(ctx, saved, dout, dlse)
        else:
            found = _gradients(ctx, saved, dout, dlse)
        return (*found, *(None,) * (num_inputs - len(found)))


# As doors._apply.
_apply = super(torch.autograd.Function, _AttentionOfQuantized).apply


def _gradients(
    ctx, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors of ``Tensors``, in their order."""
    options, dtype = ctx.options, ctx.dtype
    q, of_q, k, of_k, v, of_v, mean, lse, out, edges_q, edges_k, *rest = saved
    dequantize = _quantization().dequantize
    block_q, block_k, block_v = ctx.blocks
    of_v = v, of_v, block_v, edges_k, ctx.v_shape
    sides = dequantize(q, of_q, block_q, edges_q, k, of_k, block_k, *of_v, dtype)
    tensors = Tensors(*sides, edges_q, edges_k, *rest)
    with_dbias = ctx.needs_input_grad[BIAS : BIAS + 1] if changes_scores(tensors) else ()
    out = out if out.dtype == dtype else out.to(dtype)
    dout = or_zeros(dout, out)
    dout = dout if dout.dtype == dtype else dout.to(dtype)
    if not is_traced():
        out, lse = checked_saved(options.function, dout, out, lse, tensors)
    launch, of_lse = ctx.launch, dlse
    if launch is not None and (
        torch.is_grad_enabled()
        or profiler._is_profiler_enabled
        or not (have_data(dout, out, sides[0]) and is_plain())
        or is_batched(dout, dlse)
    ):
        launch = None
    if ctx.has_codes:
        out, lse, of_lse = _with_exact_rows(tensors, options, launch, out, lse, dout, dlse)
    given = dout, of_lse, out, lse
    if launch is not None:
        dq, dk, *others = launch.backward(*given, tensors, *with_dbias)
    else:
        passed = flat(tensors, bool(with_dbias)), _of_16_bits(options)
        dq, dk, *others = gradient_of(*given, *passed, *with_dbias)
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
    launch: Launch | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and dlse for the backward, computed again where rows see few keys: tensors of all
    rows, or the first of a causal call. The latter's out stays; their sums of dout * out, which
    alone the backward needs, are corrected through dlse, from which it subtracts them. launch: that
    of the tensors and options, if nothing watches the call."""
    q, k, v = tensors.q, tensors.k, tensors.v
    sees_all = not options.causal and options.window_left < 0 and options.window_right < 0
    plain = tensors.cu_seqlens_q is tensors.mask_entries_q is None
    if plain and sees_all and k.shape[1] > FEW_KEYS:
        return out, lse, dlse
    keys_before = k.shape[1] - q.shape[1]  # of the first row
    count = min(FEW_KEYS - keys_before, q.shape[1])
    if not (plain and options.causal and options.window_left < 0 and k.shape[1] > FEW_KEYS):
        run = partial(_computed, options=options) if launch is None else launch.forward
        return *run(tensors)[:2], dlse
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
    exact, exact_lse = _computed(first, options)
    return out, *_quantization().take_exact_rows(out, exact, dout, lse, exact_lse, dlse)


def _computed(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """out and lse in 16 bits. torch.compile refuses a backward that reads all that ``attend``
    checks."""
    if torch.compiler.is_compiling():
        return forward_watched(tensors, _of_rows_again(options))[:2]
    return attend(tensors, _kept_of_rows_again(options))


def _imported_quantization() -> ModuleType:
    from ..quantization import dispatch  # its custom operators import Triton

    return dispatch


_kept_quantization = cache(_imported_quantization)


def _quantization() -> ModuleType:
    # torch.compile would warn of the cache.
    return (_imported_quantization if torch.compiler.is_compiling() else _kept_quantization)()


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
