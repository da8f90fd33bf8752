"""Checks of one tensor of a call from its metadata, for calls of all kinds."""

from __future__ import annotations

import torch

from ..errors import expect
from .metadata import Metadata


def check_device(function: str, name: str, x: Metadata, device: torch.device, of: str) -> None:
    """of: name of the tensor whose device it is."""
    check_equal(function, f"{name}.device", x.device, device, of)


def check_equal(function: str, what: str, found: object, wanted: object, of: str) -> None:
    """Raise unless a property is that of another tensor, whose name is ``of``."""
    expect(found == wanted, function, what, f"{wanted} as {of}'s", found)


def check_dense(function: str, name: str, x: Metadata, wanted: object = 1) -> None:
    """Raise unless the elements of a row lie side by side."""
    expect(x.rows_are_dense, function, f"{name}.stride(-1)", wanted, tuple(x.stride)[-1])


def check_float32(function: str, name: str, x: Metadata, device: torch.device, of: str) -> None:
    """of: as in ``check_device``."""
    expect(x.dtype == torch.float32, function, f"{name}.dtype", torch.float32, x.dtype)
    check_device(function, name, x, device, of)


def check_given(
    function: str, name: str, x, shape: tuple, dtype: torch.dtype, device: torch.device, of: str
) -> None:
    """Raise unless a tensor that the caller gives has the shape, dtype and device of a result. x:
    the tensor or its metadata. of: as in ``check_device``."""
    wanted, found = tuple(shape), tuple(x.shape)
    expect(found == wanted, function, f"{name}.shape", wanted, found)
    expect(x.dtype == dtype, function, f"{name}.dtype", dtype, x.dtype)
    check_device(function, name, x, device, of)


def check_int32(
    function: str, name: str, x: Metadata, ndim: int, device: torch.device, of: str
) -> None:
    """Lengths, indices or, with two axes, a page table. of: as in ``check_device``."""
    wanted = ("one-dimensional", "two-dimensional: (batch, max_pages)")[ndim - 1]
    expect(len(x.shape) == ndim, function, f"{name}.shape", wanted, tuple(x.shape))
    expect(x.dtype == torch.int32, function, f"{name}.dtype", torch.int32, x.dtype)
    check_device(function, name, x, device, of)
