"""A kernel that only reads: how fast the bytes of a call can come from memory at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 4096  # 32-bit words in one load of a program
PROGRAMS_PER_SM = 8


def prepare_read(num_bytes: int, device: torch.device) -> Callable[[], Tensor]:
    """A function that reads a buffer of its own of so many bytes. On a CPU torch reads it."""
    words = max(BLOCK, num_bytes // 4)
    buffer = torch.zeros(words, dtype=torch.int32, device=device)
    if device.type != "cuda":
        return lambda: buffer.sum()
    from ._read_triton import read_kernel  # imports Triton

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    programs = min(sms * PROGRAMS_PER_SM, -(-words // BLOCK))
    found = torch.zeros(programs, dtype=torch.int32, device=device)

    def read() -> Tensor:
        read_kernel[(programs,)](buffer, found, words, programs, BLOCK, num_warps=8)
        return found

    return read
