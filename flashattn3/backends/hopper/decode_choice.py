"""Which kernel takes a cached call, and why another one does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...call.cache_descales import OF_KEYS
from ...call.dtypes import EIGHT_BIT, NAMES, SIXTEEN_BIT
from ..base import score_factor_reason
from .config_types import MAX_HEAD_DIM
from .kernel_configs import (
    DECODE_CONFIGS,
    DecodeConfig,
    ForwardConfig,
    KernelConfig,
    select_byte_decode_config,
    select_cached_forward_config,
    select_decode_config,
)

if TYPE_CHECKING:
    from ...call.cached import AppendProblem, DecodeProblem

ALIGNED_BYTES = 16  # which a thread copies at once
# Packed rows up to which a cached call runs on a decode kernel, which reads K and V once for each
# DECODE_TILE_ROWS rows, of all heads of a KV head. Reading them takes longer than multiplying up to
# about 256 rows: 128 keys of dim 128 are 4850 cycles of an SM's share of an H100's memory bandwidth
# and 1024 of its tensor cores for each 64 rows.
DECODE_ROWS = 192
# Packed rows of all sequences up to which a prefix runs on a decode kernel, which reads it once for
# each DECODE_TILE_ROWS rows, from L2 but for the first time. A forward kernel multiplies faster, on
# few SMs where there are few rows, and none reads the sequences' own keys meanwhile. On an H200, 8k
# keys before 512, the time of two calls times 0.64 with 256 rows, 1.03 to 1.1 with 1024.
PREFIX_ROWS = 512
# Bytes that K and V of one KV head may take where a cache of 8 bits is widened for a forward
# kernel. The workspace has as many heads as fit into kWidenedBytes (csrc/launch/widen_cache.h), at
# least one.
MOST_WIDENED_BYTES = 1 << 31
_DESCALES = frozenset(("q_descale", "k_descale", "v_descale"))


def unfit_reason(problem: DecodeProblem) -> str | None:
    """Why no decode kernel takes the problem, or None."""
    if problem.dtype not in SIXTEEN_BIT:
        return f"computes in float16 and bfloat16, not in {problem.dtype}"
    if reads_bytes(problem):
        if problem.split_tokens:
            return "cuts caches of 8 bits into equal shares of all SMs, not into spans"
    else:
        if problem.cache_dtype != problem.dtype:
            return f"reads caches of q's dtype, {problem.dtype}, not {problem.cache_dtype}"
        if (reason := descale_reason(problem)) is not None:
            return reason
    aligned = ALIGNED_BYTES // problem.cache_dtype.itemsize
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size > MAX_HEAD_DIM or size % aligned:
            limits = f"multiples of {aligned} up to {MAX_HEAD_DIM}"
            return f"takes head dims that are {limits}, {name} is {size}"
    caches = sorted(problem.misaligned - {"q"})
    if caches and not problem.split_tokens:  # with it addresses change no bit: they are copied
        return f"copies 16 bytes at once: rows of {caches[0]} begin at other addresses"
    if "alibi_slopes" in problem.given:
        return "has no kernel of cached calls with alibi_slopes"
    if problem.tree_words and (reason := tree_reason(problem)) is not None:
        return reason
    if problem.num_splits > 1:
        parts = "cuts the batch into equal shares (num_splits=0) or no sequence (1)"
        return f"{parts}, num_splits is {problem.num_splits}"
    return score_factor_reason(problem, 100, torch.float32)


def tree_reason(problem: DecodeProblem) -> str | None:
    """Why no kernel reads the tree_mask of a problem that has one, or None."""
    if problem.split_tokens:
        return "has no kernel with spans of keys and a tree_mask"
    if reads_bytes(problem):
        return "has no kernel for caches of 8 bits with a tree_mask"
    if config_of(problem) is None:
        most = max(config.head_dim for config in DECODE_CONFIGS if config.tree)
        return f"takes a tree_mask up to head_dim {most}"
    return None


def prefix_config_of(problem: DecodeProblem, config: KernelConfig) -> DecodeConfig | None:
    """The decode kernel that reads a prefix in front of all sequences of a problem of the config.
    None: there is none, or the rows of a sequence are so many that a forward kernel takes them."""
    others = config.kind == "forward" or any(_kind(problem))
    if others or not problem.page_size or problem.window_left >= 0:
        return None
    select = select_byte_decode_config if reads_bytes(problem) else select_decode_config
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return select(NAMES[problem.dtype], head_dim, prefix=True)


def reads_bytes(problem: DecodeProblem) -> bool:
    """Whether the cache has 8 bits."""
    return problem.cache_dtype in EIGHT_BIT


def descale_reason(problem: DecodeProblem | AppendProblem) -> str | None:
    """Why no kernel reads the descales of a problem's caches, or None."""
    for name in ("k_descale", "v_descale"):
        kind = getattr(problem, name)
        if kind in OF_KEYS:
            return f"takes a descale for each head of a sequence, {name} has those of {kind}"
    return None


def config_of(problem: DecodeProblem) -> DecodeConfig | None:
    """The decode kernel of a problem. None: the problem is unfit."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    if reads_bytes(problem):
        return select_byte_decode_config(NAMES[problem.dtype], head_dim)
    return select_decode_config(NAMES[problem.dtype], head_dim, *_kind(problem))


def _kind(problem: DecodeProblem) -> tuple[bool, bool]:
    """Whether the kernels of a problem have spans of keys, and whether they read a tree_mask."""
    return problem.split_tokens is not None, problem.tree_words > 0


def forward_config_of(problem: DecodeProblem) -> ForwardConfig:
    """The cached forward kernel of a problem that has neither unfit_reason nor forward_reason; with
    split_tokens it gives a row the bits of the decode kernel."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return select_cached_forward_config(NAMES[problem.dtype], head_dim, *_kind(problem))


def forward_reason(problem: DecodeProblem) -> str | None:
    """Why a problem that is not unfit runs on a decode kernel, not on a forward kernel; or None."""
    if problem.rows <= DECODE_ROWS:
        return f"up to {DECODE_ROWS} packed rows"
    if reads_bytes(problem):
        return _widening_reason(problem)
    given = sorted(problem.given & _DESCALES)
    if given:
        return f"forward kernels take no {given[0]}"
    expanded = sorted(problem.expanded - {"q"})
    if expanded:
        return f"forward kernels need strides that are not 0: {expanded[0]} is expanded"
    return None


def _widening_reason(problem: DecodeProblem) -> str | None:
    """Why a cache of 8 bits is not widened to 16 for a forward kernel, or None."""
    if "q_descale" in problem.given:
        return "forward kernels take no q_descale"
    num_bytes = problem.cached_tokens * (problem.head_dim + problem.head_dim_v) * 2
    if num_bytes > MOST_WIDENED_BYTES:
        most = f"{MOST_WIDENED_BYTES >> 20} MiB"
        return (
            f"forward kernels read a cache of 8 bits widened to 16, K and V of a head in {most}: "
            f"those of {problem.cached_tokens} tokens take {num_bytes >> 20} MiB"
        )
    return None
