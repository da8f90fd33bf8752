"""Kernels of cached calls, to compile ahead of time. Importing this module imports Triton."""

from __future__ import annotations

import torch

from flashattn3.backends.triton.cache_tiles import CacheTile
from flashattn3.backends.triton.cached_launch import (
    append_launch,
    combine_parts_launch,
    decode_launch,
)
from flashattn3.backends.triton.kernels.launch import Launch
from flashattn3.call.cached import AppendProblem, DecodeProblem
from flashattn3.call.dtypes import FP8, INT8, NAMES

TYPES = NAMES | {FP8: "u8", INT8: "i8", torch.float32: "fp32"}  # Triton's names


def sample_launches(
    problem: DecodeProblem, appended: AppendProblem, tile: CacheTile, padding: int = 0
) -> dict[str, Launch]:
    """Every kernel of a cached call with the numbers of a small one, to compile ahead of time.

    The sinks are float32. padding: elements between two rows of q, k, v and out.
    """
    of, stored = TYPES[problem.dtype], TYPES[problem.cache_dtype]
    of_out, new = TYPES[problem.out_dtype], TYPES[appended.dtype]
    index_names = ("cache_seqlens", "page_table", "cache_batch_idx", "cache_leftpad")
    index_names += ("cu_seqlens_q", "cu_seqlens_k_new")
    float_names = ("q_descale", "k_descale", "v_descale", "sinks")

    def kinds(names: tuple[str, ...], kind: str, given: frozenset[str]) -> list[str | None]:
        return [kind if name in given else None for name in names]

    given = problem.given
    indices, floats = kinds(index_names, "i32", given), kinds(float_names, "fp32", given)
    metadata = kinds(("scheduler_metadata", "tree_mask"), "i32", given)
    metadata += kinds(("alibi_slopes",), "fp32", given)
    of_k, of_v = (
        (2**20 * (dim + padding), 16 * (dim + padding), dim + padding)
        for dim in (problem.head_dim, problem.head_dim_v)
    )
    factors = (problem.window_left, problem.window_right, *problem.score_scale.log2_factors)
    lengths_of = (indices[0], *indices[3:], floats[3])
    index_names = ("cache_seqlens", "page_table", "cache_batch_idx", *index_names[4:])
    tables = ("rotary_cos", "rotary_sin"), ("rotary_seqlens",), ("k_descale", "v_descale")
    written_as = "fp8e4nv" if tile.native_fp8 and appended.cache_dtype == FP8 else stored
    append_types = [new, new, written_as, written_as, new, new]
    append_types += kinds(index_names, "i32", appended.given)
    append_types += kinds(tables[0], "fp32", appended.given)
    append_types += kinds(tables[1], "i32", appended.given)
    written = frozenset(name.removesuffix("_out") for name in appended.given)
    append_types += kinds(tables[2], "fp32", written)
    return {
        "decode": decode_launch(problem, tile).sample(
            (of, stored, stored, of_out, "fp32", "fp32", "fp32", *indices, *floats, *metadata),
            (*of_k, *of_k, *of_v, *of_v),
            (64,) * 26 + factors,
        ),
        "combine_parts": combine_parts_launch(problem, tile).sample(
            ("fp32", "fp32", of_out, "fp32", *lengths_of), (), (64,) * 16
        ),
        "append": append_launch(appended, tile).sample(
            tuple(append_types), (*of_k, *of_v, *of_k, *of_v, *of_k, *of_k), (64,) * 20
        ),
    }
