"""Conversion of scalar arguments (Python, numpy, 0-d tensors) to Python values; layout check.

Reading a 0-d tensor on a GPU synchronizes with the device; only ``length`` does not read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError, complaint, shown, type_error, value_error

LARGEST = 2**63 - 1  # torch operators take int64


def integer(function: str, name: str, value: object) -> int:
    """Convert to a 64-bit int; a bool raises TypeError."""
    if type(value) is int and -LARGEST <= value <= LARGEST:
        return value
    found = _scalar(value)
    if isinstance(found, bool) or not isinstance(found, (int, torch.SymInt)):
        raise type_error(function, name, "an int", shown(value))
    if not torch.compiler.is_compiling() and abs(found) > LARGEST:
        raise value_error(function, name, "an int of 64 bits", shown(value))
    return found


def real(function: str, name: str, value: object) -> float:
    """Convert a float or an int to float; NaN and infinity are accepted."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        sentence = complaint(function, f"{name}.requires_grad", False, True)
        raise UnsupportedError(
            f"{sentence}: it is a number without a gradient; multiply q by a learned scale, or "
            f"pass {name}.detach()"
        )
    found = _scalar(value)
    if isinstance(found, bool) or not isinstance(found, (float, int, torch.SymFloat, torch.SymInt)):
        raise type_error(function, name, "a float", shown(value))
    try:
        return found if isinstance(found, (torch.SymFloat, torch.SymInt)) else float(found)
    except OverflowError:
        raise value_error(function, name, "finite", shown(value)) from None


def boolean(function: str, name: str, value: object) -> bool:
    """Convert a bool, 0 or 1 to bool."""
    if value is False or value is True:
        return value
    found = _scalar(value)
    if not isinstance(found, (bool, int)) or found not in (0, 1):
        raise type_error(function, name, "a bool", shown(value))
    return bool(found)


def window(function: str, name: str, value: object) -> tuple[int, int]:
    """(left, right) from a tuple, list, array or tensor; None and negative sides become -1."""
    sides = value if isinstance(value, (tuple, list)) else _listed(value)
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise type_error(function, name, "a pair (left, right)", shown(value))
    left, right = sides
    return _side(function, name, 0, left), _side(function, name, 1, right)


def length(function: str, name: str, value: object) -> int | None:
    """A number of tokens, at least 0; None if not given, or if on a GPU or the meta device."""
    if value is None:
        return None
    if isinstance(value, Tensor) and (value.is_cuda or value.is_meta):
        if value.ndim or value.is_floating_point() or value.is_complex():
            raise type_error(function, name, "an int", shown(value))
        return None
    compiling = torch.compiler.is_compiling()
    unknown = compiling and type(value) is int  # the compiler may know no bounds of it
    found = value if unknown else integer(function, name, value)
    if compiling:
        torch._check(found >= 0)
    elif found < 0:
        raise value_error(function, name, ">= 0", found)
    return found


def expect_strided(function: str, name: str, tensor: object) -> None:
    """Raise TypeError for what is no tensor, or one without strides: sparse, mkldnn or nested."""
    if not isinstance(tensor, Tensor):
        raise type_error(function, name, "a torch.Tensor", shown(tensor))
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise type_error(function, f"{name}.layout", "torch.strided, of a plain tensor", layout)


def is_distributed(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, which has no memory of its own for a kernel to read."""
    return not torch.compiler.is_compiling() and hasattr(tensor, "device_mesh")


def expect_local(function: str, name: str, tensor: object) -> None:
    """``expect_strided``; a DTensor raises TypeError too."""
    expect_strided(function, name, tensor)
    if is_distributed(tensor):
        wanted = "a local tensor (torch.distributed.tensor.experimental.local_map passes them)"
        raise type_error(function, name, wanted, shown(tensor))


def _side(function: str, name: str, index: int, value: object) -> int:
    if type(value) is int and -1 <= value <= LARGEST:
        return value
    return -1 if value is None else max(-1, integer(function, f"{name}[{index}]", value))


def _listed(value: object) -> object:
    """Convert 1-d arrays and tensors to lists; return any other value unchanged."""
    host = not (isinstance(value, Tensor) and value.is_meta)
    return value.tolist() if host and getattr(value, "ndim", None) == 1 else value


def _scalar(value: object) -> object:
    """Convert numpy scalars, 0-d arrays and tensors to Python; return other values unchanged."""
    if getattr(value, "ndim", None) != 0 or (isinstance(value, Tensor) and value.is_meta):
        return value
    return value.item()
