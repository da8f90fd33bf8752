"""A kernel for each mask_mod: the bits of a block mask's blocks from code of single scores."""

from __future__ import annotations

import linecache
from functools import lru_cache
from hashlib import sha256

import triton
import triton.language as tl

from . import mask_bits
from .block_lists import ROWS

# As ``bits_kernel``, of blocks as ``kinds_of_scores`` takes them; programs without a partial block
# compute no scores.
TEXT = '''
@triton.jit
def mask_mod({values}b, h, q, k):
    {lines}
    return {seen}


@triton.jit(do_not_specialize={numbers})
def mask_mod_kernel(
    {tensors}counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr, words_ptr, kinds_ptr,
    heads, queries, keys, block_q, block_k, blocks_q, blocks_k, {scalars}
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    query, key = tl.minimum(row, queries - 1), tl.minimum(column, keys - 1)
    blocks_ptr = counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr
    blocks = block_q, block_k, blocks_q, blocks_k
    kind, has_partial = kinds_of_scores(blocks_ptr, query, key, blocks)
    seen = kind == 2
    if has_partial:
        q, k = query.to(tl.int64), key.to(tl.int64)
        list_idx = tl.program_id(2) + tl.zeros((1, 1), dtype=tl.int64)
        b, h = list_idx // heads, list_idx % heads
        seen = seen | ((kind == 1) & mask_mod({values}b, h, q, k))
    inside = (row < queries) & (column < keys)
    store_scores(words_ptr, kinds_ptr, seen & inside, queries, keys)
'''
NUMBERS = ("heads", "queries", "keys", "block_q", "block_k", "blocks_q", "blocks_k")
NAMES = ("kinds_of_scores", "store_scores", "floor_divided", "remainder")


@lru_cache(maxsize=256)
def kernel_of(lines: tuple[str, ...], seen: str, num_tensors: int, num_numbers: int) -> object:
    """The kernel of a mask_mod's ``Code``. Triton reads the text of a kernel from its file."""
    tensors = "".join(f"t{i}_ptr, " for i in range(num_tensors))
    scalars = [f"n{i}" for i in range(num_numbers)]
    of_scalars = "".join(f"{x}, " for x in scalars)
    text = TEXT.format(
        values=tensors + of_scalars,
        lines="\n    ".join(lines),
        seen=seen,
        numbers=[*NUMBERS, *scalars],
        tensors=tensors,
        scalars=of_scalars,
    )
    file = f"<mask_mod {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = {"triton": triton, "tl": tl, "ROWS": ROWS, "__name__": __name__}
    names |= {name: getattr(mask_bits, name) for name in NAMES}
    exec(compile(text, file, "exec"), names)
    return names["mask_mod_kernel"]
