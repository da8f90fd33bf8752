"""Which backend a call must run on: its own argument, ``use_backend``, the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..errors import expect, shown, type_error

# The names of the backends, in the order in which automatic dispatch tries them.
NAMES = ("hopper", "triton", "reference")
ANY = ""  # Options.backend of a call that any backend may run
# Backend of calls without a backend argument: from ``use_backend``, else from the environment.
FROM_ENVIRONMENT = os.environ.get("FLASHATTN3_BACKEND") or None
named_backend: ContextVar[str | None] = ContextVar("flashattn3_backend", default=FROM_ENVIRONMENT)

# The same while torch.compile traces, because it cannot trace a ContextVar.
traced_backends: list[str] = []


def backend_in_force(function: str, name: str, backend: object) -> str | None:
    """The backend that a call must run on: its backend argument, else that of ``use_backend``, else
    ANY.

    None while torch.compile traces outside ``use_backend``: the operator then chooses in every run.
    """
    if backend is not None:
        return known_backend(function, name, backend)
    if torch.compiler.is_compiling():
        return traced_backends[-1] if traced_backends else None
    return named_backend.get() or ANY


def known_backend(function: str, what: str, name: object) -> str:
    """Return the name; raise if no backend has it."""
    if not isinstance(name, str):
        raise type_error(function, what, f"one of {NAMES}", shown(name))
    expect(name in NAMES, function, what, f"one of {NAMES}", repr(name))
    return name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, every call in this thread (or task) that names no backend runs on this one.

    It never falls back: a call that the backend does not take raises UnsupportedError. For a
    compiled function the block around its run counts, not the one around its compilation; a block
    inside it counts for the calls there. A gradient runs on the backend of its forward; that of a
    compiled function whose block is around its run may run on another one, since it is a call of
    its own, on a GPU in a thread of autograd, in which only FLASHATTN3_BACKEND counts.
    """
    known_backend("use_backend", "name", name)
    if torch.compiler.is_compiling():
        traced_backends.append(name)
        try:
            yield
        finally:
            traced_backends.pop()
        return
    token = named_backend.set(name)
    try:
        yield
    finally:
        named_backend.reset(token)
