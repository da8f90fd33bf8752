"""Descales of 8-bit inputs: validation, and the index of a token's descale.

q and k are both e4m3 or both int8, v is e4m3. A stored value times its descale is the real value.
After normalisation every descale is float32 (batch, heads, num_blocks): one per block of tokens,
counted from the beginning of the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import expect

if TYPE_CHECKING:
    from .problem import Metadata, Options, Tensors

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EIGHT_BIT = (FP8, INT8)  # dtypes of q and k that take descales
BLOCKS = (64, 128, 256)  # tokens per descale; a descale may also cover a whole sequence
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # for 8-bit calls; first is the default


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


def out_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """dtype of out. dtype: q's. asked: the out_dtype argument."""
    return asked or (OUT_DTYPES[0] if dtype in EIGHT_BIT else dtype)


def best_qk_dtype(head_dim: int, hadamard: bool) -> torch.dtype:
    """Default dtype of quantized q and k.

    int8 steps are uniform, finer than e4m3's once the rotation has removed outliers; without the
    rotation one outlier makes the steps of its whole block coarse. Over more than 128 columns
    e4m3's errors average out to the same level, and e4m3 is faster.
    """
    return INT8 if hadamard and head_dim <= 128 else FP8


def v_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of v for q's dtype: v, like P, is e4m3 when q and k have 8 bits."""
    return FP8 if dtype in EIGHT_BIT else dtype


def check_descales(function: str, tensors: Tensors, options: Options, batch: int) -> None:
    """Raise if descales, block sizes or out_dtype do not match q, k and v."""
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
    """dtype: q's."""
    scaled = dtype in EIGHT_BIT
    legal = (None, *OUT_DTYPES) if scaled else (None, dtype)
    wanted = f"None or one of {OUT_DTYPES}" if scaled else f"None or {dtype} as q's"
    expect(asked in legal, function, "out_dtype", wanted, asked)


def check_mean(
    function: str, name: str, mean: Metadata, shape: tuple[int, int, int], q: Metadata
) -> None:
    """Raise unless mean is float32 of ``shape``: (batch, heads, head_dim)."""
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
    """Raise if descales do not cover all tokens; uncovered tokens would use the last descale."""
    if not varlen:
        wanted = num_blocks(rows, block)
        fits, at_least = found == wanted, ""
    else:
        wanted = 1 if longest is None else num_blocks(min(longest, rows), block)
        fits, at_least = found >= wanted, "at least "
    wanted = f"{at_least}{wanted} (blocks of {block} tokens)"
    expect(fits, function, f"{name}.shape[2]", wanted, found)
