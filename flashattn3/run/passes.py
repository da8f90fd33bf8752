"""The two passes of attention as functions of their own, for callers who join parts themselves
(ring attention, context parallelism, FPDT): no autograd, out and lse are given and returned.

They run what the differentiable functions run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.arguments import expect_strided
from ..call.block_scaled import BlockScaled
from ..call.dtypes import EIGHT_BIT
from ..call.fields import Options
from ..call.operands import (
    LEARNED,
    NO_DESCALES,
    NUM_TENSORS,
    Tensors,
    check_tensor_types,
    data_of,
    normalised,
    with_keys_in_rows,
)
from ..call.problem import check
from ..call.tensor_checks import check_given
from ..errors import UnsupportedError, complaint, expect, shown
from ..modes import refuse_tangents
from .derivative import differentiated
from .operators import forward_watched, operator_is_watched, plan_of, returned


def forward_pass(
    tensors: Tensors, options: Options, descales: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Compute out, lse and max_logit of ``flash_attn_forward``."""
    options = options._replace(return_lse=True)
    tensors, options = _checked(tensors, options, descales)
    return returned(forward_watched(tensors, options), options)


def backward_pass(
    tensors: Tensors,
    options: Options,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    sums: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``flash_attn_backward``, and add them to the sums that are given."""
    function, sides = options.function, tensors[:3]
    tensors, options = _checked(tensors, options)
    dtype = data_of(tensors.q).dtype
    if dtype in EIGHT_BIT:
        sentence = complaint(function, "q.dtype", "of 16 bits or more", dtype)
        raise UnsupportedError(f"{sentence}: there is no gradient through 8 bits")
    watched = operator_is_watched(*tensors[:3])
    (check if watched else plan_of)(tensors, options)
    _check_passed(tensors, options, dout=dout, out=out, lse=lse, dlse=dlse)
    for name, given, side in zip(("dq", "dk", "dv"), sums, sides, strict=True):
        _check_sum(function, name, given, side)
    values, call = differentiated(tensors, options, with_dbias=tensors.bias is not None)
    dq, dk, dv, *others = call.backward(dout, dlse, out, lse, *values)
    # Keys without cu_seqlens_k were flattened to rows.
    shaped = (x.view(side.shape) for x, side in zip((dq, dk, dv), sides, strict=True))
    sums = (x if given is None else given.add_(x) for x, given in zip(shaped, sums, strict=True))
    learned = [tensors[i] for i in LEARNED]  # the compiler traces no itemgetter
    given = zip(others, learned, strict=False)
    return (*sums, *(x for x, of in given if of is not None))


def _checked(
    tensors: Tensors, options: Options, descales: tuple[Tensor | None, ...] = NO_DESCALES
) -> tuple[Tensors, Options]:
    """The normalised tensors of a call that needs no gradient, and its options."""
    function, varlen = options.function, tensors.cu_seqlens_q is not None
    if varlen:
        tensors, options = with_keys_in_rows(tensors, options)
    else:
        lengths = {"max_seqlen_q": options.max_seqlen_q, "max_seqlen_k": options.max_seqlen_k}
        for name, value in {"cu_seqlens_k": tensors.cu_seqlens_k, **lengths}.items():
            expect(value is None, function, name, "None without cu_seqlens_q", shown(value))
    for name, x in zip("qkv", tensors[:3], strict=True):
        if isinstance(x, BlockScaled) and x.gradient is not None:
            _refuse_gradients(function, **{name: x.gradient})
    tensors = normalised(function, tensors, descales)
    check_tensor_types(function, tensors, varlen)
    passed = dict(zip("qkv", map(data_of, tensors[:3]), strict=True))
    scores = zip(Tensors._fields[NUM_TENSORS:], tensors[NUM_TENSORS:], strict=True)
    passed |= {name: x for name, x in scores if x is not None}
    _refuse_gradients(function, **passed)
    return tensors, options


def _refuse_gradients(function: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{complaint(function, f'{name}.requires_grad', False, True)}: it computes one "
                "pass, without autograd; call it under torch.no_grad() or in a "
                "torch.autograd.Function, or use flash_attn_func"
            )
    refuse_tangents(function, *tensors.values())


def _check_passed(tensors: Tensors, options: Options, **given: Tensor | None) -> None:
    """Raise unless dout, out, lse and dlse, which may be None, are tensors of this call."""
    q, _, v = tensors[:3]
    rows = (*q.shape[:-1], v.shape[-1]), q.dtype
    of_rows = (*q.shape[:-3], q.shape[-2], q.shape[-3]), _dtype_of_sums(q)
    wanted = {"dout": rows, "out": rows, "lse": of_rows, "dlse": of_rows}
    for name, (shape, dtype) in wanted.items():
        if name != "dlse" or given[name] is not None:
            _check_tensor(options.function, name, given[name], q, shape, dtype)


def _check_sum(function: str, name: str, given: Tensor | None, side: Tensor) -> None:
    """Raise unless a gradient of ``side`` can be added to the given tensor."""
    if given is None:
        return
    _check_tensor(function, name, given, side, tuple(side.shape), _dtype_of_sums(side))
    steps = [step for size, step in zip(given.shape, given.stride(), strict=True) if size > 1]
    wanted = "without a stride of 0: every element is written"
    expect(0 not in steps, function, f"{name}.stride", wanted, tuple(given.stride()))


def _check_tensor(
    function: str, name: str, x: Tensor, q: Tensor, shape: tuple, dtype: torch.dtype
) -> None:
    expect_strided(function, name, x)
    check_given(function, name, x, shape, dtype, q.device, "q")
    _refuse_gradients(function, **{name: x})


def _dtype_of_sums(x: Tensor) -> torch.dtype:
    """The dtype of lse and of sums of gradients."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
