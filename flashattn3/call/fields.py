"""The description of a call: every argument that is not a tensor stands here once.

From FIELDS follow the conversion of arguments, ``Options``, the checks of single fields, the schema
of the operators, the list of hints and the fields that a ``Problem`` passes on to the backends, and
the same of cached calls (call/cached.py). tensor_fields.py has the tensors. The public signatures
repeat names and defaults for readers and type checkers; a test compares.
"""

from __future__ import annotations

import math
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError, complaint, expect, shown, type_error
from .arguments import boolean, integer, length, real, window
from .batch_invariance import WANTED, is_span, span_in_force
from .selection import backend_in_force

LOG2E = math.log2(math.e)
MAX_SPLITS = 256  # as in FlashAttention-3
FA2_ORDER = (
    "; after q, k and v FlashAttention-2 has dropout_p, softmax_scale and causal, FlashAttention-3 "
    "and this function softmax_scale, causal and qv: pass them by name"
)
Convert = Callable[[str, str, object], object]


class Field(NamedTuple):
    """One argument of the public functions.

    type: in the operators' schema; "" if only the default is supported, and nothing is passed on.
    convert: (function, name, value) → a plain value; raises TypeError for the wrong kind.
    wanted, legal: the values that are allowed, in words and as a predicate; None: all.
    hint: it changes no result; a backend without a use for it says so.
    to_backend: a ``Problem`` has it for the backends; other fields end in its lengths, its mask and
        its ``ScoreScale``.
    of_cached_calls: whether calls with a cache of keys take it too.
    parts: names of the fields of ``Options`` that a pair becomes; a flag with ``parts`` of one name
        is another name of that flag.
    instead: why only the default is supported, or what to use.
    """

    name: str
    type: str
    default: object
    convert: Convert
    wanted: str = ""
    legal: Callable[[object], bool] | None = None
    hint: bool = False
    to_backend: bool = False
    of_cached_calls: bool = True
    parts: tuple[str, ...] = ()
    instead: str = "it is not supported yet by any backend"

    def is_asked(self, value: object) -> bool:
        """Whether the value of a hint asks for something: not None, nor at most the default."""
        return value is not None and value > (self.default or 0)


def or_none(convert: Convert) -> Convert:
    return lambda function, name, value: None if value is None else convert(function, name, value)


def _scale(function: str, name: str, value: object) -> float:
    if isinstance(value, bool):
        by_name = "pass softmax_scale and causal by name, FlashAttention-2 has them elsewhere"
        raise type_error(function, name, "a float", f"{shown(value)}; {by_name}")
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


def _deterministic(function: str, name: str, value: object) -> bool:
    """``torch.use_deterministic_algorithms`` counts for every call."""
    return boolean(function, name, value) or torch.are_deterministic_algorithms_enabled()


def _splits(function: str, name: str, value: object) -> int:
    """None stands for 0: chosen."""
    return 0 if value is None else integer(function, name, value)


def _dtype(function: str, name: str, value: object) -> torch.dtype | None:
    if not (value is None or isinstance(value, torch.dtype)):
        raise type_error(function, name, "a torch.dtype or None", shown(value))
    return value


def _none_for_qv(function: str, name: str, value: object) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise type_error(function, name, None, f"{shown(value)}{FA2_ORDER}")
    return value


def as_given(function: str, name: str, value: object) -> object:
    return value


def _is_finite(value: float) -> bool:
    return not isinstance(value, float) or abs(value) < math.inf


FIELDS = (
    Field("max_seqlen_q", "SymInt?", None, length, of_cached_calls=False),
    Field("max_seqlen_k", "SymInt?", None, length, of_cached_calls=False),
    Field(
        "softmax_scale", "float?", None, or_none(_scale),
        wanted="finite", legal=lambda scale: scale is None or _is_finite(scale),
    ),
    Field("causal", "bool", False, _causal),
    Field(
        "window_size", "SymInt", (-1, -1), window, to_backend=True,
        parts=("window_left", "window_right"),
    ),
    Field(
        "softcap", "float", 0.0, real,
        wanted="finite and >= 0", legal=lambda cap: _is_finite(cap) and cap >= 0,
    ),
    Field(
        "num_splits", "int", 0, _splits, hint=True, to_backend=True,
        wanted=f"at most {MAX_SPLITS}", legal=lambda splits: splits <= MAX_SPLITS,
    ),
    Field(
        "split_tokens", "int?", None, span_in_force, to_backend=True, wanted=WANTED, legal=is_span
    ),
    Field("pack_gqa", "bool?", None, or_none(boolean), hint=True, to_backend=True),
    Field("deterministic", "bool", False, _deterministic, to_backend=True, of_cached_calls=False),
    Field(
        "sm_margin", "int", 0, integer, hint=True, to_backend=True,
        wanted=">= 0", legal=lambda sms: sms >= 0,
    ),
    Field(
        "use_fast_accum", "bool", False, boolean, hint=True, to_backend=True,
        of_cached_calls=False,
    ),
    Field("return_lse", "bool", False, boolean, to_backend=True),
    Field("return_max_logit", "bool", False, boolean, to_backend=True, of_cached_calls=False),
    Field(
        "return_attn_probs", "", False, boolean, of_cached_calls=False, parts=("return_lse",)
    ),
    Field("backend", "str?", None, backend_in_force, to_backend=True),
    Field("out_dtype", "ScalarType?", None, _dtype, to_backend=True),
    Field("qv", "", None, _none_for_qv),
    Field("attention_chunk", "", 0, integer),
    Field(
        "dropout_p", "", 0, real, of_cached_calls=False,
        instead="torch.nn.functional.scaled_dot_product_attention drops probabilities",
    ),
)  # fmt: skip
HINTS = tuple(field for field in FIELDS if field.hint)


class Description:
    """What follows from the fields of a kind of call.

    Options: the options of a call in plain values: the fields that have a type, and the public
        function that was called, for errors.
    schema: of the options as arguments of an operator. types: of each.
    to_backend: names of the options that a problem has for the backends.
    """

    def __init__(self, options: str, fields: tuple[Field, ...], function: str) -> None:
        stored = [field for field in fields if field.type]
        names = {
            name: field for field in stored for name in _spread(field, field.parts, field.name)
        }
        defaults = [x for field in stored for x in _spread(field, field.default, field.default)]
        self.fields = {field.name: field for field in fields}
        self.Options = namedtuple(options, (*names, "function"), defaults=(*defaults, function))
        schema = [f"{field.type} {name}" for name, field in names.items()]
        self.schema = ", ".join((*schema, "str function"))
        self.types = {name: field.type for name, field in names.items()}
        self.to_backend = tuple(name for name, field in names.items() if field.to_backend)

    def check(self, options: tuple) -> None:
        """Raise ValueError for the first field with a value that is not allowed."""
        for field in self.fields.values():
            if field.legal is not None:
                value = getattr(options, field.name)
                expect(field.legal(value), options.function, field.name, field.wanted, value)
        if options.split_tokens is not None:
            wanted = "0 with split_tokens and in batch-invariant mode, which cut keys into spans"
            splits = options.num_splits
            expect(splits <= 0, options.function, "num_splits", wanted, splits)

    def convert(self, function: str, given: dict[str, object]) -> tuple:
        """The options of a call. given: arguments by name; the others have their defaults."""
        found: dict[str, object] = {}
        for name, field in self.fields.items():
            if name not in given:  # Options has the default, which torch.compile would guard here
                continue
            if not field.type and not field.parts:
                expect_default(function, field, given[name])
                continue
            value = field.convert(function, name, given[name])
            if not field.parts:
                found[name] = value
            elif len(field.parts) == 1:
                found[field.parts[0]] = found.get(field.parts[0], False) or value
            else:
                found.update(zip(field.parts, value, strict=True))
        return self.Options(**found, function=function)


def _spread(field: Field, of_pair: object, of_other: object) -> tuple:
    """The values of a field's parts, or of the field itself."""
    return tuple(of_pair) if field.parts else (of_other,)


def expect_default(function: str, field: Field, value: object) -> None:
    """Raise UnsupportedError for another value than the default, which no backend supports."""
    found = field.convert(function, field.name, value)
    if found is not None if field.default is None else found != field.default:
        sentence = complaint(function, field.name, field.default, shown(value))
        raise UnsupportedError(f"{sentence}: {field.instead}")


CALL = Description("Options", FIELDS, "flash_attn_func")
# max_seqlen None: not known on the host, then all tokens are the bound.
Options = CALL.Options
# The options that the attention of a model has: arguments of the operators in run/bhsd.py.
OF_MODELS = "softmax_scale", "causal", "window_left", "window_right", "softcap"


class ScoreScale(NamedTuple):
    """How a score follows from q kᵀ: it is softmax_scale * q kᵀ, with softcap > 0 softcap *
    tanh(softmax_scale * q kᵀ / softcap)."""

    softmax_scale: float
    softcap: float = 0.0

    @property
    def is_capped(self) -> bool:
        return self.softcap > 0

    @property
    def unit(self) -> float:
        """Tanh gives a capped score in this unit; 1 without a cap."""
        return self.softcap or 1.0

    @property
    def factors(self) -> dict[str, float]:
        """The factors of a score, by name: kernels multiply by each."""
        scale, cap = self
        factors = {"softmax_scale": scale}
        return factors | {"softmax_scale / softcap": scale / cap} if self.is_capped else factors

    @property
    def log2_factors(self) -> tuple[float, float]:
        """(scale_log2, cap_log2): factors from q kᵀ, or from tanh, to the log2 domain; cap_log2 is
        0 without a cap, and with one scale_log2 is the factor inside tanh."""
        if self.is_capped:
            return self.softmax_scale / self.softcap, self.softcap * LOG2E
        return self.softmax_scale * LOG2E, 0.0


def score_scale_of(options: tuple, head_dim: int) -> ScoreScale:
    """That of a call, normalised.

    The cap is clamped so that cap**2 and scale / cap stay in float32's range. A cap above the range
    changes no score with |q kᵀ| < 2**30, so it becomes 0: no cap. Below the lower bound, at most
    2**-40, all probabilities of a row are equal, and raising the cap to the bound keeps them so. (A
    scale above 2**60 may still be too large.)
    """
    scale = head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale)
    cap, size = float(options.softcap), abs(scale)
    if cap == 0 or cap > 2.0**50 * min(1.0, size):
        return ScoreScale(scale)
    return ScoreScale(scale, max(cap, 2.0**-50 * max(1.0, min(size, 2.0**10))))


def is_capped(options: tuple) -> bool:
    return options.softcap > 0


def expect_shared_shift(options: tuple, sinks: object, where: str) -> None:
    """Raise for what a component that all scores of a row share would change, as a smoothed k
    lacks one: a cap, a sink and the largest score."""
    function = options.function
    wanted = f"0 {where}: capped scores do not all move alike"
    expect(not is_capped(options), function, "softcap", wanted, options.softcap)
    expect(sinks is None, function, "sinks", f"None {where}: a sink does not move", "a tensor")
    wanted = f"False {where}: the scores are known up to a constant of the row"
    expect(not options.return_max_logit, function, "return_max_logit", wanted, True)
