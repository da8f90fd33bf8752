"""Calls that are like an earlier one, as each step of a generating model is like the step before.

An operator of the backend finds their launch from the tensors, in less time than Python takes to
read them: nothing of such a call is checked or planned in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..backends.base import CachedLaunch, CachedOperators
from ..call.cached import DecodeOptions, lse_shape, one_q_position


class Further(NamedTuple):
    """Arguments of a call that most calls lack. max_seqlen_q: -1: the number of rows."""

    out: Tensor | None = None
    max_seqlen_q: int = -1
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None


class NewTokens(NamedTuple):
    """Arguments of a call that appends."""

    k: Tensor
    v: Tensor
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool


class CachedLaunches:
    """The launches of calls with the same options. The backend's operators keep them under the
    number; a call whose launch they do not have is checked in Python.

    operators: None before the first launch.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.operators: CachedOperators | None = None

    def keep(self, launch: CachedLaunch, seqlen_q: int) -> None:
        """Give the operators a launch for calls with this number of queries, if they take them."""
        with _disable_current_modes():
            self.operators = launch.keep(self.number, seqlen_q) or self.operators


_numbers = count(1)


@lru_cache(maxsize=4096)
def launches_of(options: DecodeOptions) -> CachedLaunches:
    return CachedLaunches()


def run_planned(
    options: DecodeOptions,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    seqlen: int | None,
    further: Further | None,
    new: NewTokens | None,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run a call that nothing watches; None if it must be checked, because no launch is kept for
    such a call or because the tensors are invalid."""
    launches = launches_of(options)
    operators, number = launches.operators, launches.number
    if operators is None:
        return None
    if seqlen is None:
        seqlen = -1
    elif seqlen < 0:
        return None
    try:
        if torch.is_grad_enabled() and (
            q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
        ):
            return None
        if further is new is None:
            operator, more = operators.decode, ()
        else:
            operator, more = _with_more(operators, options, further or _NOTHING, new)
            if operator is None:
                return None
        lse = q.new_empty(lse_shape(q), dtype=torch.float32) if options.return_lse else None
        out = operator(number, q, k_cache, v_cache, cache_seqlens, page_table, seqlen, lse, *more)
    except (AttributeError, RuntimeError, ValueError):
        return None  # the checks name the argument, or the launch fails again
    return out if lse is None or out is None else (out, lse)


_NOTHING = Further()


def _with_more(
    operators: CachedOperators, options: DecodeOptions, further: Further, new: NewTokens | None
) -> tuple[Callable[..., Tensor | None] | None, tuple]:
    """The operator of a call with more arguments, and these. None if Python has to check the call:
    torch sees the operators of other classes of tensors."""
    out = further.out
    if not (out is None or type(out) is Tensor) or _need_gradient(out):
        return None, ()
    if new is None:
        return operators.decode_with, further
    k, v, _, cos, sin, _ = new
    if not type(k) is type(v) is Tensor or _need_gradient(k, v, cos, sin):
        return None, ()
    return operators.append, (*further, *new, one_q_position(options))


def _need_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False
