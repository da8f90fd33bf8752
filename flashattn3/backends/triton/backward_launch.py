"""Builds the launches of the backward from a problem and its tiles.

The tuples below follow the kernel signatures in kernels/. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...call.dtypes import NAMES
from ...call.operands import NUM_TENSORS, tensors_of_mask
from ...call.problem import Problem
from ..conversions import with_dense_rows
from .bias_launch import dbias_launch, ds_strides, prepare_dbias, stores_ds
from .config import TritonConfig
from .kernels import backward, backward_dq, backward_preprocess, dq_accum
from .kernels.launch import Launch, stride_unit
from .launch_parts import (
    ROW_TILE,
    ROWS_PER_PROGRAM,
    backward_columns_of,
    dense_strides,
    features,
    has_tail,
    index_types,
    input_strides,
    launch_of,
    lengths_of,
    lse_delta_shape,
    lse_delta_strides_of,
    lse_in_scores,
    lse_strides_of,
    mask_scalars,
    mask_types,
    minus_lse_unit,
    num_blocks_of,
    padded_rows,
    sinks_type,
    term_constants,
    term_scalars,
    term_types,
    unit_of_terms,
    value_row,
    with_dense_slopes,
)


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
    accum_shape = (*shape, backward_columns_of(problem, config)["BLOCK_D"])
    adds_dq = config.tiles.bwd is not None
    stored = with_dbias and stores_ds(problem)
    new_dbias, sum_dbias = prepare_dbias(problem, config) if with_dbias else (None, None)
    new_like = torch.zeros if problem.varlen else torch.empty
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
        dbias = new_dbias() if with_dbias else None
        lengths_q = indices[::2]
        rows = minus_lse, minus_delta
        preprocess(out, dout, lse, dlse, *rows, dq_accum, *lengths_q, sinks, dsinks)
        main(q, k, v, dout, *rows, dk, dv, dq_accum, *indices, slopes, bias, *of_keys)
        if adds_dq:
            last(dq_accum, dq, *lengths_q)
        else:
            ds = dbias if stored else None
            last(q, k, v, dout, *rows, dq, ds, *indices, slopes, bias, *of_queries)
        for launch in shared_bias:
            launch(q, k, v, dout, *rows, dbias, slopes, bias)
        dsinks = None if sinks is None else dsinks.sum(1).to(sinks.dtype)
        return dq, dk, dv, dsinks, sum_dbias(dbias) if with_dbias else None

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
    bwd_dq: q, k, v, dout, minus_lse, minus_delta, dq, dS, the four of index_types, slopes, bias,
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
    stored = with_dbias and stores_ds(problem)
    last = _dq_launch(problem, config, dout_strides, stored)
    launches = {"bwd_preprocess": preprocess, "bwd_dkdv": main, "bwd_dq": last}
    if with_dbias and not stored:
        launches["bwd_dbias"] = dbias_launch(problem, config, dout_strides)
    return launches


def _preprocess_launch(problem: Problem, config: TritonConfig, dout_strides, dlse_stride) -> Launch:
    has_dlse = dlse_stride is not None
    num_m_blocks = padded_rows(problem.seqlen_q) // ROWS_PER_PROGRAM
    scalars = (
        *dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v),
        *dout_strides,
        *lse_strides_of(problem),
        *((0, 0, 0, *dlse_stride)[-3:] if has_dlse else (0, 0, 0)),
        *lse_delta_strides_of(problem),
        num_m_blocks,
        problem.num_heads_q,
        problem.seqlen_q,
        problem.total_q,
        -minus_lse_unit(problem, config),
    )
    columns = backward_columns_of(problem, config)
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
        backward_preprocess.bwd_preprocess_kernel, types, grid, scalars, constants, ROW_TILE, config
    )


def _bwd_launch(problem: Problem, config: TritonConfig, dout_strides) -> Launch:
    tile = config.tiles.of_bwd_kernel
    num_n_blocks = num_blocks_of(problem, problem.seqlen_k, tile.block_n)
    keys, heads = problem.total_k, problem.num_heads_kv
    scalars = (
        *input_strides(problem, dout_strides),
        *dense_strides(problem, keys, heads, problem.head_dim),
        *dense_strides(problem, keys, heads, problem.head_dim_v),
        num_n_blocks,
        problem.num_heads_kv,
        *_bounds_and_factors(problem),
        *term_scalars(problem),
        unit_of_terms(problem, config),
        *mask_scalars(problem, problem.seqlen_k, problem.seqlen_q),
    )
    tail_q = has_tail(problem, problem.seqlen_q, tile.block_m)
    tail_k = problem.seqlen_k % tile.block_n != 0
    columns = backward_columns_of(problem, config)
    constants = features(problem, tile, columns, dout_strides) | {
        "LSE_IN_SCORES": lse_in_scores(problem, config),
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
    columns = backward_columns_of(problem, config)
    num_m_blocks = tile.num_m_blocks(problem.seqlen_q)
    scalars = (
        *lse_delta_strides_of(problem),
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
        dq_accum.bwd_postprocess_kernel, types, grid, scalars, constants, ROW_TILE, config
    )


def _dq_launch(problem: Problem, config: TritonConfig, dout_strides, with_ds: bool) -> Launch:
    tile = config.tiles.bwd_dq
    num_m_blocks = num_blocks_of(problem, problem.seqlen_q, tile.block_m)
    scalars = (
        *input_strides(problem, dout_strides),
        *dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim),
        num_m_blocks,
        problem.num_heads_q,
        *_bounds_and_factors(problem),
        *term_scalars(problem),
        unit_of_terms(problem, config),
        *(ds_strides(problem) if with_ds else (None, None)),
        *mask_scalars(problem, problem.seqlen_q, problem.seqlen_k),
    )
    columns = backward_columns_of(problem, config)
    constants = features(problem, tile, columns, dout_strides) | {
        "LSE_IN_SCORES": lse_in_scores(problem, config),
        "TAIL": has_tail(problem, problem.seqlen_k, tile.block_n),
        **term_constants(problem),
    }
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    dtype = NAMES[problem.dtype]
    stored = dtype if with_ds else None
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
    return launch_of(backward_dq.bwd_dq_kernel, types, grid, scalars, constants, tile, config)


def _without_added_dq(config: TritonConfig) -> TritonConfig:
    """The backward in seven GEMMs: its kernel of dQ stores dbias."""
    return config._replace(tiles=config.tiles._replace(bwd=None))


def _bounds_and_factors(problem: Problem) -> tuple[int | float, ...]:
    return (
        problem.qhead_per_kvhead,
        *lengths_of(problem),
        problem.window_left,
        problem.window_right,
        problem.score_scale.softmax_scale,
        *problem.score_scale.log2_factors,
    )


def _dq_accum_type(config: TritonConfig) -> str | None:
    """Triton's type of dq_accum, which the backward in five GEMMs has."""
    return None if config.tiles.bwd is None else "fp32"
