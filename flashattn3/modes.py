"""Detects which parts of torch are active in a call: the compiler, tracing modes, transforms,
automatic differentiation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from .errors import UnsupportedError, complaint

_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def is_plain() -> bool:
    """Whether nothing of torch watches the call: no compiler, mode, transform or dual level."""
    return not _is_compiling() and is_plain_if_eager()


def is_plain_if_eager() -> bool:
    """The same of a call that the compiler is known not to trace."""
    return not (_num_modes() or _transforms() is not None or forward_ad._current_level >= 0)


def is_watched(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a cached call must go through its operator: for the compiler, a torch mode, a
    transform, a dual level or a tensor subclass but nn.Parameter."""
    own = type(x) is type(other) is torch.Tensor or {type(x), type(other)} <= _OWN
    return not own or x.is_meta or not is_plain()


_OWN = {torch.Tensor, torch.nn.Parameter}
# The classes of arguments that are no tensor subclass of others.
USUAL = _OWN | {type(None)}


def unseen_by_modes() -> AbstractContextManager:
    """Within it no dispatch mode sees what is called. The compiler traces none."""
    return nullcontext() if _is_compiling() or not _num_modes() else _disable_current_modes()


# Returns whether autocast is enabled for any kind of device.
has_autocast = torch._C._is_any_autocast_enabled
# Returns what torch.are_deterministic_algorithms_enabled, a function in Python, returns.
are_deterministic = torch._C._get_deterministic_algorithms


def has_saved_tensor_hooks() -> bool:
    """Whether hooks see the tensors that autograd saves, as those of a checkpoint do."""
    return _top_hooks(False) is not None


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def is_traced() -> bool:
    """Whether the compiler, a dispatch mode or a function transform is active."""
    return _is_compiling() or _num_modes() > 0 or _transforms() is not None


def is_transformed() -> bool:
    """Whether the call is inside one of torch.func's transforms."""
    return _transforms() is not None


def is_batched(*gradients: torch.Tensor | None) -> bool:
    """Return whether torch.autograd.grad(is_grads_batched=True) computes several gradients at once:
    it passes tensors of a C++ class of its own."""
    return any(x is not None and _is_legacy_batched(x) for x in gradients)


_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def refuse_transforms(function: str, *tensors: torch.Tensor) -> None:
    """Raise inside functionalize, and inside vmap if it maps one of the tensors: torch lets neither
    reach an operator that writes to its arguments."""
    top = None if _is_compiling() else _transforms()
    if top is None:
        return
    reason = ", because results are written in place"
    if _is_functionalize(top):
        raise _no_transform(function, "functionalize", reason)
    refuse_vmap(function, *tensors, reason=reason)


def refuse_vmap(function: str, *tensors: torch.Tensor | None, reason: str = "") -> None:
    """Raise if vmap maps one of the tensors. reason: why, behind a comma."""
    if any(x is not None and torch._C._functorch.is_batchedtensor(x) for x in tensors):
        raise _no_transform(function, "vmap", reason)


def refuse_functionalize(function: str) -> None:
    """Raise inside functionalize, also around other transforms: torch has no rule for autograd
    functions there."""
    if any(map(_is_functionalize, torch._C._functorch.get_interpreter_stack() or ())):
        raise _no_transform(function, "functionalize")


def _is_functionalize(transform) -> bool:
    return transform.key() == torch._C._functorch.TransformType.Functionalize


def _no_transform(function: str, name: str, reason: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"{function}: torch.func.{name} is not supported{reason}; call it outside of {name}"
    )


def autocasts(kind: str) -> bool:
    """Whether autocast is enabled for a kind of device; the meta device has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> AbstractContextManager:
    """Within it autocast casts nothing on a kind of device."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext()


def refuse_jit_trace(function: str) -> None:
    """Raise under torch.jit.trace, which would keep the lengths and the plan of one call."""
    if not _is_compiling() and torch._C._get_tracing_state() is not None:
        raise UnsupportedError(
            f"{function}: torch.jit.trace (and torch.onnx.export with dynamo=False) is not "
            "supported; use torch.compile or torch.export"
        )


def has_dual_level() -> bool:
    """Whether forward-mode differentiation is active, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


def refuse_gradients(function: str, **tensors: torch.Tensor | None) -> None:
    """Raise if a gradient or a tangent would have to pass through 8-bit quantization."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise no_fp8_gradient(function, name)
    refuse_tangents(function, *tensors.values())


def refuse_tangents(function: str, *tensors: torch.Tensor | None) -> None:
    """Raise if forward-mode differentiation has given a tensor a tangent."""
    if has_dual_level():
        given = (tensor for tensor in tensors if tensor is not None)
        if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
            raise no_tangent(function)


def inputs_apart(tensors: Iterable[torch.Tensor | None]) -> Iterable[torch.Tensor | None]:
    """The tensors as inputs of an autograd function, to which torch.compile passes none twice."""
    if not _is_compiling():
        return tensors
    return [None if x is None else x.view_as(x) for x in tensors]


def needs_gradient(values: Iterable[object]) -> bool:
    """Return whether grad mode is on and one of the values is a tensor that requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    if not _is_compiling():
        return _any_requires_grad(*values)
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


_any_requires_grad = torch._C._any_requires_grad  # the compiler does not trace it


def no_fp8_gradient(function: str, name: str) -> UnsupportedError:
    sentence = complaint(function, f"{name}.requires_grad", False, True)
    answer = "call it under torch.no_grad()"
    if is_transformed():
        answer = "flash_attn_fp8_func and rotate_and_quantize have one for Tensor.backward alone"
    return UnsupportedError(f"{sentence}: there is no gradient through FP8; {answer}")


def no_tangent(function: str) -> UnsupportedError:
    return UnsupportedError(
        f"{function}: forward-mode differentiation (torch.func.jvp, jacfwd, linearize) is not "
        "supported; use reverse mode (torch.func.grad, vjp, jacrev)"
    )
