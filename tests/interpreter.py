"""Less work for Triton's interpreter, with the same results: most of its time is spent on types and
shapes that it derives anew for every operation of every program.

Each change applies where this Triton has the function that it replaces; another is slower.
"""

from __future__ import annotations

import functools
import inspect
import math
from contextlib import suppress


def make_quick() -> None:
    for change in CHANGES:
        with suppress(ImportError, AttributeError):
            change()


def _builtins_are_looked_for_once() -> None:
    """The interpreter replaces the functions of triton.language that a kernel may call. It looks
    for them in each call of a device function."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch_attr, _ = interpreter._patch_attr, interpreter._patch_builtin
    names = {}  # of a module or class, which holds the originals when it is first seen

    def patch_builtin(package, *how):
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        # All are replaced together, and restored together.
        if not names[package] or not is_builtin(getattr(package, names[package][0])):
            return
        for name in names[package]:
            patch_attr(package, name, getattr(package, name), *how)

    interpreter._patch_builtin = patch_builtin


def _functions_of_a_kernel_are_patched_once() -> None:
    """A device function finds triton.language as its kernel has left it."""
    from triton.language import core
    from triton.runtime import interpreter

    language = interpreter.tl
    patch_lang, no_changes = interpreter._patch_lang, interpreter._LangPatchScope
    modules = {}  # of the globals of a function; they are kept, so their id stays theirs

    def patch_once(function):
        known = modules.get(id(function.__globals__))
        if known is None:
            values = function.__globals__.values()
            used = [lang for lang in (language, core) if any(value is lang for value in values)]
            known = modules[id(function.__globals__)] = (used, function.__globals__)
        if known[0] and not any(core.is_builtin(lang.load) for lang in (language, *known[0])):
            return no_changes()
        return patch_lang(function)

    interpreter._patch_lang = patch_once


def _no_overflow_checks_that_are_dropped() -> None:
    """An addition of integers is repeated in 64 bits, for an assertion that only debug keeps."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_kept(self, *operands):
        if self.builder.options.debug:
            check(self, *operands)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_kept


def _numpy_types_are_remembered() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    of_scalar = functools.cache(interpreter._get_np_dtype)
    pointers = interpreter._get_np_dtype(core.pointer_type(core.int8))

    def numpy_type(dtype):
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return pointers if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = numpy_type


def _shapes_are_remembered() -> None:
    from triton.language import core

    of_sizes, make_checked = {}, core.block_type.__init__  # a block type's, by its plain sizes

    def make_block_type(self, element_ty, shape):
        sizes = tuple(shape)
        if all(type(size) is int for size in sizes) and sizes in of_sizes:
            self.element_ty = element_ty
            self.shape, self.numel = of_sizes[sizes]
            self.name = f"<{self.shape}, {element_ty}>"
            return
        make_checked(self, element_ty, shape)
        of_sizes[tuple(self.shape)] = self.shape, self.numel

    @functools.cache
    def of_tensor(*sizes):
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return core.constexpr(math.prod(sizes)), shape

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensor(*(type.shape if type.is_block() else ()))

    core.tensor.__init__ = make_tensor
    core.block_type.__init__ = make_block_type


CHANGES = (
    _builtins_are_looked_for_once,
    _functions_of_a_kernel_are_patched_once,
    _no_overflow_checks_that_are_dropped,
    _numpy_types_are_remembered,
    _shapes_are_remembered,
)
