"""Attention whose sums have one order for all calls: split_tokens of the reference backend.

torch's products and sums add in an order that depends on their shapes. So products are written out,
sums are halved until one number is left, and spans of keys are joined one after the other. All else
is elementwise, which rounds a number alike wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...call.cached import DecodeProblem

BLOCK = 128  # keys whose products are written out at once; it divides every span
MAX_PRODUCTS = 2**22  # written out at once


def tokens_at_once(problem: DecodeProblem) -> int:
    columns = max(problem.head_dim, problem.head_dim_v)
    return max(1, MAX_PRODUCTS // (problem.num_heads_q * BLOCK * columns))


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shown: Callable[[Tensor, int], Tensor],
    span: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out (heads_kv, group, tokens, dv) and lse (heads_kv, group, tokens).

    q: (heads_kv, group, tokens, d), scaled. k, v: (heads_kv, keys, ·). shown: of products
    (heads_kv, group, tokens, BLOCK) and their first key: the scores, -inf where a query does not
    see the key. sinks: (heads_kv, group, 1, 1).
    """
    joined = q.new_zeros((*q.shape[:3], v.shape[-1])), *_nothing(q)
    for first in range(0, k.shape[1], span):
        end = min(first + span, k.shape[1])
        part, lse = _normalised(*_one_span(q, k, v, shown, range(first, end, BLOCK)))
        joined = _join(*joined, part, lse)
    if sinks is not None:
        lse = sinks.squeeze(-1).expand(q.shape[:3])
        joined = _join(*joined, torch.zeros_like(joined[0]), lse)
    return _normalised(*joined)


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and largest score of rows that have seen no key."""
    return q.new_zeros(q.shape[:3]), q.new_full(q.shape[:3], -math.inf)


def _join(
    out: Tensor, total: Tensor, largest: Tensor, part: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the spans before, their sum and largest lse, with one span more."""
    raised = torch.maximum(largest, lse)
    reference = torch.where(raised.isinf(), 0.0, raised)
    weight, decay = torch.exp(lse - reference), torch.exp(largest - reference)
    out = out * decay.unsqueeze(-1) + part * weight.unsqueeze(-1)
    return out, total * decay + weight, raised


def _normalised(out: Tensor, total: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    empty = total == 0
    out = out / torch.where(empty, 1.0, total).unsqueeze(-1)
    out = torch.where(out == 0, 0.0, out)  # -0 depends on spans of weight 0
    return out, torch.where(empty, -math.inf, largest + torch.log(total))


def _one_span(
    q: Tensor, k: Tensor, v: Tensor, shown: Callable[[Tensor, int], Tensor], firsts: range
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulator, sum and largest score of a span, block by block."""
    total, largest = _nothing(q)
    blocks = []
    for first in firsts:
        keys = _block(k, first)[:, None, None]
        blocks.append(shown(_summed(q.unsqueeze(3) * keys), first))
        largest = torch.maximum(largest, blocks[-1].amax(-1))
    reference = torch.where(largest == -math.inf, 0.0, largest).unsqueeze(-1)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    for first, scores in zip(firsts, blocks, strict=True):
        p = torch.exp(scores - reference)
        values = _block(v, first).transpose(1, 2)[:, None, None]
        out, total = out + _summed(p.unsqueeze(3) * values), total + _summed(p)
    return out, total, largest


def _block(x: Tensor, first: int) -> Tensor:
    """BLOCK tokens, 0 behind the last."""
    tokens = x[:, first : first + BLOCK]
    return torch.nn.functional.pad(tokens, (0, 0, 0, BLOCK - tokens.shape[1]))


def _summed(x: Tensor) -> Tensor:
    """The sum over the last axis, in an order that depends on its size alone."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x.squeeze(-1)
