"""The checks of rotate_and_quantize: of metadata, and of the values that value_checks.py checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.arguments import boolean, expect_local, integer, real
from ..call.dtypes import EIGHT_BIT, SIXTEEN_BIT, best_qk_dtype
from ..call.hadamard import is_rotatable
from ..call.quantization_limits import BLOCKS
from ..call.tensor_checks import check_device
from ..call.value_checks import is_checked
from ..errors import expect, type_error
from ..modes import is_traced
from .lengths import checked_lengths

FUNCTION = "rotate_and_quantize"


class Scheme(NamedTuple):
    """The options of a call that no tensor but q takes part in, converted."""

    interleaved: bool
    eps: float
    block: int
    hadamard: bool
    qk_dtype: torch.dtype
    smooth_k: bool


def scheme_of(head_dim: int, interleaved, eps, block, hadamard, qk_dtype, smooth_k) -> Scheme:
    """Convert the options of a call. head_dim: of q."""
    block, eps = integer(FUNCTION, "block", block), real(FUNCTION, "norm_eps", eps)
    hadamard = boolean(FUNCTION, "hadamard", hadamard)
    smooth_k = boolean(FUNCTION, "smooth_k", smooth_k)
    interleaved = boolean(FUNCTION, "rotary_interleaved", interleaved)
    if qk_dtype is None:
        qk_dtype = best_qk_dtype(head_dim, hadamard)
    expect(qk_dtype in EIGHT_BIT, FUNCTION, "qk_dtype", f"one of {(None, *EIGHT_BIT)}", qk_dtype)
    expect(block in BLOCKS, FUNCTION, "block", f"one of {BLOCKS}", block)
    fits = not hadamard or is_rotatable(head_dim)
    expect(fits, FUNCTION, "q.shape[-1]", "a power of two with hadamard=True", head_dim)
    return Scheme(interleaved, eps, block, hadamard, qk_dtype, smooth_k)


def checked(
    tensors: tuple, num_heads_q: object, max_seqlen: object, options: tuple
) -> tuple[int | None, Scheme]:
    """The longest sequence of a varlen batch, and the scheme. tensors: q, k, v, rotary_cos,
    rotary_sin, positions, q_norm, k_norm, cu_seqlens. options: those of scheme_of."""
    q, k, v, cos, sin, positions, q_norm, k_norm, cu_seqlens = tensors
    q, k, v = _sides(q, k, v, num_heads_q)
    scheme = scheme_of(q.shape[-1], *options)
    wanted = "False without k"
    expect(not scheme.smooth_k or k is not None, FUNCTION, "smooth_k", wanted, scheme.smooth_k)
    expect(k_norm is None or k is not None, FUNCTION, "k_norm", "None without k", "a tensor")
    longest = checked_lengths(FUNCTION, "q", q, cu_seqlens, max_seqlen)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _expect_tensor(name, weight, q, (q.shape[-1],))
    _check_rotary(q, cos, sin, positions, cu_seqlens, longest)
    return longest, scheme


def _sides(q, k, v, num_heads_q) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, k and v, checked, and taken apart where they are one tensor."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if name == "q" or x is not None:
            expect_local(FUNCTION, name, x)
            expect(x.ndim >= 3, FUNCTION, f"{name}.ndim", "3 or 4", x.ndim)
    if q.dtype not in SIXTEEN_BIT:
        raise type_error(FUNCTION, "q.dtype", f"one of {SIXTEEN_BIT}", q.dtype)
    if num_heads_q is not None:
        expect(k is v is None, FUNCTION, "num_heads_q", "None with k and v", num_heads_q)
        heads, rest = integer(FUNCTION, "num_heads_q", num_heads_q), q.shape[-2]
        fits = 0 < heads < rest and (rest - heads) % 2 == 0
        wanted = "such that an even number of {} heads is left for k and v"
        expect(fits, FUNCTION, "num_heads_q", wanted, heads, rest)
        q, k, v = q.split((heads, (rest - heads) // 2, (rest - heads) // 2), -2)
    if (k is None) != (v is None):
        raise type_error(FUNCTION, "v" if v is None else "k", "given with the other", None)
    if k is not None:
        heads, rows = k.shape[-2], tuple(q.shape[:-2])
        _expect_tensor("k", k, q, (*rows, heads, q.shape[-1]), (q.dtype,))
        _expect_tensor("v", v, q, (*rows, heads, v.shape[-1]), (q.dtype,))
        divides = heads > 0 and q.shape[-2] % heads == 0
        expect(divides, FUNCTION, "k.shape[-2]", "a divisor of {}", heads, q.shape[-2])
    expect(q.shape[-1] >= 1, FUNCTION, "q.shape[-1]", "at least 1", q.shape[-1])
    return q, k, v


def _expect_tensor(
    name: str,
    x: object,
    q: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *SIXTEEN_BIT),
) -> None:
    expect_local(FUNCTION, name, x)
    if x.dtype not in dtypes:
        raise type_error(FUNCTION, f"{name}.dtype", f"one of {dtypes}", x.dtype)
    expect(tuple(x.shape) == shape, FUNCTION, f"{name}.shape", shape, tuple(x.shape))
    check_device(FUNCTION, name, x, q.device, "q")


def _check_rotary(q, cos, sin, positions, cu_seqlens, longest: int | None) -> None:
    if (cos is None) != (sin is None):
        name = "rotary_sin" if sin is None else "rotary_cos"
        raise type_error(FUNCTION, name, "given with the other", None)
    if cos is None:
        expect(positions is None, FUNCTION, "positions", "None without rotary_cos", "a tensor")
        return
    shape = tuple(cos.shape) if isinstance(cos, Tensor) and cos.ndim == 2 else (0, 0)
    _expect_tensor("rotary_cos", cos, q, shape)
    _expect_tensor("rotary_sin", sin, q, shape, (cos.dtype,))
    half, most = shape[1], q.shape[-1] // 2
    fits = 1 <= half <= most
    expect(fits, FUNCTION, "rotary_cos.shape[1]", "between 1 and {}", half, most)
    if positions is not None:
        _expect_tensor("positions", positions, q, q.shape[:-2], (torch.int32, torch.int64))
        if is_checked(q.device) and not is_traced() and positions.numel():
            low, high = (int(x) for x in positions.aminmax())
            fits = low >= 0 and high < shape[0]
            wanted = f"between 0 and {shape[0] - 1}, rows of rotary_cos"
            expect(fits, FUNCTION, "positions", wanted, f"{low} to {high}")
        return
    needed = q.shape[1] if cu_seqlens is None else longest
    fits, wanted = needed <= shape[0], ">= {}, the longest sequence"
    expect(fits, FUNCTION, "rotary_cos.shape[0]", wanted, shape[0], needed)
