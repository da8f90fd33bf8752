"""Launching a kernel whose every argument but the tensors is known beforehand.

Triton's own launch path inspects all arguments each time (about 20 us on the host for kernels with as many
as ours). A plan fixes the scalars, and the kernels are specialized on nothing else of a pointer than
whether it is a multiple of 16 bytes, so the compiled kernel is looked up by that alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from triton.compiler import CompiledKernel


@dataclass
class Launch:
    """One kernel, its grid and its arguments after the tensors, in the order of the signature."""

    kernel: object
    grid: tuple[int, int, int]
    scalars: tuple
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    _compiled: dict[int, CompiledKernel] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream of the current device, which must be the tensors'."""
        if 0 in self.grid:
            return
        alignment = 0
        for tensor in tensors:
            alignment = alignment << 1 | (tensor is not None and tensor.data_ptr() % 16 == 0)
        compiled = self._compiled.get(alignment)
        if compiled is None:
            compiled = self.kernel[self.grid](
                *tensors, *self.scalars, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
            )
            if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
                self._compiled[alignment] = compiled
        else:
            compiled[self.grid](*tensors, *self.scalars, *self.constants.values())
