"""The derivative of attention: for eager calls, for torch.func's transforms, for torch.compile.

Eager calls and transforms use autograd functions, which take the tensors and one Options object;
the compiler sees the operators, for which the same derivative is registered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .call.problem import Options, Tensors
from .modes import has_dual_level, is_transformed, no_tangent
from .ops import NUM_TENSORS, run_backward, run_forward

NUM_GRADIENTS = 4  # dout, dlse, out, lse: they precede the tensors in backward's arguments


def attention(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute out and lse of one call, differentiably. The public functions call it."""
    if not torch.compiler.is_compiling() and _is_differentiated(tensors):
        function = _TransformedAttention if is_transformed() else _Attention
        return function.apply(*tensors, options)
    return run_forward(tensors, options)


def _is_differentiated(tensors: Tensors) -> bool:
    wanted = tensors.q.requires_grad or tensors.k.requires_grad or tensors.v.requires_grad
    return (wanted and torch.is_grad_enabled()) or has_dual_level() or is_transformed()


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.options = inputs[NUM_TENSORS:]


def _differentiate(gradient: Callable, ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    *tensors, out, lse = ctx.saved_tensors
    no_gradient = (None,) * (NUM_TENSORS - 3 + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *no_gradient)
    if dout is None:
        dout = torch.zeros_like(out)
    return (*gradient(dout, dlse, out, lse, *tensors, *ctx.options), *no_gradient)


def _gradient(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv from dout, dlse, out, lse, the tensors and the options."""
    if torch.is_grad_enabled() or has_dual_level() or is_transformed():
        return _AttentionGradient.apply(*arguments)
    return _run_backward(*arguments)


def _run_forward(*arguments) -> tuple[Tensor, Tensor]:
    *tensors, options = arguments
    return run_forward(Tensors(*tensors), options)


def _run_backward(dout, dlse, out, lse, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, options = arguments
    return run_backward(dout, dlse, out, lse, Tensors(*tensors), options)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flashattn3::backward: the second derivative of attention is not implemented"
    )


class _Attention(torch.autograd.Function):
    """Computes out and lse of an eager call from the tensors and the options."""

    @staticmethod
    def forward(ctx, *arguments):
        results = _run_forward(*arguments)
        _save_for_backward(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx, dout, dlse):
        return _differentiate(_gradient, ctx, dout, dlse)

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_tangent(ctx.options[0].function)


class _TransformedAttention(_Attention):
    """The same function for torch.func's transforms, which need setup_context and vmap. With
    setup_context, apply binds its arguments through inspect, which takes longer than a launch, so
    eager calls use _Attention."""

    forward = staticmethod(_run_forward)
    setup_context = staticmethod(_save_for_backward)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _mapped(_TransformedAttention.apply, NUM_TENSORS, info, in_dims, arguments)


class _AttentionGradient(torch.autograd.Function):
    """Computes the gradient when a transform or a second derivative applies to it."""

    forward = staticmethod(_run_backward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function = inputs[-1].function

    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_tangent(ctx.function)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        num_tensors = NUM_GRADIENTS + NUM_TENSORS
        return _mapped(_AttentionGradient.apply, num_tensors, info, in_dims, arguments)


def _mapped(function: Callable, num_tensors: int, info, in_dims, arguments) -> tuple:
    """Apply a function to every entry of a mapped axis, which comes first in the results.

    Dense calls merge the axis into the batch, the first axis of every tensor. Varlen calls run one
    entry at a time, because entries may have different sequences.
    """
    size, options = info.batch_size, arguments[num_tensors:]
    tensors = [
        x if x is None else (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0))
        for x, dim in zip(arguments[:num_tensors], in_dims, strict=False)
    ]
    varlen = tensors[num_tensors - NUM_TENSORS + Tensors._fields.index("cu_seqlens_q")] is not None
    if varlen:
        entries = [
            function(*(x if x is None else x[i] for x in tensors), *options) for i in range(size)
        ]
        results = tuple(torch.stack(of_entries) for of_entries in zip(*entries, strict=True))
    else:
        merged = function(*(x if x is None else x.flatten(0, 1) for x in tensors), *options)
        results = tuple(x.unflatten(0, (size, -1)) for x in merged)
    return results, (0,) * len(results)


torch.library.register_autograd(
    "flashattn3::forward",
    lambda *arguments: _differentiate(torch.ops.flashattn3.backward.default, *arguments),
    setup_context=_save_for_backward,
)
torch.library.register_autograd("flashattn3::backward", _no_second_derivative)
