"""Checks of one tensor of a call from its metadata, for calls of all kinds."""

from __future__ import annotations

import torch

from ..errors import expect
from .metadata import Metadata


def check_device(function: str, name: str, x: Metadata, device: torch.device, of: str) -> None:
    """of: name of the tensor whose device it is."""
    expect(x.device == device, function, f"{name}.device", f"{device} as {of}'s", x.device)


def check_int32(
    function: str, name: str, x: Metadata, ndim: int, device: torch.device, of: str
) -> None:
    """Lengths, indices or, with two axes, a page table. of: as in ``check_device``."""
    wanted = ("one-dimensional", "two-dimensional: (batch, max_pages)")[ndim - 1]
    expect(len(x.shape) == ndim, function, f"{name}.shape", wanted, tuple(x.shape))
    expect(x.dtype == torch.int32, function, f"{name}.dtype", torch.int32, x.dtype)
    check_device(function, name, x, device, of)
