"""Builds the launches of cached calls: grids, workspace, and the numbers of each call.

The tuples follow the kernel signatures in kernels/. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.cache_descales import HEADS, OF_KEYS, PAGES, TOKENS, is_one_number, kind_of
from ...call.cached import new_out, query_sizes
from ...call.dtypes import EIGHT_BIT, FP8
from .cache_tiles import EVERY_SPAN, CacheTile
from .columns import blocks_alike, padded
from .kernels import append, append_rows, cache_parts, combine, decode
from .kernels.launch import is_elementwise
from .kernels.variable_launch import VariableLaunch
from .launch_parts import capping

if TYPE_CHECKING:
    from ...call.cached import (
        AppendProblem,
        AppendTensors,
        CombineProblem,
        DecodeProblem,
        DecodeTensors,
        Lengths,
    )

LARGEST_WINDOW = 2**30  # keys are counted in 32 bits
APPEND_ROWS = 16
COMBINE_ROWS = 4
SMALLEST_WIDENED = 32  # columns: a GEMM has the even ones, 16 at least
COMBINE_COLUMNS = 512  # of a program at most: 16 numbers of a part in each thread


def prepare_decode(problem: DecodeProblem, tile: CacheTile) -> Callable:
    """Build a function of (out, lse, tensors, lengths, options_hash) that returns out, new if
    None. lse: None where the call does not return it."""
    launch, join = decode_launch(problem, tile), combine_parts_launch(problem, tile)
    slot_m, heads_q, heads_kv = tile.slot_m, problem.num_heads_q, problem.num_heads_kv
    varlen, dim_v = problem.varlen, problem.head_dim_v
    has_descales = any(name.endswith("descale") for name in problem.given)
    eight_bits, dtype = problem.cache_dtype == FP8, problem.out_dtype
    no_strides = (0,) * 8  # of q_descale, k_descale and v_descale
    programs_per_tile = tile.slot_m // join.constants["ROWS"]
    window_left = min(problem.window_left, LARGEST_WINDOW)
    factors = (
        window_left,
        min(problem.window_right, LARGEST_WINDOW),
        *problem.score_scale.log2_factors,
    )

    def run(
        out: Tensor | None,
        lse: Tensor | None,
        tensors: DecodeTensors,
        lengths: Lengths,
        options_hash: int,
    ) -> Tensor:
        out = new_out(tensors, dtype) if out is None else out
        if varlen:  # no kernel writes rows of no sequence
            out.zero_()
            if lse is not None:
                lse.fill_(-inf)
        batch, total_q, seqlen_q = query_sizes(tensors, lengths.max_seqlen_q)
        capacity, num_caches, num_pages = sizes_of(tensors.k_cache, tensors.page_table)
        tiles, parts, slots = tile.grid(problem, batch, total_q, seqlen_q, capacity)
        if tiles == 0:
            return out
        num_splits = problem.num_splits
        if problem.split_tokens:
            num_splits = EVERY_SPAN if slots else 1
        seqlen_k = capacity if lengths.seqlen is None else lengths.seqlen
        # One allocation holds the workspace and an lse that is not returned.
        rows, own_lse = slots * slot_m, 0
        if lse is None:
            own_lse = heads_q * total_q * (1 if varlen else batch)
            lse_strides = 0 if varlen else heads_q * total_q, total_q
        else:
            lse_strides = _lse_strides(lse, varlen)
        room = lse
        if slots or own_lse:
            room = out.new_empty(rows * (dim_v + 1) + own_lse, dtype=torch.float32)
        out_parts = lse_parts = room
        if slots:
            out_parts, lse_parts, room = room.split_with_sizes((rows * dim_v, rows, own_lse))
        if lse is None:
            lse = room
        q, k, v = map(as_bytes, tensors[:3]) if eight_bits else tensors[:3]
        places = (*_strides(out, varlen), *lse_strides)
        seqlens = (batch, seqlen_q, total_q, min(seqlen_k, capacity + 1), lengths.seqlen_new)
        numbers = (
            *places[3:],
            0 if tensors.page_table is None else tensors.page_table.stride(0),
            *_tree_strides(tensors.tree_mask),
            _slopes_stride(tensors.alibi_slopes),
            *(_descale_strides(tensors) if has_descales else no_strides),
            *seqlens,
            capacity,
            num_caches,
            num_pages,
            heads_kv,
            tile.num_ctas,
            num_splits,
            options_hash,
            *factors,
        )
        launch(
            (parts, 1, 1),
            (q, k, v, out, lse, out_parts, lse_parts, *tensors[3:]),
            (*_strides(q, varlen), *_strides(k), *_strides(v), *places[:3]),
            numbers,
        )
        if slots:
            indices = (tensors.cache_seqlens, tensors.cache_leftpad, tensors.cu_seqlens_q)
            indices += (tensors.cu_seqlens_k_new,)
            sizes = (*seqlens, capacity, heads_kv, tile.num_ctas, num_splits, window_left)
            join(
                (programs_per_tile * min(tiles, slots // 2), 1, 1),
                (out_parts, lse_parts, out, lse, *indices, tensors.sinks),
                places,
                (*sizes, slots),
            )
        return out

    return run


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of e4m3, which Triton has as a type on some GPUs only."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _descale_strides(tensors: DecodeTensors) -> tuple[int, ...]:
    """(batch, head) of q's descales, and (batch, token, head) of K's and of V's; batch: of pages or
    caches where these, or tokens, have descales."""
    of_q = tensors.q_descale
    return (
        *((0, 0) if of_q is None or is_one_number(of_q) else of_q.stride()),
        *_key_strides(tensors.k_descale, tensors.k_cache),
        *_key_strides(tensors.v_descale, tensors.v_cache),
    )


def _key_strides(descale: Tensor | None, cache: Tensor) -> tuple[int, int, int]:
    kind = kind_of(descale, cache)
    if kind is None or is_one_number(descale):
        return 0, 0, 0
    batch, *token, head = descale.stride()
    return batch, token[0] if kind == TOKENS else 0, head


def sizes_of(cache: Tensor, page_table: Tensor | None) -> tuple[int, int, int]:
    """Capacity of a cache in tokens, number of caches, number of pages."""
    if page_table is None:
        return cache.shape[1], cache.shape[0], 0
    num_pages, page_size = cache.shape[:2]
    # Without pages every entry of the table is wrong, and none may be looked up in a cache.
    return page_table.shape[1] * page_size, page_table.shape[0], num_pages


def _strides(x: Tensor, varlen: bool = False) -> tuple[int, ...]:
    """(batch, sequence, head)."""
    return (0, *x.stride()[:2]) if varlen else x.stride()[:3]


def _lse_strides(lse: Tensor, varlen: bool) -> tuple[int, int]:
    return (0, lse.stride(0)) if varlen else lse.stride()[:2]


def _tree_strides(tree: Tensor | None) -> tuple[int, int]:
    """(batch, sequence)."""
    return (0, 0) if tree is None else (0, *tree.stride())[-3:-1]


def _slopes_stride(slopes: Tensor | None) -> int:
    """Of the batch."""
    return 0 if slopes is None or slopes.ndim == 1 else slopes.stride(0)


def decode_launch(problem: DecodeProblem, tile: CacheTile) -> VariableLaunch:
    dims = problem.head_dim, problem.head_dim_v
    widens = problem.cache_dtype in EIGHT_BIT
    blocks = blocks_alike(*(max(dim, SMALLEST_WIDENED * widens) for dim in dims))
    alike = {"BLOCK_D": blocks[0], "BLOCK_DV": blocks[1]}
    elementwise = alike | {"WORDS": False}
    constants = {
        "STRIDE_UNIT": 1,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_DV": padded(problem.head_dim_v),
        "GROUP": problem.qhead_per_kvhead,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FEW_M": tile.few_m,
        "FEW_N": tile.few_n,
        **_units(problem, tile),
        "PAGE_SIZE": problem.page_size,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "SOFTCAP": capping(problem.score_scale),
        "TREE_WORDS": problem.tree_words,
        "K_OF_KEYS": problem.k_descale in OF_KEYS,
        "V_OF_KEYS": problem.v_descale in OF_KEYS,
        "NATIVE_FP8": tile.native_fp8,
        "WORDS": True,
    }
    # Keys that are widened are not pipelined any more: they take turns with values.
    if widens or problem.split_tokens or tile.num_stages == 1:
        constants |= alike
    if is_elementwise(*dims):
        constants |= elementwise
    options = _part_options(problem, tile)
    return VariableLaunch(decode.decode_kernel, 4, constants, options, elementwise)


def _units(problem: DecodeProblem, tile: CacheTile) -> dict[str, object]:
    """The constants of parts: rows of each in the workspace, and keys in which they are counted."""
    unit = problem.split_tokens or max(tile.block_n, tile.few_n)
    return {"SLOT_M": tile.slot_m, "UNIT": unit, "SPANS": problem.split_tokens is not None}


def combine_parts_launch(problem: DecodeProblem, tile: CacheTile) -> VariableLaunch:
    block_dv = padded(problem.head_dim_v)
    constants = {
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_DV": block_dv,
        "GROUP": problem.qhead_per_kvhead,
        "BLOCK_M": tile.block_m,
        "FEW_M": tile.few_m,
        **_units(problem, tile),
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        # All loads of a step are in flight at once: 4096 numbers for 128 threads.
        "ROWS": 1 if tile.slot_m == 16 else 2,
        "PARTS": 16 if tile.slot_m == 16 else 8,
    }
    return VariableLaunch(
        cache_parts.combine_parts_kernel,
        0,
        constants,
        {**_part_options(problem, tile), "num_warps": 4},
    )


def _part_options(problem: DecodeProblem, tile: CacheTile) -> dict[str, object]:
    """Kernels of spans fuse no product that spans.py does not: dense caches and each size of pages
    have one of their own, and their bits are the same."""
    options = _options(tile)
    return {**options, "enable_fp_fusion": False} if problem.split_tokens else options


def _options(tile: CacheTile) -> dict[str, object]:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return options if tile.arch is None else {**options, "arch": tile.arch}


def prepare_append(problem: AppendProblem, tile: CacheTile) -> Callable:
    """Build a function of (tensors, lengths)."""
    launch = append_launch(problem, tile)
    heads_q, heads_kv = problem.num_heads_q, problem.num_heads_kv
    no_strides = (0, 0, 0)

    def run(tensors: AppendTensors, lengths: Lengths) -> None:
        k, v, k_cache, v_cache, q, q_out = tensors[:6]
        varlen = tensors.cu_seqlens_k_new is not None
        ragged_q = tensors.cu_seqlens_q is not None
        batch = tensors.cu_seqlens_k_new.shape[0] - 1 if varlen else k.shape[0]
        num_rows_k = k.shape[0] * (1 if varlen else k.shape[1])
        num_rows_q, seqlen_q = 0, 0
        if q is not None:
            seqlen_q = q.shape[-3]
            num_rows_q = seqlen_q * (1 if ragged_q else q.shape[0])
        capacity, num_caches, num_pages = sizes_of(k_cache, tensors.page_table)
        seqlen_k = capacity if lengths.seqlen is None else lengths.seqlen
        cos = tensors.rotary_cos
        launch(
            (ceil(max(num_rows_k, num_rows_q) / APPEND_ROWS), 2 * heads_kv + heads_q, 1),
            append_tensors(tensors, tile),
            (
                *_strides(k, varlen),
                *_strides(v, varlen),
                *_strides(k_cache),
                *_strides(v_cache),
                *(no_strides if q is None else _strides(q, ragged_q)),
                *(no_strides if q is None else _strides(q_out, ragged_q)),
            ),
            (
                0 if tensors.page_table is None else tensors.page_table.stride(0),
                0 if cos is None else cos.stride(0),
                *_key_strides(*_descale_of("k", tensors)),
                *_key_strides(*_descale_of("v", tensors)),
                batch,
                num_rows_q,
                num_rows_k,
                seqlen_q,
                min(seqlen_k, capacity + 1),
                0 if varlen else k.shape[1],
                capacity,
                num_caches,
                num_pages,
                0 if cos is None else cos.shape[0],
                heads_q,
                heads_kv,
            ),
        )

    return run


# Constexpr arguments of the append kernel by the kind of a descale.
_DESCALE_OF = {
    None: append_rows.PER_SEQUENCE.value,
    HEADS: append_rows.PER_SEQUENCE.value,
    PAGES: append_rows.PAGES.value,
    TOKENS: append_rows.TOKENS.value,
}


def _descale_of(name: str, tensors: AppendTensors) -> tuple[Tensor | None, Tensor]:
    """The descale by which new tokens are divided, or which is written, and the cache."""
    written = getattr(tensors, f"{name}_descale_out")
    given = getattr(tensors, f"{name}_descale")
    return given if written is None else written, getattr(tensors, f"{name}_cache")


def append_tensors(tensors: AppendTensors, tile: CacheTile) -> tuple[Tensor | None, ...]:
    """Those of the kernel, which has one pointer for a descale that is given or written."""
    caches = tensors[2:4] if tile.native_fp8 else map(as_bytes, tensors[2:4])
    others = tensors[4 : tensors._fields.index("k_descale")]
    return *tensors[:2], *caches, *others, *(_descale_of(name, tensors)[0] for name in "kv")


def append_launch(problem: AppendProblem, tile: CacheTile) -> VariableLaunch:
    constants = {
        "STRIDE_UNIT": 1,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "HALF": problem.rotary_dim // 2,
        "INTERLEAVED": problem.rotary_interleaved,
        "ONE_Q_POSITION": problem.one_q_position,
        "PAGE_SIZE": problem.page_size,
        "K_DESCALE": _DESCALE_OF[problem.k_descale],
        "V_DESCALE": _DESCALE_OF[problem.v_descale],
        "BLOCK": APPEND_ROWS,
    }
    return VariableLaunch(append.append_kernel, 6, constants, _options(tile))


def prepare_combine(problem: CombineProblem, tile: CacheTile) -> Callable:
    """Build a function of (out, lse, out_partial, lse_partial)."""
    launch = combine_rows_launch(problem, tile)
    column_blocks = ceil(problem.head_dim / launch.constants["BLOCK_D"])

    def run(out: Tensor, lse: Tensor, out_partial: Tensor, lse_partial: Tensor) -> None:
        *lead, heads, _ = out.shape
        seqlen_q = lead[-1]
        num_rows = out.numel() // problem.head_dim
        launch(
            (ceil(num_rows / COMBINE_ROWS), column_blocks, 1),
            (out_partial, lse_partial, out, lse),
            (
                *_part_strides(out_partial)[:4],
                *_part_strides(out.unsqueeze(0))[1:4],
                *_part_strides(lse_partial.unsqueeze(-1))[:4],
                *_part_strides(lse.unsqueeze(0).unsqueeze(-1))[1:4],
            ),
            (num_rows, out_partial.shape[0], seqlen_q, heads),
        )

    return run


def _part_strides(x: Tensor) -> tuple[int, ...]:
    """(part, batch, sequence, head, dim); without a batch its stride is 0."""
    stride = x.stride()
    return stride if len(stride) == 5 else (stride[0], 0, *stride[1:])


def combine_rows_launch(problem: CombineProblem, tile: CacheTile) -> VariableLaunch:
    constants = {
        "STRIDE_UNIT": 1,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": min(padded(problem.head_dim), COMBINE_COLUMNS),
        "ROWS": COMBINE_ROWS,
    }
    return VariableLaunch(
        combine.combine_rows_kernel, 4, constants, _options(tile), num_row_strides=7
    )
