"""Makes the public functions from their signatures: reads the options of a call by their fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import signature
from typing import TypeVar

import torch

from ..modes import are_deterministic
from .batch_invariance import span_of_all_calls
from .fields import CALL, Description
from .foreign import translated
from .selection import named_backend
from .tensor_fields import GROUPS

F = TypeVar("F", bound=Callable)
# The expression that a compiled function passes for an argument of a form that stands for several
# arguments of the function.
_PASSED = {name: f"({', '.join(group)})" for name, group in GROUPS.items()}
_PASSED["scores"] = f"None if {' is '.join(GROUPS['scores'])} is None else {_PASSED['scores']}"
# Options that torch.use_deterministic_algorithms, ``use_backend`` and batch-invariant mode ask of
# all calls, with the values of a call that asks for nothing itself.
OF_ALL_CALLS = {"deterministic": False, "backend": None, "split_tokens": None}


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


def reader(description: Description, function: str, names: tuple[str, ...]) -> Callable:
    """Build the function that reads the options ``names``, in this order and window_size first.

    A call with plain values is read once and then found by them, and by what torch and
    ``use_backend`` ask of all calls, also of functions without such an argument.
    """
    scale = names.index("softmax_scale") - 1  # its place among the values

    @once_for_plain_values
    def read_once(left, right, forced, span, deterministic, *values):
        if values[scale] == 0:
            raise TypeError  # a scale of 0 warns, which the function counts, not this cache
        return convert((left, right), *values)

    def convert(*values):
        given = dict(zip(names, values, strict=True))
        return description.convert(function, OF_ALL_CALLS | given)

    def read(window_size, *values):
        if not torch.compiler.is_compiling() and isinstance(window_size, (tuple, list)):
            try:
                left, right = window_size
                deterministic = are_deterministic()
                in_force = named_backend.get(), span_of_all_calls.get()
                return read_once(left, right, *in_force, deterministic, *values)
            except (TypeError, ValueError):
                pass  # the conversion finds the words for it
        return convert(window_size, *values)

    return read


def public(form: Callable, description: Description = CALL) -> Callable[[F], F]:
    """Decorator of a public function, which has a signature and a docstring: the call's options are
    read by the fields of its description, its other arguments go to ``form(options, ...)``. A form
    takes those of GROUPS as a tuple under the group's name, for ``scores`` None where a call has
    none.

    The function is compiled from its signature, as namedtuple and dataclass do it, so that Python
    binds the arguments and no call fills a dictionary. Keywords that are not in the signature go to
    ``translated``, and the function is called again with what it makes of them.
    """

    def decorate(described: F) -> F:
        function, parameters = described.__name__, signature(described).parameters
        fields = description.fields
        passed = [name for name in signature(form).parameters if name != "options"]
        taken = {argument for name in passed for argument in GROUPS.get(name, (name,))}
        names = [name for name in parameters if name in fields and name not in taken]
        names.sort(key=lambda name: name != "window_size")
        unread = parameters.keys() - {*names, *taken} | taken - parameters.keys()
        if unread:
            raise TypeError(f"{function}: no field and no argument of {form.__name__}: {unread}")
        heads, star = [], False
        for name, parameter in parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and not star:
                heads, star = [*heads, "*"], True
            required = parameter.default is parameter.empty
            heads.append(name if required else f"{name}=defaults[{name!r}]")
        given = ", ".join(f"{name!r}: {name}" for name in parameters)
        results = [_PASSED.get(name, name) for name in passed]
        source = (
            "def make(form, read, translated, defaults):\n"
            f"    def {function}({', '.join(heads)}, **foreign):\n"
            "        if foreign:\n"
            f"            given = translated({function!r}, {{{given}}}, foreign)\n"
            f"            return {function}(**given)\n"
            f"        return form(read({', '.join(names)}), {', '.join(results)})\n"
            f"    return {function}\n"
        )
        space = {}
        exec(compile(source, f"<flashattn3 {function}>", "exec"), space)
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        read = reader(description, function, tuple(names))
        made = space["make"](form, read, translated, defaults)
        return wraps(described)(made)

    return decorate
