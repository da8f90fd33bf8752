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
from typing import NamedTuple

import torch
from torch import Tensor

from flashattn3.call.operands import Tensors


def attention(
    tensors: Tensors, *, dtype: torch.dtype = torch.float64, **options: float
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable by autograd.

    Args:
        tensors: dense or varlen; the heads of q are a multiple of those of k and v. seqused is
            taken in both forms. Sinks are below inf. A bias of -inf hides a key.
        dtype: what is computed in; q, k and v are converted first.
        options: softmax_scale, window_left, window_right and softcap, as in ``Problem``; -1 is an
            open window, and the default. wide_scores: scores are float32 at least behind the
            product of q and k, whatever the dtype.

    Returns:
        out in q's shape with v's head dim, in ``dtype``; lse (batch, heads, seqlen_q) or (heads,
        total_q), natural logarithm, in ``dtype`` or float32, whichever is wider. Rows that see no
        key and rows of no sequence: out 0, lse -inf, gradient 0; with sinks the former have lse of
        their sink.
    """
    q, k, v = (x.to(dtype) for x in tensors[:3])
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=_wide(dtype))
    for (rows, keys), added in zip(heads_of(tensors), added_of_heads(tensors), strict=True):
        out[rows], lse[rows] = _one_head(q[rows], k[keys], v[keys], added, **options)
    return out, lse.transpose(-1, -2)


def max_logit(tensors: Tensors, **options: float) -> Tensor:
    """The largest score of each head (heads,) that a query sees, in float64; -inf without any. The
    options are ``attention``'s."""
    q, k = (x.detach().double() for x in tensors[:2])
    found = q.new_full((q.shape[-2],), -math.inf)
    for (rows, keys), added in zip(heads_of(tensors), added_of_heads(tensors), strict=True):
        scores, blind = scores_of_head(q[rows], k[keys], added, **options)
        seen = scores.masked_fill(blind, -math.inf).flatten()
        if seen.numel():
            found[rows[-1]] = torch.maximum(found[rows[-1]], seen.max())
    return found


def gradients(
    tensors: Tensors,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    **options: float,
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv in ``dtype``, by autograd through one head at a time; of calls with sinks,
    slopes or a bias dsinks and dbias too, None where there is no such tensor.

    dout: in the shape of out. dlse: in the shape of lse; None stands for zero. The other arguments
    are those of ``attention``. Sums over query heads are at least float32.
    """
    of_scores = [None if x is None else x.detach() for x in tensors[7:]]
    detached = Tensors(*(x.detach().to(dtype) for x in tensors[:3]), *tensors[3:7], *of_scores)
    inputs = detached[:3]
    of_sums = [*inputs, *(x for x in (detached.sinks, detached.bias) if x is not None)]
    sums = tuple(torch.zeros_like(x, dtype=_wide(dtype)) for x in of_sums)
    for (rows, keys), added in zip(heads_of(tensors), added_of_heads(detached), strict=True):
        places = [rows, keys, keys]
        leaves = [x[place].requires_grad_() for x, place in zip(inputs, places, strict=True)]
        if added.sink is not None:
            places.append(rows[-1])
            leaves.append(added.sink.to(dtype).clone().requires_grad_())
            added = added._replace(sink=leaves[-1])
        if added.bias is not None:
            batch, heads = detached.bias.shape[:2]
            places.append((rows[0] if batch > 1 else 0, rows[-1] if heads > 1 else 0))
            leaves.append(added.bias.to(dtype).clone().requires_grad_())
            added = added._replace(bias=leaves[-1])
        out, lse = _one_head(*leaves[:3], added, **options)
        given_out, given_lse = dout[rows].to(out.dtype), torch.zeros_like(lse)
        if dlse is not None:
            given_lse += dlse.transpose(-1, -2)[rows]
        given = given_out, given_lse
        found = torch.autograd.grad((out, lse), leaves, given, materialize_grads=True)
        for total, place, gradient in zip(sums, places, found, strict=True):
            total[place] += gradient
    found = [total.to(dtype) for total in sums]
    if all(x is None for x in of_scores):
        return tuple(found)
    dsinks = found[3] if detached.sinks is not None else None
    return (*found[:3], dsinks, found[-1] if detached.bias is not None else None)


class Added(NamedTuple):
    """What changes the scores of a query head in one sequence: the sink and the slope, scalars, and
    the bias (sq, sk)."""

    sink: Tensor | None = None
    slope: Tensor | None = None
    bias: Tensor | None = None


def added_of_heads(tensors: Tensors) -> Iterator[Added]:
    """In the order of ``heads_of``."""
    sinks, slopes, bias = (tuple(tensors) + (None,) * 10)[7:10]
    heads, batch = tensors.q.shape[-2], tensors.q.shape[0]
    if tensors.cu_seqlens_q is not None:
        batch = tensors.cu_seqlens_q.shape[0] - 1
    slopes = None if slopes is None else slopes.view(-1, heads).expand(batch, heads)
    bias = None if bias is None else bias.expand(batch, heads, -1, -1)
    for index in range(batch):
        for head in range(heads):
            yield Added(
                None if sinks is None else sinks[head],
                None if slopes is None else slopes[index, head],
                None if bias is None else bias[index, head],
            )


def _one_head(
    q: Tensor, k: Tensor, v: Tensor, added: Added, **options: float
) -> tuple[Tensor, Tensor]:
    """q (sq, d), k (sk, d), v (sk, dv) -> out (sq, dv), lse (sq,)."""
    scores, blind = scores_of_head(q, k, added, **options)
    of_blind = scores.new_full((1,), -math.inf, dtype=_wide(q.dtype))
    if added.sink is not None and added.sink.isfinite():  # -inf is no sink
        of_blind = added.sink.to(of_blind.dtype)
        column = added.sink.to(scores.dtype).expand(scores.shape[0], 1)
        scores = torch.cat((scores, column), dim=1)
    p = torch.softmax(scores, dim=1)[:, : k.shape[0]]
    out = (p.to(v.dtype) @ v).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores.to(_wide(q.dtype)), dim=1)
    return out, torch.where(blind.squeeze(1), of_blind, lse)


def scores_of_head(
    q: Tensor,
    k: Tensor,
    added: Added = Added(),  # noqa: B008
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    wide_scores: bool = False,
) -> tuple[Tensor, Tensor]:
    """q (sq, d), k (sk, d) -> scores (sq, sk), -inf where hidden; rows that see nothing, (sq, 1).

    A row that sees nothing has the scores of all keys, to be replaced behind: no NaN, gradient 0.
    """
    scores = (q * softmax_scale) @ k.T
    if wide_scores:
        scores = scores.to(_wide(q.dtype))
    if softcap:
        # Scores over a cap far from them are outside of what 16 bits hold.
        scores = (softcap * torch.tanh(scores.double() / softcap)).to(scores.dtype)
    sq, sk = scores.shape
    i, j = torch.arange(sq, device=q.device), torch.arange(sk, device=q.device)
    distance = j - (i + sk - sq).unsqueeze(1)
    if added.slope is not None:
        slope = added.slope.to(_wide(scores.dtype))
        scores = scores - (slope * distance.abs()).to(scores.dtype)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if added.bias is not None:
        lost = added.bias == -math.inf
        scores = scores + added.bias.to(scores.dtype).masked_fill(lost, 0.0)
        hidden |= lost
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
