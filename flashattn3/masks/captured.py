"""Finds the values that a mask_mod reads without being passed them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor

Named = tuple[str, object]


def captured_tensors(mask_mod: object) -> list[tuple[str, Tensor]]:
    """The tensors in the closure of a function and of the functions that it has captured, as
    and_masks and or_masks have, with their names there."""
    return [of for of in _found(mask_mod, _in_closure) if isinstance(of[1], Tensor)]


def values_read(mask_mod: object) -> list[object]:
    """The captured tensors, numbers and strings, those that a function may reach by the names in
    its code (defaults, global variables, attributes of objects, of classes and of modules), and the
    code itself."""
    return [x for _, x in _found(mask_mod, _by_name)]


def _found(mask_mod: object, inside: Callable) -> list[Named]:
    """inside: gives what a value holds; names: of the function that the value was found in."""
    found, seen = [], {}

    def visit(name: str, value: object, names: frozenset[str]) -> None:
        names = _names_in(value) or names
        if (id(value), names) in seen:
            return
        seen[id(value), names] = value  # alive, so that no other value gets its id
        for named in inside(name, value, names):
            inner, x = named
            if type(x) in _LEAF_TYPES or isinstance(x, _LEAVES):
                found.append(named)
            else:
                visit(inner, x, names)

    visit("a tensor", (mask_mod,), frozenset())
    return found


_LEAVES = (Tensor, int, float, str, bytes, type(None), torch.dtype, torch.device, CodeType)
_LEAF_TYPES = frozenset(_LEAVES)  # most values are of one of these themselves


def _in_closure(name: str, value: object, _: frozenset[str]) -> list[Named]:
    if isinstance(value, (tuple, list)):
        return [(name, x) for x in value]
    found = []
    if isinstance(value, partial):
        found += [(name, x) for x in (value.func, *value.args, *value.keywords.values())]
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    for inner, cell in zip(names, getattr(value, "__closure__", None) or (), strict=True):
        try:
            found.append((inner, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    return found


def _by_name(name: str, value: object, names: frozenset[str]) -> list[Named]:
    found = _in_closure(name, value, names)
    if isinstance(value, FunctionType):
        found.append((name, value.__code__))
        if not (value.__module__ or "").startswith("torch."):
            found += [(x, value.__globals__[x]) for x in names & value.__globals__.keys()]
            defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
            found += [(name, x) for x in defaults]
    elif isinstance(value, MethodType):
        found += [(name, x) for x in (value.__func__, value.__self__)]
    elif isinstance(value, dict):
        found += value.items()
    elif not isinstance(value, (tuple, list, partial)):
        if not isinstance(value, (type, ModuleType)) and _names_in(type(value).__call__):
            found.append((name, value.__call__))
        for x in names:
            try:
                inner = getattr(value, x, None)
            except Exception:  # of a property, which mask_mod would raise too
                continue
            if not isinstance(value, ModuleType) or isinstance(inner, _LEAVES):
                found.append((x, inner))
    return found


def _names_in(value: object) -> frozenset[str]:
    """The names of global variables and attributes in the code of a function; none of others."""
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    return _names_of(value.__code__) if isinstance(value, FunctionType) else frozenset()


@lru_cache(maxsize=1024)
def _names_of(code: CodeType) -> frozenset[str]:
    inner = (_names_of(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*inner)
