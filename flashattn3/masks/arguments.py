"""Checks of what builders take. Values are read on a CPU, and elsewhere only in a process with
FLASHATTN3_CHECK=1, because that waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..call.arguments import integer
from ..call.value_checks import is_checked
from ..errors import expect, shown, type_error, value_error
from ..modes import is_traced

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_BOOLS = (torch.bool,)


def checked_length(function: str, name: str, value: object) -> int:
    """A length in tokens."""
    length = integer(function, name, value)
    if length < 0:
        raise value_error(function, name, "at least 0", length)
    return length


def checked_lengths(function: str, name: str, values: object) -> list[int]:
    """Lengths in tokens that are given as ints."""
    if not isinstance(values, Iterable):
        raise type_error(function, name, "a sequence of ints or a torch.Tensor", shown(values))
    return [integer(function, f"{name}[...]", value) for value in values]


def checked_tensor(
    function: str, name: str, x: object, axes: str, *ranks: int, boolean: bool = False
) -> Tensor:
    """A tensor of integers or, if boolean, of bools, with one of the ranks. axes: in words."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise type_error(function, name, f"a torch.Tensor {axes}", shown(x))
    if x.ndim not in ranks:
        raise value_error(function, f"{name}.shape", axes, tuple(x.shape))
    if x.dtype not in (_BOOLS if boolean else _INTEGERS):
        wanted = "torch.bool" if boolean else f"one of {_INTEGERS}"
        raise value_error(function, f"{name}.dtype", wanted, x.dtype)
    return x


def expect_alike(function: str, name: str, x: Tensor, of: Tensor, other: str) -> None:
    """Raise unless two tensors have one shape and one device. other: the name of the second."""
    for what in ("shape", "device"):
        wanted, got = getattr(of, what), getattr(x, what)
        if got != wanted:
            raise value_error(function, f"{name}.{what}", f"{wanted} as {other}'s", got)


def check_bounds(
    function: str,
    name: str,
    values: Tensor,
    low: int,
    high: int,
    of: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Raise if values are read and one is not between low and high. of: computes what is checked
    from the values."""
    if not is_checked(values.device) or is_traced() or values.is_meta or not values.numel():
        return
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    values = values if of is None else of(values)
    lowest, highest = (int(x) for x in values.aminmax())
    got = lowest if lowest < low else highest
    expect(low <= got <= high, function, name, f"between {low} and {high}", got)


def without_copies(x: Tensor) -> Tensor:
    """x, of four axes, with size 1 where its batch or head axis repeats one and the same."""
    for axis in (0, 1):
        if x.stride(axis) == 0 and x.shape[axis] > 1:
            x = x.narrow(axis, 0, 1)
    return x
