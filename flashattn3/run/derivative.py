"""The derivative of attention behind the operators and torch.func's transforms, and the gradient of
what a forward has saved.

Two autograd functions serve every operator: one for the attention, one for its gradient. What
differs is a record of the call without its tensors, such as ``Rows``. Eager calls have a function
of their own (doors.py), because these bind their arguments through inspect, which takes longer than
a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..call.dtypes import EIGHT_BIT
from ..call.fields import Options
from ..call.metadata import ALIGNMENT_BYTES
from ..call.operands import (
    LEARNED,
    NUM_OF_8_BITS,
    NUM_OF_SCORES,
    NUM_TENSORS,
    Tensors,
    of_flat,
    tensors_by_name,
)
from ..errors import value_error
from ..modes import (
    has_dual_level,
    is_batched,
    is_plain,
    is_transformed,
    needs_gradient,
    no_tangent,
    refuse_gradients,
    refuse_tangents,
)
from .operators import (
    BACKWARDS,
    FORWARDS,
    backward_of,
    backward_operator,
    backward_results,
    flat_of,
    forward_operator,
    forward_watched,
    have_data,
    operator_is_watched,
    options_in_force,
    run_backward_operator,
    run_forward_operator,
    split_backward,
    split_forward,
)

NUM_GRADIENTS = 4  # dout, dlse, out, lse: they precede the tensors in backward's arguments
CU_SEQLENS_Q = Tensors._fields.index("cu_seqlens_q")
BIAS = Tensors._fields.index("bias")


class Call(Protocol):
    """A call of a pair of operators, all of it but its tensors.

    num_tensors: those that the backward takes, q, k and v first. function: for errors.
    merges: whether vmap may merge its axis into the batch, the first axis of every tensor.
    """

    num_tensors: int
    function: str
    merges: bool

    def forward(self, *tensors) -> tuple[Tensor, ...]:
        """out and lse, and what more the operator returns, not differentiably."""

    def backward(self, dout, dlse, out, lse, *tensors) -> tuple[Tensor, ...]:
        """The results of the gradient's operator, not differentiably."""

    def gradient(self, dout, dlse, out, lse, *tensors) -> tuple[Tensor | None, ...]:
        """The gradients of the first tensors, differentiably or at once. dout None is zero."""


@dataclass(frozen=True)
class Rows:
    """A call of ``forward`` and ``backward``; the values of ``flat`` are its tensors. See Call.

    with_dbias: whether the bias needs a gradient, of an overload that takes one, else nothing.
    """

    options: Options
    with_dbias: tuple[bool, ...] = ()

    @property
    def num_tensors(self) -> int:
        return NUM_OF_SCORES if self.with_dbias else NUM_TENSORS

    @property
    def function(self) -> str:
        return self.options.function

    @property
    def merges(self) -> bool:
        return not self.with_dbias

    def forward(self, *tensors) -> tuple[Tensor, ...]:
        return forward_watched(of_flat(tensors), self.options)

    def backward(self, dout, dlse, out, lse, *tensors) -> tuple[Tensor, ...]:
        more = self.with_dbias
        if operator_is_watched(dout, out, tensors[0]):
            return backward_operator(dout, dlse, out, lse, *tensors, *self.options, *more)
        return backward_results(dout, dlse, out, lse, Tensors(*tensors), self.options, *more)

    def gradient(self, dout, dlse, out, lse, *tensors) -> tuple[Tensor | None, ...]:
        given = or_zeros(dout, out), dlse, out, lse, tensors, self.options
        return by_tensor(gradient_of(*given, *self.with_dbias), *tensors)


def by_tensor(results: tuple[Tensor | None, ...], *tensors: Tensor | None) -> tuple:
    """The gradients of the tensors of ``Tensors``, of as many as may have one.

    results: dq, dk and dv, and of calls that change scores those of LEARNED, which are None or
        without elements where nothing asks for them.
    """
    if len(results) == 3:
        return results
    dq, dk, dv, *others = results
    gradients = [dq, dk, dv, *[None] * (NUM_OF_SCORES - 3)]
    for index, gradient in zip(LEARNED, others, strict=True):
        x = tensors[index]
        if x is not None and gradient is not None and gradient.shape == x.shape:
            gradients[index] = gradient
    return tuple(gradients)


def or_zeros(dout: Tensor | None, out: Tensor) -> Tensor:
    """dout, or zeros if autograd has none."""
    return torch.zeros_like(out) if dout is None else dout


def gradient_of(
    dout, dlse, out, lse, tensors: tuple, options: Options, *with_dbias: bool
) -> tuple[Tensor | None, ...]:
    """Compute the gradients; the tensors are those of an operator."""
    # Compiled autograd traces this, and not what the other conditions read.
    if not torch.compiler.is_compiling() and not is_batched(dout, dlse):
        if have_data(dout, out, tensors[0]) and is_plain() and not torch.is_grad_enabled():
            return backward_of(dout, dlse, out, lse, Tensors(*tensors), options, *with_dbias)
        if has_dual_level() or is_transformed():
            call = Rows(options, with_dbias)
            return AttentionGradient.apply(dout, dlse, out, lse, *tensors, call)
    return backward_operator(dout, dlse, out, lse, *tensors, *options, *with_dbias)


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


def in_saved_order(lse: Tensor, out: Tensor, q, k, v, *rest) -> tuple[Tensor | None, ...]:
    """What autograd saves, in the order of the node in C++, because checkpoints count: the tensors
    that change scores, k, q, v, lse, out and all others. rest: as in ``Tensors``."""
    return (*rest[_SCORES], k, q, v, lse, out, *rest[: _SCORES.start], *rest[_SCORES.stop :])


def of_saved(saved: tuple) -> tuple[Tensor, Tensor, tuple]:
    """lse, out and the values of ``Tensors``, of what ``in_saved_order`` returns."""
    first = _SCORES.stop - _SCORES.start if len(saved) > _NUM_SAVED else 0
    k, q, v, lse, out, *others = saved[first:]
    edges, of_mask = others[: _SCORES.start], others[_SCORES.start :]
    return lse, out, (q, k, v, *edges, *saved[:first], *of_mask)


_SCORES = slice(NUM_TENSORS - 3, BIAS - 2)  # behind q, k and v: sinks, slopes and bias
_NUM_SAVED = NUM_TENSORS + 2  # where nothing changes scores


class AttentionOfOperator(torch.autograd.Function):
    """Of the tensors and the ``Call``."""

    @staticmethod
    def forward(*arguments):
        return arguments[-1].forward(*arguments[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_inputs = inputs[-1], len(inputs)
        out, lse, *max_logit = output
        ctx.mark_non_differentiable(*max_logit)
        ctx.save_for_backward(*in_saved_order(lse, out, *inputs[: ctx.call.num_tensors]))

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        if dout is None and dlse is None:
            return (None,) * ctx.num_inputs
        lse, out, values = of_saved(ctx.saved_tensors)
        gradients = ctx.call.gradient(dout, dlse, out, lse, *values)
        return (*gradients, *(None,) * (ctx.num_inputs - len(gradients)))

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_tangent(ctx.call.function)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        apart = arguments[CU_SEQLENS_Q] is not None or not arguments[-1].merges
        return mapped(AttentionOfOperator.apply, apart, info, in_dims, arguments)


class AttentionGradient(torch.autograd.Function):
    """The gradient, of dout, dlse, out, lse, the tensors and the ``Call``, where a transform or a
    second derivative applies to it."""

    @staticmethod
    def forward(*arguments):
        return arguments[-1].backward(*arguments[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function = inputs[-1].function

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "flashattn3::backward: the second derivative of attention is not implemented"
        )

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_tangent(ctx.function)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        varlen = arguments[NUM_GRADIENTS + CU_SEQLENS_Q] is not None
        apart = varlen or not arguments[-1].merges
        return mapped(AttentionGradient.apply, apart, info, in_dims, arguments)


def mapped(function: Callable, apart: bool, info, in_dims, arguments) -> tuple:
    """Apply a function to every entry of a mapped axis, which comes first in the results.

    apart: run one entry at a time: entries of varlen calls may have different sequences, and sinks
        have no batch. Other calls merge the axis into the batch, the first axis of every tensor.
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

    if apart:
        found = [entries(lambda x, i=i: x[i]) for i in range(size)]
        results = tuple(torch.stack(of_entries) for of_entries in zip(*found, strict=True))
    else:
        merged = entries(lambda x: x.flatten(0, 1))
        batch = next(x.shape[1] for x in batched if isinstance(x, Tensor))
        results = tuple(x.unflatten(0, (size, batch)) for x in merged)
    return results, (0,) * len(results)


# A compiled graph calls the implementations below. It needs no gradient there, so they compute at
# once; those of register_autograd go on to the dispatcher and then to Python again, in 5 us more.
def differentiable(
    name: str, operator: Callable, run: Callable, split: Callable, sides_alone: bool = True
) -> None:
    """Register an attention operator's implementation for autograd.

    run: the operator on tensors with data. split: of the arguments and whether it runs → the
    tensors and the ``Call``. sides_alone: whether no tensors but q, k and v may need a gradient.
    """

    def for_autograd(*arguments):
        sides = arguments[:3]
        runs = is_plain() and have_data(*sides)
        if needs_gradient(sides if sides_alone else arguments):
            tensors, call = split(arguments, runs)
            return AttentionOfOperator.apply(*tensors, call)
        if runs:
            return run(*arguments)
        refuse_tangents(split(arguments, runs)[1].function, *sides)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    torch.library.impl(name, "Autograd", for_autograd)


def differentiable_gradient(
    name: str, operator: Callable, run: Callable, split: Callable, sides_alone: bool = True
) -> None:
    """The same of the operator of its gradient; split: of the arguments behind lse."""

    def for_autograd(*arguments):
        dout, _, out, _, q, _, _ = given = arguments[: NUM_GRADIENTS + 3]
        runs = is_plain() and have_data(dout, out, q)
        if needs_gradient(given if sides_alone else arguments):
            tensors, call = split(arguments[NUM_GRADIENTS:], runs)
            return AttentionGradient.apply(*arguments[:NUM_GRADIENTS], *tensors, call)
        if runs:
            return run(*arguments)
        refuse_tangents(split(arguments[NUM_GRADIENTS:], runs)[1].function, *given)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    torch.library.impl(name, "Autograd", for_autograd)


def _split(arguments: tuple, runs: bool) -> tuple[tuple, Rows]:
    tensors, values = split_forward(arguments)
    options = options_in_force(values) if runs else Options(*values)
    if arguments[0].dtype in EIGHT_BIT:
        refuse_gradients(options.function, **tensors_by_name(tensors))
    return differentiated(tensors, options)


def differentiated(
    tensors: Tensors, options: Options, with_dbias: bool | None = None
) -> tuple[tuple, Rows]:
    """The inputs of the autograd function of a call: the values of ``flat`` and the ``Call``.

    with_dbias: None: whether the bias needs a gradient.
    """
    values, bias = flat_of(tensors, options), tensors.bias
    if len(values) % NUM_OF_8_BITS == NUM_TENSORS:
        return values, Rows(options)
    if with_dbias is None:  # a transform hides which of its tensors need a gradient
        with_dbias = bias is not None and (is_transformed() or bias.requires_grad)
    return values, Rows(options, (with_dbias,))


def _split_gradient(arguments: tuple, runs: bool) -> tuple[tuple, Rows]:
    tensors, values, with_dbias = split_backward(arguments)
    options = options_in_force(values) if runs else Options(*values)
    return tensors[: NUM_OF_SCORES if with_dbias else NUM_TENSORS], Rows(options, with_dbias)


for _name in FORWARDS:
    plain = _name == FORWARDS[0]
    differentiable(_name, forward_operator, run_forward_operator, _split, plain)
for _name in BACKWARDS:
    plain = _name == BACKWARDS[0]
    differentiable_gradient(_name, backward_operator, run_backward_operator, _split_gradient, plain)
