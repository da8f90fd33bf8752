"""The descales of 8-bit operands: what is legal, and where a kernel finds the one of a token.

q and k are both e4m3 or both int8, v is e4m3. A stored value times its descale is the real value.
In the pipeline every descale is float32 (batch, heads, num_blocks): one for each block of tokens of
a sequence, counted from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import expect

if TYPE_CHECKING:
    from .problem import Metadata, Options, Tensors

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EIGHT_BIT = (FP8, INT8)  # of q and k that come with descales
BLOCKS = (64, 128, 256)  # tokens that may share a descale, apart from all of a sequence
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of 8-bit calls; the first is default


class Descales(NamedTuple):
    """The descale of a token is descale[batch, head, min(token // block, num_blocks - 1)].

    heads: those of the operand, or, of q, those of k: query heads that share a key head then share
        descales too.
    stride: (batch, head, block), in elements.
    """

    block: int
    heads: int
    num_blocks: int
    stride: tuple[int, int, int]


def descales_of(descale: Metadata | None, block: int) -> Descales | None:
    """Of a descale in the pipeline's shape; None stands for descale 1."""
    if descale is None:
        return None
    _, heads, num_blocks = descale.shape
    return Descales(block, heads, num_blocks, tuple(descale.stride))


def num_blocks(seqlen: int, block: int) -> int:
    return max(1, -(-seqlen // block))


def out_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Of q's dtype and the option."""
    return asked or (OUT_DTYPES[0] if dtype in EIGHT_BIT else dtype)


def best_qk_dtype(head_dim: int, hadamard: bool) -> torch.dtype:
    """What q and k are quantized to where nothing else is asked for.

    int8 has even steps, finer than e4m3's where the rotation left no outliers; without it one
    outlier makes those of its whole block coarse. Over more than 128 columns e4m3's errors average
    out as far, and it is faster.
    """
    return INT8 if hadamard and head_dim <= 128 else FP8


def v_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of q's: v, like P, is e4m3 where q and k have 8 bits."""
    return FP8 if dtype in EIGHT_BIT else dtype


def check_descales(function: str, tensors: Tensors, options: Options, batch: int) -> None:
    """Raise for descales, blocks and an out_dtype that do not go with q, k and v."""
    q, k = tensors[:2]
    check_out_dtype(function, q.dtype, options.out_dtype)
    if q.dtype not in EIGHT_BIT:
        for name in ("q_descale", "k_descale", "v_descale"):
            given = getattr(tensors, name)
            expect(given is None, function, name, f"None where q is {q.dtype}", "a tensor")
        permuted = options.v_permuted
        expect(permuted == 0, function, "v_permuted", f"0 where q is {q.dtype}", permuted)
        return
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    of_k = f"{heads_kv} (k's heads)"
    for side, x, heads, wanted, longest in (
        ("q", q, (heads_q, heads_kv), f"{of_k} or {heads_q} (q's)", options.max_seqlen_q),
        ("k", k, (heads_kv,), of_k, options.max_seqlen_k),
        ("v", k, (heads_kv,), of_k, options.max_seqlen_k),
    ):
        name, block = f"{side}_descale", getattr(options, f"{side}_block")
        descale = getattr(tensors, name)
        if descale is None:
            expect(block == 0, function, f"{side}_block", f"0 without {name}", block)
            continue
        shape = tuple(descale.shape)
        expect(len(shape) == 3, function, f"{name}.shape", "(batch, heads, blocks)", shape)
        expect(shape[0] == batch, function, f"{name}.shape[0]", f"{batch} (batch)", shape[0])
        expect(shape[1] in heads, function, f"{name}.shape[1]", wanted, shape[1])
        _check_float32(function, name, descale, q)
        one = shape[2] == 1 and block >= 1
        expect(one or block in BLOCKS, function, f"{side}_block", f"one of {BLOCKS}", block)
        varlen = tensors.cu_seqlens_q is not None
        _check_num_blocks(function, name, shape[2], block, x.shape[-3], varlen, longest)


def check_out_dtype(function: str, dtype: torch.dtype, asked: torch.dtype | None) -> None:
    """dtype: of q."""
    scaled = dtype in EIGHT_BIT
    legal = (None, *OUT_DTYPES) if scaled else (None, dtype)
    wanted = f"None or one of {OUT_DTYPES}" if scaled else f"None or {dtype} as q's"
    expect(asked in legal, function, "out_dtype", wanted, asked)


def check_mean(
    function: str, name: str, mean: Metadata, shape: tuple[int, int, int], q: Metadata
) -> None:
    """Raise unless it has a vector for each batch entry and head; shape: what those make."""
    found, wanted = tuple(mean.shape), f"{shape} (batch, heads, head_dim)"
    expect(found == shape, function, f"{name}.shape", wanted, found)
    _check_float32(function, name, mean, q)


def _check_float32(function: str, name: str, x: Metadata, q: Metadata) -> None:
    found, wanted = x.dtype, torch.float32
    expect(found == wanted, function, f"{name}.dtype", wanted, found)
    found, wanted = x.device, f"{q.device} as q's"
    expect(found == q.device, function, f"{name}.device", wanted, found)


def _check_num_blocks(
    function: str, name: str, found: int, block: int, rows: int, varlen: bool, longest: int | None
) -> None:
    """As many descales as the tokens need; tokens beyond them would share the last one."""
    if not varlen:
        wanted = num_blocks(rows, block)
        fits, at_least = found == wanted, ""
    else:
        wanted = 1 if longest is None else num_blocks(min(longest, rows), block)
        fits, at_least = found >= wanted, "at least "
    wanted = f"{at_least}{wanted} (blocks of {block} tokens)"
    expect(fits, function, f"{name}.shape[2]", wanted, found)
