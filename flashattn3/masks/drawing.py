"""Coarse drawings of a mask. They read the mask, so they wait for its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .block_lists import BLOCK_COLUMNS, BLOCK_ROWS, FULL, HIDDEN, PARTIAL, kinds_of

if TYPE_CHECKING:
    from .mask import Mask

_CHARACTERS = {HIDDEN: "·", PARTIAL: "▒", FULL: "█"}
_MOST_CHARACTERS = 64  # of a line; a longer one has every n-th block


def summary(mask: Mask) -> str:
    """Lengths, heads and memory in one line."""
    of = (f"{size} {name}" for size, name in zip(mask.shape, ("batch", "heads"), strict=False))
    lengths = f"{mask.seqlen_q} queries x {mask.seqlen_k} keys"
    return f"{lengths}, {', '.join(of)}, {mask.nbytes / 2**20:.2f} MiB, {mask.device}"


def text(mask: Mask) -> str:
    """The summary, the density, and the blocks of the first head of the first batch_idx, a line for
    a block of 128 queries, a character for one of 64 keys."""
    legend = ", ".join(
        f"{_CHARACTERS[kind]} {name}"
        for kind, name in ((FULL, "full"), (PARTIAL, "partial"), (HIDDEN, "hidden"))
    )
    kinds = kinds_of(mask.of_queries)[:1, :1].flatten(0, 2)
    steps = [1 + (size - 1) // _MOST_CHARACTERS for size in kinds.shape]
    shown = kinds[:: max(1, steps[0]), :: max(1, steps[1])].tolist()
    blocks = f"blocks of {BLOCK_ROWS} queries x {BLOCK_COLUMNS} keys"
    if max(steps) > 1:
        blocks += f", one of {max(1, steps[0])} x {max(1, steps[1])}"
    lines = ["".join(_CHARACTERS[kind] for kind in row) for row in shown]
    head = f"Mask: {summary(mask)}; {100 * float(mask.density):.1f} % visible"
    return "\n".join([head, f"{blocks}: {legend}", *lines])
