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

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "UnsupportedError",
    "available_backends",
    "explain",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "use_backend",
]
