"""The derivative of attention: for eager calls, for torch.func's transforms, for the operators.

Eager calls and transforms use autograd functions. The compiler, modes and tensors of other classes
see the operators, whose implementations for autograd stand here. A call that nothing watches
bypasses the dispatcher.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import profiler

from ..call.dtypes import EIGHT_BIT
from ..call.fields import Options
from ..call.operands import (
    NUM_TENSORS,
    Scaled,
    Tensors,
    check_tensor_types,
    checked_key_of,
    data_of,
    flat,
    key_of,
    key_of_transposed,
    of_flat,
    tensors_by_name,
)
from ..modes import (
    has_autocast,
    has_dual_level,
    is_batched,
    is_plain,
    is_transformed,
    needs_gradient,
    no_tangent,
    refuse_gradients,
    refuse_tangents,
)
from .gradient import (
    CU_SEQLENS_Q,
    AttentionGradient,
    backward_operator,
    checked_saved,
    gradient_of,
    mapped,
    or_zeros,
)
from .launches import LaunchCache
from .operator_rules import recorded, under_autocast
from .operators import (
    END_OF_OPTIONS,
    FORWARDS,
    forward_of,
    forward_operator,
    have_data,
    launch_under,
    operator_arguments,
    operator_is_watched,
    options_among,
    options_in_force,
    plan_of,
    run_backward_operator,
    run_forward_operator,
    tensors_among,
)

if TYPE_CHECKING:
    from ..backends.base import Launch


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
def launch_cache(options: Options, bhsd: bool) -> LaunchCache:
    """That of eager calls with these options, and of compiled ones. bhsd: as in ``attend``."""
    return LaunchCache(options, bhsd, _forward_of_node, _backward_of_node)


def _attend_plain(tensors: Tensors, options: Options, bhsd: bool) -> Tensor | tuple[Tensor, Tensor]:
    """An eager call that nothing watches, with a node in C++ where the backend has one.

    Hooks see the same saved tensors with either node, and of any such call: checkpoints compare
    them with those of the same call at another time.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    needs_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    differentiably = needs_gradient and torch.is_grad_enabled()
    # The node of the backend does not differentiate lse.
    has_cache = tensors.cu_seqlens_q is None and not (differentiably and options.return_lse)
    if has_cache:
        cache = launch_cache(options, bhsd)
        results = cache.attend(q, k, v, differentiably) if cache.operators is not None else None
        if results is not None:
            return results if options.return_lse else results[0]
    if differentiably and q.dtype in EIGHT_BIT:
        refuse_gradients(options.function, q=q, k=k, v=v)
    key = checked_key_of(options.function, tensors)
    launch = launch_under(key_of_transposed(key) if bhsd else key, tensors, options)
    if has_cache and launch.passes is not None:
        cache.keep(launch.passes, q, k, v, None, None)
        if differentiably and cache.operators is not None:
            results = cache.attend(q, k, v, True)
            if results is not None:
                return results[0]
    if differentiably:
        return _apply(q, k, v, tensors, options, key, launch, bhsd)
    out, lse = launch.forward(_transposed(tensors) if bhsd else tensors)
    return (out, lse) if options.return_lse else out


def _launch_of_node(cache: LaunchCache, tensors: Tensors) -> Launch:
    """The launch of a call that the node got; the operators find it from now on."""
    key = checked_key_of(cache.options.function, tensors)
    launch = launch_under(key_of_transposed(key) if cache.bhsd else key, tensors, cache.options)
    if launch.passes is not None:
        cache.keep(launch.passes, *tensors[:5])
    return launch


def _forward_of_node(cache: LaunchCache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    tensors = Tensors(q, k, v)
    return _launch_of_node(cache, tensors).forward(_transposed(tensors) if cache.bhsd else tensors)


def _backward_of_node(cache: LaunchCache, dout, out, lse, *of_call) -> tuple[Tensor, ...]:
    tensors = Tensors(*of_call)
    in_rows = _transposed(tensors) if cache.bhsd else tensors
    out, lse = checked_saved(cache.options.function, dout, out, lse, in_rows)
    gradients = _launch_of_node(cache, tensors).backward(dout, None, out, lse, in_rows)
    return tuple(x.transpose(1, 2) for x in gradients) if cache.bhsd else gradients


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
    if operator_is_watched(q, k, v):
        return forward_operator(*operator_arguments(tensors, options))
    return forward_of(tensors, options)


def _save_for_backward(ctx, tensors: Tensors, options: Options, results: tuple) -> None:
    """Save in the order of the node in C++, as ``_Attention`` does: checkpoints count."""
    ctx.set_materialize_grads(False)
    q, k, v, *indices = map(data_of, tensors)
    out, lse = results
    ctx.save_for_backward(k, q, v, lse, out, *indices)
    ctx.options = options


def _differentiate(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """dq, dk and dv, or three times None."""
    if dout is None and dlse is None:
        return (None, None, None)
    k, q, v, lse, out, *indices = ctx.saved_tensors
    return gradient_of(or_zeros(dout, out), dlse, out, lse, q, k, v, *indices, ctx.options)


class _Attention(torch.autograd.Function):
    """Computes what an eager call returns from q, k and v, all of the tensors, the options, the key
    of the tensors, the launch, and whether heads come before tokens.

    Without return_lse autograd does not see lse, one result less to wrap.
    """

    @staticmethod
    def forward(ctx, q, k, v, tensors, options, key, launch, bhsd):
        out, lse = launch.forward(_transposed(tensors) if bhsd else tensors)
        ctx.save_for_backward(k, q, v, lse, out, *tensors[3:])
        ctx.call = launch, key, options, bhsd
        if not options.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        """The forward's launch computes the gradient, unless something watches it or hooks on saved
        tensors have returned others."""
        nothing = (None,) * 5
        if dout is None and dlse is None:
            return (None, None, None, *nothing)
        launch, key, options, bhsd = ctx.call
        k, q, v, lse, out, *indices = ctx.saved_tensors
        tensors = Tensors(q, k, v, *indices)
        in_rows = _transposed(tensors) if bhsd else tensors
        plain = is_plain() and type(dout) is Tensor and not is_batched(dout, dlse)
        at_once = plain and not torch.is_grad_enabled()
        if at_once:
            out, lse = checked_saved(options.function, dout, out, lse, in_rows)
        if at_once and key_of(tensors) == key and not profiler._is_profiler_enabled:
            gradients = launch.backward(dout, dlse, out, lse, in_rows)
        else:
            gradients = gradient_of(or_zeros(dout, out), dlse, out, lse, *in_rows, options)
        dq, dk, dv = (x.transpose(1, 2) for x in gradients) if bhsd else gradients
        return (dq, dk, dv, *nothing)


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
        return mapped(_TransformedAttention.apply, CU_SEQLENS_Q, info, in_dims, arguments)


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
        return AttentionGradient.apply(dout, dlse, out, lse, *tensors, options)
    if runs:
        return run_backward_operator(dout, dlse, out, lse, *arguments)
    refuse_tangents(Options(*options).function, *given)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_operator(dout, dlse, out, lse, *arguments)
