"""Exact attention on every machine: one interface, kernels chosen by the GPU's compute
capability."""

from . import masks
from .api import (
    explain,
    flash_attn_backward,
    flash_attn_forward,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_fp8_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .cached_explanation import explain_with_kvcache
from .call.batch_invariance import use_batch_invariant_mode
from .call.block_scaled import BlockScaled
from .call.selection import use_backend
from .errors import UnsupportedError
from .explanation import Explanation, available_backends
from .flex import flex_attention
from .kvcache_api import (
    append_kvcache,
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from .quantization import quantize_block_fp8, rotate_and_quantize

__version__ = "0.1.0"

__all__ = [
    "BlockScaled",
    "Explanation",
    "UnsupportedError",
    "append_kvcache",
    "available_backends",
    "explain",
    "explain_with_kvcache",
    "flash_attn_backward",
    "flash_attn_combine",
    "flash_attn_forward",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "get_scheduler_metadata",
    "masks",
    "quantize_block_fp8",
    "rotate_and_quantize",
    "use_backend",
    "use_batch_invariant_mode",
]
