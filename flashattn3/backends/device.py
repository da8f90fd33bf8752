"""Device properties that the planner needs, read once and never during a kernel launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch

# Shared memory one block may use, in KiB, by what the chip is: the largest opt-in size CUDA
# documents ("Technical Specifications per Compute Capability" in the CUDA C++ programming guide).
SHARED_MEMORY_KIB = {
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
    121: 99,
}


class DeviceInfo(NamedTuple):
    """One device. capability and lowering are written as 90 for compute capability 9.0.

    lowering: the capability whose instructions Triton uses. It differs from the chip's own when
        TRITON_OVERRIDE_ARCH is set, as the tests do to run Ampere code on a newer GPU, and on 10.x
        and 11.x: what Triton makes of these kernels for tcgen05 spills kilobytes or stops with a
        trap, so such chips run Ampere's instructions.
    shared_memory_bytes: what one block may use there, at most what the lowering's own chip has.
    interpreted: Triton kernels run in its interpreter (TRITON_INTERPRET=1), on any tensor.
    """

    kind: str
    name: str
    capability: int | None = None
    lowering: int | None = None
    shared_memory_bytes: int = 0
    num_sms: int = 1
    interpreted: bool = False


@cache
def describe_device(device: torch.device) -> DeviceInfo:
    """Read a device's properties. The environment variables are read once per process and device.

    FLASHATTN3_SHARED_MEMORY_KIB caps what is taken for a block's shared memory, so that the tiles
    of a smaller chip can be run and tested on a larger one.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or torch.version.hip:  # torch names AMD's GPUs cuda too
        kind = "ROCm" if device.type == "cuda" else device.type
        return DeviceInfo(kind, kind, interpreted=interpreted, shared_memory_bytes=99 * 1024)
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    info = DeviceInfo(
        kind="cuda",
        name=properties.name,
        capability=capability,
        lowering=default_lowering(capability),
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        num_sms=properties.multi_processor_count,
        interpreted=interpreted,
    )
    return _overridden(info)


def default_lowering(capability: int) -> int:
    return 80 if 100 <= capability < 120 else capability


def _overridden(info: DeviceInfo) -> DeviceInfo:
    arch = os.environ.get("TRITON_OVERRIDE_ARCH", "").removeprefix("sm")
    if arch:
        lowering = _number_of("TRITON_OVERRIDE_ARCH", arch.rstrip("af"), "written like sm80")
        capped = min(info.shared_memory_bytes, SHARED_MEMORY_KIB.get(lowering, 99) * 1024)
        info = info._replace(lowering=lowering, shared_memory_bytes=capped)
    cap = os.environ.get("FLASHATTN3_SHARED_MEMORY_KIB")
    if cap:
        kib = _number_of("FLASHATTN3_SHARED_MEMORY_KIB", cap, "a number of KiB")
        info = info._replace(shared_memory_bytes=min(info.shared_memory_bytes, kib * 1024))
    return info


def _number_of(variable: str, text: str, wanted: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{variable} must be {wanted}, got {os.environ[variable]!r}")
    return int(text)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, where Triton launches."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE


_HERE = nullcontext()


def run_on_device_of(tensor: torch.Tensor, run: Callable, *arguments: object) -> object:
    """``run(*arguments)`` there, in less time."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return run(*arguments)
    with torch.cuda.device(tensor.device):
        return run(*arguments)
