"""What tests and benchmarks share: cases, inputs, the fp64 reference, and the rule that compares
with it. What tests alone use is in tests/support.
"""

from .cases import Case
from .fp64_reference import attention, gradients, max_logit
from .rounding import E4M3_TRUNCATION, score_rounding
from .tolerance import (
    FORWARD_FACTOR,
    FP8_OF_16_BIT,
    FP8_OF_QUANTIZED,
    GRADIENT_FACTOR,
    INT8_OF_QUANTIZED,
    check,
    check_fp8,
)

__all__ = [
    "E4M3_TRUNCATION",
    "FORWARD_FACTOR",
    "FP8_OF_16_BIT",
    "FP8_OF_QUANTIZED",
    "GRADIENT_FACTOR",
    "INT8_OF_QUANTIZED",
    "Case",
    "attention",
    "check",
    "check_fp8",
    "gradients",
    "max_logit",
    "score_rounding",
]
