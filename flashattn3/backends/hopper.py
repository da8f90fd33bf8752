"""The Hopper backend: FlashAttention-3 kernels, compiled ahead of time, for compute capability 9.0.

The gradient runs through the Triton backend, with this kernel's log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..device import DeviceInfo
from ..errors import UnsupportedError
from ..kernel_table import E4M3, MAX_HEAD_DIM, ROWS, ForwardRow, select_row
from ..problem import ALIGNMENT_BYTES, Problem, Tensors
from ..scales import FP8
from . import hopper_launches, sixteen_bit
from .hopper_library import MENDED_BY, Library, library_for_gpu
from .triton import BACKEND as TRITON

if TYPE_CHECKING:
    from ..plan import Plan

CAPABILITY = 90


@dataclass(frozen=True)
class HopperConfig:
    """The kernel row of a plan and what has to happen around it.

    copied: names of the tensors that TMA cannot read where they are: it wants addresses and
        strides in multiples of 16 bytes.
    num_ctas: thread blocks, each of which works off tiles until none is left.
    """

    row: ForwardRow
    num_ctas: int
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
            "gradient": "triton",
        }


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
        needed = max(row.shared_memory_bytes for row in ROWS)
        if device.shared_memory_bytes < needed:
            found = device.shared_memory_bytes
            return f"needs {needed} bytes of shared memory for a block, {device.name} has {found}"
        fault = self.library().fault
        return None if fault is None else f"{fault}; in the checkout: {MENDED_BY}"

    def decline_reason(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = sixteen_bit.decline_reason(problem, MAX_HEAD_DIM)
        if reason is not None:
            return reason
        if problem.num_splits > 1:
            return "works the keys off in one pass (num_splits)"
        row = _row_of(problem)
        if row.name not in self.library().rows:
            return f"kernel row {row.name} is not in this build (FLASHATTN3_KERNELS)"
        if self.only_measured and not row.measured and problem.backend != self.name:
            return f"kernel row {row.name} was never run on a GPU; backend='hopper' would run it"
        return None

    def configure(self, problem: Problem, device: DeviceInfo) -> HopperConfig:
        row = _row_of(problem)
        tiles = ceil(problem.seqlen_q / row.block_m) * problem.num_heads_q * problem.batch
        num_ctas = max(1, min(tiles, device.num_sms - problem.sm_margin))
        return HopperConfig(row, num_ctas, _unfit_for_tma(problem))

    def forward(self, plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
        run = plan.launches.get("forward")
        if run is None:
            run = plan.launches["forward"] = hopper_launches.prepare(plan, self.library())
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
        triton = plan.launches.get("backward")
        if triton is None:
            triton = plan.launches["backward"] = _gradient_plan(plan)
        return TRITON.backward(triton, dout, dlse, tensors, out, lse)


BACKEND = HopperBackend()


def _row_of(problem: Problem) -> ForwardRow:
    head_dim = max(problem.head_dim, problem.head_dim_v)
    dtype = E4M3 if problem.dtype == FP8 else sixteen_bit.DTYPE_NAMES[problem.dtype]
    return select_row(dtype, head_dim, problem.windowed, problem.seqlen_k)


def _unfit_for_tma(problem: Problem) -> tuple[str, ...]:
    """Which of q, k and v lie at an address, or have a stride, that TMA does not take.

    Strides of 0 (an expanded tensor) are among them: its descriptors are for distinct rows. V in 8
    bits comes in slots, or is put into them.
    """
    lengths = {"q": problem.total_q, "k": problem.total_k, "v": problem.total_k}
    aligned_elements = ALIGNMENT_BYTES // problem.dtype.itemsize
    if problem.dtype == FP8:
        del lengths["v"]
    unfit = []
    for name, length in lengths.items():
        heads = problem.num_heads_q if name == "q" else problem.num_heads_kv
        batch = 1 if problem.varlen else problem.batch
        strides = zip((batch, length, heads), getattr(problem, f"{name}_stride"), strict=True)
        odd = any(size > 1 and (not step or step % aligned_elements) for size, step in strides)
        if odd or name in problem.misaligned:
            unfit.append(name)
    return tuple(unfit)


def _gradient_plan(plan: Plan) -> Plan:
    """The same problem on the Triton backend; UnsupportedError where that does not take it."""
    problem, device = plan.problem, plan.device
    reason = TRITON.unavailable_reason(device) or TRITON.decline_reason(problem, device)
    if reason is not None:
        raise UnsupportedError(
            f"{problem.function}: the gradient of backend 'hopper' runs on Triton, which does not "
            f"take this problem (triton: {reason})"
        )
    config = TRITON.configure(problem, device)
    return replace(plan, backend=TRITON, config=config, launches={})
