"""The code of a mask_mod that is like an earlier one, which is not traced again."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType

import torch
from torch import Tensor

from .predicates import Code, code_of

MOST = 1024
# The fields of a ``Code`` whose tensors are their places among the variables of a function.
_known: dict[tuple, tuple] = {}
_NUMBERS = frozenset((int, bool))
_VARIABLES = _NUMBERS | {Tensor, torch.nn.Parameter}


def known_code_of(mask_mod: Callable[..., Tensor], device: torch.device) -> Code | None:
    """``code_of``, which traces functions with one body once, if all that they read are integers
    and bools, of one value, and tensors, of one dtype and shape. It traces others in each call."""
    key, variables = key_of(mask_mod)
    if key is None:
        return code_of(mask_mod, device)
    key = device, key
    known = _known.get(key)
    if known is not None:
        lines, seen, places, numbers = known
        return Code(lines, seen, tuple([variables[i] for i in places]), numbers)
    code = code_of(mask_mod, device)
    places = None if code is None else places_of(code, variables)
    if places is not None:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = code.lines, code.seen, places, code.numbers
    return code


def key_of(mask_mod: Callable[..., Tensor]) -> tuple[tuple | None, list]:
    """What the code of a function depends on beside the device, and the variables that it reads.
    None for a function whose code depends on more."""
    variables = _variables_of(mask_mod)
    if variables is None:
        return None, []
    addresses = [*map(id, variables)]
    key = [mask_mod.__code__, torch.get_default_dtype()]  # of a float beside an integer
    for x in variables:
        if type(x) in _NUMBERS:
            key += type(x), x
        else:
            plain = x.layout is torch.strided and x.is_contiguous()
            key += type(x), x.dtype, x.device, x.shape, plain, addresses.index(id(x))
    return tuple(key), variables


def places_of(code: Code, variables: list) -> tuple[int, ...] | None:
    """Those of the code's tensors among the variables. None if it has others, such as a copy."""
    addresses = [*map(id, variables)]
    try:
        return tuple([addresses.index(id(x)) for x in code.tensors])
    except ValueError:
        return None


def _variables_of(function: object) -> list | None:
    """The values that a function reads beside its arguments: those of its closure and globals. None
    if it has others, or calls something by name."""
    if type(function) is not FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    code, of_module = function.__code__, function.__globals__
    try:
        found = [x.cell_contents for x in function.__closure__ or ()]
        found += [of_module[name] for name in code.co_names]
    except (KeyError, ValueError):  # a method or a builtin; a variable that is not assigned yet
        return None
    if CodeType in map(type, code.co_consts) or not _VARIABLES.issuperset(map(type, found)):
        return None
    return found
