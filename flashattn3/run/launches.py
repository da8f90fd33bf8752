"""The launches of calls like an earlier one, as each step of a generating model is like the step
before: an operator of the backend finds a call's launch from its tensors, in less time than Python
takes to read them. Nothing of such a call is checked or planned in Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from operator import attrgetter
from threading import Lock, local
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..call.cached import DecodeOptions, lse_shape, one_q_position
from ..call.dtypes import EIGHT_BIT
from ..modes import has_autocast
from .aten_node import registered_nodes

if TYPE_CHECKING:
    from ..backends.base import CachedOperators, PassOperators

# The node replaces a kernel for tensors on a GPU; on others torch's own would run.
has_node = attrgetter("is_cuda")


class LaunchCache:
    """The launches of calls with the same options, and the same axes. The backend's operators keep
    them under the number of the cache; a call whose launch they do not have is checked in Python.

    operators: None before the first launch. nodes: attention with an autograd node in C++, of plain
        calls and of those with one tensor that changes scores, or None.
    of_mask: the tensors of the only mask of these calls, which the operators keep beside the
        launches until ``forget``; empty without one.
    in_python: compute both passes of a call of the node whose launch the operators do not have,
        from the cache and the tensors of the pass, and give them the launch.
    """

    def __init__(
        self,
        options,
        bhsd: bool = False,
        in_python: tuple[Callable, ...] = (),
        of_mask: tuple[Tensor, ...] = (),
    ) -> None:
        self.options, self.bhsd, self.in_python = options, bhsd, in_python
        self.of_mask = of_mask
        self.number = next(_numbers)
        self.operators: PassOperators | CachedOperators | None = None
        self.nodes: tuple[Callable | None, ...] = None, None

    def keep(self, keep: Callable, *call: object) -> None:
        """Give the operators a launch for calls like this one. keep, call: of ``Launch.keep``."""
        with _disable_current_modes():
            operators = keep(self.number, *call)
        if operators.namespace is not None and len(_with_node) < MOST:
            _with_node[self.number] = self
            self.nodes = nodes_of(operators)
        self.operators = operators

    def forget(self) -> None:
        """Drop the launches of a mask that no call and no gradient needs any more."""
        _with_node.pop(self.number, None)
        if self.operators is not None:
            self.operators.forget(self.number)

    def run(self, operator: Callable, *arguments) -> tuple[Tensor | None, ...] | None:
        """Compute a pass, not differentiably. None if Python has to: there is no launch, or it
        failed and will again. operator: of ``operators``. arguments: behind the number."""
        try:
            results = operator(self.number, *arguments)
        except RuntimeError:
            return None
        return None if results[0] is None else results

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Tensor | None = None,
        index: int | None = None,
        life: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Compute out and lse with a node; only out is differentiable. None if Python has to: there
        is no node. score: a tensor that changes scores; index: its place among these. life: a
        tensor without elements that the node of a call without score saves."""
        of_sides, of_score = self.nodes
        run = of_sides if score is None else of_score
        if run is None or not has_node(q):
            return None
        try:
            if score is not None:
                return run(q, k, v, score, self.number, scale=index)
            if life is not None:
                return run(q, k, v, self.number, attn_mask=life)
            return run(q, k, v, self.number)
        except NotImplementedError:  # of the dispatcher: the operator takes no tensor of a layout
            return None
        except RuntimeError as raised:  # hooks on saved tensors have seen the call: no second try
            error = _failed.__dict__.pop("error", None)
            if error is None or _text(error) not in str(raised):  # of a hook, or of the kernel
                raise
            raise error from None


_numbers = count(1)  # torch's own calls of the node have the number 0
MOST = 4096  # caches with a node: gradients may ask for any of them, so that none is dropped
_with_node: dict[int, LaunchCache] = {}
_failed = local()  # error: what forward_in_python raised in this thread
_registers = Lock()


def forward_in_python(number: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backend's operator of this name. Its caller in C++ loses exceptions."""
    cache = _with_node[number]
    try:
        return (*cache.in_python[0](cache, *tensors), None)
    except BaseException as error:
        _failed.error = error
        return None, None, _message(error)


def backward_in_python(
    number: int, dout: Tensor, out: Tensor, lse: Tensor, *tensors: object
) -> tuple[Tensor | None, ...]:
    """The same of the gradient. Autograd runs it in a thread of its own, so that its caller gets
    the message alone."""
    cache = _with_node[number]
    try:
        return (*cache.in_python[1](cache, dout, out, lse, *tensors), None)
    except BaseException as error:
        return None, None, None, None, _message(error)


def nodes_of(operators: PassOperators) -> tuple[Callable | None, ...]:
    """The attention with the autograd nodes of these operators, registered in the first call."""
    with _registers:  # threads may make their first calls at once
        return registered_nodes(operators.namespace, forward_in_python, backward_in_python)


def _message(error: BaseException) -> Tensor:
    return torch.frombuffer(bytearray(_text(error).encode()), dtype=torch.uint8)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class Further(NamedTuple):
    """Arguments of a cached call that most calls lack. max_seqlen_q: -1: the number of rows."""

    out: Tensor | None = None
    max_seqlen_q: int = -1
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    sinks: Tensor | None = None
    scheduler_metadata: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class NewTokens(NamedTuple):
    """Arguments of a cached call that appends."""

    k: Tensor
    v: Tensor
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool


cached_launch_cache = lru_cache(maxsize=4096)(LaunchCache)  # of DecodeOptions


def attend_kept(
    options: DecodeOptions,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    seqlen: int | None,
    further: Further | None,
    new: NewTokens | None,
    prefix: tuple[Tensor, Tensor | None, int] | tuple[()] = (),
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run a cached call that nothing watches; None if it must be checked, because no launch is kept
    for such a call or because the tensors are invalid. prefix: of ``Prefix.arguments``."""
    cache = cached_launch_cache(options)
    operators, number = cache.operators, cache.number
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
        if has_autocast() and k_cache.dtype in EIGHT_BIT:  # q follows autocast, not the cache
            return None
        if further is new is None and not prefix:
            operator, more = operators.decode, ()
        else:
            operator, more = _with_more(operators, options, further or _NOTHING, new, prefix)
            if operator is None:
                return None
        lse = q.new_empty(lse_shape(q), dtype=torch.float32) if options.return_lse else None
        out = operator(number, q, k_cache, v_cache, cache_seqlens, page_table, seqlen, lse, *more)
    except (AttributeError, IndexError, RuntimeError, ValueError):
        return None  # the checks name the argument, or the launch fails again
    return out if lse is None or out is None else (out, lse)


_NOTHING = Further()
_DENSE = Tensor, torch.nn.Parameter


def _with_more(
    operators: CachedOperators,
    options: DecodeOptions,
    further: Further,
    new: NewTokens | None,
    prefix: tuple,
) -> tuple[Callable[..., Tensor | None] | None, tuple]:
    """The operator of a call with more arguments, and these. None if Python has to check the call:
    torch sees the operators of other classes of tensors."""
    out = further.out
    sinks = further.sinks
    if not (out is None or type(out) is Tensor) or _need_gradient(out, sinks):
        return None, ()
    if sinks is not None and not (
        type(sinks) in _DENSE and sinks.dtype is torch.float32 and sinks.is_contiguous()
    ):  # others are copied
        return None, ()
    *first, k_descale, v_descale = further
    if not (k_descale is v_descale is None):
        for x in (k_descale, v_descale):
            if not (x is None or type(x) in _DENSE) or _need_gradient(x):
                return None, ()
        if new is not None:
            return None, ()
    if new is None:
        return operators.decode_with, further + prefix
    k, v, _, cos, sin, _ = new
    if prefix and cos is not None:  # is refused
        return None, ()
    if not type(k) is type(v) is Tensor or _need_gradient(k, v, cos, sin):
        return None, ()
    return operators.append, (*first, *new, one_q_position(options), *prefix)


def _need_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False
