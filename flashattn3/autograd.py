"""The derivative of attention: for eager calls, for torch.func's transforms, for the operators.

Eager calls and transforms use autograd functions. The compiler, modes and tensors of other classes
see the operators, whose implementations for autograd stand here. A call that nothing watches
bypasses the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import profiler

from .call.dtypes import EIGHT_BIT
from .call.inputs import (
    NUM_TENSORS,
    Scaled,
    Tensors,
    check_tensor_types,
    checked_key_of,
    data_of,
    flat,
    key_of_transposed,
    of_flat,
    tensors_by_name,
)
from .call.spec import Options
from .dispatch.planned import PlannedCalls
from .modes import (
    has_autocast,
    has_dual_level,
    is_batched,
    is_plain,
    is_traced,
    is_transformed,
    needs_gradient,
    no_tangent,
    refuse_gradients,
    refuse_tangents,
)
from .operator_rules import recorded, under_autocast
from .ops import (
    END_OF_OPTIONS,
    FORWARDS,
    backward_of,
    forward_of,
    forward_operator,
    launch_under,
    operator_arguments,
    options_among,
    options_in_force,
    plan_of,
    run_backward_operator,
    run_forward_operator,
    tensors_among,
)

NUM_GRADIENTS = 4  # dout, dlse, out, lse: they precede the tensors in backward's arguments
CU_SEQLENS_Q = Tensors._fields.index("cu_seqlens_q")


def attend(
    tensors: Tensors, options: Options, bhsd: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what a call returns: out, or out and lse. The public functions call it.

    bhsd: q, k and v, of 16 bits or more, are (batch, heads, seqlen, head_dim); out is not.
    """
    if has_autocast():
        tensors = under_autocast(tensors)
    q, k, v = tensors.q, tensors.k, tensors.v  # torch 2.8 traces no slice of a NamedTuple
    if is_plain() and have_data(q, k, v):
        attend_plain = _attend_plain
        if profiler._is_profiler_enabled:
            in_rows = _transposed(tensors) if bhsd else tensors
            attend_plain = recorded(plan_of(in_rows, options), attend_plain)
        return attend_plain(tensors, options, bhsd)
    if bhsd:
        tensors = _transposed(tensors)
    plain = type(q) is Scaled and _is_plain_8_bits(q, k, v)
    out, lse = (forward_of if plain else _watched_or_scaled)(tensors, options)
    return (out, lse) if options.return_lse else out


@lru_cache(maxsize=4096)
def planned_calls(options: Options, bhsd: bool) -> PlannedCalls:
    """The launches of eager calls with these options."""
    return PlannedCalls()


def _attend_plain(tensors: Tensors, options: Options, bhsd: bool) -> Tensor | tuple[Tensor, Tensor]:
    """An eager call that nothing watches, with a node in C++ where the backend has one."""
    q, k, v = tensors.q, tensors.k, tensors.v
    needs_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    differentiably = needs_gradient and torch.is_grad_enabled()
    # The node of the backend does not differentiate lse.
    plannable = tensors.cu_seqlens_q is None and not (differentiably and options.return_lse)
    if plannable:
        calls = planned_calls(options, bhsd)
        results = calls.attend(q, k, v, differentiably) if calls.found else None
        if results is not None:
            return results if options.return_lse else results[0]
    if differentiably and q.dtype in EIGHT_BIT:
        refuse_gradients(options.function, q=q, k=k, v=v)
    key = checked_key_of(options.function, tensors)
    if bhsd:
        key = key_of_transposed(key)
    launch = launch_under(key, tensors, options)
    planned = (launch.planned_bhsd if bhsd else launch.planned_bshd) if plannable else None
    if planned is not None:
        calls.add(planned)
    if bhsd:
        tensors = _transposed(tensors)
    if not differentiably:
        out, lse = launch.forward(tensors)
        return (out, lse) if options.return_lse else out
    if planned is not None and planned.operators.differentiable is not None:
        return planned.operators.differentiable(q, k, v, attn_mask=planned.words)[0]
    return _apply(tensors.q, tensors.k, tensors.v, tensors, options, key, launch)


def _transposed(tensors: Tensors) -> Tensors:
    q, k, v = tensors.q, tensors.k, tensors.v
    return Tensors(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _is_plain_8_bits(*sides: Tensor | Scaled) -> bool:
    """Whether q, k and v have 8 bits, and neither need a gradient nor are watched."""
    for x in sides:
        if not (type(x) is Scaled and type(x.data) is type(x.descale) is Tensor):
            return False
        if x.data.requires_grad or x.descale.requires_grad or x.mean is not None or x.data.is_meta:
            return False
    return is_plain()


def _watched_or_scaled(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """A call with 8-bit inputs, tensors of other classes, a mode, a transform or the compiler."""
    check_tensor_types(options.function, tensors, tensors.cu_seqlens_q is not None)
    if data_of(tensors.q).dtype in EIGHT_BIT:
        refuse_gradients(options.function, **tensors_by_name(tensors))
    if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
        return _TransformedAttention.apply(*flat(tensors), options)
    return _run_forward(tensors, options)


def _run_forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute out and lse; only the operator does so differentiably."""
    q, k, v = data_of(tensors.q), data_of(tensors.k), data_of(tensors.v)
    if _operator_is_watched(q, k, v):
        return forward_operator(*operator_arguments(tensors, options))
    return forward_of(tensors, options)


def _run_backward(dout, dlse, out, lse, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, not differentiably, from the tensors and the options."""
    *tensors, options = arguments
    if _operator_is_watched(dout, out, tensors[0]):
        return _backward_operator(dout, dlse, out, lse, *tensors, *options)
    return backward_of(dout, dlse, out, lse, Tensors(*tensors), options)


def _operator_is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiler, a torch mode, a tensor subclass or a tensor without data needs the
    operator.

    If not, the call bypasses the dispatcher, which halves the host time of a small call.
    """
    return not have_data(q, k, v) or is_traced()


def have_data(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v have data: none is of a subclass or on the meta device."""
    return type(q) is type(k) is type(v) is Tensor and not q.is_meta


_backward_operator = torch.ops.flashattn3.backward.default


def _save_for_backward(ctx, tensors: Tensors, options: Options, results: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*map(data_of, tensors), *results)
    ctx.options = options


def _differentiate(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """dq, dk and dv, or three times None."""
    if dout is None and dlse is None:
        return (None, None, None)
    *tensors, out, lse = ctx.saved_tensors
    return _gradient(_given(dout, out), dlse, out, lse, *tensors, ctx.options)


def _given(dout: Tensor | None, out: Tensor) -> Tensor:
    return torch.zeros_like(out) if dout is None else dout


def _gradient(dout, dlse, out, lse, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv from dout, dlse, out, lse, the tensors and the options."""
    *tensors, options = arguments
    if not is_batched(dout, dlse):
        if type(dout) is type(tensors[0]) is Tensor and is_plain() and not torch.is_grad_enabled():
            return backward_of(dout, dlse, out, lse, Tensors(*tensors), options)
        if has_dual_level() or is_transformed():
            return _AttentionGradient.apply(dout, dlse, out, lse, *arguments)
    return _backward_operator(dout, dlse, out, lse, *tensors, *options)


def no_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flashattn3::backward: the second derivative of attention is not implemented"
    )


class _Attention(torch.autograd.Function):
    """Computes what an eager call returns from q, k and v, all of the tensors, the options, the key
    of the tensors and the launch.

    Without return_lse autograd does not see lse, one result less to wrap.
    """

    @staticmethod
    def forward(ctx, q, k, v, tensors, options, key, launch):
        out, lse = launch.forward(tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = launch, key, options
        if not options.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        """The forward's launch computes the gradient, unless something watches it or hooks on saved
        tensors have returned others."""
        launch, key, options = ctx.call
        *tensors, out, lse = ctx.saved_tensors
        plain = type(dout) is Tensor and not is_batched(dout, dlse) and is_plain()
        unrecorded = not profiler._is_profiler_enabled
        if plain and unrecorded and not torch.is_grad_enabled():
            q, k, v = tensors[:3]
            if q.stride() == key[0][1] and k.stride() == key[1][1] and v.stride() == key[2][1]:
                dq, dk, dv = launch.backward(dout, dlse, out, lse, Tensors(*tensors))
                return dq, dk, dv, None, None, None, None
        if dout is None and dlse is None:
            return (None,) * 7
        dq, dk, dv = _gradient(_given(dout, out), dlse, out, lse, *tensors, options)
        return dq, dk, dv, None, None, None, None


# What Function.apply calls where no transform is active, as is known here. The rest of apply, which
# looks for setup_context and for tensors that outlived a transform, takes about 1.5 us.
_apply = super(torch.autograd.Function, _Attention).apply


class _WatchedAttention(torch.autograd.Function):
    """The same for the forward operator, where a mode or a tensor class needs the operators."""

    @staticmethod
    def forward(ctx, q, k, v, tensors, options):
        results = _run_forward(tensors, options)
        _save_for_backward(ctx, tensors, options, results)
        return results

    @staticmethod
    def backward(ctx, dout, dlse):
        return (*_differentiate(ctx, dout, dlse), None, None)


class _TransformedAttention(torch.autograd.Function):
    """The same function of the values of ``flat`` and the options, for torch.func's transforms,
    which need setup_context and vmap. With setup_context, apply binds its arguments through
    inspect, which takes longer than a launch, so eager calls use _Attention."""

    @staticmethod
    def forward(*arguments):
        return _run_forward(of_flat(arguments[:-1]), arguments[-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_for_backward(ctx, of_flat(inputs[:-1]), inputs[-1], output)
        ctx.num_inputs = len(inputs)

    @staticmethod
    def backward(ctx, dout, dlse):
        gradients = _differentiate(ctx, dout, dlse)
        return (*gradients, *((None,) * (ctx.num_inputs - len(gradients))))

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_tangent(ctx.options.function)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _mapped(_TransformedAttention.apply, CU_SEQLENS_Q, info, in_dims, arguments)


class _AttentionGradient(torch.autograd.Function):
    """Computes the gradient when a transform or a second derivative applies to it."""

    forward = staticmethod(_run_backward)

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
        return _mapped(_AttentionGradient.apply, place, info, in_dims, arguments)


def _mapped(function: Callable, place: int, info, in_dims, arguments) -> tuple:
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


# A compiled graph calls these implementations. It needs no gradient there, so they compute at once;
# those of register_autograd go on to the dispatcher and then to Python again, in 5 us more.
def _forward_for_autograd(*arguments):
    q, k, v = arguments[:3]
    has_8_bits = len(arguments) > END_OF_OPTIONS
    runs = is_plain() and have_data(q, k, v)
    if not needs_gradient(arguments if has_8_bits else (q, k, v)):
        if runs:
            return run_forward_operator(*arguments)
        refuse_tangents(Options(*options_among(arguments)).function, q, k, v)
        with torch._C._AutoDispatchBelowAutograd():
            return forward_operator(*arguments)
    tensors, options = tensors_among(arguments), options_among(arguments)
    options = options_in_force(options) if runs else Options(*options)
    if q.dtype in EIGHT_BIT:
        refuse_gradients(options.function, **tensors_by_name(tensors))
    return _WatchedAttention.apply(q, k, v, tensors, options)


for _name in FORWARDS:
    torch.library.impl(_name, "Autograd", _forward_for_autograd)


@torch.library.impl("flashattn3::backward", "Autograd")
def _backward_for_autograd(dout, dlse, out, lse, *arguments):
    tensors, options = arguments[:NUM_TENSORS], arguments[NUM_TENSORS:]
    given = (dout, dlse, out, lse, *tensors[:3])
    runs = is_plain() and have_data(dout, out, tensors[0])
    if needs_gradient(given):
        options = options_in_force(options) if runs else Options(*options)
        return _AttentionGradient.apply(dout, dlse, out, lse, *tensors, options)
    if runs:
        return run_backward_operator(dout, dlse, out, lse, *arguments)
    refuse_tangents(Options(*options).function, *given)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_operator(dout, dlse, out, lse, *arguments)
