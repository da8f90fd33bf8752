"""Runs a call: metadata → Problem → Plan (all three cached together) → backend.

The torch operators ``flashattn3::forward`` and ``flashattn3::backward`` do the same for whoever
watches a call: torch.compile, modes, transforms. This file registers their implementation for every
device and the fake one that torch.compile and FakeTensorMode use; autograd.py registers the
derivative.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backends import BACKENDS
from .call import inputs, spec
from .call.dtypes import EIGHT_BIT, out_dtype
from .call.inputs import Scaled, Tensors, checked_key_of, flat, key_of, metadata_under
from .call.problem import check, describe, in_rows
from .call.spec import Options
from .call.value_checks import check_values, is_checked
from .dispatch.device import describe_device
from .dispatch.planner import Plan, choose
from .dispatch.selection import ANY, FROM_ENVIRONMENT, named_backend
from .modes import no_fp8_gradient
from .operator_rules import warn_of_reference

if TYPE_CHECKING:
    from .dispatch.backend import Launch

torch.library.define(
    "flashattn3::forward", f"({inputs.SCHEMA}, {spec.CALL.schema}) -> (Tensor out, Tensor lse)"
)
torch.library.define(
    "flashattn3::backward",
    "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{inputs.UNSCALED_SCHEMA}, {spec.CALL.schema}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


@lru_cache(maxsize=4096)
def _plan(key: tuple, options: Options) -> Plan:
    plan = _chosen(metadata_under(key), options)
    warn_of_reference(plan)
    return plan


def _chosen(metadata: tuple, options: Options) -> Plan:
    problem = describe(metadata, options)
    try:
        return choose(problem, describe_device(problem.device), BACKENDS)
    except ValueError as error:
        if options.backend and options.backend == FROM_ENVIRONMENT:
            told = f"{error}; FLASHATTN3_BACKEND={FROM_ENVIRONMENT} is set"
            raise type(error)(told) from None
        raise


def plan_on(device: torch.device, tensors: Tensors, options: Options) -> Plan:
    """The plan of a call as if its meta tensors were on the device."""
    return _chosen(tuple(_moved(x, device) for x in metadata_under(key_of(tensors))), options)


def _moved(of, device: torch.device):
    """The metadata of a tensor, or a ``Scaled`` of metadata, on the device instead of on meta."""
    if type(of) is Scaled:
        return of._replace(**{x: _moved(getattr(of, x), device) for x in inputs.TENSORS_OF_8_BITS})
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
    return launch_of(tensors, options).forward(tensors)


def backward_of(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, not differentiably and without the dispatcher."""
    plan = plan_of(tensors, options)
    if plan.problem.dtype in EIGHT_BIT:
        raise no_fp8_gradient(plan.problem.function, "q")
    return plan.launch.backward(dout, dlse, out, lse, tensors)


def _in_force(options: Options) -> Options:
    """The options of a running operator; a compiled call gets its backend only here."""
    if options.backend is None:
        return options._replace(backend=named_backend.get() or ANY)
    return options


def _unpacked(arguments: tuple) -> tuple[Tensors, Options]:
    """Split the forward operator's arguments into tensors and options."""
    return inputs.of_flat(arguments[: inputs.NUM_FLAT]), Options(*arguments[inputs.NUM_FLAT :])


@torch.library.impl("flashattn3::forward", "CompositeExplicitAutograd")
def _forward(*arguments):
    tensors, options = _unpacked(arguments)
    return forward_of(tensors, _in_force(options))


@torch.library.impl("flashattn3::backward", "CompositeExplicitAutograd")
def _backward(dout, dlse, out, lse, *arguments):
    count = len(Tensors._fields)
    tensors, options = Tensors(*arguments[:count]), Options(*arguments[count:])
    return backward_of(dout, dlse, out, lse, tensors, _in_force(options))


def forward_operator(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    return torch.ops.flashattn3.forward.default(*flat(tensors), *options)


@torch.library.register_fake("flashattn3::forward")
def _forward_fake(*arguments):
    tensors, options = _unpacked(arguments)
    check(tensors, options)
    q, _, v = in_rows(options.function, tensors)
    heads_and_rows = (
        (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    of_out = (*q.shape[:-1], v.shape[-1])
    out = q.new_empty(of_out, dtype=out_dtype(q.dtype, options.out_dtype))
    return out, q.new_empty(heads_and_rows, dtype=lse_dtype)


@torch.library.register_fake("flashattn3::backward")
def _backward_fake(dout, dlse, out, lse, q, k, v, *arguments):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
