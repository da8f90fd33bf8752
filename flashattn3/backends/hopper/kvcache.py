"""The Hopper backend of cached calls: few query rows run on the decode kernels, many on the cached
forward kernels where these take the call.

Appends run on the append kernel once a GPU has measured it, or where a call has backend="hopper";
other appends and combinations on Triton's kernels, in the same stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from ...call.cached import AppendProblem, CacheProblem, CombineProblem, DecodeProblem
from ..device import DeviceInfo
from ..planned import Planned
from ..triton.kvcache import BACKEND as TRITON
from . import append_launch, decode_launch
from .backend import BACKEND as FORWARD
from .backend import HopperBackend
from .kernel_configs import APPEND_MEASURED, DecodeConfig, KernelConfig


class HopperCachedCall:
    """The launch of one cached call, prepared once. needs_lse: lse may be None. appends: whether
    the append kernel writes the new tokens of such calls."""

    needs_lse = False

    def __init__(self, launch: decode_launch.DecodeLaunch, appends: bool) -> None:
        self._launch, self._appends = launch, appends
        self.describe, self.describe_sizes = launch.describe, launch.describe_sizes

    @cached_property
    def decode(self) -> Callable[..., Tensor]:
        """A function of (out, lse, tensors, lengths, options_hash) that returns out, new if
        None."""
        return decode_launch.prepare_decode(self._launch)

    def planned(self, seqlen_q: int) -> Planned | None:
        """The launch for calls like one with this number of queries; None if they must be checked
        in Python."""
        return decode_launch.planned_decode(self._launch, seqlen_q, self._appends)


class HopperCacheBackend:
    """Takes decode problems and appends itself, combinations as Triton's backend does.

    forward: the backend of calls without a cache, which has the library.
    """

    name = "hopper"

    def __init__(self, forward: HopperBackend = FORWARD) -> None:
        self._forward = forward

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        return self._forward.unavailable_reason(device)

    def unused_hints(self, problem: CacheProblem, device: DeviceInfo) -> dict[str, str]:
        return {}

    def decline_reason(self, problem: CacheProblem, device: DeviceInfo) -> str | None:
        if not isinstance(problem, DecodeProblem):
            if self.append_reason(problem) is None:
                return None
            reason = TRITON.unavailable_reason(device) or TRITON.decline_reason(problem, device)
            return reason and f"runs Triton's kernel for this: {reason}"
        reason = decode_launch.unfit_reason(problem)
        if reason is not None:
            return reason
        config, why = self._choose(problem)
        limit = decode_launch.DECODE_ROWS
        many = problem.rows > limit and problem.backend != self.name
        if many and isinstance(config, DecodeConfig):
            again = f"reads the keys again for every {decode_launch.DECODE_TILE_ROWS} rows"
            return f"{again}, over {limit} only with backend='hopper'; {why}"
        return self._forward.unusable_reason(config, problem.backend)

    def prepare(self, problem: CacheProblem, device: DeviceInfo) -> object:
        if not isinstance(problem, DecodeProblem):
            if self.append_reason(problem) is None:
                return append_launch.AppendLaunch(problem, self._forward.library())
            return TRITON.prepare(problem, device)
        chosen, library = self._choose(problem), self._forward.library()
        launch = decode_launch.decode_launch(problem, device, library, *chosen)
        return HopperCachedCall(launch, self._append_kernel_reason(problem) is None)

    def append_reason(self, problem: AppendProblem | CombineProblem) -> str | None:
        """Why a problem that is no decode does not run on the append kernel; or None."""
        if isinstance(problem, CombineProblem):
            return "combines partial results"
        return self._append_kernel_reason(problem)

    def _append_kernel_reason(self, problem: DecodeProblem | AppendProblem) -> str | None:
        """Why the append kernel does not write new tokens of a problem's dtype and head dims."""
        if self._forward.only_measured and not APPEND_MEASURED and problem.backend != self.name:
            return "the append kernel was never run on a GPU; backend='hopper' would run it"
        return append_launch.unfit_reason(problem)

    def _choose(self, problem: DecodeProblem) -> tuple[KernelConfig, str]:
        """The kernel config of a problem that is not unfit, and why of this kind."""
        reason = decode_launch.forward_reason(problem)
        if reason is None:
            config = decode_launch.forward_config_of(problem)
            reason = self._forward.unusable_reason(config, self.name)
            if self._forward.only_measured and not config.measured:
                # Not for backend="hopper" either: decode kernels, which have run, take the call.
                reason = f"kernel config {config.name} was never run on a GPU"
            if reason is None:
                return config, f"over {decode_launch.DECODE_ROWS} packed rows"
        return decode_launch.config_of(problem), reason


BACKEND = HopperCacheBackend()
