"""What the launches of the forward and the backward share: tensor types, scalars and constants that
follow from a problem.

The tuples follow the kernel signatures in kernels/. Importing this module imports Triton.
"""

from __future__ import annotations

from math import ceil

import torch

from ...call.dtypes import NAMES
from ...call.fields import LOG2E, ScoreScale
from ...call.mask_tensors import COLUMNS, ROWS
from ...call.operands import Tensors
from ...call.problem import Problem
from .columns import backward_columns, padded
from .config import TritonConfig
from .kernels.backward_parts import LSE_DELTA_ROWS as PADDED_ROWS
from .kernels.launch import Launch, stride_unit
from .kernels.score_terms import BOTH_SIDES, LEFT_ALONE
from .tile_configs import Tile

LARGEST_EXACT_CAP = 256.0  # at this cap tanh's absolute error is 1e-4 in a score
ROWS_PER_PROGRAM = 64  # rows per program of the row-wise kernels (combine, preprocess)
ROW_TILE = Tile(ROWS_PER_PROGRAM, 0, num_warps=4, num_stages=2)
SMALLEST_DIVISOR = 2.0**-64  # smallest scale that lse is divided by, far from overflow
LSE_DELTA_ROWS = PADDED_ROWS.value
TERM_TYPES = {**NAMES, torch.float32: "fp32"}


def launch_of(kernel, types, grid, scalars, constants, tile: Tile, config: TritonConfig) -> Launch:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if config.arch is not None:
        options["arch"] = config.arch
    if tile.max_registers:
        options["maxnreg"] = tile.max_registers
    return Launch(kernel, types, grid, scalars, constants, options)


def index_types(problem: Problem) -> tuple[str | None, ...]:
    """Types of what follows q, k and v in ``Tensors``."""
    present = (problem.varlen, problem.varlen, problem.q.has_seqused, problem.k.has_seqused)
    return tuple("i32" if given else None for given in present)


def value_row(problem: Problem, strides: tuple[int, ...]) -> dict[str, int]:
    """constexpr arguments of a row-wise kernel. strides: of its inputs that are not dense."""
    return {
        "STRIDE_UNIT": stride_unit(problem.head_dim_v, *strides),
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_DV": padded(problem.head_dim_v),
        "BLOCK_M": ROWS_PER_PROGRAM,
    }


def num_heads_of(problem: Problem) -> int:
    """batch * num_heads_q; varlen counts as one sequence."""
    return problem.num_heads_q * (1 if problem.varlen else problem.batch)


def num_rows_of(problem: Problem) -> int:
    return num_heads_of(problem) * problem.total_q


def dense_strides(problem: Problem, rows: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """(batch, sequence, head) strides of a contiguous tensor."""
    return (0 if problem.varlen else rows * heads * head_dim, heads * head_dim, head_dim)


def lse_strides_of(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of lse, whose rows are contiguous."""
    return (0 if problem.varlen else problem.num_heads_q * problem.total_q, problem.total_q)


def lengths_of(problem: Problem) -> tuple[int, ...]:
    return (problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k)


def capping(scale: ScoreScale) -> int:
    """The kernels' SOFTCAP: 0 without a cap, 2 where ``tanh_exp2`` needs its series."""
    return scale.is_capped + (scale.unit > LARGEST_EXACT_CAP)


def features(
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


def alibi_of(problem: Problem) -> int:
    """The kernels' ALIBI (kernels/score_terms.py)."""
    if problem.slopes is None:
        return 0
    left_alone = problem.window_right == 0 or problem.seqlen_q == 1
    return (LEFT_ALONE if left_alone else BOTH_SIDES).value


def sinks_type(problem: Problem) -> str | None:
    return None if problem.sinks_dtype is None else TERM_TYPES[problem.sinks_dtype]


def term_types(problem: Problem) -> tuple[str | None, str | None]:
    """Types of slopes and bias."""
    slopes = None if problem.slopes is None else "fp32"
    return slopes, None if problem.bias is None else TERM_TYPES[problem.bias.dtype]


def term_scalars(problem: Problem) -> tuple[int | None, ...]:
    """The batch stride of slopes, and the strides of bias; None: there are none."""
    of_batch = {None: None, "heads": 0, "batch": problem.num_heads_q}[problem.slopes]
    return (of_batch, *((None,) * 3 if problem.bias is None else problem.bias.stride))


def term_constants(problem: Problem) -> dict[str, int]:
    unit = 1 if problem.bias is None else stride_unit(*problem.bias.stride)
    return {"ALIBI": alibi_of(problem), "BIAS_UNIT": unit}


def num_blocks_of(problem: Problem, length: int, block: int) -> int:
    """The blocks of queries or keys that programs hold; of a mask they fill whole lists."""
    if problem.mask is None:
        return ceil(length / block)
    return ceil(length / ROWS) * (ROWS // block)


def has_tail(problem: Problem, length: int, block: int) -> bool:
    """Whether a block of a loop may go past the end; listed blocks of 64 may in all their steps."""
    return problem.varlen or length % (block if problem.mask is None else COLUMNS) != 0


def mask_types(problem: Problem) -> tuple[str | None, ...]:
    """Types of the entries, the work and the tiles of one side of a mask."""
    return (None,) * 3 if problem.mask is None else ("i32", "i32", "i64")


def mask_scalars(problem: Problem, rows: int, columns: int) -> tuple[int | None, ...]:
    """The batch and the head stride of lists, in lists, and the entries of a list.

    rows, columns: the lengths of the side whose lists are passed, and of the other.
    """
    if problem.mask is None:
        return (None,) * 3
    (batch, heads), lists = problem.mask, ceil(rows / ROWS)
    of_batch, of_head = 0 if batch == 1 else lists * heads, 0 if heads == 1 else lists
    return of_batch, of_head, ceil(columns / COLUMNS)


def with_dense_slopes(problem: Problem, tensors: Tensors) -> Tensors:
    """Slopes of sequences lie side by side."""
    if problem.slopes != "batch":
        return tensors
    return tensors._replace(alibi_slopes=tensors.alibi_slopes.contiguous())


def lse_delta_shape(problem: Problem) -> tuple[int, ...]:
    """(batch, heads, rows) or, for varlen, (heads, rows); rows include the padding."""
    if problem.varlen:
        return (problem.num_heads_q, problem.total_q + problem.batch * LSE_DELTA_ROWS)
    return (problem.batch, problem.num_heads_q, padded_rows(problem.seqlen_q))


def padded_rows(rows: int) -> int:
    return ceil(rows / LSE_DELTA_ROWS) * LSE_DELTA_ROWS


def lse_delta_strides_of(problem: Problem) -> tuple[int, int]:
    """(batch, head) strides of the tensors that bwd_preprocess_kernel writes."""
    rows = lse_delta_shape(problem)[-1]
    return (0 if problem.varlen else problem.num_heads_q * rows, rows)


def input_strides(problem: Problem, dout_strides) -> tuple[int, ...]:
    return (
        *problem.q.stride,
        *problem.k.stride,
        *problem.v.stride,
        *dout_strides,
        *lse_delta_strides_of(problem),
    )


def backward_columns_of(problem: Problem, config: TritonConfig) -> dict[str, int]:
    dims = problem.head_dim, problem.head_dim_v
    narrowest = config.tiles.of_bwd_kernel.narrowest_part if config.in_parts else None
    return backward_columns(*dims, narrowest)


def lse_in_scores(problem: Problem, config: TritonConfig) -> bool:
    """Whether the backward subtracts lse from raw scores: not if they are capped, nor if the scale
    is too small to divide by, nor where the tile has no biases."""
    scale = problem.score_scale
    divides = abs(scale.softmax_scale) >= SMALLEST_DIVISOR
    return config.tiles.of_bwd_kernel.biased and divides and not scale.is_capped


def minus_lse_unit(problem: Problem, config: TritonConfig) -> float:
    """What a natural score is multiplied by where the backward subtracts lse."""
    in_scores = lse_in_scores(problem, config)
    return 1.0 / problem.score_scale.softmax_scale if in_scores else LOG2E


def unit_of_terms(problem: Problem, config: TritonConfig) -> float | None:
    has_terms = problem.slopes is not None or problem.bias is not None
    return minus_lse_unit(problem, config) if has_terms else None
