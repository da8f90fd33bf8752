"""Checks of what stands in tensors. They read it on the host, so they wait for the device.

Only a process started with FLASHATTN3_CHECK=1 makes them.
"""

from __future__ import annotations

import os
from itertools import pairwise

from torch import Tensor

from .errors import expect
from .problem import Options, Tensors, function_name

CHECKED = os.environ.get("FLASHATTN3_CHECK") == "1"


def check_contents(tensors: Tensors, options: Options) -> None:
    """Raise for cu_seqlens and seqused that fall, pass an end or do not fit max_seqlen."""
    sides = (
        ("q", tensors.q, tensors.cu_seqlens_q, tensors.seqused_q, options.max_seqlen_q),
        ("k", tensors.k, tensors.cu_seqlens_k, tensors.seqused_k, options.max_seqlen_k),
    )
    function = function_name(True)
    for side, rows, cu_seqlens, seqused, max_seqlen in sides:
        if cu_seqlens is None:
            continue
        edges = cu_seqlens.tolist()
        name = f"cu_seqlens_{side}"
        expect(edges[0] == 0, function, f"{name}[0]", 0, edges[0])
        lengths = [high - low for low, high in pairwise(edges)]
        expect(min(lengths, default=0) >= 0, function, name, "non-decreasing", edges)
        expect(
            edges[-1] <= rows.shape[0],
            function,
            f"{name}[-1]",
            f"<= {rows.shape[0]} rows",
            edges[-1],
        )
        for index, used in enumerate(seqused.tolist() if seqused is not None else ()):
            wanted = f"between 0 and {lengths[index]}, the sequence's length"
            expect(0 <= used <= lengths[index], function, f"seqused_{side}[{index}]", wanted, used)
            lengths[index] = used
        longest = max(lengths, default=0)
        fits = max_seqlen is None or longest <= max_seqlen
        expect(
            fits, function, f"max_seqlen_{side}", f">= {longest}, the longest sequence", max_seqlen
        )


def check_same_contents(function: str, what: str, given: Tensor, wanted: Tensor) -> None:
    """Raise unless two one-dimensional integer tensors of one shape are equal."""
    given, wanted = given.tolist(), wanted.tolist()
    expect(given == wanted, function, what, f"{wanted} as the call's", given)
