"""The masks of the suites ``masks`` and ``masks-build``: ours, FlexAttention's function of the same
scores, and our own call that computes them without a mask object, where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashattn3
from flashattn3 import masks

Attend = Callable[..., Tensor]


class Shape(NamedTuple):
    """build: gives the Mask. mask_mod: FlexAttention's function of the same scores. plain: the same
    attention of ours without a mask object, (q, k, v) → out, or None."""

    build: Callable[[], masks.Mask]
    mask_mod: Callable[..., Tensor]
    plain: Attend | None = None


def _full(n: int, device: torch.device) -> Shape:
    return Shape(
        partial(masks.window, n, -1, -1, device=device),
        lambda b, h, q, k: q >= 0,
        flashattn3.flash_attn_func,
    )


def _causal(n: int, device: torch.device) -> Shape:
    plain = partial(flashattn3.flash_attn_func, causal=True)
    return Shape(partial(masks.window, n, -1, 0, device=device), lambda b, h, q, k: q >= k, plain)


def lengths_of(n: int) -> list[int]:
    """Documents of 700 tokens on average, or of a quarter of a short row."""
    mean, draw, found = min(700, n // 4), random.Random(0), []
    while sum(found) < n:
        found.append(min(draw.randint(mean // 4, 2 * mean - mean // 4), n - sum(found)))
    return found


def _documents(n: int, device: torch.device) -> Shape:
    lengths = torch.tensor(lengths_of(n), dtype=torch.int32, device=device)
    ids = torch.repeat_interleave(lengths)
    edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = q.shape[0]
        starts = torch.arange(batch, device=device, dtype=torch.int32)[:, None] * n
        all_edges = torch.cat([(starts + edges[:-1]).flatten(), edges.new_full((1,), batch * n)])
        rows = (x.flatten(0, 1) for x in (q, k, v))
        call = flashattn3.flash_attn_varlen_func
        out = call(*rows, all_edges.int(), all_edges.int(), longest, longest, causal=True)
        return out.unflatten(0, (batch, n))

    return Shape(
        partial(masks.documents, lengths, seqlen=n, causal=True),
        lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        plain,
    )


def _prefix(n: int, device: torch.device) -> Shape:
    prefix = n // 4
    lengths = torch.tensor([prefix], dtype=torch.int32, device=device)
    mask_mod = lambda b, h, q, k: (q >= k) | (k < prefix)  # noqa: E731
    return Shape(partial(masks.prefix_lm, lengths, n), mask_mod)


def _blocks(block_k: int, n: int, device: torch.device) -> Shape:
    shape = 1, 1, -(-n // 128), -(-n // block_k)
    generator = torch.Generator().manual_seed(0)
    selected = (torch.rand(shape, generator=generator) < 0.25).to(device)
    return Shape(
        partial(masks.blocks, selected, 128, block_k, seqlen_q=n, seqlen_k=n),
        lambda b, h, q, k: selected[0, 0, q // 128, k // block_k],
    )


def _global(n: int, device: torch.device) -> Shape:
    """Global tokens see all, and are seen by all, beside a window on both sides."""
    first, reach = min(128, n // 8), min(512, n // 4)

    def build() -> masks.Mask:
        token = torch.arange(n, device=device).view(1, 1, n, 1)
        ends = torch.where(token < first, n, 0)
        near = masks.window(n, reach, reach, sinks=first, device=device)
        return near | masks.intervals(torch.zeros_like(ends), ends)

    return Shape(build, lambda b, h, q, k: ((q - k).abs() <= reach) | (k < first) | (q < first))


def _tree(n: int, device: torch.device) -> Shape:
    """Sixteen answers to a prompt of half the tokens."""
    prompt, token = n // 2, torch.arange(n, device=device)
    length = -(-(n - prompt) // 16)
    answer = (token - prompt).div(length, rounding_mode="floor").clamp(min=-1)
    begins = (token >= prompt) & ((token - prompt) % length == 0)
    parents = torch.where(begins, prompt - 1, token - 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((k < prompt) | (answer[q] == answer[k]))

    return Shape(partial(masks.tree, parents), mask_mod)


def _bits(n: int, device: torch.device) -> Shape:
    generator = torch.Generator(device).manual_seed(0)
    seen = torch.rand(n, n, generator=generator, device=device) < 0.5
    return Shape(partial(masks.from_bool, seen), lambda b, h, q, k: seen[q, k])


SHAPES: dict[str, Callable[[int, torch.device], Shape]] = {
    "full": _full,
    "causal": _causal,
    "documents": _documents,
    "prefix": _prefix,
    "blocks of 128": partial(_blocks, 128),
    "blocks of 64": partial(_blocks, 64),
    "global and window": _global,
    "tree": _tree,
    "bits": _bits,
}


def block_mask_of(shape: Shape, n: int, device: torch.device) -> Any:
    """FlexAttention's mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(shape.mask_mod, None, None, n, n, device=str(device))
