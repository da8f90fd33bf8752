"""The launch of the Hopper kernel that normalizes, rotates and quantizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.arguments import integer, length
from ..call.dtypes import INT8
from ..call.hadamard import kept_signs, signs
from ..call.value_checks import is_checked
from . import dispatch
from .embedding import RotaryCall
from .embedding_checks import FUNCTION, Scheme, scheme_of

_PLAIN = frozenset((int, float, bool, torch.dtype, type(None)))
# Data and descale of q, k and v, those of k and v None with q alone.
Found = tuple[Tensor | None, ...]


class _Numbers(NamedTuple):
    """The operator's arguments that are no tensors. num_heads_q: -1: q, k and v are tensors of
    their own, or q is alone. max_seqlen: -1: dense. together: all results in one allocation."""

    num_heads_q: int
    interleaved: bool
    eps: float
    block: int
    max_seqlen: int
    int8: bool
    together: bool


class _Known(NamedTuple):
    """What the operator gets besides the tensors of a call. signs: see ``call/hadamard.py``."""

    scheme: Scheme
    signs: Tensor | None
    numbers: _Numbers


def rotate_and_quantize_at_once(
    tensors: tuple, num_heads_q: object, max_seqlen: object, options: tuple, differentiably: bool
) -> tuple[Scheme, Found] | tuple[None, None]:
    """The scheme and the results, with no mean of k, of a call that nothing watches, whose tensors
    the operator checks. None where Python has to check the call or to convert a tensor. The
    arguments are those of ``checked`` and whether a tensor needs a gradient."""
    q, k, v, cos, sin, positions, q_norm, k_norm, cu_seqlens = tensors
    if not (type(q) is Tensor and (k is None or type(k) is type(v) is Tensor)):
        return None, None
    try:
        known = _known(q.device, q.size(-1), num_heads_q, max_seqlen, *options)
        if known is None:
            return None, None
        scheme, of_rotation, numbers = known
        of_call = q, k, v, cos, sin, of_rotation, *numbers
        operator, of_further = _operators()
        if not positions is q_norm is k_norm is cu_seqlens is None:
            operator, of_call = of_further, (*of_call, positions, q_norm, k_norm, cu_seqlens, None)
        if not differentiably:
            found = operator(*of_call)
        else:  # torch warns where autograd meets an operator without a gradient
            with torch._C._AutoDispatchBelowAutograd():
                found = operator(*of_call)
    except (IndexError, RuntimeError, TypeError):
        return None, None  # the checks name the argument, or the launch fails again
    return (None, None) if found[0] is None else (scheme, (*found, None))


@lru_cache(maxsize=4096, typed=True)
def _known(
    device: torch.device, head_dim: int, num_heads_q: object, max_seqlen: object, *options: object
) -> _Known | None:
    """None for options that are wrong or need more than one launch, and where no kernel runs.
    TypeError, which is not kept, for options that are no plain values, and where a graph is
    captured that would own the signs."""
    given = num_heads_q, max_seqlen, *options
    if not _PLAIN.issuperset(map(type, given)):
        raise TypeError
    if is_checked(device) or not dispatch.runs_on("hopper", device.type, device.index):
        return None
    try:
        scheme = scheme_of(head_dim, *options)
        heads = -1 if num_heads_q is None else integer(FUNCTION, "num_heads_q", num_heads_q)
        longest = -1 if max_seqlen is None else length(FUNCTION, "max_seqlen", max_seqlen)
    except (TypeError, ValueError):
        return None
    if scheme.smooth_k or longest is None or (num_heads_q is not None and heads < 1):
        return None
    of_rotation = kept_signs(head_dim, device) if scheme.hadamard else None
    if scheme.hadamard and of_rotation is None:
        raise TypeError
    how = scheme.interleaved, scheme.eps, scheme.block
    numbers = _Numbers(heads, *how, longest, scheme.qk_dtype == INT8, together=True)
    return _Known(scheme, of_rotation, numbers)


@cache
def _operators() -> tuple[Callable, Callable]:
    """That of calls without positions, norms, cu_seqlens and a mean of k, and that of all."""
    operator = torch.ops.flashattn3_hopper.rotate_and_quantize
    return operator.default._op, operator.further._op


def rotate_and_quantize(call: RotaryCall) -> Found | None:
    """The same of a call that is checked, maybe for a custom operator, whose results share no
    memory. None for tensors that the kernel does not read."""
    q, k, v, embedding, (cu_seqlens, max_seqlen), block, hadamard, qk_dtype, mean = call
    q_norm, k_norm, cos, sin, positions, interleaved, eps = embedding
    longest = -1 if max_seqlen is None else max_seqlen
    _, operator = _operators()
    cos, sin, positions, cu_seqlens = (
        None if x is None else x.contiguous() for x in (cos, sin, positions, cu_seqlens)
    )
    found = operator(
        *(q, k, v if v is None or v.stride(-1) == 1 else v.contiguous(), cos, sin),
        signs(q.shape[-1], q.device) if hadamard else None,
        *_Numbers(-1, interleaved, eps, block, longest, qk_dtype == INT8, together=False),
        positions,
        *(None if weight is None else weight.float().contiguous() for weight in (q_norm, k_norm)),
        *(cu_seqlens, mean),
    )
    return None if found[0] is None else found
