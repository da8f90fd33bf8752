"""Descales of 8-bit inputs: validation, and the index of a token's descale.

q and k are both e4m3 or both int8, v is e4m3. A stored value times its descale is the real value.
After normalisation every descale is float32 (batch, heads, num_blocks): one per block of tokens,
counted from the beginning of the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import expect, value_error
from .dtypes import EIGHT_BIT, OUT_DTYPES
from .quantization_limits import BLOCKS
from .tensor_checks import check_equal, check_float32

if TYPE_CHECKING:
    from .fields import Options
    from .metadata import Metadata
    from .operands import Scaled


class Descales(NamedTuple):
    """The descale of a token is descale[batch, head, min(token // block, num_blocks - 1)].

    heads: number of heads of the tensor; for q it may be k's, then query heads that share a KV head
        also share descales.
    stride: (batch, head, block), in elements.
    """

    block: int
    heads: int
    num_blocks: int
    stride: tuple[int, int, int]


def descales_of(descale: Metadata | None, block: int) -> Descales | None:
    """Describe a descale (batch, heads, num_blocks); None means descale 1."""
    if descale is None:
        return None
    _, heads, num_blocks = descale.shape
    return Descales(block, heads, num_blocks, tuple(descale.stride))


def num_blocks(seqlen: int, block: int) -> int:
    return max(1, -(-seqlen // block))


def check_scaled(
    function: str, sides: dict[str, Scaled], options: Options, batch: int, varlen: bool
) -> None:
    """Raise if what belongs to 8 bits, or out_dtype, does not match q, k and v.

    sides: q, k and v by name, of tensors or of their metadata.
    """
    q, k, v = sides.values()
    dtype = q.data.dtype
    check_out_dtype(function, dtype, options.out_dtype)
    for name, x in sides.items():
        if dtype not in EIGHT_BIT:
            wanted = f"None where q is {dtype}"
            expect(x.descale is None, function, f"{name}_descale", wanted, "a tensor")
        layouts = ("rows", "permuted") if name == "v" and dtype in EIGHT_BIT else ("rows",)
        expect(x.layout in layouts, function, f"{name}.layout", f"one of {layouts}", x.layout)
    check_equal(function, "k.hadamard", k.hadamard, q.hadamard, "q")
    expect(not v.hadamard, function, "v.hadamard", "False: out would stay rotated", v.hadamard)
    _check_means(function, q, k, v, batch)
    heads_q, heads_kv = q.data.shape[-2], k.data.shape[-2]
    of_k = "{} (k's heads)"
    for name, heads, wanted in (
        ("q", (heads_kv, heads_q), of_k + " or {} (q's)"),
        ("k", (heads_kv,), of_k),
        ("v", (heads_kv,), of_k),
    ):
        descale, what = sides[name].descale, f"{name}_descale"
        if descale is None:
            block = sides[name].block
            expect(not block, function, f"{name}_block", f"0 without {what}", block)
            continue
        block = block_of(function, name, sides, options, varlen)
        shape = tuple(descale.shape)
        expect(shape[0] == batch, function, f"{what}.shape[0]", f"{batch} (batch)", shape[0])
        expect(shape[1] in heads, function, f"{what}.shape[1]", wanted, shape[1], *heads)
        check_float32(function, what, descale, q.data.device, "q")
        if block == 0:  # there are no tokens
            continue
        one = shape[2] == 1 and block >= 1
        expect(one or block in BLOCKS, function, f"{name}_block", f"one of {BLOCKS}", block)
        rows, longest = _tokens(name, sides, options)
        _check_num_blocks(function, what, shape[2], block, rows, varlen, longest)


def _tokens(name: str, sides: dict[str, Scaled], options: Options) -> tuple[int, int | None]:
    """Rows of q, or of k and v, and the longest sequence of a varlen call."""
    if name == "q":
        return sides["q"].data.shape[-3], options.max_seqlen_q
    return sides["k"].data.shape[-3], options.max_seqlen_k


def block_of(
    function: str, name: str, sides: dict[str, Scaled], options: Options, varlen: bool
) -> int:
    """Tokens of a descale; 0 if there are no tokens. A block that is not given is the one with
    which the tokens take as many blocks as there are descales."""
    x = sides[name]
    if x.descale is None:
        return 0
    what, shape = f"{name}_descale", tuple(x.descale.shape)
    axes = "(batch, heads) or (batch, heads, blocks)"
    expect(len(shape) == 3, function, f"{what}.shape", axes, shape)
    if x.block is not None:
        return x.block
    found = shape[2]
    rows, longest = _tokens(name, sides, options)
    if varlen and found != 1:
        argument = f"max_seqlen_{'q' if name == 'q' else 'k'}"
        wanted = f"an int where {what} is per block"
        expect(longest is not None, function, argument, wanted, None)
    seqlen = rows if longest is None else longest
    if found == 1:
        return max(1, seqlen)
    if found == 0 and seqlen == 0:
        return 0
    block = _block_of_count(found, seqlen)
    if block is not None:
        # quantize_block_fp8 makes blocks for no more tokens than there are rows.
        other = _block_of_count(found, min(seqlen, rows))
        wanted = f"at most {rows}, the number of rows, where {what} has {found} blocks"
        argument = f"max_seqlen_{'q' if name == 'q' else 'k'}"
        expect(other in (None, block), function, argument, wanted, seqlen)
        return block
    counts = sorted({1, *(num_blocks(seqlen, block) for block in BLOCKS)})
    wanted = f"one of {counts} (1, or blocks of one of {BLOCKS} for {seqlen} tokens)"
    raise value_error(function, f"{what}.shape[2]", wanted, found)


def _block_of_count(count: int, tokens: int) -> int | None:
    """The smallest block with which the tokens take this many blocks."""
    return next((block for block in BLOCKS if num_blocks(tokens, block) == count), None)


def _check_means(function: str, q: Scaled, k: Scaled, v: Scaled, batch: int) -> None:
    """Raise unless k alone has a mean, if any: float32 (batch, heads, head_dim)."""
    expect(q.mean is None, function, "q.mean", "None: it would change weights", "a tensor")
    expect(v.mean is None, function, "v.mean", "None: out would lack it", "a tensor")
    if k.mean is None:
        return
    shape = (batch, *k.data.shape[-2:])
    found, wanted = tuple(k.mean.shape), f"{shape} (batch, heads, head_dim)"
    expect(found == shape, function, "k.mean.shape", wanted, found)
    check_float32(function, "k.mean", k.mean, q.data.device, "q")


def check_out_dtype(function: str, dtype: torch.dtype, asked: torch.dtype | None) -> None:
    """dtype: q's."""
    scaled = dtype in EIGHT_BIT
    legal = (None, *OUT_DTYPES) if scaled else (None, dtype)
    wanted = f"None or one of {OUT_DTYPES}" if scaled else f"None or {dtype} as q's"
    expect(asked in legal, function, "out_dtype", wanted, asked)


def _check_num_blocks(
    function: str, name: str, found: int, block: int, rows: int, varlen: bool, longest: int | None
) -> None:
    """Raise if descales do not cover all tokens; uncovered tokens would use the last descale."""
    if not varlen:
        wanted = num_blocks(rows, block)
        fits, at_least = found == wanted, ""
    else:
        wanted = 1 if longest is None else num_blocks(min(longest, rows), block)
        fits, at_least = found >= wanted, "at least "
    wanted = f"{at_least}{wanted} (blocks of {block} tokens)"
    expect(fits, function, f"{name}.shape[2]", wanted, found)
