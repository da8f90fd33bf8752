"""A kernel for each mask_mod: the bits of a block mask's blocks from code of single scores."""

from __future__ import annotations

import linecache
from functools import lru_cache
from hashlib import sha256

import triton
import triton.language as tl

from . import mask_bits
from .block_lists import ROWS

# As ``bits_kernel``, of blocks as ``kind_of_program`` takes them.
TEXT = """
@triton.jit
def mask_mod({values}b, h, q, k):
    {lines}
    return {seen}


@triton.jit(do_not_specialize={numbers})
def mask_mod_kernel(
    {tensors}counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr, words_ptr, heads, queries,
    keys, block_q, block_k, blocks_q, blocks_k, {scalars}
):
    blocks_ptr = counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr
    blocks = block_q, block_k, blocks_q, blocks_k
    kind = kind_of_program(blocks_ptr, blocks)
    if is_plain(kind, queries, keys):
        store_kind(words_ptr, kind, queries, keys)
    else:
        query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
        first = tl.program_id(0) * ROWS + 8 * tl.arange(0, ROWS // 8)[None, :]
        list_idx = tl.program_id(2) + tl.zeros((1, 1), dtype=tl.int64)
        b, h, q = list_idx // heads, list_idx % heads, tl.minimum(query, queries - 1).to(tl.int64)
        bytes = tl.zeros((ROWS, ROWS // 8), dtype=tl.int64)
        for i in tl.static_range(8):
            key = first + i
            seen = mask_mod({values}b, h, q, tl.minimum(key, keys - 1).to(tl.int64))
            seen = bytes_of_scores(seen, kind, blocks_ptr, blocks, query, key, queries, keys)
            bytes |= seen << (8 * i)
        store_words(words_ptr, bytes, queries, keys)
"""
NUMBERS = ("heads", "queries", "keys", "block_q", "block_k", "blocks_q", "blocks_k")
NAMES = ("kind_of_program", "is_plain", "store_kind", "bytes_of_scores", "store_words")
NAMES += ("floor_divided", "remainder")


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
