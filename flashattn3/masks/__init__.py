"""Masks: which keys each query sees, built once and used by all layers and both passes."""

from .builders import blocks, documents, intervals, prefix_lm, tree, window
from .conversions import from_block_mask, from_bool
from .figure import figure
from .mask import Mask

__all__ = [
    "Mask",
    "blocks",
    "documents",
    "figure",
    "from_block_mask",
    "from_bool",
    "intervals",
    "prefix_lm",
    "tree",
    "window",
]
