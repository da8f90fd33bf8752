"""A figure of a mask, where matplotlib is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .block_lists import FULL, kinds_of
from .mask import Mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_SCORES = 2**20  # of a figure that shows single scores; a larger mask shows its blocks


def figure(mask: Mask, batch_idx: int = 0, head: int = 0) -> Figure:
    """Draw one head of a mask: its scores up to 1024 x 1024, else its blocks, of which partial ones
    are lighter. It reads the mask, so it waits for the device. Raises ImportError without
    matplotlib.

    Returns: a matplotlib Figure, with ``savefig``.
    """
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
