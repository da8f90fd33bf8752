"""What FlashAttention's functions for one pass have in common, over its releases."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature

import torch

from ..call.tensor_checks import check_given
from ..errors import shown, type_error


def one_pass(function: Callable, older: Callable | None = None) -> Callable:
    """The function without autograd, as libraries call it in the forward of their own
    ``autograd.Function``, some with grad mode on.

    The function has window_size_left and window_size_right. It also takes window_size, a pair, at
    the place of the first or by keyword, as releases of FlashAttention-2 up to 2.6 do.

    older: makes the result of such a call from q, k, v and the result, where it differed too.
    """
    described = signature(function)
    place = [*described.parameters].index("window_size_left")

    @wraps(function)
    def call(*arguments, window_size=None, **options):
        at_its_place = arguments[place] if len(arguments) > place else None
        takes_pair = window_size is not None
        if isinstance(at_its_place, (tuple, list)):
            arguments = (*arguments[:place], *at_its_place, *arguments[place + 1 :])
            takes_pair = True
        elif takes_pair:
            options["window_size_left"], options["window_size_right"] = window_size
        with torch.no_grad():
            result = function(*arguments, **options)
        if older is None or not takes_pair:
            return result
        return older(*arguments[:3], *(options[x] for x in "qkv" if x in options), *result)

    call.__signature__ = described  # inspect.getfullargspec reads it, and callers read that
    return call


def write_gradients(function: str, given: tuple, gradients: tuple) -> None:
    """Write gradients into the tensors that FlashAttention's backward functions are given. All are
    checked before the first is written."""
    named = list(zip(("dq", "dk", "dv"), given, gradients, strict=True))
    for name, tensor, gradient in named:
        _check_given(function, name, tensor, gradient)
    for _, tensor, gradient in named:
        if tensor is not None:
            tensor.copy_(gradient)


def written_to(function: str, out: object, result: torch.Tensor) -> torch.Tensor:
    """The result, in the tensor out if it is given."""
    _check_given(function, "out", out, result)
    return result if out is None else out.copy_(result)


def _check_given(function: str, name: str, given: object, result: torch.Tensor) -> None:
    """Raise where a copy would broadcast or convert the result."""
    if given is None:
        return
    if not isinstance(given, torch.Tensor):
        raise type_error(function, name, "a torch.Tensor or None", shown(given))
    check_given(function, name, given, result.shape, result.dtype, result.device, "q")
