"""The Hopper backend: FlashAttention-3 kernels, compiled ahead of time, for compute capability 9.0.

A gradient for which there is no row of the kernel table runs through the Triton backend, with this
backend's log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..device import DeviceInfo
from ..errors import UnsupportedError
from ..kernel_table import (
    E4M3,
    INT8,
    MAX_HEAD_DIM,
    BackwardRow,
    ForwardRow,
    Row,
    all_rows,
    select_backward_row,
    select_row,
)
from ..problem import Problem, Tensors
from ..scales import EIGHT_BIT
from . import hopper_launches, sixteen_bit
from .hopper_library import Library, library_for_gpu, mended_by
from .triton import BACKEND as TRITON

if TYPE_CHECKING:
    from ..plan import Plan

CAPABILITY = 90
# The backward finds tanh again from P and lse, to about 1e-5 / softcap.
SMALLEST_GRADIENT_CAP = 2.0**-6
DTYPE_NAMES = {**sixteen_bit.DTYPE_NAMES, torch.float8_e4m3fn: E4M3, torch.int8: INT8}  # of rows


@dataclass(frozen=True)
class HopperConfig:
    """The kernel rows of a plan and what has to happen around them.

    gradient_row: None where the gradient runs on Triton.
    copied: names of the tensors that TMA cannot read where they are: it wants addresses and
        strides in multiples of 16 bytes.
    num_ctas: thread blocks, each of which works off tiles until none is left.
    """

    row: ForwardRow
    num_ctas: int
    gradient_row: BackwardRow | None = None
    copied: tuple[str, ...] = ()

    def describe(self) -> dict[str, object]:
        row = self.row
        return {
            "row": row.name,
            "tile": f"{row.block_m} rows x {row.block_n} keys",
            "num_stages": row.num_stages,
            "warpgroups": f"1 loads, {row.num_mma_warpgroups} multiply",
            "grid": (self.num_ctas, 1, 1),
            "shared_memory_bytes": row.shared_memory_bytes,
            "tile measured": row.measured or "not yet",
            "copied first": ", ".join(self.copied) or "nothing",
            "gradient": "triton" if self.gradient_row is None else self.gradient_row.name,
            "sm_margin of": "forward and gradient" if self._gradient_is_persistent else "forward",
        }

    @property
    def _gradient_is_persistent(self) -> bool:
        """Else it has a program or a cluster for each tile, and cannot leave SMs free."""
        return self.gradient_row is not None and not self.gradient_row.in_pairs


@dataclass(frozen=True)
class HopperBackend:
    """See ``Backend``. library: called once a Hopper GPU is met, not before.

    only_measured: rows that no GPU has run yet are left to who names this backend.
    """

    name: str = "hopper"
    library: Callable[[], Library] = field(default=library_for_gpu, repr=False)
    only_measured: bool = True
    reads_slots: ClassVar[bool] = True

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        if device.kind != "cuda":
            return f"needs an NVIDIA GPU, the tensors are on {device.kind!r}"
        if device.capability != CAPABILITY:
            return f"needs compute capability 9.0, {device.name} has {device.capability / 10}"
        if device.interpreted or device.lowering != CAPABILITY:
            return "stands aside where Triton is told to interpret or to compile for another chip"
        needed = max(row.shared_memory_bytes for row in all_rows())
        if device.shared_memory_bytes < needed:
            found = device.shared_memory_bytes
            return f"needs {needed} bytes of shared memory for a block, {device.name} has {found}"
        fault = self.library().fault
        return None if fault is None else f"{fault}; to build them, {mended_by()}"

    def decline_reason(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = sixteen_bit.decline_reason(problem, MAX_HEAD_DIM)
        return reason or self._unusable_reason(_row_of(problem), problem)

    def _unusable_reason(self, row: Row, problem: Problem) -> str | None:
        if row.name not in self.library().rows:
            return f"kernel row {row.name} is not in this build (FLASHATTN3_KERNELS)"
        if self.only_measured and not row.measured and problem.backend != self.name:
            return f"kernel row {row.name} was never run on a GPU; backend='hopper' would run it"
        return None

    def unused_hints(self, problem: Problem) -> dict[str, str]:
        unused = {
            "pack_gqa": "has no packed layout of grouped queries",
            "num_splits": "computes all keys in one pass",
        }
        if problem.dtype not in EIGHT_BIT:
            unused["use_fast_accum"] = "accumulates 16-bit products in float32"
        return unused

    def configure(self, problem: Problem, device: DeviceInfo) -> HopperConfig:
        row = _row_of(problem)
        tiles = ceil(problem.seqlen_q / row.block_m) * problem.num_heads_q * problem.batch
        num_ctas = max(1, min(tiles, device.num_sms - problem.sm_margin))
        return HopperConfig(row, num_ctas, self._gradient_row(problem), _unfit_for_tma(problem))

    def _gradient_row(self, problem: Problem) -> BackwardRow | None:
        head_dim = max(problem.head_dim, problem.head_dim_v)
        row = select_backward_row(DTYPE_NAMES[problem.dtype], head_dim)
        if row is None or self._unusable_reason(row, problem) is not None:
            return None
        return None if 0 < problem.softcap < SMALLEST_GRADIENT_CAP else row

    def forward(self, plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
        run = plan.launches.get("forward")
        if run is None:
            run = plan.launches["forward"] = hopper_launches.prepare_forward(plan, self.library())
        return run(*tensors)

    def backward(
        self,
        plan: Plan,
        dout: Tensor,
        dlse: Tensor | None,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if plan.config.gradient_row is None:
            triton = plan.launches.get("backward")
            if triton is None:
                triton = plan.launches["backward"] = _gradient_plan(plan)
            return TRITON.backward(triton, dout, dlse, tensors, out, lse)
        run = plan.launches.get("backward")
        if run is None:
            run = plan.launches["backward"] = hopper_launches.prepare_backward(plan, self.library())
        return run(dout, dlse, out, lse, *tensors)


BACKEND = HopperBackend()


def _row_of(problem: Problem) -> ForwardRow:
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return select_row(DTYPE_NAMES[problem.dtype], head_dim, problem.windowed, problem.seqlen_k)


def _unfit_for_tma(problem: Problem) -> tuple[str, ...]:
    """Which of q, k and v lie at an address, or have a stride, that TMA does not take.

    V in 8 bits comes in slots, or is put into them.
    """
    lengths = {"q": problem.total_q, "k": problem.total_k, "v": problem.total_k}
    if problem.dtype in EIGHT_BIT:
        del lengths["v"]
    unfit = []
    for name, length in lengths.items():
        heads = problem.num_heads_q if name == "q" else problem.num_heads_kv
        sizes = (1 if problem.varlen else problem.batch, length, heads)
        strides = getattr(problem, f"{name}_stride")
        fits = hopper_launches.fits_tma(sizes, strides, problem.dtype.itemsize)
        if not fits or name in problem.misaligned:
            unfit.append(name)
    return tuple(unfit)


def _gradient_plan(plan: Plan) -> Plan:
    """The same problem on the Triton backend; UnsupportedError where that does not take it."""
    problem, device = plan.problem, plan.device
    reason = TRITON.unavailable_reason(device) or TRITON.decline_reason(problem, device)
    if reason is not None:
        raise UnsupportedError(
            f"{problem.function}: this gradient of backend 'hopper' runs on Triton, which does not "
            f"take the problem (triton: {reason})"
        )
    config = TRITON.configure(problem, device)
    return replace(plan, backend=TRITON, config=config, launches={})
