"""Launches a kernel whose arguments, except the tensors, are fixed.

Triton's own launch path inspects every argument in each call, tens of microseconds on the host for
kernels with this many. A plan fixes the scalars, so two launches differ only in whether the tensor
addresses are multiples of 16 bytes. If all are, the usual case, the kernel compiled for aligned
addresses is launched directly.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from math import gcd

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver


def stride_unit(*strides: int) -> int:
    """The largest unit, up to 16 elements, of which all strides are multiples; 1 for 16.

    Triton specializes a kernel on strides that are multiples of 16, and knows nothing of others:
    with head dim 72 it would load single elements, without cp.async. Kernels pass the unit to
    ``common.stride_of``. The strides of a dense tensor are multiples of its head dim.
    """
    unit = gcd(16, *strides)
    return 1 if unit == 16 else unit


def is_elementwise(*strides: int) -> bool:
    """Whether a load of 16-bit rows moves single elements: strides or head dims are odd.

    Such loads are not pipelined, because cp.async moves 4 bytes at least.
    """
    return gcd(16, *strides) == 1


def starter(compiled: CompiledKernel) -> Callable[..., None]:
    """``compiled[grid](*arguments)`` as a function of the grid and the arguments.

    Triton's own asks in every launch for the driver and the kernel's handles, and calls the hooks
    of profilers with a description of the launch also where there are no hooks. A kernel is
    compiled in a process that has initialised CUDA, so torch's check of that is left out too.
    """
    run, fixed, is_tuple = _without_scratch(compiled)
    device_of, stream_of = torch._C._cuda_getDevice, driver.active.get_current_stream
    runtime = knobs.runtime

    def start(grid: tuple[int, int, int], *arguments: object) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", True) or getattr(leave, "calls", True):
            compiled[grid](*arguments)
        elif is_tuple:
            run(*grid, stream_of(device_of()), *fixed, arguments)
        else:
            run(*grid, stream_of(device_of()), *fixed, *arguments)

    return start


def _without_scratch(compiled: CompiledKernel) -> tuple[Callable, tuple, bool]:
    """A function that launches the kernel, its arguments behind the grid and the stream, and
    whether those of the kernel follow as one tuple.

    It is the one in C that Triton's launcher calls, because the launcher's preparations, which are
    written in Python, give a kernel without scratch memory the same in every launch; or else the
    launcher. What the launcher passes differs between Triton's versions, so it is asked once, with
    objects that nothing can compute with in place of what differs between launches.
    """
    run, handles = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    passed: list[object] = []
    try:
        asked, launch = copy(run), run.launch
        asked.launch = lambda *found: passed.extend(found)
        *first, a, b = (object() for _ in range(6))
        asked(*first, *handles, a, b)
    except (AttributeError, TypeError):
        return run, handles, False
    is_tuple = passed[-1:] == [(a, b)]
    if passed[:4] != first or not (is_tuple or passed[-2:] == [a, b]):
        return run, handles, False
    return launch, tuple(passed[4 : -1 if is_tuple else -2]), is_tuple


@dataclass
class Launch:
    """One kernel, its grid and its arguments after the tensors, in the order of the signature.

    tensor_types: Triton's name of each tensor's dtype ("bf16", "fp32", "i32"); None: no tensor.
    options: Triton's launch options: num_warps, num_stages, arch.
    unaligned: constants that replace others where a tensor does not begin at a multiple of 16
        bytes, because Triton then loads single elements.
    """

    kernel: object
    tensor_types: tuple[str | None, ...]
    grid: tuple[int, int, int]
    scalars: tuple
    constants: dict[str, object]
    options: dict[str, object]
    unaligned: dict[str, object] = field(default_factory=dict)
    _aligned: Callable | None = field(default=None, init=False)
    _values: tuple = field(init=False)

    def __post_init__(self) -> None:
        self._values = (*self.scalars, *self.constants.values())

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream of the current device, which must be the tensors'."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        misaligned = 0
        for address in addresses:
            misaligned |= address or 0
        misaligned &= 15
        if self._aligned is not None and not misaligned:
            self._aligned(self.grid, *addresses, *self._values)
        elif 0 not in self.grid:
            compiled = self.kernel[self.grid](
                *tensors,
                *self.scalars,
                **self.constants_of(not misaligned),
                **self.options,
            )
            # The interpreter compiles nothing.
            if isinstance(compiled, CompiledKernel) and not misaligned:
                self._aligned = starter(compiled)

    def constants_of(self, aligned: bool) -> dict[str, object]:
        return self.constants if aligned else self.constants | self.unaligned
