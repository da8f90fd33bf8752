"""The error of 8-bit attention on data that trained models have, beside the error that 8 bits have
in any case: out, its bias, and the log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import flashattn3
from flashattn3.call.dtypes import FP8, INT8

from .checking.distributions import (
    DistributionCase,
    Errors,
    Inputs,
    allowance,
    cases,
    compare,
    heavy_probability,
    honest,
    reference,
)
from .runner import FAILED, MISSED, OK, Record, Settings, described, first_line, name_of

SUITE = "fp8-distributions"
SEED = 0
LENGTHS = (2048, 8192, 32768, 131072)
BIAS_LENGTHS = (1024, 4096)  # of V = 1 besides
QUICK_LENGTHS, QUICK_HEAD_DIMS = (512,), (64,)
HEAD_DIMS = (64, 128, 256)
OURS, HONEST = "flashattn3", "honest"
DTYPES = {"int8": INT8, "e4m3": FP8}  # of q and k


def distribution_cases(
    quick: bool, head_dims: Sequence[int] | None, lengths: Sequence[int] | None
) -> list[DistributionCase]:
    """None: those of the suite; V = 1 at two lengths more."""
    head_dims = head_dims or (QUICK_HEAD_DIMS if quick else HEAD_DIMS)
    if quick or lengths:
        return cases(lengths or QUICK_LENGTHS, head_dims)
    ones = (case for case in cases(BIAS_LENGTHS, head_dims) if case.name == "ones")
    return [*ones, *cases(LENGTHS, head_dims)]


def run_distribution(case: DistributionCase, settings: Settings) -> Iterator[Record]:
    """For q and k in int8 and in e4m3 a record of ours and one of honest's."""
    for short, dtype in DTYPES.items():
        inputs = case.build(settings.device, dtype, SEED)
        wanted = reference(inputs)
        allowed = allowance(inputs, wanted)
        row, place = f"d{case.head_dim} {case.name}", {"column": str(case.seqlen_k)}
        about = {
            **described("distribution", SUITE, row, case.id, **place, direction="fwd"),
            "seqlen_k": case.seqlen_k,
            "head_dim": case.head_dim,
            "qk_dtype": name_of(dtype),
            "seed": SEED,
            "bounds": {n: x for n, x in case.bounds._asdict().items() if math.isfinite(x)},
        }
        if case.heavy:
            about["heavy_probability"] = heavy_probability(case, inputs, wanted[1])
        outcome = _outcome(case, inputs, wanted, allowed)
        yield {**about, "provider": f"{OURS} {short}", **outcome}
        errors = compare(honest(inputs), wanted)
        yield {**about, "provider": f"{HONEST} {short}", "status": OK, **errors._asdict()}


def _outcome(
    case: DistributionCase, inputs: Inputs, wanted: tuple[Tensor, Tensor], allowed: Errors
) -> Record:
    try:
        # float16 rounds out eight times finer than bfloat16.
        arguments = {**inputs._asdict(), "return_lse": True, "out_dtype": torch.float16}
        result = flashattn3.flash_attn_func(**arguments)
        backend = flashattn3.explain(**arguments).backend
    except Exception as error:  # whatever it is, the other cases go on
        return {"status": FAILED, "reason": first_line(error)}
    found = compare(result, wanted)
    misses = case.misses(found, allowed)
    status = {"status": MISSED, "reason": "; ".join(misses)} if misses else {"status": OK}
    return {**status, **found._asdict(), "backend": backend}
