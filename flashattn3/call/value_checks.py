"""Checks of the values in index tensors. They read on the host, so they synchronize with a device.

They always run on a CPU; on other devices, only in a process started with FLASHATTN3_CHECK=1.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import expect, value_error

if TYPE_CHECKING:
    from .fields import Options
    from .operands import SequenceLengths

OFF = ("", "0", "false", "no", "off")
CHECKED = os.environ.get("FLASHATTN3_CHECK", "").lower() not in OFF


def is_checked(device: torch.device) -> bool:
    """Whether values of index tensors on this device are checked."""
    return CHECKED or device.type == "cpu"


def check_values(
    lengths_q: SequenceLengths,
    lengths_k: SequenceLengths,
    options: Options,
    total_q: int,
    total_k: int,
) -> None:
    """Raise if cu_seqlens decrease, or if cu_seqlens, seqused or max_seqlen are out of bounds."""
    sides = (
        ("q", total_q, *lengths_q, options.max_seqlen_q),
        ("k", total_k, *lengths_k, options.max_seqlen_k),
    )
    function = options.function
    for side, rows, cu_seqlens, seqused, max_seqlen in sides:
        lengths = check_edges(function, f"cu_seqlens_{side}", cu_seqlens, rows)
        for index, used in enumerate(seqused.tolist() if seqused is not None else ()):
            if not 0 <= used <= lengths[index]:
                wanted = f"between 0 and {lengths[index]}, the sequence's length"
                raise value_error(function, f"seqused_{side}[{index}]", wanted, used)
            lengths[index] = used
        check_longest(function, f"max_seqlen_{side}", max_seqlen, lengths)


def check_edges(function: str, name: str, cu_seqlens: Tensor, rows: int) -> list[int]:
    """Sequence lengths. Raise unless edges start at 0, never decrease and end within ``rows``."""
    edges = cu_seqlens.tolist()
    expect(edges[0] == 0, function, f"{name}[0]", 0, edges[0])
    lengths = [high - low for low, high in pairwise(edges)]
    expect(min(lengths, default=0) >= 0, function, name, "non-decreasing", edges)
    expect(edges[-1] <= rows, function, f"{name}[-1]", f"<= {rows} rows", edges[-1])
    return lengths


def check_longest(function: str, name: str, max_seqlen: int | None, lengths: list[int]) -> None:
    longest = max(lengths, default=0)
    fits = max_seqlen is None or longest <= max_seqlen
    expect(fits, function, name, f">= {longest}, the longest sequence", max_seqlen)


def check_same_values(function: str, what: str, given: Tensor, wanted: Tensor, of: str) -> None:
    """Raise unless two one-dimensional integer tensors of one shape are equal. of: the name of the
    wanted one."""
    given, wanted = given.tolist(), wanted.tolist()
    expect(given == wanted, function, what, f"{wanted} as {of}'s", given)
