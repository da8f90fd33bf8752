"""Prepares appends for the compiled append kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...call.dtypes import SIXTEEN_BIT
from ...call.tensor_fields import WRITTEN_DESCALES
from ..base import head_dim_reason
from .config_types import MAX_HEAD_DIM
from .decode_choice import descale_reason
from .kernel_configs import APPEND_MEASURED

if TYPE_CHECKING:
    from ...call.cached import AppendProblem, AppendTensors, Lengths
    from .library import Library


class AppendLaunch:
    """The launch of the appends of one problem: a call is one operator."""

    def __init__(self, problem: AppendProblem, library: Library) -> None:
        self.append = prepare_append(problem, library)

    def describe(self) -> dict[str, object]:
        return {"kernel": "append", "kernel measured": APPEND_MEASURED or "not yet"}


def unfit_reason(problem: AppendProblem) -> str | None:
    """Why the append kernel does not take the problem, or None."""
    for dtype in (problem.dtype, problem.cache_dtype):
        if dtype not in SIXTEEN_BIT:
            return f"writes float16 and bfloat16, not {dtype}"
    return descale_reason(problem) or head_dim_reason(problem, MAX_HEAD_DIM)


def prepare_append(problem: AppendProblem, library: Library) -> Callable:
    """Build a function of (tensors, lengths)."""
    operator = library.append
    interleaved, one_q_position = problem.rotary_interleaved, problem.one_q_position

    def run(tensors: AppendTensors, lengths: Lengths) -> None:
        seqlen = lengths.seqlen
        given = tensors[: -len(WRITTEN_DESCALES)]
        operator(*given, -1 if seqlen is None else seqlen, interleaved, one_q_position)

    return run
