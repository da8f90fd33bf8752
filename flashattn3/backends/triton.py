"""The Triton backend: FlashAttention-2 kernels for every GPU from compute capability 8.0."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..device import DeviceInfo
from ..problem import SIXTEEN_BIT, Problem, Tensors
from ..triton_kernels.configs import MAX_HEAD_DIM, MIN_SHARED_MEMORY_KIB, Row, Tile, select_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..plan import Plan

@dataclass(frozen=True)
class TritonConfig:
    """The table row of a plan and how many parts the keys are worked off in."""

    row: Row
    num_splits: int
    grid: tuple[int, int, int]

    def describe(self) -> dict[str, object]:
        forward = self.row.forward
        return {
            "tile": f"{forward.block_m} rows x {forward.block_n} keys",
            "num_warps": forward.num_warps,
            "num_stages": forward.num_stages,
            "num_splits": self.num_splits,
            "grid": self.grid,
            "shared_memory_bytes": self.row.shared_memory_kib * 1024,
            "row": f"head dim <= {self.row.head_dim}, {self.row.shared_memory_kib} KiB, "
            + ("wgmma" if self.row.wgmma else "mma.sync"),
        }


class TritonBackend:
    """See ``Backend``. Triton itself is imported when the first kernel is launched, not before."""

    name = "triton"

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if device.interpreted:
            return None
        if device.kind != "cuda":
            return f"needs an NVIDIA GPU, the tensors are on {device.kind!r}"
        if device.capability < 80:
            return f"needs compute capability 8.0 or newer, {device.name} has {device.capability / 10}"
        if device.shared_memory_bytes < MIN_SHARED_MEMORY_KIB * 1024:
            found = device.shared_memory_bytes // 1024
            return f"needs {MIN_SHARED_MEMORY_KIB} KiB of shared memory for a block, {device.name} has {found}"
        return None

    def decline_reason(self, problem: Problem, device: DeviceInfo) -> str | None:
        if problem.dtype not in SIXTEEN_BIT:
            return f"computes in float16 and bfloat16, not in {problem.dtype}"
        for name in ("head_dim", "head_dim_v"):
            if getattr(problem, name) > MAX_HEAD_DIM:
                return f"takes head dims up to {MAX_HEAD_DIM}, {name} is {getattr(problem, name)}"
        if problem.pack_gqa:
            return "has no packed layout of grouped queries (pack_gqa)"
        if problem.sm_margin:
            return "launches one program per tile, so it cannot leave SMs free (sm_margin)"
        return None

    def configure(self, problem: Problem, device: DeviceInfo) -> TritonConfig:
        row = select_row(problem.head_dim, problem.head_dim_v, device.lowering, device.shared_memory_bytes)
        tiles = ceil(problem.seqlen_q / row.forward.block_m) * problem.num_heads_q * problem.batch
        num_splits = _num_splits(problem.num_splits, tiles, problem.seqlen_k, row.forward, device.num_sms)
        return TritonConfig(row, num_splits, (tiles * num_splits, 1, 1))

    def forward(self, plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
        from . import triton_launches as launches

        problem, num_splits = plan.problem, plan.config.num_splits
        q, v = tensors.q, tensors.v
        # Only varlen can have rows that no program writes.
        blank = problem.varlen
        out = (q.new_zeros if blank else q.new_empty)((*q.shape[:-1], v.shape[-1]))
        lse = _row_values(problem, blank)
        with _on_device(q):
            launch = _prepared(plan, "forward", launches.forward_launch)
            if num_splits == 1:
                launch(q, tensors.k, v, out, lse, *tensors[3:])
            else:
                out_parts, lse_parts = _parts(problem, num_splits, out, lse)
                launch(q, tensors.k, v, out_parts, lse_parts, *tensors[3:])
                _prepared(plan, "merge", launches.merge_launch)(out_parts, lse_parts, out, lse)
        return out, lse

    def backward(
        self, plan: Plan, dout: Tensor, dlse: Tensor | None, tensors: Tensors, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from . import triton_launches as launches

        problem = plan.problem
        q, k, v = tensors[:3]
        strides = (dout.stride(), None if dlse is None else dlse.stride())
        statistics_launch, key_value_launch, query_launch = _prepared(
            plan, ("backward", *strides), launches.backward_launches, *strides
        )
        new = torch.Tensor.new_zeros if problem.varlen else torch.Tensor.new_empty
        dk, dv = new(k, k.shape), new(v, v.shape)
        shape = launches.statistics_shape(problem)
        lse_log2, delta = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
        rows = (dout, lse_log2, delta)
        indices = tensors[3:]
        with _on_device(q):
            statistics_launch(
                out.contiguous(), dout, lse.contiguous(), dlse, lse_log2, delta, tensors.cu_seqlens_q, tensors.seqused_q
            )
            if query_launch is None:
                dq = q.new_zeros(q.shape, dtype=torch.float32)
                key_value_launch(q, k, v, *rows, dq, dk, dv, *indices)
                return dq.to(q.dtype), dk, dv
            dq = new(q, q.shape)
            key_value_launch(q, k, v, *rows, None, dk, dv, *indices)
            query_launch(q, k, v, *rows, dq, *indices)
        return dq, dk, dv


BACKEND = TritonBackend()


def _num_splits(asked: int, tiles: int, seqlen_k: int, tile: Tile, num_sms: int) -> int:
    """How many parts to work the keys off in: as asked, or, for <= 0, enough to occupy every SM."""
    key_tiles = max(1, ceil(seqlen_k / tile.block_n))
    if asked > 0:
        return min(asked, key_tiles)
    if tiles >= num_sms or tiles == 0:
        return 1
    # Under four key tiles for each part the merge costs more than the idle SMs do.
    return max(1, min(num_sms // tiles, key_tiles // 4))


def _on_device(tensor: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def _row_values(problem: Problem, blank: bool) -> Tensor:
    """One float32 for every query row and head: (batch, heads, seqlen_q) or (heads, total_q)."""
    shape = (problem.num_heads_q, problem.total_q)
    if not problem.varlen:
        shape = (problem.batch, *shape)
    if blank:
        return torch.full(shape, float("-inf"), dtype=torch.float32, device=problem.device)
    return torch.empty(shape, dtype=torch.float32, device=problem.device)


def _parts(problem: Problem, num_splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out_parts = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
    lse_parts = lse.new_empty((num_splits, *lse.shape))
    if problem.varlen:
        out_parts.zero_()
        lse_parts.fill_(float("-inf"))
    return out_parts, lse_parts


def _prepared(plan: Plan, key: object, build: Callable, *arguments: object):
    """What ``triton_launches`` builds for this plan, built once."""
    launch = plan.launches.get(key)
    if launch is None:
        launch = plan.launches[key] = build(plan.problem, plan.config, *arguments)
    return launch
