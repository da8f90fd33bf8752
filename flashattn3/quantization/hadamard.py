"""A random-sign Hadamard rotation of the head dim, which spreads outliers over all columns.

Rotating q and k alike leaves q @ k.T as it is (Shah et al., FlashAttention-3, arXiv 2407.08608,
section 3.3).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIGN_SEED = 0x5EED
CPU = torch.device("cpu")


@cache
def signs(head_dim: int, device: torch.device = CPU) -> Tensor:
    """The fixed signs, float32 (head_dim), the same in every process. Copied to a device once."""
    with torch.inference_mode(False):  # the tensor outlives the caller's mode
        if device != CPU:
            return signs(head_dim).to(device)
        generator = torch.Generator().manual_seed(SIGN_SEED + head_dim)
        return torch.randint(0, 2, (head_dim,), generator=generator).mul(2).sub(1).float()


def rotate(x: Tensor) -> Tensor:
    """x D H / sqrt(head_dim) over the last axis, float32 (float64 stays): an orthogonal map.

    x: (..., head_dim), head_dim a power of two. D holds the signs, H is the Hadamard matrix.
    """
    return _transform(_wide(x) * signs(x.shape[-1], x.device))


def rotate_back(x: Tensor) -> Tensor:
    """The inverse of rotate."""
    return _transform(_wide(x)) * signs(x.shape[-1], x.device)


def is_rotatable(head_dim: int) -> bool:
    return head_dim > 0 and head_dim & (head_dim - 1) == 0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _transform(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform in natural order: a stage for each bit of the column."""
    head_dim = x.shape[-1]
    width = 1
    while width < head_dim:
        pairs = x.unflatten(-1, (head_dim // (2 * width), 2, width))
        even, odd = pairs.unbind(-2)
        x = torch.stack((even + odd, even - odd), -2).flatten(-3)
        width *= 2
    return x * head_dim**-0.5
