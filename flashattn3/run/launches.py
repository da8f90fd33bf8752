"""The launches of calls like an earlier one: an operator of the backend finds a call's launch from
its tensors, in less time than Python takes to read them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from threading import Lock, local
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .aten_node import registered_node

if TYPE_CHECKING:
    from ..backends.base import Passes, PassOperators

# The node replaces a kernel for tensors on a GPU; on others torch's own would run.
has_node = attrgetter("is_cuda")


class LaunchCache:
    """The launches of calls with the same options and axes. The operators keep them under a number
    of the cache; a call whose launch they do not have is checked in Python.

    operators: None before the first launch. node: attention with an autograd node in C++, or None.
    forward_of, backward_of: compute a call of the autograd node whose launch the operators do not
        have, from the cache and the tensors of the pass, and give them the launch.
    """

    def __init__(self, options, bhsd: bool, forward_of: Callable, backward_of: Callable) -> None:
        self.options, self.bhsd = options, bhsd
        self.forward_of, self.backward_of = forward_of, backward_of
        self.operators: PassOperators | None = None
        self.node: Callable | None = None
        self.number = 0

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, differentiably: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Compute out and lse; only out is differentiable. None if Python has to: there is no node,
        or no launch, or the launch failed and will again. ``operators`` must not be None.
        """
        operators = self.operators
        if not differentiably:
            try:
                results = operators.forward(self.number, q, k, v, None, None)
            except RuntimeError:
                return None
            return None if results[0] is None else results
        run = self.node
        if run is None or not has_node(q):
            return None
        try:
            return run(q, k, v, self.number)
        except RuntimeError as raised:  # hooks on saved tensors have seen the call: no second try
            error = _failed.__dict__.pop("error", None)
            if error is None or _text(error) not in str(raised):  # of a hook, or of the kernel
                raise
            raise error from None

    def keep(self, passes: Passes, *tensors: Tensor | None) -> None:
        """Give the operators a launch for calls like that of q, k, v, cu_seqlens_q and
        cu_seqlens_k, if not too many options have launches."""
        if self.operators is None and not _enumerate(self):
            return
        with _disable_current_modes():
            operators, *launches = passes
            operators.keep(self.number, self.bhsd, *launches, *tensors)
        self.node = node_of(operators)
        self.operators = operators


MOST = 4096  # options with a number; gradients may ask for any of them, so that none is dropped
_numbered: list[LaunchCache | None] = [None]  # torch's own calls have the number 0
_lock = Lock()
_failed = local()  # error: what forward_in_python raised in this thread


def _enumerate(cache: LaunchCache) -> bool:
    """Return whether the cache has a number, or gets one."""
    with _lock:
        if not cache.number and len(_numbered) <= MOST:
            cache.number = len(_numbered)
            _numbered.append(cache)
    return cache.number > 0


def forward_in_python(number: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """The backend's operator of this name. Its caller in C++ loses exceptions."""
    cache = _numbered[number]
    try:
        return (*cache.forward_of(cache, q, k, v), None)
    except BaseException as error:
        _failed.error = error
        return None, None, _message(error)


def backward_in_python(number: int, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """The same of the gradient, from dout, out, lse, q, k and v. Autograd runs it in a thread of
    its own, so that its caller gets the message alone."""
    cache = _numbered[number]
    try:
        return (*cache.backward_of(cache, *tensors), None)
    except BaseException as error:
        return None, None, None, _message(error)


def node_of(operators: PassOperators) -> Callable | None:
    """The attention with the autograd node of these operators, registered in the first call."""
    if operators.namespace is None:
        return None
    return registered_node(operators.namespace, forward_in_python, backward_in_python)


def _message(error: BaseException) -> Tensor:
    return torch.frombuffer(bytearray(_text(error).encode()), dtype=torch.uint8)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
