"""8-bit tensors with a scale for each block, and the rotation against outliers."""

from .block_fp8 import (
    KINDS,
    BlockScaled,
    comes_in_slots,
    quantize_block_fp8,
    quantize_qkv,
    scaled_qkv,
)

__all__ = [
    "KINDS",
    "BlockScaled",
    "comes_in_slots",
    "quantize_block_fp8",
    "quantize_qkv",
    "scaled_qkv",
]
