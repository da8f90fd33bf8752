"""Bytes that an attention forward moves between memory and the SMs, counted from its loops.

A count is of all loads and stores of tiles, whether L2 has them or not. Step 3 of the ladder
(examples/learn) counts the same in a run; the tests compare both.
"""

from __future__ import annotations

from .checking import Case

ELEMENT, FLOAT = 2, 4  # bytes
GEMM_TILE = 128  # rows and columns; of the GEMMs of the naive form


def visited(case: Case, block_m: int, block_n: int) -> int:
    """Tiles of the score matrix of one head in which some row sees some key."""
    total = 0
    for first in range(0, case.seqlen_q, block_m):
        last = min(first + block_m, case.seqlen_q) - 1
        keys = case.seqlen_k
        if case.causal:
            keys = max(min(keys, last + case.seqlen_k - case.seqlen_q + 1), 0)
        total += -(-keys // block_n)
    return total


def naive(case: Case) -> int:
    """S is written by a GEMM, masked, read and replaced by P, and read by a GEMM."""
    sq, sk, d = case.seqlen_q, case.seqlen_k, case.head_dim
    passes = 6 if case.causal else 4
    scores = passes * sq * sk * ELEMENT
    q_and_k = -(-sk // GEMM_TILE) * sq * d + -(-sq // GEMM_TILE) * sk * d
    v_and_out = -(-sq // GEMM_TILE) * sk * d + sq * d
    return scores + (q_and_k + v_and_out) * ELEMENT


def flash_attention_1(case: Case, block: int, accumulator: int = FLOAT) -> int:
    """K and V once; Q, O and two statistics for each visited tile, the last two in both ways.

    accumulator: bytes of an element of O and of a statistic.
    """
    per_row = case.head_dim * (ELEMENT + 2 * accumulator) + 4 * accumulator
    rows = min(block, case.seqlen_q)
    return (
        visited(case, block, block) * rows * per_row + 2 * case.seqlen_k * case.head_dim * ELEMENT
    )


def flash_attention_2(case: Case, block_m: int, block_n: int) -> int:
    """Q, O and the log-sum-exp once; K and V for each visited tile."""
    q_and_out = case.seqlen_q * (2 * case.head_dim * ELEMENT + FLOAT)
    keys = min(block_n, case.seqlen_k)
    return q_and_out + visited(case, block_m, block_n) * keys * 2 * case.head_dim * ELEMENT
