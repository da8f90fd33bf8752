"""8-bit tensors with a descale per block, and the Hadamard rotation against outliers."""

from ..call.block_scaled import BlockScaled, lse_with_mean
from .block_fp8 import KINDS, comes_permuted, quantize_block_fp8, quantize_qkv
from .rotary_quantization import rotate_and_quantize

__all__ = [
    "KINDS",
    "BlockScaled",
    "comes_permuted",
    "lse_with_mean",
    "quantize_block_fp8",
    "quantize_qkv",
    "rotate_and_quantize",
]
