"""The torch operators: ``flashattn3::forward`` and ``flashattn3::backward``.

An operator call runs the whole pipeline: metadata → Problem → Plan (all three cached together) →
backend. This file registers the implementation for every device and the fake one that
torch.compile and FakeTensorMode use; autograd.py registers the derivative.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from .backends import BACKENDS
from .call.descales import EIGHT_BIT, out_dtype
from .call.problem import (
    Metadata,
    Options,
    Tensors,
    check,
    describe,
    key_of,
    metadata_of,
    metadata_under,
)
from .call.value_checks import check_values, is_checked
from .dispatch.device import describe_device
from .dispatch.planner import Plan, choose
from .errors import expect, shown, type_error
from .modes import is_traced, no_fp8_gradient
from .quantization import permuted_v

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
)
_OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, int num_splits, bool? pack_gqa, "
    "bool deterministic, int sm_margin, bool use_fast_accum, str? backend, "
    "ScalarType? out_dtype, SymInt q_block, SymInt k_block, SymInt v_block, SymInt v_permuted, "
    "str function"
)
NUM_TENSORS = len(Tensors._fields)

ANY = ""  # Options.backend of a call that any backend may run
# Backend of calls without a backend argument: from ``use_backend``, else from the environment.
FROM_ENVIRONMENT = os.environ.get("FLASHATTN3_BACKEND") or None
named_backend: ContextVar[str | None] = ContextVar("flashattn3_backend", default=FROM_ENVIRONMENT)

# The same while torch.compile traces, because it cannot trace a ContextVar.
traced_backends: list[str] = []

torch.library.define("flashattn3::forward", f"({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flashattn3::backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)


@lru_cache(maxsize=4096)
def _plan(key: tuple, options: Options) -> Plan:
    return _chosen(metadata_under(key), options)


def _chosen(metadata: tuple[Metadata | None, ...], options: Options) -> Plan:
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
    found = map(metadata_of, tensors)
    moved = (of._replace(device=device) if of and of.device.type == "meta" else of for of in found)
    return _chosen(tuple(moved), options)


def plan_of(tensors: Tensors, options: Options) -> Plan:
    """The plan of a call: a pure function of its tensors' metadata and its options."""
    return _plan(key_of(tensors), options)


def backend_in_force(function: str, backend: object) -> str | None:
    """The backend that a call must run on: its backend argument, else that of ``use_backend``, else
    ANY.

    None while torch.compile traces outside ``use_backend``: the operator then chooses in every run.
    """
    if backend is not None:
        return known_backend(function, "backend", backend)
    if torch.compiler.is_compiling():
        return traced_backends[-1] if traced_backends else None
    return named_backend.get() or ANY


def known_backend(function: str, what: str, name: object) -> str:
    """Return the name; raise if no backend has it."""
    if not isinstance(name, str):
        raise type_error(function, what, "a str or None", shown(name))
    names = tuple(backend.name for backend in BACKENDS)
    expect(name in names, function, what, f"one of {names}", repr(name))
    return name


def run_forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute out and lse, not differentiably."""
    if _operator_is_watched(tensors.q, tensors.k, tensors.v):
        return torch.ops.flashattn3.forward.default(*tensors, *options)
    return _forward_of(tensors, options)


def run_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv, not differentiably."""
    if _operator_is_watched(dout, out, tensors.q):
        return torch.ops.flashattn3.backward.default(dout, dlse, out, lse, *tensors, *options)
    return _backward_of(dout, dlse, out, lse, tensors, options)


def _operator_is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiler, a torch mode, a tensor subclass or a tensor without data needs the
    operator.

    If not, the call bypasses the dispatcher, which halves the host time of a small call.
    """
    return not type(q) is type(k) is type(v) is Tensor or q.is_meta or is_traced()


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _copied(tensors: Tensors, plan: Plan) -> Tensors:
    copies = {name: getattr(tensors, name).contiguous() for name in plan.problem.copied}
    return tensors._replace(**copies) if copies else tensors


def _with_unpermuted_v(tensors: Tensors, options: Options) -> Tensors:
    """Convert permuted v to rows; a call does this nowhere else."""
    shape = (*tensors.k.shape[:-1], options.v_permuted)
    return tensors._replace(v=permuted_v.unpermute_v(tensors.v, shape, tensors.cu_seqlens_k))


def _forward_of(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    plan = plan_of(tensors, options)
    if plan.problem.varlen and is_checked(plan.problem.device):
        check_values(tensors, options)
    if plan.problem.copied:
        tensors = _copied(tensors, plan)
    if plan.unpermutes_v:
        tensors = _with_unpermuted_v(tensors, options)
    return plan.backend.forward(plan, tensors)


def _backward_of(dout, dlse, out, lse, tensors: Tensors, options: Options):
    plan = plan_of(tensors, options)
    if plan.problem.dtype in EIGHT_BIT:
        raise no_fp8_gradient(plan.problem.function, "q")
    return plan.backend.backward(plan, _dense_rows(dout), dlse, _copied(tensors, plan), out, lse)


def unpacked(arguments: tuple) -> tuple[Tensors, Options]:
    """Split an operator's arguments, without the gradients, into tensors and options."""
    return Tensors(*arguments[:NUM_TENSORS]), Options(*arguments[NUM_TENSORS:])


def _in_force(arguments: tuple) -> tuple[Tensors, Options]:
    """Unpack the arguments of a running operator; a compiled call gets its backend only here."""
    tensors, options = unpacked(arguments)
    if options.backend is None:
        options = options._replace(backend=named_backend.get() or ANY)
    return tensors, options


@torch.library.impl("flashattn3::forward", "CompositeExplicitAutograd")
def _forward(*arguments):
    return _forward_of(*_in_force(arguments))


@torch.library.impl("flashattn3::backward", "CompositeExplicitAutograd")
def _backward(dout, dlse, out, lse, *arguments):
    return _backward_of(dout, dlse, out, lse, *_in_force(arguments))


@torch.library.register_fake("flashattn3::forward")
def _forward_fake(*arguments):
    tensors, options = unpacked(arguments)
    check(tensors, options)
    q, v = tensors.q, tensors.v
    heads_and_rows = (
        (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    head_dim_v = options.v_permuted or v.shape[-1]
    out = q.new_empty((*q.shape[:-1], head_dim_v), dtype=out_dtype(q.dtype, options.out_dtype))
    return out, q.new_empty(heads_and_rows, dtype=lse_dtype)


@torch.library.register_fake("flashattn3::backward")
def _backward_fake(dout, dlse, out, lse, q, k, v, *arguments):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
