"""The torch operators: ``flashattn3::forward`` and ``flashattn3::backward``.

An operator call is the whole pipeline: metadata → Problem → Plan (all three cached together) →
backend. Registered here are the real implementation for every device, the fake one that
torch.compile and FakeTensorMode use, and autograd.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from .backends import BACKENDS
from .contents import CHECKED, check_contents
from .device import describe_device
from .plan import Plan, choose
from .problem import (
    Metadata,
    Options,
    Tensors,
    check,
    check_option_types,
    describe,
    function_name,
    metadata_fields,
    no_fp8_gradient,
)
from .quantization import BlockScaled
from .scales import EIGHT_BIT, out_dtype

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
)
_OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, int num_splits, bool? pack_gqa, "
    "bool deterministic, int sm_margin, str? backend, ScalarType? out_dtype, "
    "SymInt q_block, SymInt k_block, SymInt v_block, SymInt v_slots"
)
_NUM_TENSORS = len(Tensors._fields)

# The backend of calls that name none: that of ``use_backend``, else of the environment.
named_backend: ContextVar[str | None] = ContextVar(
    "flashattn3_backend", default=os.environ.get("FLASHATTN3_BACKEND") or None
)

torch.library.define("flashattn3::forward", f"({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flashattn3::backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)


@lru_cache(maxsize=4096, typed=True)
def _plan(*arguments) -> Plan:
    """The plan of a call from its tensors' metadata and its options, one after the other."""
    fields, options = arguments[:_NUM_TENSORS], Options(*arguments[_NUM_TENSORS:])
    metadata = tuple(None if of is None else Metadata(*of) for of in fields)
    check_option_types(function_name(metadata[3] is not None), options)
    problem = describe(metadata, options)
    return choose(problem, describe_device(problem.device), BACKENDS)


def plan_of(tensors: Tensors, options: Options) -> Plan:
    """The plan that a call follows: a pure function of its tensors' metadata and its options."""
    return _plan(*[None if t is None else metadata_fields(t) for t in tensors], *options)


def backend_in_force(backend: str | None) -> str | None:
    """The backend that a call is bound to, which names this one or none.

    While torch.compile traces, the choice is left to the operator, which makes it in every run.
    """
    return backend if backend or torch.compiler.is_compiling() else named_backend.get()


def attention(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """out and lse of one call, differentiable. What the public functions come down to."""
    if _operator_is_watched(tensors):
        check_option_types(function_name(tensors.cu_seqlens_q is not None), options)
        return torch.ops.flashattn3.forward.default(*tensors, *options)
    return _run_forward(tensors, options)


def _operator_is_watched(tensors: Tensors) -> bool:
    """Whether anything but the kernel has to see the operator: autograd, the compiler, a torch
    mode, a subclass.

    If not, the dispatcher is passed by, which halves the host time of a small call.
    """
    q, k, v = tensors[:3]
    return (
        (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or torch.compiler.is_compiling()
        or not type(q) is type(k) is type(v) is Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _copied(tensors: Tensors, plan: Plan) -> Tensors:
    copies = {name: getattr(tensors, name).contiguous() for name in plan.problem.copied}
    return tensors._replace(**copies) if copies else tensors


def _with_v_in_rows(tensors: Tensors, options: Options) -> Tensors:
    """The only place where v is put back from the Hopper kernel's slots into rows."""
    v = BlockScaled(
        tensors.v,
        tensors.v_descale,
        options.v_block,
        cu_seqlens=tensors.cu_seqlens_k,
        layout="slots",
        shape=(*tensors.k.shape[:-1], options.v_slots),
    ).in_rows()
    return tensors._replace(v=v.data, v_descale=v.descale)


def _run_forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    plan = plan_of(tensors, options)
    if CHECKED:
        check_contents(tensors, options)
    if plan.problem.copied:
        tensors = _copied(tensors, plan)
    if plan.v_to_rows:
        tensors = _with_v_in_rows(tensors, options)
    return plan.backend.forward(plan, tensors)


def _unpacked(arguments: tuple) -> tuple[Tensors, Options]:
    options = Options(*arguments[_NUM_TENSORS:])
    options = options._replace(backend=backend_in_force(options.backend))
    return Tensors(*arguments[:_NUM_TENSORS]), options


@torch.library.impl("flashattn3::forward", "CompositeExplicitAutograd")
def _forward(*arguments):
    return _run_forward(*_unpacked(arguments))


@torch.library.impl("flashattn3::backward", "CompositeExplicitAutograd")
def _backward(dout, dlse, out, lse, *arguments):
    tensors, options = _unpacked(arguments)
    plan = plan_of(tensors, options)
    if plan.problem.dtype in EIGHT_BIT:
        raise no_fp8_gradient(plan.problem.function)
    return plan.backend.backward(plan, _dense_rows(dout), dlse, _copied(tensors, plan), out, lse)


@torch.library.register_fake("flashattn3::forward")
def _forward_fake(*arguments):
    tensors = Tensors(*arguments[:_NUM_TENSORS])
    options = Options(*arguments[_NUM_TENSORS:])
    check(tensors, options)
    q, v = tensors.q, tensors.v
    heads_and_rows = (
        (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    head_dim_v = options.v_slots or v.shape[-1]
    out = q.new_empty((*q.shape[:-1], head_dim_v), dtype=out_dtype(q.dtype, options.out_dtype))
    return out, q.new_empty(heads_and_rows, dtype=lse_dtype)


@torch.library.register_fake("flashattn3::backward")
def _backward_fake(dout, dlse, out, lse, q, k, v, *arguments):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output)
    ctx.options = inputs[_NUM_TENSORS:]


def _differentiate(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    no_gradient = (None,) * (_NUM_TENSORS - 3 + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *no_gradient)
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = torch.ops.flashattn3.backward.default(dout, dlse, out, lse, *tensors, *ctx.options)
    return (*gradients, *no_gradient)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flashattn3::backward: the second derivative of attention is not implemented"
    )


torch.library.register_autograd(
    "flashattn3::forward", _differentiate, setup_context=_save_for_backward
)
torch.library.register_autograd("flashattn3::backward", _no_second_derivative)
