"""8-bit tensors with a scale for each block, and the rotation against outliers."""

from .block_fp8 import KINDS, BlockScaled, quantize_block_fp8, quantize_qkv

__all__ = ["KINDS", "BlockScaled", "quantize_block_fp8", "quantize_qkv"]
