"""Launches a kernel whose sizes and strides change from call to call.

Triton specializes a kernel on properties of its integer arguments: 1, a multiple of 16, 64 bits.
Sizes are not specialized (do_not_specialize), so only these properties of the strides choose among
the compiled kernels, and a growing cache launches the same one. As in launch.py, a kernel for
aligned addresses is launched directly, without Triton's inspection of every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul

import torch
from triton.compiler import CompiledKernel

from .launch import Launch, is_elementwise, starter, stride_unit


@dataclass
class VariableLaunch:
    """num_specialized: of the first tensors; Triton specializes on whether these are aligned.

    A kernel with the constant STRIDE_UNIT gets the ``stride_unit`` of each call's strides; of the
    first num_row_strides if not all are of rows. elementwise: constants that replace others where
    Triton loads single elements.
    """

    kernel: object
    num_specialized: int
    constants: dict[str, object]
    options: dict[str, object]
    elementwise: dict[str, object] = field(default_factory=dict)
    num_row_strides: int | None = None
    _starters: dict[tuple, Callable] = field(default_factory=dict, init=False)
    _values: tuple = field(init=False)

    def __post_init__(self) -> None:
        self._values = tuple(self.constants.values())

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor | None, ...],
        strides: tuple[int, ...],
        numbers: tuple,
    ) -> None:
        """Launch on the current stream. numbers: the arguments that are not specialized."""
        if 0 in grid:
            return
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        misaligned = 0
        for address in addresses[: self.num_specialized]:
            misaligned |= address or 0
        key = None if misaligned & 15 else _properties(strides, self.num_row_strides)
        start = self._starters.get(key)
        if start is not None:
            start(grid, *addresses, *strides, *numbers, *self._values)
            return
        constants = self._constants_of(strides, key is not None)
        launched = self.kernel[grid](*tensors, *strides, *numbers, **constants, **self.options)
        # The interpreter compiles nothing.
        if key is not None and isinstance(launched, CompiledKernel):
            self._starters[key] = starter(launched)

    def sample(
        self, tensor_types: tuple[str | None, ...], strides: tuple[int, ...], numbers: tuple
    ) -> Launch:
        """The same kernel with fixed numbers, to compile it ahead of time."""
        scalars, constants = (*strides, *numbers), self._constants_of(strides, True)
        options, unaligned = dict(self.options), dict(self.elementwise)
        return Launch(self.kernel, tensor_types, (1, 1, 1), scalars, constants, options, unaligned)

    def _constants_of(self, strides: tuple[int, ...], aligned: bool) -> dict[str, object]:
        rows = strides[: self.num_row_strides]
        constants = dict(self.constants)
        if "STRIDE_UNIT" in constants:
            constants["STRIDE_UNIT"] = stride_unit(*rows)
        return constants | self.elementwise if not aligned or is_elementwise(*rows) else constants


@lru_cache(maxsize=4096)
def _properties(strides: tuple[int, ...], num_row_strides: int | None) -> tuple[int, ...]:
    """The unit of the strides of rows, and what Triton's specialization sees of each stride."""
    wide = (-1 if stride >= 2**31 else 1 for stride in strides)
    units = (1 if stride == 1 else 2 if stride & 15 else 16 for stride in strides)
    return (stride_unit(*strides[:num_row_strides]), *map(mul, wide, units))
