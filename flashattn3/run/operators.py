"""Runs a call: metadata → Problem → Plan (all three cached together) → backend.

The torch operators ``flashattn3::forward`` and ``flashattn3::backward`` do the same for whoever
watches a call: torch.compile, modes, transforms. They have overloads for 8-bit inputs, ``scaled``,
and for calls with sinks, slopes or a bias, or that return the largest score, ``scores``, because
torch spends 0.1 us on each argument. This file registers their implementation for every device and
the fake one that torch.compile and FakeTensorMode use; derivative.py registers what autograd calls.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import profiler

from ..backends.device import describe_device
from ..backends.registry import BACKENDS
from ..call import fields, operands
from ..call.batch_invariance import span_of_all_calls
from ..call.dtypes import EIGHT_BIT, out_dtype
from ..call.fields import Options
from ..call.operands import (
    Scaled,
    Tensors,
    changes_scores,
    checked_key_of,
    data_of,
    flat,
    key_of,
    learned_of,
    lengths_of_k,
    lengths_of_q,
    metadata_under,
    tensors_of_mask,
)
from ..call.problem import check, describe, in_rows
from ..call.selection import ANY, named_backend
from ..call.value_checks import check_values, is_checked
from ..modes import is_traced, no_fp8_gradient
from .operator_rules import recorded, register_fake, warn_of_reference
from .planner import Plan, choose

if TYPE_CHECKING:
    from ..backends.base import Launch

_SCHEMA = f"{operands.SCHEMA}, {fields.CALL.schema}"
_SCORES = f"{operands.SCHEMA_OF_SCORES}, {fields.CALL.schema}"
_GIVEN = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
# Where max_logit, dsinks or dbias is not asked for, it has no elements: operators return no None.
_FORWARDS = {
    "": f"({_SCHEMA}) -> (Tensor out, Tensor lse)",
    ".scaled": f"({_SCHEMA}, {operands.SCHEMA_OF_8_BITS}) -> (Tensor out, Tensor lse)",
    ".scores": f"({_SCORES}) -> (Tensor out, Tensor lse, Tensor max_logit)",
    ".scaled_scores": f"({_SCORES}, {operands.SCHEMA_OF_8_BITS}) -> "
    "(Tensor out, Tensor lse, Tensor max_logit)",
}
_BACKWARDS = {
    "": f"({_GIVEN}, {_SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv)",
    ".scores": f"({_GIVEN}, {_SCORES}, bool with_dbias) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)",
}
FORWARDS = [f"flashattn3::forward{overload}" for overload in _FORWARDS]
BACKWARDS = [f"flashattn3::backward{overload}" for overload in _BACKWARDS]
for _name, _schema in zip(
    (*FORWARDS, *BACKWARDS), (*_FORWARDS.values(), *_BACKWARDS.values()), strict=True
):
    torch.library.define(_name, _schema)
NUM_OPTIONS = len(Options._fields)


@lru_cache(maxsize=4096)
def _plan(key: tuple, options: Options) -> Plan:
    plan = _chosen(metadata_under(key), options)
    warn_of_reference(plan)
    return plan


def _chosen(metadata: tuple, options: Options) -> Plan:
    problem = describe(metadata, options)
    return choose(problem, describe_device(problem.device), BACKENDS)


def plan_on(device: torch.device, tensors: Tensors, options: Options) -> Plan:
    """The plan of a call as if its meta tensors were on the device."""
    return _chosen(tuple(_moved(x, device) for x in metadata_under(key_of(tensors))), options)


def _moved(of, device: torch.device):
    """The metadata of a tensor, or a ``Scaled`` of metadata, on the device instead of on meta."""
    if type(of) is Scaled:
        return of._replace(
            **{x: _moved(getattr(of, x), device) for x in operands.TENSORS_OF_8_BITS}
        )
    return of._replace(device=device) if of and of.device.type == "meta" else of


def plan_of(tensors: Tensors, options: Options) -> Plan:
    """The plan of a call: a pure function of its tensors' metadata and its options."""
    return _plan(checked_key_of(options.function, tensors), options)


def launch_of(tensors: Tensors, options: Options) -> Launch:
    """The prepared launch of a call, whose values have been checked."""
    return launch_under(checked_key_of(options.function, tensors), tensors, options)


def launch_under(key: tuple, tensors: Tensors, options: Options) -> Launch:
    """The same, with the key of the tensors."""
    plan = _plan(key, options)
    problem = plan.problem
    if problem.varlen and is_checked(problem.device):
        lengths = lengths_of_q(tensors), lengths_of_k(tensors)
        check_values(*lengths, options, problem.total_q, problem.total_k)
    return plan.launch


def forward_of(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """Compute out and lse, and max_logit where it is asked for, not differentiably and without the
    dispatcher."""
    forward = launch_of(tensors, options).forward
    if profiler._is_profiler_enabled:
        forward = recorded(plan_of(tensors, options), forward)
    return forward(tensors)


def returned(results: tuple[Tensor, ...], options: Options) -> Tensor | tuple[Tensor, ...]:
    """What a call returns of out, lse and max_logit."""
    if options.return_max_logit:
        out, lse, max_logit = results
        return (out, lse, max_logit) if options.return_lse else (out, max_logit)
    return (results[0], results[1]) if options.return_lse else results[0]


def backward_of(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: Tensors,
    options: Options,
    *with_dbias: bool,
) -> tuple[Tensor | None, ...]:
    """Compute what the backend's backward returns, not differentiably and without the
    dispatcher."""
    plan = plan_of(tensors, options)
    if plan.problem.dtype in EIGHT_BIT:
        raise no_fp8_gradient(plan.problem.function, "q")
    backward = plan.launch.backward
    if profiler._is_profiler_enabled:
        backward = recorded(plan, backward, " backward", "gradient")
    if with_dbias and not changes_scores(tensors):  # the call returned max_logit
        return (*backward(dout, dlse, out, lse, tensors), None, None)
    return backward(dout, dlse, out, lse, tensors, *with_dbias)


def operator_is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiler, a torch mode, a tensor subclass or a tensor without data needs the
    operator.

    If not, the call bypasses the dispatcher, which halves the host time of a small call.
    """
    return not have_data(q, k, v) or is_traced()


def have_data(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v have data: none is of a subclass or on the meta device."""
    plain = type(q) is type(k) is type(v) is Tensor
    return plain and not (q.is_meta or k.is_meta or v.is_meta)


def is_score_watched(tensors: Tensors, is_mask_known: bool = False) -> bool:
    """Whether what changes scores has a tensor of a subclass, other than a parameter, or without
    data. is_mask_known: the tensors of the mask are known to be others."""
    given = tensors.sinks, tensors.alibi_slopes, tensors.bias
    if is_mask_known:
        if given[0] is given[1] is given[2] is None:
            return False
    elif tensors.mask_entries_q is not None:
        given += tensors_of_mask(tensors)
    watched = False
    for x in given:
        watched = watched or (x is not None and (type(x) not in _OF_DATA or x.is_meta))
    return watched


_OF_DATA = Tensor, torch.nn.Parameter


def options_in_force(values: tuple) -> Options:
    """The options of a running operator; a compiled call gets what is in force for all calls only
    here."""
    return _options_in_force(named_backend.get(), span_of_all_calls.get(), values)


@lru_cache(maxsize=4096)
def _options_in_force(named: str | None, span: int | None, values: tuple) -> Options:
    options = Options(*values)
    if options.split_tokens is None:
        options = options._replace(split_tokens=span)
    return options if options.backend is not None else options._replace(backend=named or ANY)


def takes_scores(tensors: Tensors, options: Options) -> bool:
    """Whether an overload with the tensors that change scores, and max_logit, computes the call."""
    return changes_scores(tensors) or options.return_max_logit


def flat_of(tensors: Tensors, options: Options) -> tuple:
    """``flat``, of the overload that computes the call."""
    return flat(tensors, takes_scores(tensors, options))


def operator_arguments(tensors: Tensors, options: Options) -> tuple:
    """The arguments of the forward operator: the tensors, the options, what 8-bit inputs have."""
    values = flat_of(tensors, options)
    end = len(values) % operands.NUM_OF_8_BITS
    return (*values[:end], *options, *values[end:])


def split_forward(arguments: tuple) -> tuple[Tensors, tuple]:
    """The tensors of a call, and the values of its options, among the forward operator's
    arguments."""
    end = (len(arguments) - NUM_OPTIONS) % operands.NUM_OF_8_BITS
    behind = end + NUM_OPTIONS
    return operands.of_flat((*arguments[:end], *arguments[behind:])), arguments[end:behind]


def split_backward(arguments: tuple) -> tuple[Tensors, tuple, tuple[bool, ...]]:
    """The same of the backward operator's arguments behind lse, and with_dbias if it is there."""
    end = operands.NUM_TENSORS
    if len(arguments) != end + NUM_OPTIONS:
        end = operands.NUM_OF_SCORES
    behind = end + NUM_OPTIONS
    return Tensors(*arguments[:end]), arguments[end:behind], arguments[behind:]


def run_forward_operator(*arguments):
    """The forward operator on tensors with data."""
    tensors, values = split_forward(arguments)
    return forward_results(tensors, options_in_force(values))


def forward_results(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """The results of the operator that takes the call, which are never None."""
    results = forward_of(tensors, options)
    if len(results) == 2 and changes_scores(tensors):
        return (*results, results[1].new_empty(0))
    return results


def run_backward_operator(dout, dlse, out, lse, *arguments):
    """The backward operator on tensors with data."""
    tensors, values, with_dbias = split_backward(arguments)
    options = options_in_force(values)
    return backward_results(dout, dlse, out, lse, tensors, options, *with_dbias)


def backward_results(dout, dlse, out, lse, tensors, options, *with_dbias) -> tuple[Tensor, ...]:
    """The results of the operator that takes the gradient, which are never None."""
    results = backward_of(dout, dlse, out, lse, tensors, options, *with_dbias)
    if not with_dbias:
        return results
    return (*results[:3], *(lse.new_empty(0) if x is None else x for x in results[3:]))


for _name in FORWARDS:
    torch.library.impl(_name, "CompositeExplicitAutograd", run_forward_operator)
for _name in BACKWARDS:
    torch.library.impl(_name, "CompositeExplicitAutograd", run_backward_operator)


def forward_operator(*arguments) -> tuple[Tensor, ...]:
    """Call the overload that takes these arguments, from ``operator_arguments``."""
    operators, given = torch.ops.flashattn3.forward, len(arguments) - NUM_OPTIONS
    if given == operands.NUM_TENSORS:
        return operators.default(*arguments)
    if given == operands.NUM_OF_SCORES:
        return operators.scores(*arguments)
    if given == operands.NUM_TENSORS + operands.NUM_OF_8_BITS:
        return operators.scaled(*arguments)
    return operators.scaled_scores(*arguments)


def backward_operator(*arguments) -> tuple[Tensor, ...]:
    """Call the overload that takes these arguments."""
    operators = torch.ops.flashattn3.backward
    plain = len(arguments) == 4 + operands.NUM_TENSORS + NUM_OPTIONS
    return operators.default(*arguments) if plain else operators.scores(*arguments)


def forward_watched(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """Compute the results of the operator that takes the call; only the operator does so
    differentiably."""
    q, k, v = data_of(tensors.q), data_of(tensors.k), data_of(tensors.v)
    if operator_is_watched(q, k, v) or is_score_watched(tensors):
        return forward_operator(*operator_arguments(tensors, options))
    return forward_results(tensors, options)


def _forward_fake(*arguments):
    tensors, values = split_forward(arguments)
    options = Options(*values)
    results = fake_forward_of(tensors, options)
    if not takes_scores(tensors, options):
        return results
    heads = results[0].shape[-2] if options.return_max_logit else 0
    return (*results, results[1].new_empty(heads))


def fake_forward_of(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """out and lse of tensors without data, after the checks."""
    check(tensors, options)
    q, _, v = in_rows(options.function, tensors)
    heads_and_rows = (
        (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    of_out = (*q.shape[:-1], v.shape[-1])
    out = q.new_empty(of_out, dtype=out_dtype(q.dtype, options.out_dtype))
    return out, q.new_empty(heads_and_rows, dtype=lse_dtype)


register_fake(FORWARDS, _forward_fake)


def _backward_fake(dout, dlse, out, lse, *arguments):
    tensors, values, with_dbias = split_backward(arguments)
    gradients = fake_backward_of(dout, dlse, out, lse, tensors, Options(*values))
    if not with_dbias:
        return gradients
    others = learned_of(tensors if with_dbias[0] else tensors._replace(bias=None))
    return (*gradients, *(lse.new_empty(0) if x is None else x.new_empty(x.shape) for x in others))


register_fake(BACKWARDS, _backward_fake)


def fake_backward_of(dout, dlse, out, lse, tensors: Tensors, options: Options):
    """dq, dk and dv of tensors without data."""
    q, k, v = tensors[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
