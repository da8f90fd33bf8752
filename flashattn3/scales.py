"""The descales of FP8 operands: what is legal, and where a kernel finds the one of a token.

A stored e4m3 value times its descale is the real value. In the pipeline every descale is float32
(batch, heads, num_blocks): one for each block of tokens of a sequence, counted from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .errors import expect

if TYPE_CHECKING:
    from .problem import Metadata, Options, Tensors

FP8 = torch.float8_e4m3fn
BLOCKS = (64, 128, 256)  # tokens that may share a descale, apart from all of a sequence
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of FP8 calls; the first is default


class Scales(NamedTuple):
    """The descale of a token is descale[batch, head, min(token // block, num_blocks - 1)].

    heads: those of the operand, or, of q, those of k: query heads that share a key head then share
        descales too.
    stride: (batch, head, block), in elements.
    """

    block: int
    heads: int
    num_blocks: int
    stride: tuple[int, int, int]


def scales_of(descale: Metadata | None, block: int) -> Scales | None:
    """Of a descale in the pipeline's shape; None stands for descale 1."""
    if descale is None:
        return None
    _, heads, num_blocks = descale.shape
    return Scales(block, heads, num_blocks, tuple(descale.stride))


def num_blocks(seqlen: int, block: int) -> int:
    return max(1, -(-seqlen // block))


def out_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Of q's dtype and the option."""
    return asked or (OUT_DTYPES[0] if dtype == FP8 else dtype)


def check_scales(function: str, tensors: Tensors, options: Options, batch: int) -> None:
    """Raise for descales, blocks and an out_dtype that do not go with q, k and v."""
    q, k = tensors[:2]
    if q.dtype != FP8:
        for name in ("q_descale", "k_descale", "v_descale"):
            given = getattr(tensors, name)
            expect(given is None, function, name, f"None where q is {q.dtype}", "a tensor")
        legal = options.out_dtype in (None, q.dtype)
        expect(legal, function, "out_dtype", f"None or {q.dtype} as q's", options.out_dtype)
        expect(not options.v_slots, function, "v_slots", f"False where q is {q.dtype}", True)
        return
    legal = options.out_dtype in (None, *OUT_DTYPES)
    expect(legal, function, "out_dtype", f"None or one of {OUT_DTYPES}", options.out_dtype)
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    for side, x, heads, longest in (
        ("q", q, (heads_q, heads_kv), options.max_seqlen_q),
        ("k", k, (heads_kv,), options.max_seqlen_k),
        ("v", k, (heads_kv,), options.max_seqlen_k),
    ):
        name = f"{side}_descale"
        descale, block = getattr(tensors, name), getattr(options, f"{side}_block")
        if descale is None:
            expect(block == 0, function, f"{side}_block", f"0 without {name}", block)
            continue
        shape = tuple(descale.shape)
        expect(len(shape) == 3, function, f"{name}.shape", "(batch, heads, blocks)", shape)
        expect(
            descale.dtype == torch.float32, function, f"{name}.dtype", torch.float32, descale.dtype
        )
        wanted = f"{q.device} as q's"
        expect(descale.device == q.device, function, f"{name}.device", wanted, descale.device)
        expect(shape[0] == batch, function, f"{name}.shape[0]", f"{batch} (batch)", shape[0])
        wanted = " or ".join(map(str, dict.fromkeys(heads))) + " (heads)"
        expect(shape[1] in heads, function, f"{name}.shape[1]", wanted, shape[1])
        one = shape[2] == 1 and block >= 1
        expect(one or block in BLOCKS, function, f"{side}_block", f"one of {BLOCKS}", block)
        if tensors.cu_seqlens_q is None:
            wanted = num_blocks(x.shape[1], block)
            fits, at_least = shape[2] == wanted, ""
        else:
            # Blocks beyond the last one given share its descale.
            wanted = 1 if longest is None else num_blocks(min(longest, x.shape[0]), block)
            fits, at_least = shape[2] >= wanted, "at least "
        wanted = f"{at_least}{wanted} (blocks of {block} tokens)"
        expect(fits, function, f"{name}.shape[2]", wanted, shape[2])
