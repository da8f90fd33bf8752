"""Plain attention in any precision: the scores of one head at a time, written out and never clever.

In float64 it is the fp64 reference that everything is compared with. In the inputs' own dtype it is
plain PyTorch in the kernel's precision, the baseline of the tolerance rule: matrix products and
probabilities rounded to that dtype, the softmax inside in float32, as torch does it. Reads
cu_seqlens on the host; for tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashattn3.call.operands import Tensors


def attention(
    tensors: Tensors,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable by autograd.

    Args:
        tensors: dense or varlen; the heads of q are a multiple of those of k and v. seqused is
            taken in both forms.
        softmax_scale, window_left, window_right, softcap: as in ``Problem``; -1 is an open window.
        dtype: what is computed in; q, k and v are converted first.

    Returns:
        out in q's shape with v's head dim, in ``dtype``; lse (batch, heads, seqlen_q) or (heads,
        total_q), natural logarithm, in ``dtype`` or float32, whichever is wider. Rows that see no
        key and rows of no sequence: out 0, lse -inf, gradient 0.
    """
    q, k, v = (x.to(dtype) for x in tensors[:3])
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=_wide(dtype))
    for rows, keys in heads_of(tensors):
        options = softmax_scale, window_left, window_right, softcap
        out[rows], lse[rows] = _one_head(q[rows], k[keys], v[keys], *options)
    return out, lse.transpose(-1, -2)


def gradients(
    tensors: Tensors,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in ``dtype``, by autograd through one head at a time.

    dout: in the shape of out. dlse: in the shape of lse; None stands for zero. The other arguments
    are those of ``attention``. Sums over query heads are at least float32.
    """
    inputs = tuple(x.detach().to(dtype) for x in tensors[:3])
    sums = tuple(torch.zeros_like(x, dtype=_wide(dtype)) for x in inputs)
    for rows, keys in heads_of(tensors):
        places = rows, keys, keys
        leaves = [x[place].requires_grad_() for x, place in zip(inputs, places, strict=True)]
        out, lse = _one_head(*leaves, softmax_scale, window_left, window_right, softcap)
        given_out, given_lse = dout[rows].to(out.dtype), torch.zeros_like(lse)
        if dlse is not None:
            given_lse += dlse.transpose(-1, -2)[rows]
        found = torch.autograd.grad((out, lse), leaves, (given_out, given_lse))
        for total, place, gradient in zip(sums, places, found, strict=True):
            total[place] += gradient
    return tuple(total.to(dtype) for total in sums)


def _one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """q (sq, d), k (sk, d), v (sk, dv) -> out (sq, dv), lse (sq,)."""
    scores, blind = scores_of_head(q, k, softmax_scale, window_left, window_right, softcap)
    out = (torch.softmax(scores, dim=1) @ v).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores.to(_wide(q.dtype)), dim=1).masked_fill(blind.squeeze(1), -math.inf)
    return out, lse


def scores_of_head(
    q: Tensor, k: Tensor, softmax_scale: float, window_left: int, window_right: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """q (sq, d), k (sk, d) -> scores (sq, sk), -inf where hidden; rows that see nothing, (sq, 1).

    A row that sees nothing has the scores of all keys, to be replaced behind: no NaN, gradient 0.
    """
    scores = (q * softmax_scale) @ k.T
    if softcap:
        # Scores over a cap far from them are outside of what 16 bits hold.
        scores = (softcap * torch.tanh(scores.double() / softcap)).to(scores.dtype)
    sq, sk = scores.shape
    i, j = torch.arange(sq, device=q.device), torch.arange(sk, device=q.device)
    distance = j - (i + sk - sq).unsqueeze(1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if window_left >= 0:
        hidden |= distance < -window_left
    if window_right >= 0:
        hidden |= distance > window_right
    blind = hidden.all(dim=1, keepdim=True)
    return scores.masked_fill(hidden & ~blind, -math.inf), blind


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def heads_of(tensors: Tensors) -> Iterator[tuple[tuple, tuple]]:
    """For every sequence and query head: an index into q (also out, dout) and one into k and v."""
    q, k, _, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tensors[:7]
    num_heads_q, num_heads_kv = q.shape[-2], k.shape[-2]
    sequences_q = _sequences(q, cu_seqlens_q, seqused_q)
    sequences_k = _sequences(k, cu_seqlens_k, seqused_k)
    for rows, keys in zip(sequences_q, sequences_k, strict=True):
        for head in range(num_heads_q):
            yield (*rows, head), (*keys, head * num_heads_kv // num_heads_q)


def _sequences(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[tuple]:
    """An index for each sequence's rows: (batch, slice) if dense, (slice,) if packed."""
    if cu_seqlens is None:
        spans = [((index,), 0, x.shape[1]) for index in range(x.shape[0])]
    else:
        edges = cu_seqlens.tolist()
        spans = [((), begin, end) for begin, end in itertools.pairwise(edges)]
    used = [end - begin for _, begin, end in spans] if seqused is None else seqused.tolist()
    return [
        (*lead, slice(begin, min(end, begin + length)))
        for (lead, begin, end), length in zip(spans, used, strict=True)
    ]
