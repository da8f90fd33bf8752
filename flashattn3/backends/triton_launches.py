"""From a problem and its tiles to kernel launches: grids, scalars and compile-time arguments, in order.

The tuples below follow the kernels' signatures in triton_kernels. Importing this module imports Triton.
"""

from __future__ import annotations

from math import ceil

from ..problem import Problem
from ..triton_kernels import backward, forward
from ..triton_kernels.configs import Tile, padded
from ..triton_kernels.launch import Launch
from .triton import TritonConfig

LOG2E = 1.4426950408889634
SMALLEST_SCALE = 2.0**-100  # stands in for a scale of 0 in the forward, where -inf * 0 would be NaN
STATISTICS_ROWS = backward.STATISTICS_ROWS.value
ROWS_PER_PROGRAM = 64  # of the kernels that only read and combine rows


def forward_launch(problem: Problem, config: TritonConfig) -> Launch:
    """(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)"""
    tile = config.row.forward
    num_m_blocks = ceil(problem.seqlen_q / tile.block_m)
    out_strides = _dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v)
    lse_strides = _lse_strides(problem)
    scalars = (
        *problem.q_stride,
        *problem.k_stride,
        *problem.v_stride,
        _num_rows(problem) * problem.head_dim_v,
        *out_strides,
        _num_rows(problem),
        *lse_strides,
        num_m_blocks,
        problem.num_heads_q,
        problem.group,
        *_lengths(problem),
        problem.window_left,
        problem.window_right,
        config.num_splits,
        *_score_factors(problem, abs(problem.softmax_scale) or SMALLEST_SCALE),
    )
    constants = _features(problem, tile) | {
        "NEGATIVE_SCALE": problem.softmax_scale < 0,
        "SPLIT": config.num_splits > 1,
        "TAIL": problem.varlen or problem.seqlen_k % tile.block_n != 0,
    }
    return _launch(forward.forward_kernel, config.grid, scalars, constants, tile)


def merge_launch(problem: Problem, config: TritonConfig) -> Launch:
    """(out_parts, lse_parts, out, lse)"""
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
    constants = _value_row(problem)
    return _launch(forward.merge_kernel, _row_grid(problem), scalars, constants, ROW_TILE)


def backward_launches(
    problem: Problem, config: TritonConfig, dout_stride: tuple[int, ...], dlse_stride: tuple[int, ...] | None
) -> tuple[Launch, Launch, Launch | None]:
    """Of statistics_kernel (out, dout, lse, dlse, lse_log2, delta, cu_seqlens_q, seqused_q), key_value_kernel
    (q, k, v, dout, lse_log2, delta, dq_sum, dk, dv, four indices) and query_kernel (q, k, v, dout, lse_log2,
    delta, dq, four indices).

    The third is None where key_value_kernel accumulates dQ.
    """
    accumulate_dq = config.row.accumulate_dq and not problem.deterministic
    dout_strides = (0, *dout_stride[:2]) if problem.varlen else dout_stride[:3]
    return (
        _statistics_launch(problem, dout_strides, dlse_stride),
        _key_value_launch(problem, config.row.key_value, dout_strides, accumulate_dq),
        None if accumulate_dq else _query_launch(problem, config.row.query, dout_strides),
    )


def statistics_shape(problem: Problem) -> tuple[int, ...]:
    """(batch, heads, rows) or, for varlen, (heads, rows): rows padded as statistics_kernel has it."""
    if problem.varlen:
        return (problem.num_heads_q, problem.total_q + problem.batch * STATISTICS_ROWS)
    return (problem.batch, problem.num_heads_q, ceil(problem.seqlen_q / STATISTICS_ROWS) * STATISTICS_ROWS)


def _statistics_launch(problem: Problem, dout_strides, dlse_stride) -> Launch:
    has_dlse = dlse_stride is not None
    num_m_blocks = ceil(problem.seqlen_q / STATISTICS_ROWS) * (STATISTICS_ROWS // ROWS_PER_PROGRAM)
    scalars = (
        *_dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v),
        *dout_strides,
        *_lse_strides(problem),
        *((0, 0, 0, *dlse_stride)[-3:] if has_dlse else (0, 0, 0)),
        *_statistics_strides(problem),
        num_m_blocks,
        problem.num_heads_q,
        problem.seqlen_q,
        problem.total_q,
    )
    constants = _value_row(problem) | {
        "VARLEN": problem.varlen,
        "USED_Q": problem.has_seqused_q,
        "HAS_DLSE": has_dlse,
    }
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    return _launch(backward.statistics_kernel, grid, scalars, constants, ROW_TILE)


def _key_value_launch(problem: Problem, tile: Tile, dout_strides, accumulate_dq: bool) -> Launch:
    num_n_blocks = ceil(problem.seqlen_k / tile.block_n)
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
    constants = _features(problem, tile) | {
        "ACCUMULATE_DQ": accumulate_dq,
        "TAIL": problem.varlen or tail_q != 0 or tail_k != 0,
    }
    grid = (num_n_blocks * heads * problem.batch, 1, 1)
    return _launch(backward.key_value_kernel, grid, scalars, constants, tile)


def _query_launch(problem: Problem, tile: Tile, dout_strides) -> Launch:
    num_m_blocks = ceil(problem.seqlen_q / tile.block_m)
    scalars = (
        *_input_strides(problem, dout_strides),
        num_m_blocks,
        problem.num_heads_q,
        *_bounds_and_factors(problem),
    )
    constants = _features(problem, tile) | {"TAIL": problem.varlen or problem.seqlen_k % tile.block_n != 0}
    grid = (num_m_blocks * problem.num_heads_q * problem.batch, 1, 1)
    return _launch(backward.query_kernel, grid, scalars, constants, tile)


def _launch(kernel, grid, scalars, constants, tile: Tile) -> Launch:
    return Launch(kernel, grid, scalars, constants, tile.num_warps, tile.num_stages)


ROW_TILE = Tile(ROWS_PER_PROGRAM, 0, num_warps=4, num_stages=2)


def _row_grid(problem: Problem) -> tuple[int, int, int]:
    return (ceil(problem.total_q / ROWS_PER_PROGRAM) * _num_heads(problem), 1, 1)


def _value_row(problem: Problem) -> dict[str, int]:
    return {
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_DV": padded(problem.head_dim_v),
        "BLOCK_M": ROWS_PER_PROGRAM,
    }


def _num_heads(problem: Problem) -> int:
    """Query heads of all sequences; the packed rows of varlen count as one sequence."""
    return problem.num_heads_q * (1 if problem.varlen else problem.batch)


def _num_rows(problem: Problem) -> int:
    return _num_heads(problem) * problem.total_q


def _dense_strides(problem: Problem, rows: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """(batch, sequence, head) strides of a contiguous tensor."""
    return (0 if problem.varlen else rows * heads * head_dim, heads * head_dim, head_dim)


def _lse_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of lse, whose rows are contiguous."""
    return (0 if problem.varlen else problem.num_heads_q * problem.total_q, problem.total_q)


def _statistics_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of the tensors that statistics_kernel writes."""
    rows = statistics_shape(problem)[-1]
    return (0 if problem.varlen else problem.num_heads_q * rows, rows)


def _input_strides(problem: Problem, dout_strides) -> tuple[int, ...]:
    return (
        *problem.q_stride,
        *problem.k_stride,
        *problem.v_stride,
        *dout_strides,
        *_statistics_strides(problem),
        *_dense_strides(problem, problem.total_q, problem.num_heads_q, problem.head_dim),
    )


def _lengths(problem: Problem) -> tuple[int, ...]:
    return (problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k)


def _bounds_and_factors(problem: Problem) -> tuple[int | float, ...]:
    return (
        problem.group,
        *_lengths(problem),
        problem.window_left,
        problem.window_right,
        problem.softmax_scale,
        *_score_factors(problem, problem.softmax_scale),
    )


def _score_factors(problem: Problem, scale: float) -> tuple[float, float]:
    """(scale_log2, cap_log2): what takes a raw score, or a capped one, into the log2 domain."""
    if problem.softcap > 0:
        return scale / problem.softcap, problem.softcap * LOG2E
    return scale * LOG2E, 0.0


def _features(problem: Problem, tile: Tile) -> dict[str, object]:
    """The compile-time arguments that the forward and the backward kernels share."""
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_DV": padded(problem.head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "VARLEN": problem.varlen,
        "USED_Q": problem.has_seqused_q,
        "USED_K": problem.has_seqused_k,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "SOFTCAP": problem.softcap > 0,
    }
