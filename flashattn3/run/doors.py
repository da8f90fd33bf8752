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
    LEARNED,
    Scaled,
    Tensors,
    changes_scores,
    check_tensor_types,
    checked_key_of,
    data_of,
    flat,
    found_of,
    key_of,
    key_of_transposed,
    learned_of,
    tensors_by_name,
    tensors_of_mask,
    with_sides,
)
from ..call.scores import refuse_gradient_of_slopes
from ..modes import (
    has_autocast,
    has_dual_level,
    has_saved_tensor_hooks,
    is_batched,
    is_plain,
    is_transformed,
    refuse_functionalize,
    refuse_gradients,
)
from .derivative import (
    BIAS,
    AttentionOfOperator,
    by_tensor,
    checked_saved,
    differentiated,
    gradient_of,
    in_saved_order,
    of_saved,
    or_zeros,
)
from .launches import LaunchCache
from .mask_launches import MaskLaunches, known_masks, new_launches_of
from .operator_rules import recorded, under_autocast
from .operators import (
    forward_watched,
    have_data,
    is_score_watched,
    launch_under,
    plan_of,
    returned,
)
from .scaled import forward_8_bits, is_plain_8_bits

if TYPE_CHECKING:
    from ..backends.base import Launch
    from ..masks.mask import Mask


def attend(
    tensors: Tensors, options: Options, bhsd: bool = False, mask: Mask | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Compute what a call returns: out, lse and max_logit, of these what it asks for. The public
    functions call it.

    bhsd: q, k and v, of 16 bits or more, are (batch, heads, seqlen, head_dim); out is not.
    mask: the object with the tensors of the mask, if there is one: launches are found by it.
    """
    if has_autocast():
        tensors = under_autocast(tensors)
    q, k, v = tensors.q, tensors.k, tensors.v  # torch 2.8 traces no slice of a NamedTuple
    entries = tensors.mask_entries_q
    scores = not (tensors.sinks is tensors.alibi_slopes is tensors.bias is entries is None)
    if scores and tensors.alibi_slopes is not None:
        refuse_gradient_of_slopes(options.function, tensors.alibi_slopes)
    if is_plain() and have_data(q, k, v):
        of_mask = None if mask is None else known_masks.get(id(mask))
        if not (scores and is_score_watched(tensors, of_mask is not None)):
            if mask is not None and of_mask is None:
                of_mask = new_launches_of(mask)
            attend_plain = _attend_plain
            if profiler._is_profiler_enabled:
                in_rows = _transposed(tensors) if bhsd else tensors
                attend_plain = recorded(plan_of(in_rows, options), attend_plain)
            return attend_plain(tensors, options, bhsd, scores, of_mask)
    if bhsd:
        tensors = _transposed(tensors)
    if type(q) is Scaled and not scores and is_plain_8_bits(q, k, v):
        return returned(forward_8_bits(tensors, options), options)
    return returned(_attend_watched(tensors, options), options)


@lru_cache(maxsize=4096)
def launch_cache(options: Options, bhsd: bool) -> LaunchCache:
    """That of eager calls with these options, and of compiled ones. bhsd: as in ``attend``."""
    return LaunchCache(options, bhsd, _in_python)


def _attend_plain(
    tensors: Tensors, options: Options, bhsd: bool, scores: bool, of_mask: MaskLaunches | None
) -> Tensor | tuple[Tensor, ...]:
    """An eager call that nothing watches. The operators of the backend find the launch of a dense
    one, with an autograd node in C++ where out is all that it returns and at most one tensor,
    beside the mask, changes scores.

    Hooks see the same saved tensors with either node, and of any such call: checkpoints compare
    them with those of the same call at another time. scores: whether a tensor changes scores. The
    operators keep those of the mask.
    """
    q, k, v, learned = tensors.q, tensors.k, tensors.v, _NONE
    needs_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    changes = not (tensors.sinks is tensors.alibi_slopes is tensors.bias is None)
    if changes:
        learned = learned_of(tensors)
        for x in learned:
            needs_gradient = needs_gradient or (x is not None and x.requires_grad)
    differentiably = needs_gradient and torch.is_grad_enabled()
    if differentiably and q.dtype in EIGHT_BIT:
        refuse_gradients(options.function, **tensors_by_name(tensors))
    returns_more = options.return_lse or options.return_max_logit
    cache = operators = results = None
    if of_mask is not None:
        cache = of_mask.cache(options, bhsd, _in_python)
        operators = cache.operators
    elif tensors.cu_seqlens_q is None and (changes or not scores):
        cache = launch_cache(options, bhsd)
        operators = cache.operators
    if operators is None:
        pass
    elif differentiably:
        if not returns_more:
            results = _attend_with_node(cache, tensors, changes, of_mask)
        if results is None:
            return _apply(q, k, v, *learned, tensors, options, bhsd, scores, cache, None)
    elif changes:
        results = cache.run(operators.forward_scores, options.return_lse, *found_of(tensors))
    else:
        results = cache.run(operators.forward, options.return_lse, q, k, v)
    if results is not None:
        return returned(results, options) if returns_more else results[0]
    planned = _planned(tensors, options, bhsd, cache)
    if differentiably:
        if not returns_more and cache is not None and cache.operators is not None:
            results = _attend_with_node(cache, tensors, changes, of_mask)
            if results is not None:
                return results[0]
        return _apply(q, k, v, *learned, tensors, options, bhsd, scores, cache, planned)
    results = planned[0].forward(_transposed(tensors) if bhsd else tensors)
    return returned(results, options) if returns_more else results[0]


def _attend_with_node(
    cache: LaunchCache, tensors: Tensors, changes: bool, of_mask: MaskLaunches | None
) -> tuple[Tensor, ...] | None:
    """See ``LaunchCache.attend``; None also if several tensors change scores. The node of out keeps
    the launches of the mask. changes: whether a tensor beside the mask changes scores."""
    score = index = life = None
    if changes:
        for place, x in enumerate((tensors.sinks, tensors.alibi_slopes, tensors.bias)):
            if x is not None:
                if score is not None:
                    return None
                score, index = x, place
    if of_mask is not None:
        life = of_mask.life
        if score is not None or has_saved_tensor_hooks():
            results = cache.attend(tensors.q, tensors.k, tensors.v, score, index)
            if results is not None:
                results[0].grad_fn.metadata[_LIFE] = life
            return results
    return cache.attend(tensors.q, tensors.k, tensors.v, score, index, life)


_LIFE = "flashattn3 mask"


def _planned(
    tensors: Tensors, options: Options, bhsd: bool, cache: LaunchCache | None
) -> tuple[Launch, tuple]:
    """Plan a call: its launch, which the operators find from now on if there is a cache, and the
    key of its tensors."""
    key = checked_key_of(options.function, tensors)
    launch = launch_under(key_of_transposed(key) if bhsd else key, tensors, options)
    if cache is not None and launch.keep is not None:
        cache.keep(launch.keep, bhsd, *found_of(tensors), *tensors_of_mask(tensors))
    return launch, key


def _forward_of_node(cache: LaunchCache, *of_call: Tensor | None) -> tuple[Tensor, Tensor]:
    tensors = _tensors_of_node(cache, *of_call)
    launch, _ = _planned(tensors, cache.options, cache.bhsd, cache)
    return launch.forward(_transposed(tensors) if cache.bhsd else tensors)


def _backward_of_node(
    cache: LaunchCache, dout, out, lse, q, k, v,
    sinks=None, alibi_slopes=None, bias=None, with_dbias: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv and the gradient of the tensor that changes scores."""
    tensors = _tensors_of_node(cache, q, k, v, sinks, alibi_slopes, bias)
    in_rows = _transposed(tensors) if cache.bhsd else tensors
    out, lse = checked_saved(cache.options.function, dout, out, lse, in_rows)
    launch, _ = _planned(tensors, cache.options, cache.bhsd, cache)
    more = (with_dbias,) if changes_scores(tensors) else ()
    gradients = by_tensor(launch.backward(dout, None, out, lse, in_rows, *more), *tensors)
    of_score = None
    if more:
        of_score = next((x for x in learned_of(gradients) if x is not None), None)
    sides = gradients[:3]
    return (*(x.transpose(1, 2) for x in sides), of_score) if cache.bhsd else (*sides, of_score)


_in_python = _forward_of_node, _backward_of_node


def _tensors_of_node(
    cache: LaunchCache, q, k, v, sinks=None, alibi_slopes=None, bias=None
) -> Tensors:
    return Tensors(q, k, v, None, None, None, None, sinks, alibi_slopes, bias, *cache.of_mask)


def _transposed(tensors: Tensors) -> Tensors:
    q, k, v = tensors.q, tensors.k, tensors.v
    return with_sides(tensors, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _attend_watched(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """A call with 8-bit inputs, tensors of other classes, a mode, a transform or the compiler."""
    check_tensor_types(options.function, tensors, tensors.cu_seqlens_q is not None)
    if data_of(tensors.q).dtype in EIGHT_BIT:
        refuse_gradients(options.function, **tensors_by_name(tensors))
    if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
        refuse_functionalize(options.function)
        values, call = differentiated(tensors, options)
        return AttentionOfOperator.apply(*values, call)
    return forward_watched(tensors, options)


class _Attention(torch.autograd.Function):
    """Computes what an eager call returns from the tensors that may need a gradient, all of the
    tensors, the options, whether heads come before tokens, whether a tensor changes scores, the
    cache of its launch, which may be None, and what ``_planned`` returns if Python planned it.

    Without return_lse autograd does not see lse, one result less to wrap.
    """

    @staticmethod
    def forward(ctx, q, k, v, *others):
        *_, tensors, options, bhsd, scores, cache, planned = others
        results = None
        if planned is None and scores:
            results = cache.run(cache.operators.forward_scores, True, *found_of(tensors))
        elif planned is None:
            results = cache.run(cache.operators.forward, True, q, k, v)
        if results is None:
            planned = planned or _planned(tensors, options, bhsd, cache)
            results = planned[0].forward(_transposed(tensors) if bhsd else tensors)
        out, lse = results[0], results[1]
        ctx.save_for_backward(*in_saved_order(lse, out, *tensors))
        ctx.call = options, bhsd, scores, cache, planned
        if options.return_max_logit:
            ctx.mark_non_differentiable(results[2])
        elif not options.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return returned(results, options)

    @staticmethod
    def backward(ctx, dout, *others):
        """The forward's launch computes the gradients, unless something watches them or hooks on
        saved tensors have returned others."""
        options, bhsd, scores, cache, planned = ctx.call
        dlse = others[0] if options.return_lse else None
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        lse, out, values = of_saved(ctx.saved_tensors)
        tensors = Tensors(*values)
        with_dbias = ctx.needs_input_grad[_BIAS : _BIAS + 1] if scores else ()
        plain = is_plain() and type(dout) is Tensor and not is_batched(dout, dlse)
        at_once = plain and not torch.is_grad_enabled()
        is_recorded, gradients = profiler._is_profiler_enabled, None
        may_find = cache is not None and cache.operators is not None
        if may_find and at_once and dlse is None and not is_recorded:
            gradients = _found_gradients(cache, dout, out, lse, tensors, with_dbias)
        if gradients is None:
            in_rows = _transposed(tensors) if bhsd else tensors
            if at_once:
                out, lse = checked_saved(options.function, dout, out, lse, in_rows)
            if at_once and planned and key_of(tensors) == planned[1] and not is_recorded:
                gradients = planned[0].backward(dout, dlse, out, lse, in_rows, *with_dbias)
            else:
                passed = flat(in_rows, bool(with_dbias)), options, *with_dbias
                gradients = gradient_of(or_zeros(dout, out), dlse, out, lse, *passed)
            if bhsd:
                gradients = (*(x.transpose(1, 2) for x in gradients[:3]), *gradients[3:])
        of_learned = learned_of(by_tensor(gradients, *tensors)) if with_dbias else _NONE
        return (*gradients[:3], *of_learned, *(None,) * 6)


def _found_gradients(
    cache: LaunchCache, dout, out, lse, tensors: Tensors, with_dbias: tuple[bool, ...]
) -> tuple[Tensor | None, ...] | None:
    """Those of a launch that the operators find, in the axes of q, k and v."""
    operators = cache.operators
    if not with_dbias:
        return cache.run(operators.backward, dout, out, lse, *tensors[:3])
    return cache.run(operators.backward_scores, dout, out, lse, *found_of(tensors), *with_dbias)


_NONE = (None,) * len(LEARNED)
_BIAS = 3 + LEARNED.index(BIAS)  # its place among the inputs

# Function.apply calls it where no transform is active, as is known here. The rest of apply, which
# looks for setup_context and for tensors that outlived a transform, takes about 1.5 us.
_apply = super(torch.autograd.Function, _Attention).apply
