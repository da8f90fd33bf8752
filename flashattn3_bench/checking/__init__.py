"""What tests and benchmarks share: cases, inputs, the fp64 reference, and the rule that compares
with it. What tests alone use is in tests/support.
"""

from .cases import FORWARD_CASES, Case, call
from .fp64_reference import attention, gradients, max_logit
from .inputs import make_inputs, make_output_gradients
from .rounding import (
    E4M3_TRUNCATION,
    FLOAT32_EPS,
    dropped_values,
    gradient_rounding,
    out_rounding,
    score_rounding,
)
from .tolerance import (
    FORWARD_FACTOR,
    FP8_OF_16_BIT,
    FP8_OF_QUANTIZED,
    GRADIENT_FACTOR,
    INT8_OF_QUANTIZED,
    check,
    check_exp2_lse,
    check_fp8,
    check_lse,
    check_rounded_p,
    score_floor,
)

__all__ = [
    "E4M3_TRUNCATION",
    "FLOAT32_EPS",
    "FORWARD_CASES",
    "FORWARD_FACTOR",
    "FP8_OF_16_BIT",
    "FP8_OF_QUANTIZED",
    "GRADIENT_FACTOR",
    "INT8_OF_QUANTIZED",
    "Case",
    "attention",
    "call",
    "check",
    "check_exp2_lse",
    "check_fp8",
    "check_lse",
    "check_rounded_p",
    "dropped_values",
    "gradient_rounding",
    "gradients",
    "make_inputs",
    "make_output_gradients",
    "max_logit",
    "out_rounding",
    "score_floor",
    "score_rounding",
]
