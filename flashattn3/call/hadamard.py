"""A random-sign Hadamard rotation of the head dim, which spreads outliers over all columns.

This is incoherent processing (QuIP, arXiv 2307.13304; FlashAttention-3, arXiv 2407.08608, section
3.3). The same rotation of q and k does not change q @ k.T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..modes import is_traced


def kept_signs(head_dim: int, device: torch.device) -> Tensor | None:
    """``signs``, that outlive the caller; None if they are not made yet and cannot be made now."""
    found = signs(head_dim, device)
    return found if _kept.get((_made_signs, head_dim, device)) is found else None


def signs(head_dim: int, device: torch.device) -> Tensor:
    """The fixed signs, float32 (head_dim), the same in every process and under every mode of torch.

    The tensor is kept, unless it is made in a trace, a transform or the capture of a CUDA graph,
    outside of which it must not be used.
    """
    head_dim = len(range(head_dim))  # a plain number where torch.compile traces a symbolic one
    return _kept_or_made(_made_signs, head_dim, device)


def _kept_or_made(make: Callable, *of: object) -> Tensor | tuple[Tensor, Tensor]:
    """make(head_dim, device, ...), which is computed once."""
    if is_traced():
        return make(*of)
    key = make, *of
    made = _kept.get(key)
    if made is not None:
        return made
    on_gpu = (device := of[1]).type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return make(*of)
    with torch.inference_mode(False):  # the tensor outlives the caller's mode
        made = make(*of)
    if on_gpu:  # other streams will read it
        torch.cuda.current_stream(device).synchronize()
    _kept[key] = made
    return made


# One or two for each head dim and device.
_kept: dict[tuple, Tensor | tuple[Tensor, Tensor]] = {}


def _made_signs(head_dim: int, device: torch.device) -> Tensor:
    """Compute the signs on the device: a copy from the host would end CUDA graph capture."""
    from .sign_bits import WORD_BITS, sign_words  # imports torch's compiler

    bit = torch.arange(min(head_dim, WORD_BITS), device=device)
    words = [torch.full_like(bit, word) >> bit for word in sign_words(head_dim)]
    return (torch.cat(words) & 1).mul(2).sub(1).float()


def rotate(x: Tensor, mean: Tensor | None = None) -> Tensor:
    """Compute x D H / sqrt(head_dim), an orthogonal map, over the last axis in float32 or float64.

    x: (..., head_dim), head_dim a power of two. D holds the signs, H is the Hadamard matrix.
    mean: subtracted from x first, as x D - mean D.
    """
    sign = signs(x.shape[-1], x.device)
    x = _wide(x) * sign
    return _transform(x if mean is None else x - mean * sign)


def rotate_back(x: Tensor) -> Tensor:
    """The inverse of rotate."""
    return _transform(_wide(x)) * signs(x.shape[-1], x.device)


def rotate_rows_back(x: Tensor) -> Tensor:
    """rotate_back in x's dtype, which tensor cores multiply by a matrix of ±1: one rounding of each
    result, as of a sum of so many products."""
    head_dim = x.shape[-1]
    unread, matrix = _kept_or_made(_made_matrix, head_dim, x.device, x.dtype)
    rows = x.reshape(-1, head_dim)
    return torch.addmm(unread, rows, matrix, beta=0, alpha=head_dim**-0.5).view_as(x)


def _made_matrix(head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A zero, which addmm takes besides, and the matrix."""
    matrix = rotate_back(torch.eye(head_dim, device=device)).sign().to(dtype)
    return matrix.new_zeros(1), matrix


def is_rotatable(head_dim: int) -> bool:
    return head_dim > 0 and head_dim & (head_dim - 1) == 0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _transform(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform in natural order: one stage per bit of the column index."""
    head_dim = x.shape[-1]
    width = 1
    while width < head_dim:
        pairs = x.unflatten(-1, (head_dim // (2 * width), 2, width))
        even, odd = pairs.unbind(-2)
        x = torch.stack((even + odd, even - odd), -2).flatten(-3)
        width *= 2
    return x * head_dim**-0.5
