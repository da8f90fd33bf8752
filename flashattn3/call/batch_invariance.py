"""Batch-invariant mode: split_tokens of every call that names none."""

from __future__ import annotations

import os
from contextvars import ContextVar

import torch

from ..errors import UnsupportedError, value_error
from .arguments import boolean, integer

SPAN_UNIT = 128  # every kernel's n_block of keys divides it
DEFAULT_SPAN = 1024
VARIABLE = "FLASHATTN3_BATCH_INVARIANT"
WANTED = f"None or a multiple of {SPAN_UNIT}"


def is_span(tokens: int | None) -> bool:
    return tokens is None or (tokens > 0 and tokens % SPAN_UNIT == 0)


def _of_environment(value: str) -> int | None:
    """The split_tokens of all calls: 0 or empty: none, 1: the default, else the number."""
    known = {"": None, "0": None, "1": DEFAULT_SPAN}
    if value in known:
        return known[value]
    if value.isdecimal() and is_span(int(value)):
        return int(value)
    raise value_error("flashattn3", VARIABLE, f"0, 1 or a multiple of {SPAN_UNIT}", repr(value))


FROM_ENVIRONMENT = _of_environment(os.environ.get(VARIABLE, ""))
span_of_all_calls: ContextVar[int | None] = ContextVar("flashattn3_span", default=FROM_ENVIRONMENT)


def span_in_force(function: str, name: str, value: object) -> int | None:
    """split_tokens of a call: its own, else that of batch-invariant mode. While torch.compile
    traces, which cannot trace a ContextVar, the call's own: its operator asks for the mode when it
    runs."""
    if value is not None:
        return integer(function, name, value)
    return None if torch.compiler.is_compiling() else span_of_all_calls.get()


class use_batch_invariant_mode:
    """Give every call of this thread (or task) that names no split_tokens this one, from now on or,
    as a context manager, within the block, as torch.set_grad_enabled does.

    The bits of a token's out and lse then depend on its query, its keys and split_tokens alone
    (docs/inference.md). A call that cannot promise it raises an error that names the argument: a
    ValueError for num_splits, an UnsupportedError for 8 bits without a cache, alibi_slopes, bias,
    mask, return_max_logit and seqused_q. Gradients are computed, but promise nothing. For a
    compiled function the mode around its run counts. FLASHATTN3_BATCH_INVARIANT=1, or =n for
    split_tokens=n, is this mode in every thread of a process.

    Args:
        enabled: False: calls that name no split_tokens have none.
        split_tokens: a multiple of 128.

    Raises: TypeError, ValueError: split_tokens is invalid; UnsupportedError: torch.compile traces.
    """

    def __init__(self, enabled: bool = True, *, split_tokens: int = DEFAULT_SPAN) -> None:
        function = "use_batch_invariant_mode"
        enabled = boolean(function, "enabled", enabled)
        tokens = integer(function, "split_tokens", split_tokens)
        if not is_span(tokens):
            wanted = f"a multiple of {SPAN_UNIT}"
            raise value_error(function, "split_tokens", wanted, tokens)
        if torch.compiler.is_compiling():
            raise UnsupportedError(f"{function}: call it around the compiled function, not inside")
        self._token = span_of_all_calls.set(tokens if enabled else None)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: object) -> None:
        span_of_all_calls.reset(self._token)
