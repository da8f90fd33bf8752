"""The Hopper backend: FlashAttention-3 kernels, compiled ahead of time, for compute capability 9.0.

A gradient without a kernel config runs on the Triton backend, with this backend's lse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from torch import Tensor

from ...call.cached import CacheProblem, DecodeProblem
from ...call.dtypes import EIGHT_BIT, NAMES
from ...call.operands import Tensors
from ...call.problem import CallProblem, Problem
from ...errors import UnsupportedError
from .. import gpu_limits, packed
from ..conversions import converting
from ..device import SHARED_MEMORY_KIB, DeviceInfo
from ..triton.backend import BACKEND as TRITON
from . import cached
from . import launch as hopper_launch
from .config_types import DECODE_TILE_ROWS, MAX_HEAD_DIM
from .decode_choice import config_of, unfit_reason
from .decode_launch import DecodeLaunch, decode_launch
from .kernel_configs import (
    BIAS,
    LARGEST,
    NO_TERM,
    SLOPES,
    BackwardConfig,
    ForwardConfig,
    KernelConfig,
    select_backward_config,
    select_forward_config,
)
from .library import Library, library_for_gpu, mended_by
from .packing import estimate

if TYPE_CHECKING:
    from ..base import CachedLaunch, PassOperators

CAPABILITY = 90
# The backward recomputes tanh from P and lse, with an error of about 1e-5 / cap.
SMALLEST_GRADIENT_CAP = 2.0**-6
LARGEST_WITH_BIAS = 128  # head dim
LARGEST_MASKED_8_BIT = 128
# Every DECODE_TILE_ROWS packed rows read the keys again, and 16 rows have kernels of their own.
PACKED = packed.Limits(few=16, most=256)


@dataclass(frozen=True)
class HopperConfig:
    """The kernel configs of a plan and its launch parameters.

    gradient_config: None if the gradient runs on Triton.
    copied: names of tensors that are copied because TMA cannot read them: it needs addresses and
        strides in multiples of 16 bytes.
    launch: the prepared launch of kernel_config.
    packing: whether a decode kernel runs the forward instead, and why.
    packed: the launch of that kernel; None: kernel_config runs the forward.
    """

    kernel_config: ForwardConfig
    launch: hopper_launch.Launch = field(compare=False, repr=False)
    packing: packed.Choice
    gradient_config: BackwardConfig | None = None
    copied: tuple[str, ...] = ()
    packed: DecodeLaunch | None = None

    def describe(self) -> dict[str, object]:
        return self._describe_forward() | {
            "gradient": "triton" if self.gradient_config is None else self.gradient_config.name,
            "sm_margin applies to": "forward and gradient"
            if self._gradient_is_persistent
            else "forward",
        }

    def _describe_forward(self) -> dict[str, object]:
        copied = {"copied first": ", ".join(self.copied) or "nothing"}
        if self.packed is not None:
            return self.packed.describe() | copied
        kernel_config = self.kernel_config
        return {
            "kernel config": kernel_config.name,
            "tile": f"{kernel_config.block_m} rows x {kernel_config.block_n} keys",
            "num_stages": kernel_config.num_stages,
            "warpgroups": f"1 loads, {kernel_config.num_mma_warpgroups} multiply",
            "num_splits": f"1: {self.packing.reason}",
            "grid": (self.launch.num_ctas, 1, 1),
            "shared_memory_bytes": self.launch.shared_memory_bytes,
            "workspace_bytes": self.launch.workspace_bytes,
            "tile measured": kernel_config.measured or "not yet",
            **copied,
        }

    @property
    def _gradient_is_persistent(self) -> bool:
        """If False, the grid has a program or a cluster per tile and cannot leave SMs free."""
        return self.gradient_config is not None and not self.gradient_config.uses_cluster2


@dataclass(frozen=True)
class HopperLaunch:
    """See ``Launch``. The operators' arguments are built when a pass first runs."""

    problem: Problem
    device: DeviceInfo
    config: HopperConfig
    library: Library = field(repr=False, compare=False)

    def describe(self) -> dict[str, object]:
        described, launch, problem = self.config.describe(), self.config.packed, self.problem
        if launch is not None:
            sizes = problem.batch, problem.total_q, problem.seqlen_q, problem.seqlen_k
            described |= launch.describe_sizes(*sizes)
            splits = launch.problem.num_splits, described["grid"][0], DECODE_TILE_ROWS
            described |= packed.describe_splits(problem, *splits)
        return described

    @cached_property
    def forward(self) -> Callable[[Tensors], tuple[Tensor, Tensor]]:
        if self.config.packed is None:
            run = hopper_launch.prepare_forward(self, self.library)
        else:
            run = hopper_launch.prepare_packed(self)
        return converting(self.problem, run, reads_permuted_v=True)

    @cached_property
    def keep(self) -> Callable[..., PassOperators] | None:
        return hopper_launch.prepare_keep(self, self.library)

    @cached_property
    def backward(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        if self.config.gradient_config is None:
            return self._backward_on_triton()
        return hopper_launch.prepare_backward(self, self.library)

    def _backward_on_triton(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        """That of Triton's launch for this problem; UnsupportedError if Triton does not take it."""
        problem, device = self.problem, self.device
        reason = TRITON.unavailable_reason(device) or TRITON.decline_reason(problem, device)
        if reason is not None:
            raise UnsupportedError(
                f"{problem.function}: this gradient of backend 'hopper' runs on Triton, which does "
                f"not take the problem (triton: {reason})"
            )
        return TRITON.prepare(problem, device).backward


@dataclass(frozen=True)
class HopperBackend:
    """See ``Backend``. library: called only when the device is a Hopper GPU.

    only_measured: skip kernels that were never benchmarked, unless the call has backend="hopper".
    """

    name: str = "hopper"
    library: Callable[[], Library] = field(default=library_for_gpu, repr=False)
    only_measured: bool = True

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        if device.kind != "cuda":
            return f"needs an NVIDIA GPU, the tensors are on {device.kind!r}"
        if device.capability != CAPABILITY:
            return f"needs compute capability 9.0, {device.name} has {device.capability / 10}"
        if device.interpreted or device.lowering != CAPABILITY:
            return "disabled: TRITON_INTERPRET or TRITON_OVERRIDE_ARCH is set"
        needed, found = SHARED_MEMORY_KIB[CAPABILITY] * 1024, device.shared_memory_bytes
        if found < needed:
            return f"needs {needed} bytes of shared memory for a block, {device.name} has {found}"
        error = self.library().error
        return None if error is None else f"{error}; to build them, {mended_by()}"

    def decline_reason(self, problem: CallProblem, device: DeviceInfo) -> str | None:
        if isinstance(problem, CacheProblem):
            return cached.decline_reason(self, problem, device)
        reason = (
            packed.spans_reason(problem)
            or gpu_limits.decline_reason(problem, MAX_HEAD_DIM)
            or score_reason(problem)
            or self.unusable_reason(_kernel_config(problem, device), problem.backend)
        )
        if reason is None and problem.split_tokens:
            return cached.decline_reason(self, _as_cached(problem), device)
        return reason

    def unusable_reason(self, kernel_config: KernelConfig, backend: str | None) -> str | None:
        """Why a call that names this backend, or None, gets no kernel of the config; or None."""
        if kernel_config.name not in self.library().configs:
            return f"kernel config {kernel_config.name} is not in this build (FLASHATTN3_KERNELS)"
        if self.only_measured and not kernel_config.measured and backend != self.name:
            return (
                f"kernel config {kernel_config.name} was never run on a GPU; "
                "backend='hopper' would run it"
            )
        return None

    def unused_hints(self, problem: CallProblem, device: DeviceInfo) -> dict[str, str]:
        if isinstance(problem, CacheProblem):
            return {}
        packs = self._packing(problem, device).packs
        rows = f"packs up to {PACKED.most} query rows of 16 bits"
        unused = {} if packs else {"pack_gqa": rows}
        if problem.num_splits > 1:
            shares = "gives every SM an equal share of the keys"
            unused["num_splits"] = shares if packs else "computes all keys in one pass"
        if problem.dtype not in EIGHT_BIT:
            unused["use_fast_accum"] = "accumulates 16-bit products in float32"
        return unused

    def prepare(self, problem: CallProblem, device: DeviceInfo) -> HopperLaunch | CachedLaunch:
        if isinstance(problem, CacheProblem):
            return cached.prepare(self, problem, device)
        return HopperLaunch(problem, device, self._configure(problem, device), self.library())

    def _configure(self, problem: Problem, device: DeviceInfo) -> HopperConfig:
        kernel_config = _kernel_config(problem, device)
        gradient_config = self._gradient_config(problem)
        packing, copied = self._packing(problem, device), _unfit_for_tma(problem)
        launch = hopper_launch.forward_launch(problem, device, kernel_config, self.library())
        config = HopperConfig(kernel_config, launch, packing, gradient_config, copied)
        if not packing.packs:
            return config
        few_rows, chosen = _as_cached(problem), None
        if problem.split_tokens:  # a prompt too, on a forward kernel of spans
            chosen = cached.choose(self, few_rows)
        chosen = chosen or (config_of(few_rows), packing.reason)
        return replace(config, packed=decode_launch(few_rows, device, self.library(), *chosen))

    def _packing(self, problem: Problem, device: DeviceInfo) -> packed.Choice:
        """Whether a decode kernel runs the forward, and why."""
        copied = problem.copied or _unfit_for_tma(problem)
        if copied and not problem.split_tokens:
            return packed.Choice(False, f"{copied[0]} is copied")
        few_rows = _as_cached(problem)
        reason = unfit_reason(few_rows)
        reason = reason or self.unusable_reason(config_of(few_rows), problem.backend)
        if reason is not None:
            return packed.Choice(False, reason)
        configs = _kernel_config(problem, device), config_of(few_rows)
        return packed.choose(problem, PACKED, estimate(problem, device, *configs))

    def _gradient_config(self, problem: Problem) -> BackwardConfig | None:
        dtype = NAMES[problem.dtype]
        dims = problem.head_dim, problem.head_dim_v
        kind = _term(problem, gradient=True), problem.mask is not None
        kernel_config = select_backward_config(dtype, *dims, *kind)
        if kernel_config is None or self.unusable_reason(kernel_config, problem.backend):
            return None
        scale = problem.score_scale
        return None if scale.is_capped and scale.unit < SMALLEST_GRADIENT_CAP else kernel_config


BACKEND = HopperBackend()


def _as_cached(problem: Problem) -> DecodeProblem:
    """The problem of the decode kernels, which have no splits of each sequence."""
    cached = packed.as_cached(problem)
    return replace(cached, num_splits=0) if cached.num_splits > 1 else cached


def score_reason(problem: Problem) -> str | None:
    """Why no kernel computes what happens to a problem's scores, or None."""
    asked = {"alibi_slopes": problem.slopes, "return_max_logit": problem.return_max_logit}
    if problem.bias is not None:
        asked["capped scores"] = problem.score_scale.is_capped
    terms = [name for name in ("bias", "mask") if getattr(problem, name) is not None]
    terms += [name for name, given in asked.items() if given]
    if len(terms) > 1:
        return f"has no kernel for {terms[0]} and {terms[1]} together"
    if problem.dtype in EIGHT_BIT and terms and problem.mask is None:
        return f"has no kernel of 8 bits for {terms[0]}"
    if problem.dtype in EIGHT_BIT and terms and problem.head_dim > LARGEST_MASKED_8_BIT:
        return f"takes a mask of 8 bits up to head_dim {LARGEST_MASKED_8_BIT}"
    if problem.bias is not None and max(problem.head_dim, problem.head_dim_v) > LARGEST_WITH_BIAS:
        return f"takes a bias up to head_dim {LARGEST_WITH_BIAS}"
    if problem.bias is not None and 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        return "takes no bias without rows or keys"
    return None


def _term(problem: Problem, gradient: bool = False) -> str:
    """The term of the config of a problem's kernel, or of its gradient's."""
    if problem.return_max_logit and not gradient:
        return LARGEST
    if problem.bias is not None:
        return BIAS
    return SLOPES if problem.slopes else NO_TERM


def _kernel_config(problem: Problem, device: DeviceInfo) -> ForwardConfig:
    """The config for the problem, whatever its sm_margin, which changes no bits of a result."""
    sequences = max(1, problem.batch) if problem.varlen else 1
    return select_forward_config(
        NAMES[problem.dtype],
        problem.head_dim,
        problem.head_dim_v,
        problem.masked,
        problem.seqlen_k,
        ceil(problem.total_q / sequences),
        problem.num_heads_q * problem.batch,
        device.num_sms,
        _term(problem),
        problem.mask is not None,
    )


def _unfit_for_tma(problem: Problem) -> tuple[str, ...]:
    """Names of those of q, k and v whose address or strides TMA does not support.

    8-bit V is not among them: TMA reads its permuted copy.
    """
    lengths = {"q": problem.total_q, "k": problem.total_k, "v": problem.total_k}
    if problem.dtype in EIGHT_BIT:
        del lengths["v"]
    unfit = []
    for name, length in lengths.items():
        heads = problem.num_heads_q if name == "q" else problem.num_heads_kv
        sizes = (1 if problem.varlen else problem.batch, length, heads)
        strides = getattr(problem, name).stride
        fits = hopper_launch.fits_tma(sizes, strides, problem.dtype.itemsize)
        if not fits or name in problem.misaligned:
            unfit.append(name)
    return tuple(unfit)
