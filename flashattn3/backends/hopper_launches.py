"""From a problem and its kernel row to a call of the compiled operator: scalars, copies, slots."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernel_table import ROWS
from ..problem import ALIGNMENT_BYTES
from ..scales import FP8

if TYPE_CHECKING:
    from ..plan import Plan
    from .hopper_library import Library

OUT_ALIGNMENT = ALIGNMENT_BYTES // 2  # out has 16 bits, and rows of whole 16 bytes


def prepare(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of the tensors in the order of ``Tensors``: (out, lse)."""
    problem, config = plan.problem, plan.config
    fp8 = problem.dtype == FP8
    run = _fp8_call(plan, library) if fp8 else _call(plan, library)
    if not config.copied and problem.head_dim_v % OUT_ALIGNMENT == 0:
        return run

    def run_with_copies(q, k, v, *others):
        fit = (
            _aligned_copy(tensor) if name in config.copied else tensor
            for name, tensor in (("q", q), ("k", k), ("v", v))
        )
        out, lse = run(*fit, *others)
        return out[..., : problem.head_dim_v].contiguous(), lse

    return run_with_copies


def _call(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    operator, scalars = library.forward, _scalars(plan)

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *no_descales):
        return operator(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *scalars)

    return run


def _fp8_call(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    problem, operator = plan.problem, library.forward_fp8
    blocks = (
        0 if scales is None else scales.block
        for scales in (problem.q_scales, problem.k_scales, problem.v_scales)
    )
    out_is_fp16 = problem.out_dtype == torch.float16
    scalars = (*blocks, problem.head_dim_v, out_is_fp16, *_scalars(plan))
    to_slots, seqlen_k = library.to_slots, problem.seqlen_k
    columns = plan.config.row.head_dim

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, *others):
        if not problem.v_slots:
            v = to_slots(v, cu_seqlens_k, seqlen_k)
        if v.shape[-2] < columns:  # those of q and k's head dim
            missing = columns - v.shape[-2]
            v = pad(v.view(torch.uint8), (0, 0, 0, missing)).view(v.dtype)
        return operator(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, *scalars)

    return run


def _scalars(plan: Plan) -> tuple:
    problem = plan.problem
    return (
        ROWS.index(plan.config.row),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.softmax_scale,
        problem.softcap,
        problem.window_left,
        problem.window_right,
        plan.device.num_sms,
        problem.sm_margin,
    )


def _aligned_copy(tensor: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes."""
    head_dim, aligned = tensor.shape[-1], ALIGNMENT_BYTES // tensor.element_size()
    rows = tensor.new_empty((*tensor.shape[:-1], ceil(head_dim / aligned) * aligned))
    return rows[..., :head_dim].copy_(tensor)
