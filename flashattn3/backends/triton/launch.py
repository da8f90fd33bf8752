"""Builds the launches of the forward from a problem and its tiles: grids, scalars, constexpr
arguments.

The tuples below follow the kernel signatures in kernels/. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf

import torch
from torch import Tensor

from ...call.descales import Descales
from ...call.dtypes import EIGHT_BIT, FP8, INT8, NAMES, v_dtype
from ...call.operands import Tensors, as_scaled
from ...call.problem import Problem
from ..results import result_shapes
from .columns import columns_alike, forward_columns, fp8_columns, whole_columns
from .config import TritonConfig
from .kernels import forward
from .kernels.combine_splits import combine_kernel
from .kernels.launch import Launch, is_elementwise
from .launch_parts import (
    ROW_TILE,
    ROWS_PER_PROGRAM,
    dense_strides,
    features,
    has_tail,
    index_types,
    launch_of,
    lengths_of,
    lse_strides_of,
    mask_scalars,
    mask_types,
    num_blocks_of,
    num_heads_of,
    num_rows_of,
    sinks_type,
    term_constants,
    term_scalars,
    term_types,
    value_row,
    with_dense_slopes,
)
from .tile_configs import MAX_HEAD_DIM, Tile

OPERAND_TYPES = {**NAMES, FP8: "u8", INT8: "i8"}  # Triton's names; e4m3 as bytes
OF_FORWARD = Tensors._fields.index("mask_entries_k")  # the forward takes the tensors before it
SMALLEST_SCALE = 2.0**-100  # replaces a scale of 0 in the forward, where -inf * 0 would be NaN


def on_device(problem: Problem, run: Callable) -> Callable:
    """``run`` with the problem's device as the current one, where Triton launches."""
    if problem.device.type != "cuda":
        return run
    index, current_device = problem.device.index, torch.cuda.current_device

    def run_there(*arguments):
        if current_device() == index:
            return run(*arguments)
        with torch.cuda.device(index):
            return run(*arguments)

    return run_there


def prepare_forward(
    problem: Problem, config: TritonConfig
) -> Callable[[Tensors], tuple[Tensor, ...]]:
    """Build a function of the tensors that returns (out, lse), and max_logit if the problem asks
    for it."""
    launch = forward_launch(problem, config)
    prepare = _prepare_split_forward if config.num_splits > 1 else _prepare_whole_forward
    run = prepare(problem, config, launch)
    if problem.dtype in EIGHT_BIT:
        return lambda tensors: run(*_of_8_bits(with_dense_slopes(problem, tensors)))

    def forward(tensors: Tensors) -> tuple[Tensor, ...]:
        return run(*tensors[:OF_FORWARD], None, None, None)

    if problem.slopes is not None:
        return lambda tensors: forward(with_dense_slopes(problem, tensors))
    return forward


def _of_8_bits(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """The kernel's tensors: e4m3 as bytes, and the descales."""
    sides = [as_scaled(x) for x in tensors[:3]]
    data = (x.data.view(torch.uint8) if x.data.dtype == FP8 else x.data for x in sides)
    return (*data, *tensors[3:OF_FORWARD], *(x.descale for x in sides))


def _prepare_whole_forward(problem: Problem, config: TritonConfig, launch: Launch) -> Callable:
    allocate = result_allocator(problem)
    wanted = problem.return_max_logit

    def run(q, k, v, *rest):
        out, lse = allocate(q)
        max_logit = new_max_logit(problem) if wanted else None
        launch(q, k, v, out, lse, max_logit, *rest)
        return (out, lse) if max_logit is None else (out, lse, max_logit)

    return run


def result_allocator(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Build a function that allocates out and lse on q's device.

    For varlen they are initialised, because no kernel writes rows outside the sequences.
    """
    out_shape, lse_shape = result_shapes(problem)
    varlen, out_dtype = problem.varlen, problem.out_dtype

    def allocate(q: Tensor) -> tuple[Tensor, Tensor]:
        # q.new_empty instead of torch.empty avoids reading q.device in Python.
        out = q.new_empty(out_shape, dtype=out_dtype)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if varlen:
            out.zero_()
            lse.fill_(float("-inf"))
        return out, lse

    return allocate


def new_max_logit(problem: Problem) -> Tensor:
    return torch.full((problem.num_heads_q,), -inf, dtype=torch.float32, device=problem.device)


def _prepare_split_forward(problem: Problem, config: TritonConfig, launch: Launch) -> Callable:
    combine = combine_launch(problem, config)
    out_size, lse_size = result_shapes(problem)
    blank = torch.zeros if problem.varlen else torch.empty
    of = {"dtype": torch.float32, "device": problem.device}
    wanted = problem.return_max_logit

    def run(q, k, v, *rest):
        out_parts = blank((config.num_splits, *out_size), **of)
        lse_parts = torch.full((config.num_splits, *lse_size), float("-inf"), **of)
        max_logit = new_max_logit(problem) if wanted else None
        launch(q, k, v, out_parts, lse_parts, max_logit, *rest)
        out = torch.empty(out_size, dtype=problem.out_dtype, device=problem.device)
        lse = torch.empty(lse_size, **of)
        combine(out_parts, lse_parts, out, lse)
        return (out, lse) if max_logit is None else (out, lse, max_logit)

    return run


def forward_launch(problem: Problem, config: TritonConfig) -> Launch:
    """Launch of (q, k, v, out, lse, max_logit, the four of index_types, sinks, slopes, bias, the
    three of mask_types, the descales)."""
    tile = config.tiles.forward
    fp8 = problem.dtype in EIGHT_BIT
    score_scale = problem.score_scale
    if not fp8:  # q is negated instead
        positive = abs(score_scale.softmax_scale) or SMALLEST_SCALE
        score_scale = score_scale._replace(softmax_scale=positive)
    num_m_blocks = num_blocks_of(problem, problem.seqlen_q, tile.block_m)
    out_strides = dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v)
    lse_strides = lse_strides_of(problem)
    scalars = (
        *problem.q.stride,
        *problem.k.stride,
        *problem.v.stride,
        num_rows_of(problem) * problem.head_dim_v,
        *out_strides,
        num_rows_of(problem),
        *lse_strides,
        num_m_blocks,
        problem.num_heads_q,
        problem.qhead_per_kvhead,
        *lengths_of(problem),
        problem.window_left,
        problem.window_right,
        config.num_splits,
        *score_scale.log2_factors,
        *_descale_layouts(problem),
        *term_scalars(problem),
        *mask_scalars(problem, problem.seqlen_q, problem.seqlen_k),
    )
    dims = problem.head_dim, problem.head_dim_v
    alike = {}
    if fp8:
        columns = fp8_columns(*dims, config.wgmma)
    else:
        columns = forward_columns(*dims) if config.in_parts else whole_columns(*dims)
    if config.wgmma and not fp8:
        alike = columns_alike(*dims)
        # The first scalars are the strides of q, k and v.
        if tile.num_stages == 1 or is_elementwise(*dims, *scalars[:9]):
            columns = alike
    constants = features(problem, tile, columns) | {
        "SLICE_N": tile.slice_n or tile.block_n,
        "K_STRIDE_S": _constant_stride(problem.k.stride[1], tile),
        "V_STRIDE_S": _constant_stride(problem.v.stride[1], tile),
        "NEGATIVE_SCALE": not fp8 and problem.score_scale.softmax_scale < 0,
        "SPLIT": config.num_splits > 1,
        "TAIL": has_tail(problem, problem.seqlen_k, tile.block_n),
        "FP8": fp8,
        "NATIVE_FP8": config.native_fp8,
        **term_constants(problem),
    }
    dtype, dtype_v = (OPERAND_TYPES[x] for x in (problem.dtype, v_dtype(problem.dtype)))
    out_type = "fp32" if config.num_splits > 1 else NAMES[problem.out_dtype]
    descales = ("fp32" if descales else None for descales in _all_descales(problem))
    max_logit_type = "fp32" if problem.return_max_logit else None
    types = (dtype, dtype, dtype_v, out_type, "fp32", max_logit_type)
    types += (*index_types(problem), sinks_type(problem), *term_types(problem))
    types += (*mask_types(problem), *descales)
    launch = launch_of(forward.forward_kernel, types, config.grid, scalars, constants, tile, config)
    return replace(launch, unaligned=alike)


def _constant_stride(stride: int, tile: Tile) -> int:
    """A token stride that the forward is compiled for, so that the pointers of a slice share
    registers. 0, a run-time stride, for whole n_blocks and where a block's offsets exceed 32 bits.
    """
    fits = stride * tile.block_n + MAX_HEAD_DIM <= 2**31
    return stride if tile.slice_n and fits else 0


def combine_launch(problem: Problem, config: TritonConfig) -> Launch:
    """Launch of (out_parts, lse_parts, out, lse)."""
    num_m_blocks = ceil(problem.total_q / ROWS_PER_PROGRAM)
    scalars = (
        num_rows_of(problem) * problem.head_dim_v,
        *dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v),
        num_rows_of(problem),
        num_m_blocks,
        problem.num_heads_q,
        problem.total_q,
        config.num_splits,
    )
    constants = value_row(problem, ()) | {"SINKS": problem.sinks_dtype is not None}
    types = ("fp32", "fp32", NAMES[problem.out_dtype], "fp32")
    grid = (num_m_blocks * num_heads_of(problem), 1, 1)
    return launch_of(combine_kernel, types, grid, scalars, constants, ROW_TILE, config)


def _all_descales(problem: Problem) -> tuple[Descales | None, ...]:
    return problem.q.descales, problem.k.descales, problem.v.descales


def _descale_layouts(problem: Problem) -> tuple[int | None, ...]:
    """Strides, query heads per descale, block and num_blocks of q, k and v; None: no descale."""
    places = []
    for descales in _all_descales(problem):
        if descales is None:
            places += [None] * 6
        else:
            qhead_per_kvhead = problem.num_heads_q // descales.heads
            places += [*descales.stride, qhead_per_kvhead, descales.block, descales.num_blocks]
    return tuple(places)
