"""Builds the calls of the compiled operators from a plan: scalars, aligned copies, permuted V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...call.dtypes import EIGHT_BIT
from ...call.inputs import ALIGNMENT_BYTES
from ...dispatch.kernel_configs import BACKWARD_CONFIGS, FORWARD_CONFIGS

if TYPE_CHECKING:
    from ...dispatch.planner import Plan
    from .library import Library

OUT_ALIGNMENT = ALIGNMENT_BYTES // 2  # in 16-bit elements: output rows are 16-byte aligned


def fits_tma(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA supports these strides, of all axes but the last.

    It does not support a stride of 0 (an expanded tensor): its descriptors need distinct rows.
    """
    aligned = ALIGNMENT_BYTES // itemsize
    return all(
        size <= 1 or (step and step % aligned == 0)
        for size, step in zip(sizes, strides, strict=True)
    )


def prepare_forward(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build a function of the tensors, in the order of ``Tensors``, that returns (out, lse)."""
    problem, config = plan.problem, plan.config
    eight_bit = problem.dtype in EIGHT_BIT
    run = _fp8_call(plan, library) if eight_bit else _call(plan, library)
    if not config.copied and problem.head_dim_v % OUT_ALIGNMENT == 0:
        return run

    def run_with_copies(q, k, v, *others):
        out, lse = run(*_copied(config.copied, q, k, v), *others)
        return out[..., : problem.head_dim_v].contiguous(), lse

    return run_with_copies


def prepare_backward(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Build a function of (dout, dlse, out, lse, *Tensors) that returns (dq, dk, dv)."""
    problem, copied, operator = plan.problem, plan.config.copied, library.backward
    config_index = BACKWARD_CONFIGS.index(plan.config.gradient_config)
    scalars = (config_index, *_scalars(plan), problem.deterministic)
    whole_rows = problem.head_dim % OUT_ALIGNMENT == problem.head_dim_v % OUT_ALIGNMENT == 0

    def run(dout, dlse, out, lse, q, k, v, *others):
        indices = others[:4]
        if copied:
            q, k, v = _copied(copied, q, k, v)
        dout, out = _in_whole_rows(dout), _in_whole_rows(out)
        results = operator(dout, dlse, out, lse.contiguous(), q, k, v, *indices, *scalars)
        if whole_rows:
            return results
        columns = (problem.head_dim, problem.head_dim, problem.head_dim_v)
        return tuple(x[..., :d].contiguous() for x, d in zip(results, columns, strict=True))

    return run


def _call(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    operator, scalars = library.forward, (_forward_config_index(plan), *_scalars(plan))

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *no_descales):
        return operator(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *scalars)

    return run


def _fp8_call(plan: Plan, library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    problem, operator = plan.problem, library.forward_fp8
    blocks = (
        0 if descales is None else descales.block
        for descales in (problem.q.descales, problem.k.descales, problem.v.descales)
    )
    out_is_fp16 = problem.out_dtype == torch.float16
    layout = (*blocks, problem.head_dim_v, out_is_fp16, problem.use_fast_accum)
    scalars = (*layout, _forward_config_index(plan), *_scalars(plan))
    permute_v, seqlen_k = library.permute_v, problem.seqlen_k
    columns = plan.config.kernel_config.head_dim

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, *others):
        if not problem.v.permuted:
            v = permute_v(v, cu_seqlens_k, seqlen_k)
        if v.shape[-2] < columns:  # pad to the kernel's head dim
            missing = columns - v.shape[-2]
            v = pad(v.view(torch.uint8), (0, 0, 0, missing)).view(v.dtype)
        return operator(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, *scalars)

    return run


def _forward_config_index(plan: Plan) -> int:
    return FORWARD_CONFIGS.index(plan.config.kernel_config)


def _scalars(plan: Plan) -> tuple:
    """Operator arguments that follow the config index."""
    problem = plan.problem
    return (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.softmax_scale,
        problem.softcap,
        problem.window_left,
        problem.window_right,
        plan.device.num_sms,
        problem.sm_margin,
    )


def _copied(names: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    named = (("q", q), ("k", k), ("v", v))
    return tuple(_aligned_copy(tensor) if name in names else tensor for name, tensor in named)


def _in_whole_rows(tensor: Tensor) -> Tensor:
    """dout or out (16 bits) itself if the kernels can read it, else an aligned copy."""
    *strides, last = tensor.stride()
    dense = tensor.is_contiguous() and tensor.shape[-1] % OUT_ALIGNMENT == 0
    fits = dense or (last == 1 and fits_tma(tensor.shape[:-1], strides, tensor.element_size()))
    return tensor if fits and tensor.data_ptr() % ALIGNMENT_BYTES == 0 else _aligned_copy(tensor)


def _aligned_copy(tensor: Tensor) -> Tensor:
    """Copy to a tensor whose rows begin at multiples of 16 bytes."""
    head_dim, aligned = tensor.shape[-1], ALIGNMENT_BYTES // tensor.element_size()
    rows = tensor.new_empty((*tensor.shape[:-1], ceil(head_dim / aligned) * aligned))
    return rows[..., :head_dim].copy_(tensor)
