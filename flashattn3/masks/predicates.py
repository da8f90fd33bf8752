"""The mask_mod of a block mask, a function of scalar positions, as code of a Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Code(NamedTuple):
    """lines: statements of a function of the positions b, h, q and k, with names t0_ptr, ... of
    tensors, contiguous ones, and n0, ... of numbers, which fit int32. seen: the name of the
    result."""

    lines: tuple[str, ...]
    seen: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]


def code_of(mask_mod: Callable[..., Tensor], device: torch.device) -> Code | None:
    """None for a mask_mod that does more than computing with single scores: elementwise operations
    of integers and bools, comparisons, and elements of tensors.

    The code has no values but those of constants that are no int32, so functions that differ in
    others have the same code.
    """
    trace = _Trace(device)
    positions = [_Score(trace, name, torch.int64) for name in POSITIONS]
    try:
        with _Functions(trace):
            seen = mask_mod(*positions)
    except Exception:  # torch.vmap raises an error of the function itself too
        return None
    if type(seen) is not _Score or seen._dtype != torch.bool:
        return None
    return Code(tuple(trace.lines), seen._name, tuple(trace.tensors), tuple(trace.numbers))


POSITIONS = "bhqk"  # not negative


class _UnknownError(Exception):
    """An operation that has no code here. It is no TypeError and no AttributeError, which Python
    would answer by trying something else."""


class _Trace:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []

    def new(self, expression: str, dtype: torch.dtype) -> _Score:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return _Score(self, name, dtype)

    def call(self, name: str, *args: object, **kwargs: object) -> _Score:
        return _OPERATIONS[name](*map(self.operand, args), **kwargs)

    def operand(self, x: object) -> object:
        """x, or the score that is the only element of a tensor without axes."""
        if type(x) is _Score or not isinstance(x, Tensor):
            return x
        with torch._C.DisableTorchFunction():
            if x.ndim:
                raise _UnknownError
            return self.new(f"tl.load({self.tensor(x)})", x.dtype)

    def tensor(self, x: Tensor) -> str:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.dtype not in _TYPES:
            raise _UnknownError
        if x.device != self.device:  # torch takes a number of the CPU, and has an error for others
            raise _UnknownError
        for i, known in enumerate(self.tensors):
            if x is known:
                return f"t{i}_ptr"
        if not x.is_contiguous():
            x = x.contiguous()
        self.tensors.append(x)
        return f"t{len(self.tensors) - 1}_ptr"

    def number(self, x: int) -> str:
        self.numbers.append(x)
        return f"n{len(self.numbers) - 1}"

    def cast(self, x: object, dtype: torch.dtype) -> str:
        """The name of a score, or the code of a number, as dtype."""
        if type(x) is _Score:
            return x._name if x._dtype == dtype else _converted(x, dtype)
        if dtype == torch.bool:
            return f"tl.full((), {int(x)}, tl.int1)"
        if dtype.is_floating_point:
            x = float(x)
            value = repr(x) if math.isfinite(x) else f'float("{x}")'
            return f"tl.full((), {value}, {_TYPES[dtype]})"
        limits = torch.iinfo(dtype)
        if type(x) is float or not limits.min <= x <= limits.max:
            raise _UnknownError
        if not -(2**31) <= x < 2**31:
            return f"tl.full((), {x}, {_TYPES[dtype]})"
        return f"tl.cast({self.number(int(x))}, {_TYPES[dtype]})"


def _converted(x: _Score, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return f"({x._name} != 0)"
    if x._dtype.is_floating_point and not dtype.is_floating_point:
        raise _UnknownError
    return f"{x._name}.to({_TYPES[dtype]})"


def _fail(*_: object) -> None:
    raise _UnknownError


class _Score:
    """A value of each score, in place of the scalar tensor that a mask_mod takes."""

    __slots__ = ("_dtype", "_name", "_trace")

    def __init__(self, trace: _Trace, name: str, dtype: torch.dtype) -> None:
        self._trace, self._name, self._dtype = trace, name, dtype

    def __getattr__(self, name: str) -> object:
        if name == "dtype":
            return self._dtype
        if name == "device":
            return self._trace.device
        if name in _OPERATIONS:
            return partial(self._trace.call, name, self)
        raise _UnknownError

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> object:
        raise _UnknownError  # _Functions is active wherever scores exist

    # Python asks for the bool or the class of an object in many places.
    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = __contains__ = _fail
    __getitem__ = __setitem__ = __str__ = __format__ = __hash__ = _fail
    __class__ = property(_fail)


class _Functions(TorchFunctionMode):
    """Takes the functions of torch, and the operators of tensors, that get a score."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function, types, args=(), kwargs=None) -> object:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name == "__getitem__":
            return self._element(*args)
        if name in _OPERATIONS and any(type(x) is _Score for x in args):
            return self.trace.call(name, *args, **kwargs)
        if name in _OF_TENSORS or function in _PROPERTIES:
            return function(*args, **kwargs)
        raise _UnknownError

    def _element(self, of: Tensor, index: object) -> object:
        index = index if type(index) is tuple else (index,)
        if _PLAIN.issuperset(map(type, index)):
            return of[index]
        if len(index) != of.ndim:
            raise _UnknownError
        trace, place, inside = self.trace, "", []
        pointer = trace.tensor(of)
        for x, size in zip(index, of.shape, strict=True):
            if type(x) is int:
                x = range(size)[x]
            else:
                x = x if type(x) is _Score else trace.operand(x)
                if type(x) is not _Score or x._dtype not in (torch.int64, torch.int32):
                    raise _UnknownError
            i, n = trace.cast(x, torch.int64), trace.number(size)
            if type(x) is _Score:
                if i not in POSITIONS:
                    i = trace.new(f"tl.where({i} < 0, {i} + {n}, {i})", torch.int64)._name
                inside.append(f"({i} >= 0) & ({i} < {n})")
            place = f"({place}) * {n} + {i}" if place else i
        return trace.new(
            f"tl.load({pointer} + ({place}), mask={' & '.join(inside)}, other=0)", of.dtype
        )


@lru_cache(maxsize=1024)
def _promoted(a: torch.dtype, b: torch.dtype | type, default: torch.dtype) -> torch.dtype:
    """Return the dtype of two scalar tensors, or of one and a number. default: torch's dtype, which
    an integer and a float have."""
    with torch._C.DisableTorchFunction():
        other = torch.empty((), dtype=b) if isinstance(b, torch.dtype) else b(1)
        return torch.result_type(torch.empty((), dtype=a), other)


def _common(a: object, b: object) -> tuple[_Trace, torch.dtype, list[str]]:
    """The dtype that torch computes in, and the operands in it."""
    if type(a) is type(b) is _Score and a._dtype == b._dtype:
        return a._trace, a._dtype, [a._name, b._name]
    trace, dtype, operands, default = None, None, (a, b), torch.get_default_dtype()
    for x in operands:
        if type(x) is _Score:
            trace, dtype = x._trace, _promoted(dtype, x._dtype, default) if dtype else x._dtype
    for x in operands:
        if type(x) is not _Score:
            if type(x) not in (bool, int, float):
                raise _UnknownError
            dtype = _promoted(dtype, type(x), default)
    if dtype not in _TYPES:
        raise _UnknownError
    return trace, dtype, [trace.cast(x, dtype) for x in operands]


def _compare(sign: str, a: object, b: object) -> _Score:
    trace, dtype, (a, b) = _common(a, b)
    if dtype == torch.bool:  # Triton compares signed bits
        a, b = (f"tl.cast({x}, tl.int32)" for x in (a, b))
    return trace.new(f"{a} {sign} {b}", torch.bool)


def _compute(form: str, kinds: str, a: object, b: object) -> _Score:
    """kinds: of the dtypes that torch computes as the form does: i(ntegers), f(loats), b(ools)."""
    trace, dtype, (a, b) = _common(a, b)
    if _kind(dtype) not in kinds:
        raise _UnknownError
    return trace.new(form.format(a, b), dtype)


def _kind(dtype: torch.dtype) -> str:
    return "b" if dtype == torch.bool else "f" if dtype.is_floating_point else "i"


def _logical(sign: str, a: _Score, b: _Score) -> _Score:
    trace = _common(a, b)[0]
    a, b = (trace.cast(x, torch.bool) for x in (a, b))
    return trace.new(f"{a} {sign} {b}", torch.bool)


def _unary(form: str, kinds: str, x: _Score) -> _Score:
    if _kind(x._dtype) not in kinds:
        raise _UnknownError
    return x._trace.new(form.format(x._name), x._dtype)


def _invert(x: _Score) -> _Score:
    return _unary("~{}" if x._dtype != torch.bool else "({} == 0)", "ib", x)


def _logical_not(x: _Score) -> _Score:
    return _invert(_to(x, torch.bool))


def _to(x: _Score, dtype: torch.dtype) -> _Score:
    if dtype not in _TYPES:
        raise _UnknownError
    return x._trace.new(x._trace.cast(x, dtype), dtype)


def _where(condition: _Score, a: object, b: object) -> _Score:
    if type(condition) is not _Score or condition._dtype != torch.bool:
        raise _UnknownError
    if type(a) is not _Score and type(b) is not _Score:  # two numbers: torch's default dtypes
        raise _UnknownError
    if type(a) is type(b) is _Score and a._dtype != b._dtype:  # torch.vmap keeps a narrower one
        raise _UnknownError
    trace, dtype, (a, b) = _common(a, b)
    return trace.new(f"tl.where({condition._name}, {a}, {b})", dtype)


def _clamp(x: _Score, min: object = None, max: object = None) -> _Score:
    for sign, limit in (("maximum", min), ("minimum", max)):
        if limit is not None:
            x = _OPERATIONS[sign](x, limit)
    return x


def _new(value: object, x: _Score, size: object = (), *, dtype=None, device=None) -> _Score:
    if tuple(size) != ():
        raise _UnknownError
    dtype = x._dtype if dtype is None else dtype
    return x._trace.new(f"tl.full((), {x._trace.cast(value, dtype)}, {_TYPES[dtype]})", dtype)


def _alike(value: object, x: _Score, *, dtype=None, device=None) -> _Score:
    return _new(value, x, dtype=dtype)


def _reversed(operation: Callable, a: object, b: object) -> _Score:
    return operation(b, a)


_TYPES = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    **{getattr(torch, f"int{n}"): f"tl.int{n}" for n in (8, 16, 32, 64)},
    torch.float32: "tl.float32",
}
_PLAIN = frozenset((int, slice))  # indices of which torch takes an element or a part
_OF_TENSORS = ("__len__", "size", "numel", "dim")
_PROPERTIES = tuple(getattr(Tensor, name).__get__ for name in ("device", "dtype", "shape", "ndim"))
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS = {name: partial(_compare, sign) for name, sign in _SIGNS.items()}
_BINARY = {
    "add": partial(_compute, "{} + {}", "if"),
    "sub": partial(_compute, "{} - {}", "if"),
    "mul": partial(_compute, "{} * {}", "if"),
    "floordiv": partial(_compute, "floor_divided({}, {})", "i"),
    "mod": partial(_compute, "remainder({}, {})", "i"),
    "and": partial(_compute, "{} & {}", "ib"),
    "or": partial(_compute, "{} | {}", "ib"),
    "xor": partial(_compute, "{} ^ {}", "ib"),
}
_NEW = {"ones": 1, "zeros": 0}
# By the names of functions, of methods and of operators. None writes to its arguments.
_OPERATIONS: dict[str, Callable[..., _Score]] = {
    **_COMPARISONS,
    **{f"__{name}__": x for name, x in (*_COMPARISONS.items(), *_BINARY.items())},
    **{f"__r{name}__": partial(_reversed, x) for name, x in _BINARY.items()},
    **{name: _BINARY[name] for name in ("add", "sub", "mul")},
    **{"floor_divide": _BINARY["floordiv"], "remainder": _BINARY["mod"]},
    **{f"bitwise_{name}": _BINARY[name] for name in ("and", "or", "xor")},
    **{f"logical_{x}": partial(_logical, y) for x, y in (("and", "&"), ("or", "|"), ("xor", "^"))},
    **dict.fromkeys(("__invert__", "bitwise_not"), _invert),
    **dict.fromkeys(("__neg__", "neg"), partial(_unary, "-{}", "if")),
    **dict.fromkeys(("__abs__", "abs"), partial(_unary, "tl.abs({})", "if")),
    "logical_not": _logical_not,
    "minimum": partial(_compute, "tl.minimum({}, {})", "i"),
    "maximum": partial(_compute, "tl.maximum({}, {})", "i"),
    "where": _where,
    "clamp": _clamp,
    "to": _to,
    **{x: partial(_to, dtype=getattr(torch, x)) for x in ("bool", "int", "long", "float")},
    **{f"new_{name}": partial(_new, value) for name, value in _NEW.items()},
    **{f"{name}_like": partial(_alike, value) for name, value in _NEW.items()},
}


def _operator(operation: Callable[..., _Score]) -> Callable[..., _Score]:
    def operator(self: _Score, *others: object) -> _Score:
        if others and type(others[0]) is not _Score:
            others = map(self._trace.operand, others)
        return operation(self, *others)

    return operator


for _name, _operation in _OPERATIONS.items():
    if _name.startswith("__"):
        setattr(_Score, _name, _operator(_operation))
