"""8-bit tensors with a scale for each block, and the rotation against outliers."""

from .block_fp8 import BlockScaled, quantize_block_fp8

__all__ = ["BlockScaled", "quantize_block_fp8"]
