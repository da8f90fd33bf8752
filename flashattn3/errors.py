"""The errors that callers can get, and the message format that they share."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """The problem is valid, but no backend (or not the named one) supports it."""


LONGEST = 60  # characters of a value in a message


def complaint(function: str, what: str, wanted: object, got: object) -> str:
    """``flash_attn_func: k.dtype must be torch.float16, got torch.bfloat16``."""
    return f"{function}: {what} must be {wanted}, got {got}"


def shown(value: object) -> str:
    """Format a value for a message: shortened, with its type; a tensor as shape and dtype."""
    kind = type(value).__name__
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        return f"{kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
    try:
        text = repr(value)
    except Exception:  # repr of a foreign class, or of an int with too many digits
        return f"a value of type {kind}"
    return f"{text if len(text) <= LONGEST else text[:LONGEST] + '...'} ({kind})"


def value_error(function: str, what: str, wanted: object, got: object) -> ValueError:
    return ValueError(complaint(function, what, wanted, got))


def type_error(function: str, what: str, wanted: object, got: object) -> TypeError:
    return TypeError(complaint(function, what, wanted, got))


def expect(
    condition: bool, function: str, what: str, wanted: object, got: object, *sizes: object
) -> None:
    """sizes: fill the braces of ``wanted``. In an f-string torch.compile makes a constant of a
    symbolic size, and each further size is compiled again."""
    if not condition:
        raise value_error(function, what, str(wanted).format(*sizes) if sizes else wanted, got)
