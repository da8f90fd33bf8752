"""Runs a call: metadata → Problem → Plan (all three cached together) → backend.

The torch operators ``flashattn3::forward`` and ``flashattn3::backward`` do the same for whoever
watches a call: torch.compile, modes, transforms. The forward has an overload for 8-bit inputs,
``scaled``, because torch spends 0.1 us on each argument. This file registers their implementation
for every device and the fake one that torch.compile and FakeTensorMode use; derivative.py
registers what autograd calls.
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
from ..call.dtypes import EIGHT_BIT, out_dtype
from ..call.fields import Options
from ..call.operands import Scaled, Tensors, checked_key_of, data_of, flat, key_of, metadata_under
from ..call.problem import check, describe, in_rows
from ..call.selection import ANY, named_backend
from ..call.value_checks import check_values, is_checked
from ..modes import is_traced, no_fp8_gradient
from .operator_rules import recorded, warn_of_reference
from .planner import Plan, choose

if TYPE_CHECKING:
    from ..backends.base import Launch

_SCHEMA = f"{operands.SCHEMA}, {fields.CALL.schema}"
torch.library.define("flashattn3::forward", f"({_SCHEMA}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flashattn3::forward.scaled",
    f"({_SCHEMA}, {operands.SCHEMA_OF_8_BITS}) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "flashattn3::backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_SCHEMA}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
)
FORWARDS = "flashattn3::forward", "flashattn3::forward.scaled"
END_OF_OPTIONS = operands.NUM_TENSORS + len(
    Options._fields
)  # among the forward operator's arguments


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
        check_values(tensors, options, problem.total_q, problem.total_k)
    return plan.launch


def forward_of(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute out and lse, not differentiably and without the dispatcher."""
    forward = launch_of(tensors, options).forward
    if profiler._is_profiler_enabled:
        forward = recorded(plan_of(tensors, options), forward)
    return forward(tensors)


def backward_of(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, not differentiably and without the dispatcher."""
    plan = plan_of(tensors, options)
    if plan.problem.dtype in EIGHT_BIT:
        raise no_fp8_gradient(plan.problem.function, "q")
    backward = plan.launch.backward
    if profiler._is_profiler_enabled:
        backward = recorded(plan, backward, " backward", "gradient")
    return backward(dout, dlse, out, lse, tensors)


def operator_is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiler, a torch mode, a tensor subclass or a tensor without data needs the
    operator.

    If not, the call bypasses the dispatcher, which halves the host time of a small call.
    """
    return not have_data(q, k, v) or is_traced()


def have_data(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v have data: none is of a subclass or on the meta device."""
    return type(q) is type(k) is type(v) is Tensor and not q.is_meta


def options_in_force(values: tuple) -> Options:
    """The options of a running operator; a compiled call gets its backend only here."""
    return _options_in_force(named_backend.get(), values)


@lru_cache(maxsize=4096)
def _options_in_force(named: str | None, values: tuple) -> Options:
    options = Options(*values)
    return options if options.backend is not None else options._replace(backend=named or ANY)


def operator_arguments(tensors: Tensors, options: Options) -> tuple:
    """The arguments of the forward operator: the tensors, the options, what 8-bit inputs have."""
    values = flat(tensors)
    return (*values[: operands.NUM_TENSORS], *options, *values[operands.NUM_TENSORS :])


def tensors_among(arguments: tuple) -> Tensors:
    """The tensors among the forward operator's arguments."""
    return operands.of_flat((*arguments[: operands.NUM_TENSORS], *arguments[END_OF_OPTIONS:]))


def options_among(arguments: tuple) -> tuple:
    """The values of the options among the forward operator's arguments."""
    return arguments[operands.NUM_TENSORS : END_OF_OPTIONS]


def run_forward_operator(*arguments):
    """The forward operator on tensors with data."""
    return forward_of(tensors_among(arguments), options_in_force(options_among(arguments)))


def run_backward_operator(dout, dlse, out, lse, *arguments):
    """The backward operator on tensors with data."""
    options = options_in_force(arguments[operands.NUM_TENSORS :])
    tensors = Tensors(*arguments[: operands.NUM_TENSORS])
    return backward_of(dout, dlse, out, lse, tensors, options)


for _name in FORWARDS:
    torch.library.impl(_name, "CompositeExplicitAutograd", run_forward_operator)
torch.library.impl("flashattn3::backward", "CompositeExplicitAutograd", run_backward_operator)


def forward_operator(*arguments) -> tuple[Tensor, Tensor]:
    """Call the overload that takes these arguments, from ``operator_arguments``."""
    operators = torch.ops.flashattn3.forward
    scaled = len(arguments) > END_OF_OPTIONS
    return operators.scaled(*arguments) if scaled else operators.default(*arguments)


def forward_watched(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute out and lse; only the operator does so differentiably."""
    q, k, v = data_of(tensors.q), data_of(tensors.k), data_of(tensors.v)
    if operator_is_watched(q, k, v):
        return forward_operator(*operator_arguments(tensors, options))
    return forward_of(tensors, options)


def _forward_fake(*arguments):
    return fake_forward_of(tensors_among(arguments), Options(*options_among(arguments)))


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


for _name in FORWARDS:
    torch.library.register_fake(_name, _forward_fake)


@torch.library.register_fake("flashattn3::backward")
def _backward_fake(dout, dlse, out, lse, *arguments):
    tensors, options = arguments[: operands.NUM_TENSORS], arguments[operands.NUM_TENSORS :]
    return fake_backward_of(dout, dlse, out, lse, Tensors(*tensors), Options(*options))


def fake_backward_of(dout, dlse, out, lse, tensors: Tensors, options: Options):
    """dq, dk and dv of tensors without data."""
    q, k, v = tensors[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
