"""The random signs of the rotation as bits, computed without torch: its modes have no effect."""

from __future__ import annotations

from random import Random

import torch

SIGN_SEED = 0x5EED
WORD_BITS = 32


@torch.compiler.assume_constant_result
def sign_words(head_dim: int) -> tuple[int, ...]:
    """One bit per column, 1 for +1, from the Mersenne twister MT19937 (Matsumoto and Nishimura
    1998), seeded with SIGN_SEED + head_dim: the lowest bit of one number per column."""
    state = [SIGN_SEED + head_dim]
    for index in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + index) & 0xFFFFFFFF)
    numbers = Random()
    numbers.setstate((3, (*state, 624), None))
    bits = [numbers.getrandbits(32) & 1 for _ in range(head_dim)]
    starts = range(0, head_dim, WORD_BITS)
    return tuple(
        sum(bit << place for place, bit in enumerate(bits[start : start + WORD_BITS]))
        for start in starts
    )
