"""Exact attention on every machine: one interface, kernels chosen by the GPU's compute
capability."""

from .api import (
    Explanation,
    available_backends,
    explain,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    use_backend,
)
from .errors import UnsupportedError
from .fp8 import flash_attn_fp8_func, flash_attn_varlen_fp8_func
from .kvcache.api import (
    append_kvcache,
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from .packed import (
    flash_attn_kvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .quantization import BlockScaled, quantize_block_fp8

__version__ = "0.1.0"

__all__ = [
    "BlockScaled",
    "Explanation",
    "UnsupportedError",
    "append_kvcache",
    "available_backends",
    "explain",
    "flash_attn_combine",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "quantize_block_fp8",
    "use_backend",
]
