"""The gradient of rotate_and_quantize: that of the norm and the rotation, passed straight through
the rounding (the straight-through estimator, Bengio et al., arXiv 1308.3432).

Numbers of 8 bits carry no gradient, so each side has a ``gradient``: a tensor of its shape without
memory. A call of attention takes these as q, k and v of its autograd function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..modes import inputs_apart
from .embedding import Embedding, Lengths
from .embedding_dispatch import Sides, rotated


def gradients_of(sides: Sides, embedding: Embedding, lengths: Lengths) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, None of those that are not given."""
    given = inputs_apart((*sides, embedding.q_norm, embedding.k_norm))
    return _Gradients.apply(*given, embedding, lengths)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_norm, k_norm, embedding, lengths):
        ctx.set_materialize_grads(False)
        # A norm's gradient needs what it was given, in 16 bits; that of a rotation does not.
        of_q, of_k = None if q_norm is None else q, None if k_norm is None else k
        tables = embedding.cos, embedding.sin, embedding.positions, lengths.cu_seqlens
        ctx.save_for_backward(q_norm, k_norm, of_q, of_k, *tables)
        ctx.others = embedding.interleaved, embedding.eps, lengths.max_seqlen
        number = q.new_empty(())  # which nothing reads
        if k is None:
            return number.expand(q.shape), None, None
        return number.expand(q.shape), number.expand(k.shape), number.expand(v.shape)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        *weights, q, k, cos, sin, positions, edges = ctx.saved_tensors
        interleaved, eps, longest = ctx.others
        embedding = Embedding(None, None, cos, sin, positions, interleaved, eps)
        results = []
        for dx, weight, x in ((dq, weights[0], q), (dk, weights[1], k)):
            if dx is not None and cos is not None:
                back = embedding._replace(sin=-sin)
                dx = rotated(dx, back, edges, longest)
            dweight = None
            if dx is not None and weight is not None:
                dx, dweight = _gradient_of_norm(dx, x, weight, eps)
            results.append((dx, dweight))
        (dq, dq_weight), (dk, dk_weight) = results
        return dq, dk, dv, dq_weight, dk_weight, None, None


def _gradient_of_norm(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight through ``embedded`` with a weight alone.
    torch.compile refuses a backward that asks autograd."""
    wide, dy = x.float(), dy.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = wide * scale
    dnormal, dweight = dy * weight.float(), (dy * normal).flatten(0, -2).sum(0)
    dx = (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), dweight.to(weight.dtype)
