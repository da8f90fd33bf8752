"""The metadata of a tensor that checks and plans read, and the key under which a plan is cached."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Alignment of addresses and strides that TMA and 16-byte vector loads need.
ALIGNMENT_BYTES = 16


class Metadata(NamedTuple):
    """The properties of a tensor that checks and planning read.

    aligned: whether its address is a multiple of 16 bytes.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True

    @property
    def rows_are_dense(self) -> bool:
        # Not "not self.shape": the compiler cannot negate a symbolic shape.
        return len(self.shape) == 0 or self.shape[-1] <= 1 or self.stride[-1] == 1

    @property
    def rows_are_aligned(self) -> bool:
        """Return whether every row begins at a multiple of 16 bytes."""
        step = ALIGNMENT_BYTES // self.dtype.itemsize
        axes = zip(self.shape[:-1], self.stride, strict=False)
        return self.aligned and all(size <= 1 or stride % step == 0 for size, stride in axes)

    @property
    def is_expanded(self) -> bool:
        """Return whether several rows have one address."""
        axes = zip(self.shape[:-1], self.stride, strict=False)
        return any(size > 1 and stride == 0 for size, stride in axes)


def metadata_of(tensor: Tensor | None) -> Metadata | None:
    """The metadata of a tensor that may have no memory."""
    if tensor is None:
        return None
    return Metadata(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def key_of(tensors: tuple[Tensor | None, ...]) -> tuple[tuple | None, ...]:
    """The metadata of all tensors as plain tuples, the key of a checked call."""
    return tuple(
        [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT_BYTES == 0)
            for x in tensors
        ]
    )


def metadata_under(key: tuple[tuple | None, ...]) -> tuple[Metadata | None, ...]:
    """The metadata of the tensors with this key."""
    return tuple([None if fields is None else Metadata(*fields) for fields in key])
