"""The ways of a call, one function each: eager, differentiable, compiled and transformed.

A call that nothing watches runs at once, past the dispatcher: ``_attend_plain``, with gradients by
the node in C++ or by ``_Attention``. The compiler, modes and tensors of other classes see the
operators, torch.func's transforms an autograd function: ``_attend_watched``.
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
    Scaled,
    Tensors,
    check_tensor_types,
    checked_key_of,
    data_of,
    flat,
    key_of,
    key_of_transposed,
    tensors_by_name,
)
from ..modes import (
    has_autocast,
    has_dual_level,
    is_batched,
    is_plain,
    is_transformed,
    refuse_gradients,
)
from .derivative import AttentionOfOperator, Rows, checked_saved, gradient_of, or_zeros
from .launches import LaunchCache
from .operator_rules import recorded, under_autocast
from .operators import (
    forward_of,
    forward_watched,
    have_data,
    launch_under,
    plan_of,
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
    out, lse = (forward_of if plain else _attend_watched)(tensors, options)
    return (out, lse) if options.return_lse else out


@lru_cache(maxsize=4096)
def launch_cache(options: Options, bhsd: bool) -> LaunchCache:
    """That of eager calls with these options, and of compiled ones. bhsd: as in ``attend``."""
    return LaunchCache(options, bhsd, (_forward_of_node, _backward_of_node))


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
    if has_cache and launch.keep is not None:
        cache.keep(launch.keep, bhsd, q, k, v, None, None)
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
    if launch.keep is not None:
        cache.keep(launch.keep, cache.bhsd, *tensors[:5])
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


def _attend_watched(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """A call with 8-bit inputs, tensors of other classes, a mode, a transform or the compiler."""
    check_tensor_types(options.function, tensors, tensors.cu_seqlens_q is not None)
    if data_of(tensors.q).dtype in EIGHT_BIT:
        refuse_gradients(options.function, **tensors_by_name(tensors))
    if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
        return AttentionOfOperator.apply(*flat(tensors), Rows(options))
    return forward_watched(tensors, options)


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
