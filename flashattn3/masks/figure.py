"""A figure of a mask, where matplotlib is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..call.arguments import integer
from ..errors import expect, shown, type_error
from .block_lists import FULL, kinds_of
from .mask import Mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTION = "masks.figure"
_MOST_SCORES = 2**20  # of a figure that shows single scores; a larger mask shows its blocks


def figure(mask: Mask, batch_idx: int = 0, head: int = 0) -> Figure:
    """Draw one head of a mask: its scores up to 1024 x 1024, else its blocks, of which partial ones
    are lighter. It reads the mask, so it waits for the device. Raises ImportError without
    matplotlib, ValueError where the mask has no such batch_idx or head.

    Returns: a matplotlib Figure, with ``savefig``.
    """
    if not isinstance(mask, Mask):
        raise type_error(FUNCTION, "mask", "a flashattn3.masks.Mask", shown(mask))
    places = (("batch_idx", batch_idx, mask.batch), ("head", head, mask.heads))
    for name, given, size in places:
        wanted = f"at least 0 and below {size}, as many as the mask has"
        expect(0 <= integer(FUNCTION, name, given) < size, FUNCTION, name, wanted, given)
    from matplotlib.figure import Figure

    if mask.seqlen_q * mask.seqlen_k <= _MOST_SCORES:
        shade = mask.to_bool()[batch_idx, head].float()
    else:
        shade = kinds_of(mask.of_queries)[batch_idx, head] / FULL
    drawn = Figure(figsize=(4, 4 * max(0.25, min(4, mask.seqlen_q / max(1, mask.seqlen_k)))))
    axes = drawn.subplots()
    extent = (0, mask.seqlen_k, mask.seqlen_q, 0)
    axes.imshow(
        shade.cpu().numpy(), cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    return drawn
