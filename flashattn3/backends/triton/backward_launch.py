"""Builds the launches of the backward from a problem and its tiles.

The tuples below follow the kernel signatures in kernels/. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from ...call.dtypes import NAMES
from ...call.fields import LOG2E
from ...call.operands import NUM_TENSORS, tensors_of_mask
from ...call.problem import Problem
from ..conversions import with_dense_rows
from .columns import backward_columns
from .config import TritonConfig
from .kernels import backward, bias_gradient
from .kernels.launch import Launch, stride_unit
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
    sinks_type,
    term_constants,
    term_scalars,
    term_types,
    value_row,
    with_dense_slopes,
)
from .tile_configs import Tile

SMALLEST_DIVISOR = 2.0**-64  # smallest scale that lse is divided by, far from overflow
LSE_DELTA_ROWS = backward.LSE_DELTA_ROWS.value


def prepare_backward(
    problem: Problem, config: TritonConfig
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Build ``Launch.backward``."""
    prepared: dict[tuple, Callable] = {}  # by what a call chooses: strides, whether it wants dbias

    def run(dout, dlse, out, lse, tensors, *with_dbias):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        asked = (dout.stride(), None if dlse is None else dlse.stride(), *with_dbias)
        backward = prepared.get(asked)
        if backward is None:
            backward = prepared[asked] = _prepare_backward(problem, config, *asked)
        tensors = with_dense_slopes(problem, with_dense_rows(problem, tensors))
        gradients = backward(dout, dlse, out.contiguous(), lse.contiguous(), tensors)
        return gradients if with_dbias else gradients[:3]

    return run


def _prepare_backward(
    problem: Problem,
    config: TritonConfig,
    dout_stride: tuple[int, ...],
    dlse_stride: tuple[int, ...] | None,
    with_dbias: bool = False,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Build a function of dout, dlse, out, lse and the tensors that returns (dq, dk, dv, dsinks,
    dbias)."""
    if with_dbias:
        config = _without_added_dq(config)
    launches = backward_launches(problem, config, dout_stride, dlse_stride, with_dbias)
    preprocess, main, last, *shared_bias = launches.values()
    shape = lse_delta_shape(problem)
    accum_shape = (*shape, _backward_columns(problem, config)["BLOCK_D"])
    adds_dq = config.tiles.bwd is not None
    stores_dbias = with_dbias and _has_own_bias(problem)
    new_like = torch.zeros if problem.varlen else torch.empty
    new_bias = torch.zeros if problem.masked and stores_dbias else torch.empty
    sinks_shape = (problem.num_heads_q, preprocess.grid[0] // max(1, problem.num_heads_q))

    def run(dout, dlse, out, lse, tensors):
        q, k, v, *indices = tensors[:NUM_TENSORS]
        sinks, slopes, bias = tensors.sinks, tensors.alibi_slopes, tensors.bias
        mask = tensors_of_mask(tensors)
        of_queries, of_keys = mask[:3], mask[3:]
        of = {"dtype": torch.float32, "device": q.device}
        minus_lse, minus_delta = (torch.empty(shape, **of) for _ in range(2))
        dq_accum = torch.empty(accum_shape, **of) if adds_dq else None
        dq, dk, dv = (new_like(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        dsinks = None if sinks is None else new_like(sinks_shape, **of)
        dbias = None
        if with_dbias:
            dbias = new_bias(bias.shape, dtype=bias.dtype, device=bias.device)
        lengths_q = indices[::2]
        rows = minus_lse, minus_delta
        preprocess(out, dout, lse, dlse, *rows, dq_accum, *lengths_q, sinks, dsinks)
        main(q, k, v, dout, *rows, dk, dv, dq_accum, *indices, slopes, bias, *of_keys)
        if adds_dq:
            last(dq_accum, dq, *lengths_q)
        else:
            stored = dbias if stores_dbias else None
            last(q, k, v, dout, *rows, dq, stored, *indices, slopes, bias, *of_queries)
        for launch in shared_bias:
            launch(q, k, v, dout, *rows, dbias, slopes, bias)
        return dq, dk, dv, None if sinks is None else dsinks.sum(1).to(sinks.dtype), dbias

    return run


def backward_launches(
    problem: Problem,
    config: TritonConfig,
    dout_stride: tuple[int, ...],
    dlse_stride: tuple[int, ...] | None,
    with_dbias: bool = False,
) -> dict[str, Launch]:
    """Launches of three kernels, or four, in their order, with the tensors that each takes:

    bwd_preprocess: out, dout, lse, dlse, minus_lse, minus_delta, dq_accum, cu_seqlens_q, seqused_q,
    sinks, dsinks.

    With a tile for it, five GEMMs:
    bwd: q, k, v, dout, minus_lse, minus_delta, dk, dv, dq_accum, the four of index_types,
    slopes, bias, the mask's lists of keys.
    bwd_postprocess: dq_accum, dq, cu_seqlens_q, seqused_q.

    Without, seven:
    bwd_dkdv: as bwd, dq_accum is None.
    bwd_dq: q, k, v, dout, minus_lse, minus_delta, dq, dbias, the four of index_types, slopes, bias,
    the mask's lists of queries.

    with_dbias, for a bias that heads or sequences share:
    bwd_dbias: q, k, v, dout, minus_lse, minus_delta, dbias, slopes, bias.
    """
    if with_dbias:
        config = _without_added_dq(config)
    dout_strides = (0, *dout_stride[:2]) if problem.varlen else dout_stride[:3]
    preprocess = _preprocess_launch(problem, config, dout_strides, dlse_stride)
    main = _bwd_launch(problem, config, dout_strides)
    if config.tiles.bwd is not None:
        last = _postprocess_launch(problem, config)
        return {"bwd_preprocess": preprocess, "bwd": main, "bwd_postprocess": last}
    stored = with_dbias and _has_own_bias(problem)
    last = _dq_launch(problem, config, dout_strides, stored)
    launches = {"bwd_preprocess": preprocess, "bwd_dkdv": main, "bwd_dq": last}
    if with_dbias and not stored:
        launches["bwd_dbias"] = _dbias_launch(problem, config, dout_strides)
    return launches


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
        *dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v),
        *dout_strides,
        *lse_strides_of(problem),
        *((0, 0, 0, *dlse_stride)[-3:] if has_dlse else (0, 0, 0)),
        *_lse_delta_strides(problem),
        num_m_blocks,
        problem.num_heads_q,
        problem.seqlen_q,
        problem.total_q,
        -minus_lse_unit(problem, config),
    )
    columns = _backward_columns(problem, config)
    constants = value_row(problem, dout_strides) | {
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
    sinks = (None, None) if problem.sinks_dtype is None else (sinks_type(problem), "fp32")
    types = (dtype, dtype, *rows, *index_types(problem)[::2], *sinks)
    return launch_of(
        backward.bwd_preprocess_kernel, types, grid, scalars, constants, ROW_TILE, config
    )


def _bwd_launch(problem: Problem, config: TritonConfig, dout_strides) -> Launch:
    tile = config.tiles.of_bwd_kernel
    num_n_blocks = num_blocks_of(problem, problem.seqlen_k, tile.block_n)
    keys, heads = problem.total_k, problem.num_heads_kv
    scalars = (
        *_input_strides(problem, dout_strides),
        *dense_strides(problem, keys, heads, problem.head_dim),
        *dense_strides(problem, keys, heads, problem.head_dim_v),
        num_n_blocks,
        problem.num_heads_kv,
        *_bounds_and_factors(problem),
        *term_scalars(problem),
        _unit_of_terms(problem, config),
        *mask_scalars(problem, problem.seqlen_k, problem.seqlen_q),
    )
    tail_q = has_tail(problem, problem.seqlen_q, tile.block_m)
    tail_k = problem.seqlen_k % tile.block_n != 0
    columns = _backward_columns(problem, config)
    constants = features(problem, tile, columns, dout_strides) | {
        "LSE_IN_SCORES": _lse_in_scores(problem, config),
        "DELTA_IN_DP": tile.biased,
        "TAIL": tail_q or tail_k,
        "NUM_WARPS": tile.num_warps,
        **term_constants(problem),
    }
    grid = (num_n_blocks * heads * problem.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    gradients = (dtype, dtype, _dq_accum_type(config))
    types = (*(dtype,) * 4, "fp32", "fp32", *gradients, *index_types(problem), *term_types(problem))
    types += mask_types(problem)
    return launch_of(backward.bwd_kernel, types, grid, scalars, constants, tile, config)


def _postprocess_launch(problem: Problem, config: TritonConfig) -> Launch:
    tile = config.tiles.bwd
    columns = _backward_columns(problem, config)
    num_m_blocks = tile.num_m_blocks(problem.seqlen_q)
    scalars = (
        *_lse_delta_strides(problem),
        *dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim),
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
    types = ("fp32", NAMES[problem.dtype], *index_types(problem)[::2])
    return launch_of(
        backward.bwd_postprocess_kernel, types, grid, scalars, constants, ROW_TILE, config
    )


def _dq_launch(problem: Problem, config: TritonConfig, dout_strides, stores_dbias: bool) -> Launch:
    tile = config.tiles.bwd_dq
    num_m_blocks = num_blocks_of(problem, problem.seqlen_q, tile.block_m)
    scalars = (
        *_input_strides(problem, dout_strides),
        *dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim),
        num_m_blocks,
        problem.num_heads_q,
        *_bounds_and_factors(problem),
        *term_scalars(problem),
        _unit_of_terms(problem, config),
        *(_dbias_strides(problem) if stores_dbias else (None, None)),
        *mask_scalars(problem, problem.seqlen_q, problem.seqlen_k),
    )
    columns = _backward_columns(problem, config)
    constants = features(problem, tile, columns, dout_strides) | {
        "LSE_IN_SCORES": _lse_in_scores(problem, config),
        "TAIL": has_tail(problem, problem.seqlen_k, tile.block_n),
        **term_constants(problem),
    }
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    stored = dtype if stores_dbias else None
    types = (
        *(dtype,) * 4,
        "fp32",
        "fp32",
        dtype,
        stored,
        *index_types(problem),
        *term_types(problem),
        *mask_types(problem),
    )
    return launch_of(backward.bwd_dq_kernel, types, grid, scalars, constants, tile, config)


def _dbias_launch(problem: Problem, config: TritonConfig, dout_strides) -> Launch:
    tile, bias = dbias_tile(problem, config), problem.bias
    num_m_blocks = tile.num_m_blocks(problem.seqlen_q)
    num_n_blocks = tile.num_n_blocks(problem.seqlen_k)
    shared_heads = problem.num_heads_q // bias.heads
    scalars = (
        *_input_strides(problem, dout_strides),
        num_m_blocks,
        num_n_blocks,
        bias.heads,
        shared_heads,
        problem.batch // max(1, bias.batch) * shared_heads,
        problem.qhead_per_kvhead,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.window_left,
        problem.window_right,
        *problem.score_scale.log2_factors,
        *term_scalars(problem),
        _unit_of_terms(problem, config),
    )
    constants = features(problem, tile, _backward_columns(problem, config), dout_strides) | {
        "LSE_IN_SCORES": _lse_in_scores(problem, config),
        "TAIL_M": problem.seqlen_q % tile.block_m != 0,
        "TAIL_N": problem.seqlen_k % tile.block_n != 0,
        **term_constants(problem),
    }
    for name in ("VARLEN", "USED_Q", "USED_K"):
        del constants[name]
    grid = (num_m_blocks * num_n_blocks * bias.heads * bias.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    types = (*(dtype,) * 4, "fp32", "fp32", dtype, *term_types(problem))
    return launch_of(bias_gradient.bwd_dbias_kernel, types, grid, scalars, constants, tile, config)


def dbias_tile(problem: Problem, config: TritonConfig) -> Tile:
    """Loads of q, k, v and dout for each sequence bound the kernel: as large as registers allow."""
    dim = max(problem.head_dim, problem.head_dim_v)
    if config.wgmma and dim <= 128:
        return Tile(64, 64, 4, 3) if dim <= 64 else Tile(128, 64, 8, 2)
    if dim <= 64:
        return Tile(64, 64, 4, 2)
    return Tile(64, 32, 4, 1) if dim <= 128 else Tile(32, 32, 4, 1)


def _without_added_dq(config: TritonConfig) -> TritonConfig:
    """The backward in seven GEMMs: its kernel of dQ stores dbias."""
    return config._replace(tiles=config.tiles._replace(bwd=None))


def _has_own_bias(problem: Problem) -> bool:
    """Whether no two heads or sequences share an element of the bias."""
    return (problem.bias.batch, problem.bias.heads) == (problem.batch, problem.num_heads_q)


def _dbias_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of a dbias that the kernel of dq stores."""
    of_head = problem.seqlen_q * problem.seqlen_k
    return problem.num_heads_q * of_head, of_head


def _unit_of_terms(problem: Problem, config: TritonConfig) -> float | None:
    has_terms = problem.slopes is not None or problem.bias is not None
    return minus_lse_unit(problem, config) if has_terms else None


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


def _bounds_and_factors(problem: Problem) -> tuple[int | float, ...]:
    return (
        problem.qhead_per_kvhead,
        *lengths_of(problem),
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


def minus_lse_unit(problem: Problem, config: TritonConfig) -> float:
    """What a natural score is multiplied by where the backward subtracts lse."""
    in_scores = _lse_in_scores(problem, config)
    return 1.0 / problem.score_scale.softmax_scale if in_scores else LOG2E


def _dq_accum_type(config: TritonConfig) -> str | None:
    """Triton's type of dq_accum, which the backward in five GEMMs has."""
    return None if config.tiles.bwd is None else "fp32"
