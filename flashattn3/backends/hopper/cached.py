"""Cached calls of the Hopper backend: few query rows run on the decode kernels, many on the cached
forward kernels where these take the call.

Appends run on the append kernel once a GPU has measured it, or where a call has backend="hopper";
other appends and combinations on Triton's kernels, in the same stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...call.cached import CacheProblem, CombineProblem, DecodeProblem
from ..triton.backend import BACKEND as TRITON
from . import append_launch, decode_choice
from .config_types import DECODE_TILE_ROWS
from .decode_launch import decode_launch
from .kernel_configs import APPEND_MEASURED, WIDEN_MEASURED, DecodeConfig, KernelConfig

if TYPE_CHECKING:
    from ..base import CachedLaunch
    from ..device import DeviceInfo
    from .backend import HopperBackend


def decline_reason(hopper: HopperBackend, problem: CacheProblem, device: DeviceInfo) -> str | None:
    """Why an available backend does not take the problem, or None."""
    if not isinstance(problem, DecodeProblem):
        if append_reason(hopper, problem) is None:
            return None
        reason = TRITON.unavailable_reason(device) or TRITON.decline_reason(problem, device)
        return reason and f"runs Triton's kernel for this: {reason}"
    reason = decode_choice.unfit_reason(problem)
    if reason is not None:
        return reason
    config, why = choose(hopper, problem)
    limit = decode_choice.DECODE_ROWS
    many = problem.rows > limit and problem.backend != hopper.name and not problem.split_tokens
    if many and isinstance(config, DecodeConfig):
        again = f"reads the keys again for every {DECODE_TILE_ROWS} rows"
        return f"{again}, over {limit} only with backend='hopper'; {why}"
    return hopper.unusable_reason(config, problem.backend)


def prepare(hopper: HopperBackend, problem: CacheProblem, device: DeviceInfo) -> CachedLaunch:
    if not isinstance(problem, DecodeProblem):
        if append_reason(hopper, problem) is None:
            return append_launch.AppendLaunch(problem, hopper.library())
        return TRITON.prepare(problem, device)
    chosen, appends = choose(hopper, problem), append_reason(hopper, problem) is None
    of_prefix = decode_choice.prefix_config_of(problem, chosen[0])
    if of_prefix is not None and hopper.unusable_reason(of_prefix, problem.backend) is not None:
        of_prefix = None
    library = hopper.library()
    return decode_launch(problem, device, library, *chosen, appends, of_prefix)


def append_reason(hopper: HopperBackend, problem: CacheProblem) -> str | None:
    """Why the append kernel does not write new tokens of a problem's dtype and head dims; or
    None."""
    if isinstance(problem, CombineProblem):
        return "combines partial results"
    if hopper.only_measured and not APPEND_MEASURED and problem.backend != hopper.name:
        return "the append kernel was never run on a GPU; backend='hopper' would run it"
    return append_launch.unfit_reason(problem)


def choose(hopper: HopperBackend, problem: DecodeProblem) -> tuple[KernelConfig, str]:
    """The kernel config of a problem that is not unfit, and why of this kind."""
    reason = decode_choice.forward_reason(problem)
    if reason is None:
        config = decode_choice.forward_config_of(problem)
        reason = hopper.unusable_reason(config, hopper.name)
        if hopper.only_measured and not config.measured:
            # backend="hopper" takes none either: decode kernels, which have run, take the call.
            reason = f"kernel config {config.name} was never run on a GPU"
        careful = hopper.only_measured and problem.backend != hopper.name
        if careful and not WIDEN_MEASURED and decode_choice.reads_bytes(problem):
            reason = "the widening kernel was never run on a GPU; backend='hopper' would run it"
        if reason is None:
            return config, f"over {decode_choice.DECODE_ROWS} packed rows"
    return decode_choice.config_of(problem), reason
