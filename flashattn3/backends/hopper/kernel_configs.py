"""Kernel configs of the compiled Hopper kernels, for the planner, the build, tests and doctor.

Imports only config_types.py and the standard library, so that setup.py can read it without torch.
"""

from __future__ import annotations

import hashlib
import math
from fnmatch import fnmatchcase

from .config_types import (
    BIAS,
    EIGHT_BIT,
    LARGEST,
    NO_TERM,
    SIXTEEN_BIT,
    SLOPES,
    BackwardConfig,
    DecodeConfig,
    ForwardConfig,
    KernelConfig,
)

PLANNED_FIELDS = ("max_seqlen_k", "measured")  # config fields that are not compiled


def _forward_configs(
    dtypes: tuple[str, ...],
    head_dim: int | tuple[int, int],
    masked: bool,
    *tile: int,
    term: str = NO_TERM,
    listed: bool = False,
    max_seqlen_k: int | None = None,
    measured: str = "",
) -> tuple[ForwardConfig, ...]:
    """One forward config per dtype. head_dim: also that of q and k, and that of v."""
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    rest = {"term": term, "listed": listed, "max_seqlen_k": max_seqlen_k, "measured": measured}
    return tuple(ForwardConfig(dtype, *dims, masked, *tile, **rest) for dtype in dtypes)


def _backward_configs(
    head_dim: int, head_dim_v: int, *tile: int, **rest: str | bool
) -> tuple[BackwardConfig, ...]:
    """One backward config per 16-bit dtype."""
    return tuple(
        BackwardConfig(dtype, head_dim, head_dim_v, *tile, **rest) for dtype in SIXTEEN_BIT
    )


MEASURED = "H100 80GB HBM3, forward_check --time, 2026-11-21"
MEASURED_64 = "H100 80GB HBM3, flashattn3 bench --suite shapes, 2026-11-25"
MEASURED_SHORT = "H100 80GB HBM3, flashattn3 bench --suite shapes, 2026-11-26"
MEASURED_192 = "H100 80GB HBM3, forward_check --time, 2026-11-24"
MEASURED_MASK = "H100 80GB HBM3, beside dense calls, 2026-11-27"
MEASURED_LISTS = "H100 80GB HBM3, beside FlexAttention, 2026-11-28"
MEASURED_BIAS = "H100 80GB HBM3, beside FlexAttention, 2026-11-27"
MEASURED_8 = "H200, forward_check --time, 2026-11-23"
MEASURED_SCORES = "H100 80GB HBM3, forward_check, 2026-11-27"
MEASURED_WIDE_SCORES = "H200, beside Triton, 2026-11-28"
# Work tiles with rows of two lists; keys: kMostJoinedColumns of csrc/attention/list_sizes.h.
JOINED = {
    "listed": True,
    "max_seqlen_k": 524288,
    "measured": "H200, flashattn3 bench --suite masks, 2026-12-01",
}
# dtypes, head dim, masked, block_m, block_n, num_stages, num_mma_warpgroups, num_q_buffers
FORWARD_CONFIGS = (
    *_forward_configs(SIXTEEN_BIT, 64, False, 192, 128, 4, 3, 4, measured=MEASURED_64),
    *_forward_configs(SIXTEEN_BIT, 64, False, 128, 128, 4, 2, 4, measured=MEASURED_64),
    *_forward_configs(SIXTEEN_BIT, 64, False, 64, 128, 4, 1, 4, measured=MEASURED_64),
    *_forward_configs(SIXTEEN_BIT, 64, False, 192, 112, 4, 3, 4, measured=MEASURED_SHORT),
    *_forward_configs(SIXTEEN_BIT, 64, False, 128, 112, 4, 2, 4, measured=MEASURED_SHORT),
    *_forward_configs(SIXTEEN_BIT, 64, False, 64, 112, 4, 1, 4, measured=MEASURED_SHORT),
    *_forward_configs(SIXTEEN_BIT, 64, False, 192, 96, 4, 3, 4, measured=MEASURED_SHORT),
    *_forward_configs(SIXTEEN_BIT, 64, False, 128, 96, 4, 2, 4, measured=MEASURED_SHORT),
    *_forward_configs(SIXTEEN_BIT, 64, False, 64, 96, 4, 1, 4, measured=MEASURED_SHORT),
    *_forward_configs(
        SIXTEEN_BIT, 64, True, 192, 64, 4, 3, 4, max_seqlen_k=1024, measured=MEASURED_64
    ),
    *_forward_configs(
        SIXTEEN_BIT, 64, True, 128, 64, 4, 2, 4, max_seqlen_k=1024, measured=MEASURED_64
    ),
    *_forward_configs(SIXTEEN_BIT, 64, True, 192, 128, 4, 3, 4, measured=MEASURED_64),
    *_forward_configs(
        SIXTEEN_BIT, 96, False, 192, 64, 3, 3, 2, max_seqlen_k=1024, measured=MEASURED_SHORT
    ),
    *_forward_configs(SIXTEEN_BIT, 96, False, 192, 96, 2, 3, 2, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, 96, True, 192, 96, 2, 3, 2, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, 128, False, 192, 64, 4, 3, 2, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, 128, True, 192, 64, 4, 3, 2, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, 192, False, 128, 80, 2, 2, 2, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, 192, True, 128, 80, 2, 2, 2, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, (192, 128), False, 128, 96, 2, 2, 2, measured=MEASURED_192),
    *_forward_configs(SIXTEEN_BIT, (192, 128), True, 192, 64, 2, 3, 2, measured=MEASURED_192),
    *_forward_configs(SIXTEEN_BIT, 256, False, 128, 64, 2, 2, 1, measured=MEASURED),
    *_forward_configs(SIXTEEN_BIT, 256, True, 128, 64, 2, 2, 1, measured=MEASURED),
    *_forward_configs(
        SIXTEEN_BIT, 64, True, 192, 64, 4, 3, 2, term=BIAS, max_seqlen_k=512, measured=MEASURED_BIAS
    ),
    *_forward_configs(SIXTEEN_BIT, 64, True, 192, 128, 2, 3, 2, term=BIAS, measured=MEASURED_BIAS),
    *_forward_configs(SIXTEEN_BIT, 128, True, 192, 64, 2, 3, 2, term=BIAS, measured=MEASURED_BIAS),
    *_forward_configs(
        SIXTEEN_BIT, 64, True, 192, 128, 4, 3, 4, term=SLOPES, measured=MEASURED_SCORES
    ),
    *_forward_configs(
        SIXTEEN_BIT, 128, True, 192, 64, 4, 3, 2, term=SLOPES, measured=MEASURED_SCORES
    ),
    *_forward_configs(
        SIXTEEN_BIT, 256, True, 128, 64, 2, 2, 1, term=SLOPES, measured=MEASURED_WIDE_SCORES
    ),
    *_forward_configs(
        SIXTEEN_BIT, 64, True, 192, 128, 4, 3, 4, term=LARGEST, measured=MEASURED_SCORES
    ),
    *_forward_configs(
        SIXTEEN_BIT, 128, True, 192, 64, 4, 3, 2, term=LARGEST, measured=MEASURED_SCORES
    ),
    *_forward_configs(
        SIXTEEN_BIT, (192, 128), True, 192, 64, 2, 3, 2, term=LARGEST, measured=MEASURED_WIDE_SCORES
    ),
    *_forward_configs(
        SIXTEEN_BIT, 256, True, 128, 64, 2, 2, 1, term=LARGEST, measured=MEASURED_WIDE_SCORES
    ),
    *_forward_configs(SIXTEEN_BIT, 64, True, 192, 128, 4, 3, 3, **JOINED),
    *_forward_configs(
        SIXTEEN_BIT, 128, True, 128, 128, 2, 2, 2, listed=True, measured=MEASURED_MASK
    ),
    *_forward_configs(
        SIXTEEN_BIT, (192, 128), True, 128, 64, 3, 2, 2, listed=True, measured=MEASURED_MASK
    ),
    *_forward_configs(
        SIXTEEN_BIT, 256, True, 128, 64, 2, 2, 1, listed=True, measured=MEASURED_MASK
    ),
    # 8 bits: then keys_per_descale, promote_keys
    *_forward_configs(EIGHT_BIT, 64, False, 192, 128, 4, 3, 2, 64, 768, measured=MEASURED_8),
    *_forward_configs(EIGHT_BIT, 64, True, 192, 128, 4, 3, 2, 64, 768, measured=MEASURED_8),
    *_forward_configs(EIGHT_BIT, 128, False, 128, 128, 4, 2, 2, 64, 768, measured=MEASURED_8),
    *_forward_configs(
        EIGHT_BIT, 128, True, 128, 128, 4, 2, 2, 64, 768, max_seqlen_k=768, measured=MEASURED_8
    ),
    *_forward_configs(EIGHT_BIT, 128, True, 192, 96, 5, 3, 2, 32, 768, measured=MEASURED_8),
    *_forward_configs(
        EIGHT_BIT, 256, False, 128, 128, 2, 2, 2, 64, 768, max_seqlen_k=768, measured=MEASURED_8
    ),
    *_forward_configs(EIGHT_BIT, 256, False, 128, 128, 2, 2, 1, 64, 768, measured=MEASURED_8),
    *_forward_configs(
        EIGHT_BIT, 256, True, 128, 128, 2, 2, 2, 64, 768, max_seqlen_k=768, measured=MEASURED_8
    ),
    *_forward_configs(EIGHT_BIT, 256, True, 128, 128, 2, 2, 1, 64, 768, measured=MEASURED_8),
    *_forward_configs(
        EIGHT_BIT, 64, True, 128, 128, 4, 2, 2, 64, 768, listed=True, measured=MEASURED_LISTS
    ),
    *_forward_configs(
        EIGHT_BIT, 128, True, 128, 128, 4, 2, 2, 64, 768, listed=True, measured=MEASURED_LISTS
    ),
)

BACKWARD_MEASURED = "H100 80GB HBM3, backward_check --time, 2026-11-22"
BACKWARD_MEASURED_192 = "H100, backward_check --time, 2026-11-24"
BACKWARD_MEASURED_192_128 = "H100, backward_check --time, 2026-11-26"
BACKWARD_MEASURED_SCORES = "H100 80GB HBM3, backward_check --time, 2026-11-27"
# head dim, that of V, num_stages, num_mma_warpgroups
BACKWARD_CONFIGS = (
    *_backward_configs(64, 64, 4, 3, measured=BACKWARD_MEASURED),
    *_backward_configs(96, 96, 2, 2, measured=BACKWARD_MEASURED),
    *_backward_configs(128, 128, 2, 2, measured=BACKWARD_MEASURED),
    *_backward_configs(64, 64, 2, 3, term=BIAS, measured=MEASURED_BIAS),
    *_backward_configs(128, 128, 2, 2, term=BIAS, measured=MEASURED_BIAS),
    *_backward_configs(64, 64, 4, 2, listed=True, measured=MEASURED_MASK),
    *_backward_configs(128, 128, 2, 2, listed=True, measured=MEASURED_MASK),
    *_backward_configs(192, 128, 2, 2, listed=True, measured=MEASURED_LISTS),
    *_backward_configs(256, 256, 2, 2, listed=True, measured=MEASURED_LISTS),
    *_backward_configs(192, 128, 2, 2, measured=BACKWARD_MEASURED_192_128),
    *_backward_configs(192, 192, 2, 2, measured=BACKWARD_MEASURED_192),
    *_backward_configs(256, 256, 2, 2, measured=BACKWARD_MEASURED),
    *_backward_configs(64, 64, 4, 3, term=SLOPES, measured=BACKWARD_MEASURED_SCORES),
    *_backward_configs(128, 128, 2, 2, term=SLOPES, measured=BACKWARD_MEASURED_SCORES),
    *_backward_configs(256, 256, 2, 2, term=SLOPES, measured=BACKWARD_MEASURED_SCORES),
)

DECODE_MEASURED = "H100 80GB HBM3, decode_check, 2026-11-23"
SPANS_MEASURED = "H200, bench --suite invariant, 2026-11-28"
# head dim, block_n, num_stages, num_stages_beside, num_q_buffers, num_consumers
DECODE_CONFIGS = tuple(
    DecodeConfig(dtype, *tile, spans=spans, measured=SPANS_MEASURED if spans else DECODE_MEASURED)
    for spans, tiles in (
        (False, ((64, 64, 4, 4, 2, 1), (128, 64, 2, 1, 2, 1), (256, 32, 2, 2, 1, 2))),
        (True, ((64, 128, 2, 2, 2, 1), (128, 64, 4, 1, 2, 1), (256, 64, 2, 2, 1, 1))),
    )
    for tile in tiles
    for dtype in SIXTEEN_BIT
)
TREE_MEASURED = "H200, bench --suite tree, 2026-11-28"
DECODE_CONFIGS += tuple(
    config._replace(tree=True, measured=TREE_MEASURED)
    for config in DECODE_CONFIGS
    if config.head_dim <= 128 and not config.spans
)
PREFIX_MEASURED = "H200, bench --suite prefix, 2026-11-29"
DECODE_CONFIGS += tuple(
    config._replace(prefix=True, measured=PREFIX_MEASURED)
    for config in DECODE_CONFIGS
    if config.head_dim <= 128 and not config.spans and not config.tree
)
BYTE_DECODE_MEASURED = "H100 80GB HBM3, decode_check, 2026-11-27"
# For caches of 8 bits beside q of 16: the same, and num_byte_tiles
BYTE_DECODE_CONFIGS = tuple(
    DecodeConfig(dtype, *tile, num_byte_tiles=byte_tiles, measured=BYTE_DECODE_MEASURED)
    for *tile, byte_tiles in (
        (64, 64, 2, 2, 1, 1, 10),
        (128, 64, 1, 1, 1, 1, 4),
        (256, 32, 1, 1, 1, 2, 7),
    )
    for dtype in SIXTEEN_BIT
)
BYTE_DECODE_CONFIGS += tuple(
    config._replace(prefix=True, measured=PREFIX_MEASURED)
    for config in BYTE_DECODE_CONFIGS
    if config.head_dim <= 128
)

CACHED_FORWARD_MEASURED = "H100 80GB HBM3, forward_check --time cached, 2026-11-24"
# Forward kernels of cached calls: head dim, block_m, block_n, num_stages, num_mma_warpgroups,
# num_q_buffers
CACHED_FORWARD_CONFIGS = tuple(
    ForwardConfig(
        dtype, head_dim, head_dim, True, *tile, cached=True, measured=CACHED_FORWARD_MEASURED
    )
    for head_dim, *tile in (
        (64, 192, 128, 4, 3, 2),
        (128, 192, 64, 4, 3, 2),
        (256, 128, 64, 2, 2, 1),
    )
    for dtype in SIXTEEN_BIT
)
CACHED_FORWARD_CONFIGS += tuple(
    ForwardConfig(
        dtype, head_dim, head_dim, True, *tile, cached=True, spans=True, measured=SPANS_MEASURED
    )
    for head_dim, *tile in (
        (64, 192, 128, 3, 3, 2),
        (128, 192, 64, 2, 3, 1),
        (256, 128, 64, 2, 2, 1),
    )
    for dtype in SIXTEEN_BIT
)
CACHED_FORWARD_CONFIGS += tuple(
    config._replace(tree=True, measured=TREE_MEASURED)
    for config in CACHED_FORWARD_CONFIGS
    if config.head_dim <= 128 and not config.spans
)
# "GPU, case, date" of the measurement of the append kernel, which has no kernel configs; empty: no
# GPU has run it yet, and only calls with backend="hopper" do.
APPEND_MEASURED = "H100 80GB HBM3, benchmarks/append_time.py, 2026-11-24"
# The same of the kernel that widens caches of 8 bits for cached forward kernels.
WIDEN_MEASURED = "H100 80GB HBM3, bench --suite kv8, 2026-11-28"
# All kernels of cached calls, in the order of the registry.
CACHED_CONFIGS = (*DECODE_CONFIGS, *CACHED_FORWARD_CONFIGS, *BYTE_DECODE_CONFIGS)


def all_configs() -> tuple[KernelConfig, ...]:
    """The configs of the library, in the order of its registry."""
    return (*FORWARD_CONFIGS, *BACKWARD_CONFIGS, *CACHED_CONFIGS)


# Time of a work tile of so many rows over that of one of 192 rows (H100, head dim 64).
TILE_TIMES = {192: 1.0, 128: 0.87, 64: 0.68}
# Time of a key in a block of so many keys over that in a block of 128 (the same); else 1.
KEY_TIMES = {112: 1.04, 96: 1.04}


def select_forward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    masked: bool,
    seqlen_k: int,
    seqlen_q: int = 1 << 30,
    num_batch_heads: int = 1,
    num_sms: int = 1,
    term: str = NO_TERM,
    listed: bool = False,
) -> ForwardConfig | None:
    """The config with the smallest sufficient head dim, head dim of V and max_seqlen_k, in this
    order, then the one whose blocks of keys take the least time, so that the keys alone decide how
    a row is summed, and of those the one whose work tiles do; None if there is none.

    seqlen_q: of a sequence on average; by default so long that the largest tile is best.
    num_batch_heads: query heads times batch.
    term: of TERMS.
    listed: whether the mask is lists of blocks.
    """
    masked = masked or listed or term != NO_TERM
    kind = dtype, masked, term, listed
    fitting = [
        config
        for config in FORWARD_CONFIGS
        if (config.dtype, config.masked, config.term, config.listed) == kind
        and config.head_dim >= head_dim
        and config.head_dim_v >= head_dim_v
        and (config.max_seqlen_k is None or seqlen_k <= config.max_seqlen_k)
    ]

    def time(config: ForwardConfig) -> float:
        num_tiles = math.ceil(seqlen_q / config.block_m) * num_batch_heads
        return math.ceil(num_tiles / num_sms) * TILE_TIMES[config.block_m]

    def key_time(config: ForwardConfig) -> float:
        keys = math.ceil(seqlen_k / config.block_n) * config.block_n
        return keys * KEY_TIMES.get(config.block_n, 1.0)

    def order(config: ForwardConfig) -> tuple[float, ...]:
        longest = config.max_seqlen_k or math.inf
        key = key_time(config), -config.block_n
        return config.head_dim, config.head_dim_v, longest, *key, time(config)

    return min(fitting, key=order, default=None)


def select_backward_config(
    dtype: str, head_dim: int, head_dim_v: int, term: str = NO_TERM, listed: bool = False
) -> BackwardConfig | None:
    """The config with the smallest sufficient head dim, then the smallest sufficient head dim of V;
    None if there is none. term, listed: as for the forward.
    """
    fitting = [
        config
        for config in BACKWARD_CONFIGS
        if (config.dtype, config.term, config.listed) == (dtype, term, listed)
        and config.head_dim >= head_dim
        and config.head_dim_v >= head_dim_v
    ]
    return min(fitting, key=lambda config: (config.head_dim, config.head_dim_v), default=None)


def select_decode_config(
    dtype: str, head_dim: int, spans: bool = False, tree: bool = False, prefix: bool = False
) -> DecodeConfig | None:
    """The config with the smallest sufficient head dim; None if there is none."""
    kind = dtype, spans, tree, prefix
    fitting = [
        config
        for config in DECODE_CONFIGS
        if (config.dtype, config.spans, config.tree, config.prefix) == kind
        and config.head_dim >= head_dim
    ]
    return min(fitting, key=lambda config: config.head_dim, default=None)


def select_byte_decode_config(
    dtype: str, head_dim: int, prefix: bool = False
) -> DecodeConfig | None:
    """For a cache of 8 bits: the config with the smallest sufficient head dim; None if there is
    none."""
    fitting = [
        config
        for config in BYTE_DECODE_CONFIGS
        if (config.dtype, config.prefix) == (dtype, prefix) and config.head_dim >= head_dim
    ]
    return min(fitting, key=lambda config: config.head_dim, default=None)


def select_cached_forward_config(
    dtype: str, head_dim: int, spans: bool = False, tree: bool = False
) -> ForwardConfig | None:
    """The config with the smallest sufficient head dim; None if there is none."""
    kind = dtype, spans, tree
    fitting = [
        config
        for config in CACHED_FORWARD_CONFIGS
        if (config.dtype, config.spans, config.tree) == kind and config.head_dim >= head_dim
    ]
    return min(fitting, key=lambda config: config.head_dim, default=None)


def matching(pattern: str) -> tuple[KernelConfig, ...]:
    """Configs whose name matches a glob; ValueError, with every name, if none does."""
    found = tuple(config for config in all_configs() if fnmatchcase(config.name, pattern))
    if not found:
        names = ", ".join(config.name for config in all_configs())
        raise ValueError(f"no kernel config matches {pattern!r}; the kernel configs are {names}")
    return found


def compiled_fields(kind: type[KernelConfig]) -> list[str]:
    """Config fields that the kernel depends on, in the order of the C++ struct."""
    return [name for name in kind._fields if name not in PLANNED_FIELDS]


def configs_hash() -> str:
    """Hash of the order and the compiled fields of all configs, without the term and the lists of
    those that have none.
    """
    lines = []
    for config in all_configs():
        values = {name: getattr(config, name) for name in compiled_fields(type(config))}
        kinds = dict.fromkeys(("listed", "spans", "tree", "prefix"), False)
        absent = {"term": NO_TERM, **kinds}
        values = {name: value for name, value in values.items() if value != absent.get(name)}
        lines.append(f"{config.kind} {values}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
