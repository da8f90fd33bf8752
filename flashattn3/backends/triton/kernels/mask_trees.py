"""The bits of a mask's blocks from a tree, whose tokens see themselves and their ancestors.

The ancestors of a token in one block of 128 tokens are those of the nearest one there. So a program
that has found it, by a step for each block between at most, reads two words of bits.
"""

import triton
import triton.language as tl

from .block_lists import COLUMNS, ROWS
from .mask_bits import is_plain, store_kind, store_words


@triton.jit(do_not_specialize=["seqlen"])
def ancestors_kernel(parents_ptr, ancestors_ptr, seqlen):
    """int64 (batch, 3, seqlen): of each token the nearest ancestor before its block of 128 tokens,
    or -1, and two words with the bits of itself and its ancestors in the block.

    parents: integers (batch, seqlen); negative: none. A later one counts as the token before.
    Grid: blocks of 128 tokens, batch.
    """
    row, first, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    token = first + place
    parent = tl.load(parents_ptr + row * seqlen + token, mask=token < seqlen, other=0)
    parent = tl.maximum(tl.minimum(parent.to(tl.int64), token - 1), -1)
    # Ancestors in the block, twice as far away in each step (pointer jumping, Wyllie 1979).
    ancestor = tl.where(parent >= first, parent - first, place).to(tl.int32)
    bit = tl.full((ROWS,), 1, dtype=tl.int64) << (place % COLUMNS)
    low, high = tl.where(place < COLUMNS, bit, 0), tl.where(place < COLUMNS, 0, bit)
    for _ in tl.static_range(7):
        low |= tl.gather(low, ancestor, 0)
        high |= tl.gather(high, ancestor, 0)
        ancestor = tl.gather(ancestor, ancestor, 0)
    own = ancestors_ptr + row * 3 * seqlen + token
    tl.store(own, tl.gather(parent, ancestor, 0), mask=token < seqlen)
    tl.store(own + seqlen, low, mask=token < seqlen)
    tl.store(own + 2 * seqlen, high, mask=token < seqlen)


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def tree_kernel(ancestors_ptr, words_ptr, heads, queries, keys):
    """The bits and the kinds of two blocks of either side, as ``bits_kernel`` writes them.

    ancestors: as ``ancestors_kernel`` writes them. heads: 1. keys: queries.
    """
    first = tl.program_id(0) * ROWS
    query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ancestors = ancestors_ptr + tl.program_id(2).to(tl.int64) * 3 * queries
    nearest = tl.where(query < queries, query, -1)
    while tl.max(nearest, 0) >= first + ROWS:
        later = nearest >= first + ROWS
        nearest = tl.load(ancestors + nearest, mask=later, other=nearest).to(tl.int32)
    inside = nearest >= first
    words = ancestors + nearest[:, None] + (1 + tl.arange(0, 2))[None, :] * queries
    words = tl.load(words, mask=inside[:, None], other=0)
    shows_all = tl.min(tl.min((words == -1).to(tl.int32), 1), 0)
    kind = tl.max(inside.to(tl.int32), 0) + shows_all
    if is_plain(kind, queries, keys):
        store_kind(words_ptr, kind, queries, keys)
    else:
        bytes = words[:, :, None] >> (8 * tl.arange(0, 8)).to(tl.int64)[None, None, :]
        bytes = tl.reshape(bytes, (ROWS, ROWS // 8))
        seen = tl.zeros((ROWS, ROWS // 8), dtype=tl.int64)
        for i in tl.static_range(8):
            seen |= ((bytes >> i) & 1) << (8 * i)
        store_words(words_ptr, seen, queries, keys)
