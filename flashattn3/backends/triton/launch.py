"""Builds kernel launches from a problem and its tiles: grids, scalars, constexpr arguments.

The tuples below follow the kernel signatures in kernels/. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from ...call.descales import Descales
from ...call.dtypes import EIGHT_BIT, FP8, INT8, NAMES, v_dtype
from ...call.fields import LOG2E, ScoreScale
from ...call.operands import NUM_TENSORS, Tensors, as_scaled
from ...call.problem import Problem
from ..conversions import with_dense_rows
from ..results import result_shapes
from .columns import (
    backward_columns,
    blocks_alike,
    forward_columns,
    fp8_columns,
    padded,
    whole_columns,
)
from .config import TritonConfig
from .kernels import backward, forward
from .kernels.launch import Launch, is_elementwise, stride_unit
from .tile_configs import MAX_HEAD_DIM, Tile

OPERAND_TYPES = {**NAMES, FP8: "u8", INT8: "i8"}  # Triton's names; e4m3 as bytes
SMALLEST_SCALE = 2.0**-100  # replaces a scale of 0 in the forward, where -inf * 0 would be NaN
LARGEST_EXACT_CAP = 256.0  # at this cap tanh's absolute error is 1e-4 in a score
SMALLEST_DIVISOR = 2.0**-64  # smallest scale that lse is divided by, far from overflow
LSE_DELTA_ROWS = backward.LSE_DELTA_ROWS.value
ROWS_PER_PROGRAM = 64  # rows per program of the row-wise kernels (combine, preprocess)
COMBINE_TILE = Tile(ROWS_PER_PROGRAM, 0, num_warps=4, num_stages=2)


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
) -> Callable[[Tensors], tuple[Tensor, Tensor]]:
    """Build a function of the tensors that returns (out, lse)."""
    launch = forward_launch(problem, config)
    prepare = _prepare_split_forward if config.num_splits > 1 else _prepare_whole_forward
    run = prepare(problem, config, launch)
    if problem.dtype in EIGHT_BIT:
        return lambda tensors: run(*_of_8_bits(tensors))
    return lambda tensors: run(*tensors[:NUM_TENSORS], None, None, None)


def _of_8_bits(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """The kernel's tensors: e4m3 as bytes, and the descales."""
    sides = [as_scaled(x) for x in tensors[:3]]
    data = (x.data.view(torch.uint8) if x.data.dtype == FP8 else x.data for x in sides)
    return (*data, *tensors[3:NUM_TENSORS], *(x.descale for x in sides))


def _prepare_whole_forward(problem: Problem, config: TritonConfig, launch: Launch) -> Callable:
    allocate = result_allocator(problem)

    def run(q, k, v, *rest):
        out, lse = allocate(q)
        launch(q, k, v, out, lse, *rest)
        return out, lse

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


def _prepare_split_forward(problem: Problem, config: TritonConfig, launch: Launch) -> Callable:
    combine = combine_launch(problem, config)
    out_size, lse_size = result_shapes(problem)
    blank = torch.zeros if problem.varlen else torch.empty
    of = {"dtype": torch.float32, "device": problem.device}

    def run(q, k, v, *rest):
        out_parts = blank((config.num_splits, *out_size), **of)
        lse_parts = torch.full((config.num_splits, *lse_size), float("-inf"), **of)
        launch(q, k, v, out_parts, lse_parts, *rest)
        out = torch.empty(out_size, dtype=problem.out_dtype, device=problem.device)
        lse = torch.empty(lse_size, **of)
        combine(out_parts, lse_parts, out, lse)
        return out, lse

    return run


def prepare_backward(
    problem: Problem, config: TritonConfig
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Build a function of dout, dlse, out, lse and the tensors that returns (dq, dk, dv)."""
    prepared: dict[tuple, Callable] = {}  # by the strides of dout and dlse, which a call chooses

    def run(dout, dlse, out, lse, tensors):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        strides = (dout.stride(), None if dlse is None else dlse.stride())
        backward = prepared.get(strides)
        if backward is None:
            backward = prepared[strides] = _prepare_backward(problem, config, *strides)
        tensors = with_dense_rows(problem, tensors)
        return backward(dout, dlse, out.contiguous(), lse.contiguous(), *tensors[:NUM_TENSORS])

    return run


def _prepare_backward(
    problem: Problem,
    config: TritonConfig,
    dout_stride: tuple[int, ...],
    dlse_stride: tuple[int, ...] | None,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    launches = backward_launches(problem, config, dout_stride, dlse_stride)
    preprocess, main, last = launches.values()
    shape = lse_delta_shape(problem)
    accum_shape = (*shape, _backward_columns(problem, config)["BLOCK_D"])
    adds_dq = config.tiles.bwd is not None
    new_like = torch.zeros if problem.varlen else torch.empty

    def run(dout, dlse, out, lse, q, k, v, *indices):
        of = {"dtype": torch.float32, "device": q.device}
        minus_lse, minus_delta = (torch.empty(shape, **of) for _ in range(2))
        dq_accum = torch.empty(accum_shape, **of) if adds_dq else None
        dq, dk, dv = (new_like(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        lengths_q = indices[::2]
        preprocess(out, dout, lse, dlse, minus_lse, minus_delta, dq_accum, *lengths_q)
        main(q, k, v, dout, minus_lse, minus_delta, dk, dv, dq_accum, *indices)
        if adds_dq:
            last(dq_accum, dq, *lengths_q)
        else:
            last(q, k, v, dout, minus_lse, minus_delta, dq, *indices)
        return dq, dk, dv

    return run


def forward_launch(problem: Problem, config: TritonConfig) -> Launch:
    """Launch of (q, k, v, out, lse, the four of _indices, the descales)."""
    tile = config.tiles.forward
    fp8 = problem.dtype in EIGHT_BIT
    score_scale = problem.score_scale
    if not fp8:  # q is negated instead
        positive = abs(score_scale.softmax_scale) or SMALLEST_SCALE
        score_scale = score_scale._replace(softmax_scale=positive)
    num_m_blocks = tile.num_m_blocks(problem.seqlen_q)
    out_strides = _dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v)
    lse_strides = _lse_strides(problem)
    scalars = (
        *problem.q.stride,
        *problem.k.stride,
        *problem.v.stride,
        _num_rows(problem) * problem.head_dim_v,
        *out_strides,
        _num_rows(problem),
        *lse_strides,
        num_m_blocks,
        problem.num_heads_q,
        problem.qhead_per_kvhead,
        *_lengths(problem),
        problem.window_left,
        problem.window_right,
        config.num_splits,
        *score_scale.log2_factors,
        *_descale_layouts(problem),
    )
    dims = problem.head_dim, problem.head_dim_v
    alike = {}
    if fp8:
        columns = fp8_columns(*dims, config.wgmma)
    else:
        columns = forward_columns(*dims) if config.in_parts else whole_columns(*dims)
    if config.wgmma and not fp8:
        alike = whole_columns(*blocks_alike(*dims))
        # The first scalars are the strides of q, k and v.
        if tile.num_stages == 1 or is_elementwise(*dims, *scalars[:9]):
            columns = alike
    constants = _features(problem, tile, columns) | {
        "SLICE_N": tile.slice_n or tile.block_n,
        "K_STRIDE_S": _constant_stride(problem.k.stride[1], tile),
        "V_STRIDE_S": _constant_stride(problem.v.stride[1], tile),
        "NEGATIVE_SCALE": not fp8 and problem.score_scale.softmax_scale < 0,
        "SPLIT": config.num_splits > 1,
        "TAIL": problem.varlen or problem.seqlen_k % tile.block_n != 0,
        "FP8": fp8,
        "NATIVE_FP8": config.native_fp8,
    }
    dtype, dtype_v = (OPERAND_TYPES[x] for x in (problem.dtype, v_dtype(problem.dtype)))
    out_type = "fp32" if config.num_splits > 1 else NAMES[problem.out_dtype]
    descales = ("fp32" if descales else None for descales in _all_descales(problem))
    types = (dtype, dtype, dtype_v, out_type, "fp32", *_indices(problem), *descales)
    launch = _launch(forward.forward_kernel, types, config.grid, scalars, constants, tile, config)
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
        _num_rows(problem) * problem.head_dim_v,
        *_dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v),
        _num_rows(problem),
        num_m_blocks,
        problem.num_heads_q,
        problem.total_q,
        config.num_splits,
    )
    constants = _value_row(problem, ())
    types = ("fp32", "fp32", NAMES[problem.out_dtype], "fp32")
    grid = (num_m_blocks * _num_heads(problem), 1, 1)
    return _launch(forward.combine_kernel, types, grid, scalars, constants, COMBINE_TILE, config)


def backward_launches(
    problem: Problem,
    config: TritonConfig,
    dout_stride: tuple[int, ...],
    dlse_stride: tuple[int, ...] | None,
) -> dict[str, Launch]:
    """Launches of three kernels in their order, with the tensors that each takes:

    bwd_preprocess: out, dout, lse, dlse, minus_lse, minus_delta, dq_accum, cu_seqlens_q, seqused_q.

    With a tile for it, five GEMMs:
    bwd: q, k, v, dout, minus_lse, minus_delta, dk, dv, dq_accum, the four of _indices.
    bwd_postprocess: dq_accum, dq, cu_seqlens_q, seqused_q.

    Without, seven:
    bwd_dkdv: as bwd, dq_accum is None.
    bwd_dq: q, k, v, dout, minus_lse, minus_delta, dq, the four of _indices.
    """
    dout_strides = (0, *dout_stride[:2]) if problem.varlen else dout_stride[:3]
    preprocess = _preprocess_launch(problem, config, dout_strides, dlse_stride)
    main = _bwd_launch(problem, config, dout_strides)
    if config.tiles.bwd is not None:
        last = _postprocess_launch(problem, config)
        return {"bwd_preprocess": preprocess, "bwd": main, "bwd_postprocess": last}
    last = _dq_launch(problem, config, dout_strides)
    return {"bwd_preprocess": preprocess, "bwd_dkdv": main, "bwd_dq": last}


def lse_delta_shape(problem: Problem) -> tuple[int, ...]:
    """(batch, heads, rows) or, for varlen, (heads, rows); rows include the padding."""
    if problem.varlen:
        return (problem.num_heads_q, problem.total_q + problem.batch * LSE_DELTA_ROWS)
    return (problem.batch, problem.num_heads_q, _padded_rows(problem.seqlen_q))


def _padded_rows(rows: int) -> int:
    return ceil(rows / LSE_DELTA_ROWS) * LSE_DELTA_ROWS


def _preprocess_launch(problem: Problem, config: TritonConfig, dout_strides, dlse_stride) -> Launch:
    has_dlse = dlse_stride is not None
    num_m_blocks = _padded_rows(problem.seqlen_q) // ROWS_PER_PROGRAM
    scalars = (
        *_dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v),
        *dout_strides,
        *_lse_strides(problem),
        *((0, 0, 0, *dlse_stride)[-3:] if has_dlse else (0, 0, 0)),
        *_lse_delta_strides(problem),
        num_m_blocks,
        problem.num_heads_q,
        problem.seqlen_q,
        problem.total_q,
        -1.0 / problem.score_scale.softmax_scale if _lse_in_scores(problem, config) else -LOG2E,
    )
    columns = _backward_columns(problem, config)
    constants = _value_row(problem, dout_strides) | {
        "BLOCK_D": columns["BLOCK_D"],
        "PART_D": columns["PART_D"],
        "VARLEN": problem.varlen,
        "USED_Q": problem.q.has_seqused,
        "HAS_DLSE": has_dlse,
    }
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    dlse_type = "fp32" if has_dlse else None
    rows = ("fp32", dlse_type, "fp32", "fp32", _dq_accum_type(config))
    types = (dtype, dtype, *rows, *_indices(problem)[::2])
    return _launch(
        backward.bwd_preprocess_kernel, types, grid, scalars, constants, COMBINE_TILE, config
    )


def _bwd_launch(problem: Problem, config: TritonConfig, dout_strides) -> Launch:
    tile = config.tiles.of_bwd_kernel
    num_n_blocks = tile.num_n_blocks(problem.seqlen_k)
    keys, heads = problem.total_k, problem.num_heads_kv
    scalars = (
        *_input_strides(problem, dout_strides),
        *_dense_strides(problem, keys, heads, problem.head_dim),
        *_dense_strides(problem, keys, heads, problem.head_dim_v),
        num_n_blocks,
        problem.num_heads_kv,
        *_bounds_and_factors(problem),
    )
    tail_q, tail_k = problem.seqlen_q % tile.block_m, problem.seqlen_k % tile.block_n
    columns = _backward_columns(problem, config)
    constants = _features(problem, tile, columns, dout_strides) | {
        "LSE_IN_SCORES": _lse_in_scores(problem, config),
        "DELTA_IN_DP": tile.biased,
        "TAIL": problem.varlen or tail_q != 0 or tail_k != 0,
        "NUM_WARPS": tile.num_warps,
    }
    grid = (num_n_blocks * heads * problem.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    gradients = (dtype, dtype, _dq_accum_type(config))
    types = (*(dtype,) * 4, "fp32", "fp32", *gradients, *_indices(problem))
    return _launch(backward.bwd_kernel, types, grid, scalars, constants, tile, config)


def _postprocess_launch(problem: Problem, config: TritonConfig) -> Launch:
    tile = config.tiles.bwd
    columns = _backward_columns(problem, config)
    num_m_blocks = tile.num_m_blocks(problem.seqlen_q)
    scalars = (
        *_lse_delta_strides(problem),
        *_dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim),
        num_m_blocks,
        problem.num_heads_q,
        problem.seqlen_q,
        problem.total_q,
        problem.score_scale.softmax_scale,
    )
    constants = {
        "STRIDE_UNIT": stride_unit(problem.head_dim),
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": columns["BLOCK_D"],
        "PART_D": columns["PART_D"],
        "BLOCK_M": tile.block_m,
        "NUM_WARPS": tile.num_warps,
        "VARLEN": problem.varlen,
        "USED_Q": problem.q.has_seqused,
    }
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    types = ("fp32", NAMES[problem.dtype], *_indices(problem)[::2])
    return _launch(
        backward.bwd_postprocess_kernel, types, grid, scalars, constants, COMBINE_TILE, config
    )


def _dq_launch(problem: Problem, config: TritonConfig, dout_strides) -> Launch:
    tile = config.tiles.bwd_dq
    num_m_blocks = tile.num_m_blocks(problem.seqlen_q)
    scalars = (
        *_input_strides(problem, dout_strides),
        *_dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim),
        num_m_blocks,
        problem.num_heads_q,
        *_bounds_and_factors(problem),
    )
    columns = _backward_columns(problem, config)
    constants = _features(problem, tile, columns, dout_strides) | {
        "LSE_IN_SCORES": _lse_in_scores(problem, config),
        "TAIL": problem.varlen or problem.seqlen_k % tile.block_n != 0,
    }
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    types = (*(dtype,) * 4, "fp32", "fp32", dtype, *_indices(problem))
    return _launch(backward.bwd_dq_kernel, types, grid, scalars, constants, tile, config)


def _launch(kernel, types, grid, scalars, constants, tile: Tile, config: TritonConfig) -> Launch:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if config.arch is not None:
        options["arch"] = config.arch
    return Launch(kernel, types, grid, scalars, constants, options)


def _indices(problem: Problem) -> tuple[str | None, ...]:
    """Types of what follows q, k and v in ``Tensors``."""
    present = (problem.varlen, problem.varlen, problem.q.has_seqused, problem.k.has_seqused)
    return tuple("i32" if given else None for given in present)


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


def _value_row(problem: Problem, strides: tuple[int, ...]) -> dict[str, int]:
    """constexpr arguments of a row-wise kernel. strides: of its inputs that are not dense."""
    return {
        "STRIDE_UNIT": stride_unit(problem.head_dim_v, *strides),
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_DV": padded(problem.head_dim_v),
        "BLOCK_M": ROWS_PER_PROGRAM,
    }


def _num_heads(problem: Problem) -> int:
    """batch * num_heads_q; varlen counts as one sequence."""
    return problem.num_heads_q * (1 if problem.varlen else problem.batch)


def _num_rows(problem: Problem) -> int:
    return _num_heads(problem) * problem.total_q


def _dense_strides(problem: Problem, rows: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """(batch, sequence, head) strides of a contiguous tensor."""
    return (0 if problem.varlen else rows * heads * head_dim, heads * head_dim, head_dim)


def _lse_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of lse, whose rows are contiguous."""
    return (0 if problem.varlen else problem.num_heads_q * problem.total_q, problem.total_q)


def _lse_delta_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of the tensors that bwd_preprocess_kernel writes."""
    rows = lse_delta_shape(problem)[-1]
    return (0 if problem.varlen else problem.num_heads_q * rows, rows)


def _input_strides(problem: Problem, dout_strides) -> tuple[int, ...]:
    return (
        *problem.q.stride,
        *problem.k.stride,
        *problem.v.stride,
        *dout_strides,
        *_lse_delta_strides(problem),
    )


def _lengths(problem: Problem) -> tuple[int, ...]:
    return (problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k)


def _bounds_and_factors(problem: Problem) -> tuple[int | float, ...]:
    return (
        problem.qhead_per_kvhead,
        *_lengths(problem),
        problem.window_left,
        problem.window_right,
        problem.score_scale.softmax_scale,
        *problem.score_scale.log2_factors,
    )


def _backward_columns(problem: Problem, config: TritonConfig) -> dict[str, int]:
    dims = problem.head_dim, problem.head_dim_v
    narrowest = config.tiles.of_bwd_kernel.narrowest_part if config.in_parts else None
    return backward_columns(*dims, narrowest)


def _lse_in_scores(problem: Problem, config: TritonConfig) -> bool:
    """Whether the backward subtracts lse from raw scores: not if they are capped, nor if the scale
    is too small to divide by, nor where the tile has no biases."""
    scale = problem.score_scale
    divides = abs(scale.softmax_scale) >= SMALLEST_DIVISOR
    return config.tiles.of_bwd_kernel.biased and divides and not scale.is_capped


def _dq_accum_type(config: TritonConfig) -> str | None:
    """Triton's type of dq_accum, which the backward in five GEMMs has."""
    return None if config.tiles.bwd is None else "fp32"


def capping(scale: ScoreScale) -> int:
    """The kernels' SOFTCAP: 0 without a cap, 2 where ``tanh_exp2`` needs its series."""
    return scale.is_capped + (scale.unit > LARGEST_EXACT_CAP)


def _features(
    problem: Problem, tile: Tile, columns: dict[str, int], dout_strides: tuple[int, ...] = ()
) -> dict[str, object]:
    """constexpr arguments that the forward and the backward kernels share."""
    strides = (*problem.q.stride, *problem.k.stride, *problem.v.stride, *dout_strides)
    return {
        "STRIDE_UNIT": stride_unit(problem.head_dim, problem.head_dim_v, *strides),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        **columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "VARLEN": problem.varlen,
        "USED_Q": problem.q.has_seqused,
        "USED_K": problem.k.has_seqused,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "SOFTCAP": capping(problem.score_scale),
    }
