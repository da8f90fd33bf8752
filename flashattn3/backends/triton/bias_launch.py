"""Builds the launch of the gradient of a bias, and decides which kernel writes it.

Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

import torch
from torch import Tensor

from ...call.dtypes import NAMES
from ...call.problem import Problem
from .config import TritonConfig
from .kernels.bias_gradient import bwd_dbias_kernel
from .kernels.launch import Launch
from .launch_parts import (
    backward_columns_of,
    features,
    input_strides,
    launch_of,
    lse_in_scores,
    term_constants,
    term_scalars,
    term_types,
    unit_of_terms,
)
from .tile_configs import Tile

# Sequences and heads that share a bias, up to which the kernel of dQ stores dS of each in 16 bits;
# for more the bias has a kernel of its own, which is then faster.
MOST_STORED = 2
SHARED_OF_PROGRAM = 4  # that a program of this kernel sums, at least
PROGRAMS = 1024  # of that kernel, at least, where so many sequences and heads can be divided


def num_shared(problem: Problem) -> int:
    """Sequences and heads that share an element of the bias."""
    own = problem.bias.batch * problem.bias.heads
    return problem.batch * problem.num_heads_q // max(1, own)


def stores_ds(problem: Problem) -> bool:
    return num_shared(problem) <= MOST_STORED


def ds_strides(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of dS as the kernel of dQ stores it."""
    of_head = problem.seqlen_q * problem.seqlen_k
    return problem.num_heads_q * of_head, of_head


def prepare_dbias(problem: Problem, config: TritonConfig) -> tuple[Callable, Callable]:
    """Build a function that gives the memory that a kernel writes, and one that sums it up."""
    bias, sizes = problem.bias, (problem.seqlen_q, problem.seqlen_k)
    of = {"dtype": bias.dtype, "device": problem.device}
    if problem.batch == 0:  # no kernel writes
        return lambda: torch.zeros((bias.batch, bias.heads, *sizes), **of), lambda dbias: dbias
    if stores_ds(problem):
        blank = torch.zeros if problem.masked else torch.empty
        shape = (problem.batch, problem.num_heads_q, *sizes)
        axis = 0 if bias.batch != problem.batch else 1
        shared = num_shared(problem) == 2
        return lambda: blank(shape, **of), lambda ds: _sum_of_two(ds, axis) if shared else ds
    shape, splits = (bias.batch, bias.heads, *sizes), _num_splits(problem, config)
    if splits == 1:
        return lambda: torch.empty(shape, **of), lambda dbias: dbias
    of["dtype"] = torch.float32
    return lambda: torch.empty((splits, *shape), **of), lambda parts: _sum(parts, bias.dtype)


def _sum_of_two(ds: Tensor, axis: int) -> Tensor:
    """As ``sum``, which takes twice the time. torch adds 16 bits in float32."""
    first, second = ds.split(1, axis)
    return first + second


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts.sum(0).to(dtype)


def dbias_launch(problem: Problem, config: TritonConfig, dout_strides) -> Launch:
    """Launch of (q, k, v, dout, minus_lse, minus_delta, dbias, slopes, bias)."""
    tile, bias, splits = _tile(problem, config), problem.bias, _num_splits(problem, config)
    scalars = (
        *input_strides(problem, dout_strides),
        *_blocks(problem, tile),
        bias.heads,
        bias.batch,
        problem.num_heads_q // bias.heads,
        num_shared(problem),
        splits,
        problem.qhead_per_kvhead,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.window_left,
        problem.window_right,
        *problem.score_scale.log2_factors,
        *term_scalars(problem),
        unit_of_terms(problem, config),
    )
    constants = features(problem, tile, backward_columns_of(problem, config), dout_strides) | {
        "LSE_IN_SCORES": lse_in_scores(problem, config),
        "TAIL_M": problem.seqlen_q % tile.block_m != 0,
        "TAIL_N": problem.seqlen_k % tile.block_n != 0,
        **term_constants(problem),
    }
    for name in ("VARLEN", "USED_Q", "USED_K"):
        del constants[name]
    grid = (prod(_blocks(problem, tile)) * bias.heads * bias.batch * splits, 1, 1)
    dtype = NAMES[problem.dtype]
    written = dtype if splits == 1 else "fp32"
    types = (*(dtype,) * 4, "fp32", "fp32", written, *term_types(problem))
    return launch_of(bwd_dbias_kernel, types, grid, scalars, constants, tile, config)


def _tile(problem: Problem, config: TritonConfig) -> Tile:
    """Loads of q, k, v and dout for each sequence bound the kernel: as large as registers allow."""
    dim = max(problem.head_dim, problem.head_dim_v)
    if config.wgmma and dim <= 128:
        return Tile(64, 64, 4, 3) if dim <= 64 else Tile(128, 64, 8, 2)
    if dim <= 64:
        return Tile(64, 64, 4, 2)
    return Tile(64, 32, 4, 1) if dim <= 128 else Tile(32, 32, 4, 1)


def _blocks(problem: Problem, tile: Tile) -> tuple[int, int]:
    return tile.num_m_blocks(problem.seqlen_q), tile.num_n_blocks(problem.seqlen_k)


def _num_splits(problem: Problem, config: TritonConfig) -> int:
    """Parts of the sequences and heads that share the bias, each summed by a program."""
    tiles = prod(_blocks(problem, _tile(problem, config))) * problem.bias.heads * problem.bias.batch
    return max(1, min(ceil(PROGRAMS / max(1, tiles)), num_shared(problem) // SHARED_OF_PROGRAM))
