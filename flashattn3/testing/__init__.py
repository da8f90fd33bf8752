"""What tests and benchmarks share: cases, inputs, the truth, and the rule that compares with it.

Attention itself never imports this package. ``strategies`` (random cases) needs hypothesis, so it
is not imported here.
"""

from .cases import FORWARD_CASES, NAMED_SHAPES, OTHER_DIMS, PAPER_GRID, Case, call
from .inputs import make_inputs, make_output_gradients
from .tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, check, check_lse, score_floor
from .truth import attention, gradients

__all__ = [
    "FORWARD_CASES",
    "FORWARD_FACTOR",
    "GRADIENT_FACTOR",
    "NAMED_SHAPES",
    "OTHER_DIMS",
    "PAPER_GRID",
    "Case",
    "attention",
    "call",
    "check",
    "check_lse",
    "gradients",
    "make_inputs",
    "make_output_gradients",
    "score_floor",
]
