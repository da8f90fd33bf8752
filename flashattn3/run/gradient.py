"""The gradient of attention from what a forward has saved: computed at once, or through what
watches it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..call.metadata import ALIGNMENT_BYTES
from ..call.operands import Tensors
from ..errors import value_error
from ..modes import has_dual_level, is_batched, is_plain, is_transformed, no_tangent
from .operators import backward_of, operator_is_watched

NUM_GRADIENTS = 4  # dout, dlse, out, lse: they precede the tensors in backward's arguments
CU_SEQLENS_Q = Tensors._fields.index("cu_seqlens_q")


def run_backward(dout, dlse, out, lse, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, not differentiably, from the tensors and the options."""
    *tensors, options = arguments
    if operator_is_watched(dout, out, tensors[0]):
        return backward_operator(dout, dlse, out, lse, *tensors, *options)
    return backward_of(dout, dlse, out, lse, Tensors(*tensors), options)


backward_operator = torch.ops.flashattn3.backward.default


def or_zeros(dout: Tensor | None, out: Tensor) -> Tensor:
    """dout, or zeros if autograd has none."""
    return torch.zeros_like(out) if dout is None else dout


def gradient_of(dout, dlse, out, lse, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv from dout, dlse, out, lse, the tensors and the options."""
    *tensors, options = arguments
    # Compiled autograd traces this, and not what the other conditions read.
    if not torch.compiler.is_compiling() and not is_batched(dout, dlse):
        if type(dout) is type(tensors[0]) is Tensor and is_plain() and not torch.is_grad_enabled():
            return backward_of(dout, dlse, out, lse, Tensors(*tensors), options)
        if has_dual_level() or is_transformed():
            return AttentionGradient.apply(dout, dlse, out, lse, *arguments)
    return backward_operator(dout, dlse, out, lse, *tensors, *options)


def checked_saved(
    function: str, dout: Tensor, out: Tensor, lse: Tensor, tensors: Tensors
) -> tuple[Tensor, Tensor]:
    """Return out and lse, which hooks on saved tensors may have exchanged, as kernels read them.
    ValueError for a saved tensor whose dtype, device or shape does not fit dout."""
    q, k, v, shape = tensors.q, tensors.k, tensors.v, dout.shape
    dtype, device = dout.dtype, dout.device
    of_lse = torch.float64 if dtype == torch.float64 else torch.float32
    fit = dtype == q.dtype == k.dtype == v.dtype == out.dtype and lse.dtype == of_lse
    if not (
        fit
        and device == q.device == k.device == v.device == out.device == lse.device
        and q.shape[:-1] == shape[:-1]
        and v.shape[-1] == shape[-1]
        and out.shape == shape
        and lse.shape == (*shape[:-3], shape[-2], shape[-3])
    ):
        raise _saved_error(function, dout, of_lse, q=q, k=k, v=v, out=out, lse=lse)
    if (out.data_ptr() | lse.data_ptr()) % ALIGNMENT_BYTES:
        return out.clone(), lse.clone()
    return out, lse


def _saved_error(function: str, dout: Tensor, of_lse: torch.dtype, **saved: Tensor) -> ValueError:
    """Name the first tensor that does not fit dout."""
    *batch, seqlen, heads, columns = dout.shape
    rows = *batch, seqlen, heads
    shapes = {
        "q": (*rows, saved["q"].shape[-1]),
        "k": tuple(saved["k"].shape),
        "v": (*saved["v"].shape[:-1], columns),
        "out": (*rows, columns),
        "lse": (*batch, heads, seqlen),
    }
    for name, x in saved.items():
        wanted = of_lse if name == "lse" else dout.dtype, dout.device, shapes[name]
        for what, value, found in zip(
            ("dtype", "device", "shape"), wanted, (x.dtype, x.device, tuple(x.shape)), strict=True
        ):
            if value != found:
                return value_error(function, f"saved {name}.{what}", f"{value} as in dout", found)
    raise AssertionError("all saved tensors fit")


def no_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flashattn3::backward: the second derivative of attention is not implemented"
    )


class AttentionGradient(torch.autograd.Function):
    """Computes the gradient when a transform or a second derivative applies to it."""

    forward = staticmethod(run_backward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function = inputs[-1].function

    backward = staticmethod(no_second_derivative)

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_tangent(ctx.function)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        place = NUM_GRADIENTS + CU_SEQLENS_Q
        return mapped(AttentionGradient.apply, place, info, in_dims, arguments)


def mapped(function: Callable, place: int, info, in_dims, arguments) -> tuple:
    """Apply a function to every entry of a mapped axis, which comes first in the results.

    Dense calls merge the axis into the batch, the first axis of every tensor. Varlen calls run one
    entry at a time, because entries may have different sequences.

    place: index of cu_seqlens_q among the arguments.
    """
    size = info.batch_size
    batched = [
        x
        if not isinstance(x, Tensor)
        else (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0))
        for x, dim in zip(arguments, in_dims, strict=True)
    ]

    def entries(convert: Callable[[Tensor], Tensor]) -> tuple:
        return function(*(convert(x) if isinstance(x, Tensor) else x for x in batched))

    if batched[place] is not None:
        found = [entries(lambda x, i=i: x[i]) for i in range(size)]
        results = tuple(torch.stack(of_entries) for of_entries in zip(*found, strict=True))
    else:
        merged = entries(lambda x: x.flatten(0, 1))
        batch = next(x.shape[1] for x in batched if isinstance(x, Tensor))
        results = tuple(x.unflatten(0, (size, batch)) for x in merged)
    return results, (0,) * len(results)
