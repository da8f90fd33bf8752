"""The forward of few query rows, without a cache: the kernels of cached calls serve it as well.

They hold the query heads of a KV head in one tile, so each key is read once for all of them, and
cut the keys into parts where the call asks for splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from ..call.dtypes import SIXTEEN_BIT
from ..call.problem import Problem
from ..dispatch.device import DeviceInfo
from ..kvcache.problem import DecodeProblem, DecodeTensors, Lengths, packed_rows
from .results import result_shapes

FEW_ROWS = 64  # packed rows that one tile of the forward would have too
LONG_KEYS = 1024  # below, the forward's one launch ends sooner
MAX_ROWS = 2**30  # packed rows are counted in 32 bits


def can_pack(problem: Problem) -> bool:
    return (
        not problem.varlen
        and problem.dtype in SIXTEEN_BIT
        and problem.qhead_per_kvhead * problem.seqlen_q < MAX_ROWS
    )


def is_packed(problem: Problem, device: DeviceInfo, programs: int) -> bool:
    """Whether the kernels of cached calls run the forward. programs: of the other, unsplit.

    With num_splits=1 a tile reads all keys, so only rows that fit one tile gain by it.
    """
    if problem.pack_gqa is not None or not can_pack(problem):
        return bool(problem.pack_gqa) and can_pack(problem)
    few = problem.qhead_per_kvhead * problem.seqlen_q <= FEW_ROWS
    idle = problem.num_splits != 1 and programs < device.num_sms
    return problem.seqlen_k >= LONG_KEYS and (few or idle)


def as_cached(problem: Problem) -> DecodeProblem:
    """The same attention as a problem of cached calls: its keys are a full dense cache."""
    names = (field.name for field in fields(DecodeProblem))
    common = {name: getattr(problem, name) for name in names if hasattr(problem, name)}
    common |= {
        "page_size": 0,
        "rows": packed_rows(problem.qhead_per_kvhead * problem.seqlen_q),
        "given": frozenset(),
        "sinks_dtype": None,
        "misaligned": frozenset(),
        "expanded": frozenset(),
        "num_splits": max(0, problem.num_splits),
    }
    return DecodeProblem(**common)


def prepare_packed(problem: Problem, decode: Callable) -> Callable:
    """Build a function of the tensors that returns (out, lse). decode: of the cached problem."""
    _, lse_shape = result_shapes(problem)

    def run(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
        lse = tensors[0].new_empty(lse_shape, dtype=torch.float32)
        return decode(None, lse, DecodeTensors(*tensors[:3]), Lengths(), 0), lse

    return run
