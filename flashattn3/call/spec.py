"""The description of a call: every argument that is not a tensor stands here once.

From FIELDS follow the conversion of arguments, ``Options``, the checks of single fields, the schema
of the operators, the list of hints and the fields that a ``Problem`` passes on to the backends. The
public signatures repeat names and defaults for readers and type checkers; a test compares.
"""

from __future__ import annotations

import math
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from inspect import signature

import torch
from torch import Tensor

from ..dispatch.selection import backend_in_force, named_backend
from ..errors import UnsupportedError, expect, shown, type_error
from .arguments import boolean, integer, length, real, window

MAX_SPLITS = 256  # as in FlashAttention-3
FA2_ORDER = (
    "; after q, k and v FlashAttention-2 has dropout_p, softmax_scale and causal, FlashAttention-3 "
    "and this function softmax_scale, causal and qv: pass them by name"
)
Convert = Callable[[str, str, object], object]


@dataclass(frozen=True)
class Field:
    """One argument of the public functions.

    type: in the operators' schema; "" if only the default is supported, and nothing is passed on.
    convert: (function, name, value) → a plain value; raises TypeError for the wrong kind.
    wanted, legal: the values that are allowed, in words and as a predicate; None: all.
    hint: it changes no result; a backend without a use for it says so.
    to_backend: a ``Problem`` has it for the backends; other fields end in its lengths and masks.
    parts: names of the fields of ``Options`` that a pair becomes; a flag with ``parts`` of one name
        is another name of that flag.
    """

    name: str
    type: str
    default: object
    convert: Convert
    wanted: str = ""
    legal: Callable[[object], bool] | None = None
    hint: bool = False
    to_backend: bool = False
    parts: tuple[str, ...] = ()

    def is_asked(self, value: object) -> bool:
        """Whether the value of a hint asks for something: not None, nor at most the default."""
        return value is not None and value > (self.default or 0)


def _or_none(convert: Convert) -> Convert:
    return lambda function, name, value: None if value is None else convert(function, name, value)


def _scale(function: str, name: str, value: object) -> float:
    scale = real(function, name, value)
    if scale == 0 and not torch.compiler.is_compiling():
        _warn_of_zero_scale(function)
    return scale


@cache
def _warn_of_zero_scale(function: str) -> None:
    """Once for each function."""
    sentence = f"{function}: softmax_scale is 0, so all keys weigh the same{FA2_ORDER}"
    warnings.warn(sentence, stacklevel=7)


def _causal(function: str, name: str, value: object) -> bool:
    if value is None:
        raise type_error(function, name, "a bool", f"None{FA2_ORDER}")
    return boolean(function, name, value)


def _dtype(function: str, name: str, value: object) -> torch.dtype | None:
    if not (value is None or isinstance(value, torch.dtype)):
        raise type_error(function, name, "a torch.dtype or None", shown(value))
    return value


def _none_for_qv(function: str, name: str, value: object) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise type_error(function, name, None, f"{shown(value)}{FA2_ORDER}")
    return value


def _as_given(function: str, name: str, value: object) -> object:
    return value


def _is_finite(value: float) -> bool:
    return not isinstance(value, float) or abs(value) < math.inf


FIELDS = (
    Field("max_seqlen_q", "SymInt?", None, length),
    Field("max_seqlen_k", "SymInt?", None, length),
    Field(
        "softmax_scale", "float?", None, _or_none(_scale), to_backend=True,
        wanted="finite", legal=lambda scale: scale is None or _is_finite(scale),
    ),
    Field("causal", "bool", False, _causal),
    Field(
        "window_size", "SymInt", (-1, -1), window, to_backend=True,
        parts=("window_left", "window_right"),
    ),
    Field(
        "softcap", "float", 0.0, real, to_backend=True,
        wanted="finite and >= 0", legal=lambda cap: _is_finite(cap) and cap >= 0,
    ),
    Field(
        "num_splits", "int", 1, integer, hint=True, to_backend=True,
        wanted=f"at most {MAX_SPLITS}", legal=lambda splits: splits <= MAX_SPLITS,
    ),
    Field("pack_gqa", "bool?", None, _or_none(boolean), hint=True, to_backend=True),
    Field("deterministic", "bool", False, boolean, to_backend=True),
    Field(
        "sm_margin", "int", 0, integer, hint=True, to_backend=True,
        wanted=">= 0", legal=lambda sms: sms >= 0,
    ),
    Field("use_fast_accum", "bool", False, boolean, hint=True, to_backend=True),
    Field("return_lse", "bool", False, boolean, to_backend=True),
    Field("return_attn_probs", "", False, boolean, parts=("return_lse",)),
    Field("backend", "str?", None, backend_in_force, to_backend=True),
    Field("out_dtype", "ScalarType?", None, _dtype, to_backend=True),
    Field("qv", "", None, _none_for_qv),
    Field("attention_chunk", "", 0, integer),
    Field("dropout_p", "", 0, real),
    Field("alibi_slopes", "", None, _as_given),
)  # fmt: skip
FIELD = {field.name: field for field in FIELDS}


def _spread(field: Field, of_pair: object, of_other: object) -> tuple:
    """The values of a field's parts, or of the field itself."""
    return tuple(of_pair) if field.parts else (of_other,)


_STORED = tuple(field for field in FIELDS if field.type)
_NAMES = tuple(name for field in _STORED for name in _spread(field, field.parts, field.name))
_DEFAULTS = tuple(x for field in _STORED for x in _spread(field, field.default, field.default))

# The options of a call in plain values: FIELDS that have a type, and the public function that was
# called, for errors. max_seqlen None: not known on the host, then all tokens are the bound.
Options = namedtuple("Options", (*_NAMES, "function"), defaults=(*_DEFAULTS, "flash_attn_func"))

SCHEMA = ", ".join(
    f"{field.type} {name}" for field in _STORED for name in _spread(field, field.parts, field.name)
)
SCHEMA += ", str function"
HINTS = tuple(field for field in FIELDS if field.hint)
# Names of the options that a Problem has for the backends.
TO_BACKEND = tuple(
    name
    for field in _STORED
    if field.to_backend
    for name in _spread(field, field.parts, field.name)
)


def check_options(options: Options) -> None:
    """Raise ValueError for the first field with a value that is not allowed."""
    for field in FIELDS:
        if field.legal is not None:
            value = getattr(options, field.name)
            expect(field.legal(value), options.function, field.name, field.wanted, value)


def convert(function: str, given: dict[str, object]) -> Options:
    """The options of a call. given: arguments by name; the others have their defaults."""
    found: dict[str, object] = {}
    for field in FIELDS:
        name = field.name
        if name not in given:  # Options has the default, which torch.compile would guard here
            continue
        value = field.convert(function, name, given[name])
        if not field.type and not field.parts:
            if value is not None if field.default is None else value != field.default:
                refuse(function, name, field.default, given[name])
        elif not field.parts:
            found[name] = value
        elif len(field.parts) == 1:
            found[field.parts[0]] = found.get(field.parts[0], False) or value
        else:
            found.update(zip(field.parts, value, strict=True))
    return Options(**found, function=function)


def refuse(function: str, name: str, default: object, value: object) -> None:
    """Raise UnsupportedError for an argument that no backend supports."""
    raise UnsupportedError(
        f"{function}: {name} must be {default}, got {shown(value)}: "
        "it is not supported yet by any backend"
    )


def once_for_plain_values(read: Callable) -> Callable:
    """Cache the results of ``read`` for plain values: equal values of other types are other calls.

    Called with anything else (tensors, numpy, lists) it raises TypeError: ``read`` must then run.
    """

    @lru_cache(maxsize=4096, typed=True)
    def cached(*values):
        if not _PLAIN.issuperset(map(type, values)):
            raise TypeError
        return read(*values)

    return cached


_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))


def reader(function: str, names: tuple[str, ...]) -> Callable[..., Options]:
    """Build the function that reads the options ``names``, in this order and window_size first.

    A call with plain values is read once and then found by them.
    """
    scale = names.index("softmax_scale") - 1  # its place among the values

    @once_for_plain_values
    def read_once(left, right, forced, *values) -> Options:
        if values[scale] == 0:
            raise TypeError  # a scale of 0 warns, which the function counts, not this cache
        return convert(function, dict(zip(names, ((left, right), *values), strict=True)))

    def read(window_size, *values) -> Options:
        if not torch.compiler.is_compiling():
            try:
                left, right = window_size
                return read_once(left, right, named_backend.get(), *values)
            except (TypeError, ValueError):
                pass  # convert finds the words for it
        return convert(function, dict(zip(names, (window_size, *values), strict=True)))

    return read


def public(form: Callable) -> Callable[[Callable], Callable]:
    """Decorator of a public function, which has a signature and a docstring: the call's options are
    read by FIELDS, its other arguments go to ``form(options, ...)`` by name.

    The function is compiled from its signature, as namedtuple and dataclass do it, so that Python
    binds the arguments and no call builds a dictionary.
    """

    def decorate(described: Callable) -> Callable:
        function, parameters = described.__name__, signature(described).parameters
        taken = [name for name in signature(form).parameters if name != "options"]
        names = [name for name in parameters if name in FIELD and name not in taken]
        names.sort(key=lambda name: name != "window_size")
        unread = parameters.keys() - {*names, *taken} | set(taken) - parameters.keys()
        if unread:
            raise TypeError(f"{function}: no field and no argument of {form.__name__}: {unread}")
        heads, star = [], False
        for name, parameter in parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and not star:
                heads, star = [*heads, "*"], True
            required = parameter.default is parameter.empty
            heads.append(name if required else f"{name}=defaults[{name!r}]")
        source = (
            "def make(form, read, defaults):\n"
            f"    def {function}({', '.join(heads)}):\n"
            f"        return form(read({', '.join(names)}), {', '.join(taken)})\n"
            f"    return {function}\n"
        )
        space = {}
        exec(compile(source, f"<flashattn3 {function}>", "exec"), space)
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        made = space["make"](form, reader(function, tuple(names)), defaults)
        return wraps(described)(made)

    return decorate
