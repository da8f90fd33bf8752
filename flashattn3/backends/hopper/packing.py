"""Estimates whether a decode kernel runs a forward without a cache sooner than a forward kernel.

A work tile of the forward has an SM for itself and reads all keys, while other SMs have none; the
decode kernel gives every SM an equal share, but has smaller work tiles and combines their parts.
The constants are fitted to an H100: 180 problems of 1 to 512 queries and 128 to 64k keys. A kernel
of another GPU is estimated by its number of SMs.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from ..packed import Choice, num_tiles, packed_rows_of, visible_keys
from .config_types import DECODE_TILE_ROWS

if TYPE_CHECKING:
    from ...call.problem import Problem
    from ..device import DeviceInfo
    from .kernel_configs import DecodeConfig, ForwardConfig

# Packing must be estimated to take so much of the forward's time.
SURELY_FASTER = 0.9
# The GEMMs take so much longer where a work tile has no whole number of shares.
UNEVEN = 1.6


def estimate(
    problem: Problem, device: DeviceInfo, forward: ForwardConfig, decode: DecodeConfig
) -> Choice:
    packed_us = _packed_us(problem, device.num_sms, decode)
    num_ctas = ceil(problem.seqlen_q / forward.block_m) * problem.num_heads_q * problem.batch
    waves = ceil(num_ctas / device.num_sms)
    forward_us = 7.5 + waves * visible_keys(problem) * _forward_ns(problem, forward) / 1000
    reason = f"about {packed_us:.0f} us in equal shares, {forward_us:.0f} us in {num_ctas} CTAs"
    return Choice(packed_us < SURELY_FASTER * forward_us, reason)


def _packed_us(problem: Problem, num_sms: int, decode: DecodeConfig) -> float:
    """Launch and combination of the parts, which takes longer with more rows; then the GEMMs."""
    rows = min(packed_rows_of(problem), DECODE_TILE_ROWS)
    tiles = max(1, num_tiles(problem, DECODE_TILE_ROWS))
    shares = num_sms // tiles * tiles if tiles <= num_sms else tiles
    ns = max(10, 0.1 * decode.head_dim) * (1 if shares * 16 >= num_sms * 15 else UNEVEN)
    return 7.0 + 0.3 * rows + tiles * visible_keys(problem) * ns / num_sms / 1000


def _forward_ns(problem: Problem, config: ForwardConfig) -> float:
    """Time of a key in a work tile: of few rows its latency, of many that of the GEMMs. Warpgroups
    without rows skip theirs."""
    columns = (problem.head_dim + problem.head_dim_v) / 2
    rows = min(config.block_m, 64 * ceil(problem.seqlen_q / 64))
    return max(4.0 + columns / 30, rows * columns / 1850)
