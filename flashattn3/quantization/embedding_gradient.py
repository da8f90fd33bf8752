"""The gradient of rotate_and_quantize: that of the norm and the rotation, passed straight through
the rounding (the straight-through estimator, Bengio et al., arXiv 1308.3432).

Numbers of 8 bits carry no gradient, so each side has a ``gradient``: a tensor of its shape without
memory. A call of attention takes these as q, k and v of its autograd function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..modes import inputs_apart, is_traced
from .embedding import Embedding, Lengths
from .embedding_dispatch import Sides, rotated


def gradients_of(sides: Sides, embedding: Embedding, lengths: Lengths) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, None of those that are not given."""
    given = inputs_apart((*sides, embedding.q_norm, embedding.k_norm))
    return (_Gradients.apply if is_traced() else _apply)(*given, embedding, lengths)


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
            return number.expand_as(q), None, None
        return number.expand_as(q), number.expand_as(k), number.expand_as(v)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        *weights, q, k, cos, sin, positions, edges = ctx.saved_tensors
        interleaved, eps, longest = ctx.others
        if cos is not None and not (dq is dk is None):
            how = Embedding(None, None, cos, sin, positions, interleaved, eps)
            of = how, Lengths(edges, longest), True
            if dq is None:
                dk, _ = rotated(dk, None, *of)
            else:
                dq, dk = rotated(dq, dk, *of)
        dq_weight = dk_weight = None
        if dq is not None and weights[0] is not None:
            dq, dq_weight = _gradient_of_norm(dq, q, weights[0], eps)
        if dk is not None and weights[1] is not None:
            dk, dk_weight = _gradient_of_norm(dk, k, weights[1], eps)
        return dq, dk, dv, dq_weight, dk_weight, None, None


# Without the search for transforms in Function.apply; see ``doors._apply``.
_apply = super(torch.autograd.Function, _Gradients).apply


def _gradient_of_norm(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight through ``embedded`` with a weight alone.
    torch.compile refuses a backward that asks autograd."""
    wide, dy = x.float(), dy.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = wide * scale
    dnormal, dweight = dy * weight.float(), (dy * normal).flatten(0, -2).sum(0)
    dx = (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), dweight.to(weight.dtype)
