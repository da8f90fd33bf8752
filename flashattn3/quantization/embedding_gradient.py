"""The gradient of rotate_and_quantize: that of the norm and the rotation, passed straight through
the rounding (the straight-through estimator, Bengio et al., arXiv 1308.3432).

Numbers of 8 bits carry no gradient, so each side has a ``gradient``: a tensor of its shape without
memory. A call of attention takes these as q, k and v of its autograd function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .embedding import Embedding, Lengths, embedded
from .embedding_dispatch import Sides, rotate_and_quantize, rotated


def rotate_and_quantize_differentiably(
    sides: Sides, embedding: Embedding, lengths: Lengths, *how: object
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """What rotate_and_quantize returns, and the gradients of q, k and v."""
    found = _RotateAndQuantize.apply(*sides, *embedding[:2], embedding, lengths, how)
    return found[3:], found[:3]


class _RotateAndQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *tensors, embedding, lengths, how = arguments
        sides = tuple(tensors[:3])
        found = rotate_and_quantize(sides, embedding, lengths, *how)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in found if x is not None])
        # A norm's gradient needs what it was given, in 16 bits; that of a rotation does not.
        kept = [x if w is not None else None for x, w in zip(sides[:2], embedding[:2], strict=True)]
        tables = embedding.cos, embedding.sin, embedding.positions, lengths.cu_seqlens
        ctx.save_for_backward(*embedding[:2], *kept, *tables)
        ctx.others = embedding.interleaved, embedding.eps, lengths.max_seqlen
        # Lists, because torch 2.9 traces no generator here.
        return *[x if x is None else x.new_zeros(()).expand(x.shape) for x in sides], *found

    @staticmethod
    def backward(ctx, dq, dk, dv, *_):
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
        return dq, dk, dv, dq_weight, dk_weight, None, None, None


def _gradient_of_norm(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of embedded with a weight alone, with respect to x and the weight."""
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = embedded(x, weight, Embedding(weight, None, None, None, None, False, eps), None)
        return torch.autograd.grad(y, (x, weight), dy.to(y.dtype))
