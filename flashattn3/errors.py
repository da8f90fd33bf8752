"""The errors a caller can meet, and the one sentence they are all built with."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """The problem is legal, but no backend (or not the named one) takes it."""


def complaint(function: str, what: str, wanted: object, got: object) -> str:
    """``flash_attn_func: k.dtype must be torch.float16, got torch.bfloat16``."""
    return f"{function}: {what} must be {wanted}, got {got}"


def value_error(function: str, what: str, wanted: object, got: object) -> ValueError:
    return ValueError(complaint(function, what, wanted, got))


def type_error(function: str, what: str, wanted: object, got: object) -> TypeError:
    return TypeError(complaint(function, what, wanted, got))


def expect(condition: bool, function: str, what: str, wanted: object, got: object) -> None:
    if not condition:
        raise value_error(function, what, wanted, got)
