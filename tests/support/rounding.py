"""What the roundings that the algorithm has cost, element by element, from the arithmetic alone.

A 16-bit kernel rounds P, dS and out to its dtype before they are multiplied, and its results when
they are stored (docs/algorithm.md); all else is float32. A rounding moves x by at most unit * |x|,
so a sum of products x moves by at most unit * sum |x|. Roundings are independent and as often up as
down: such a sum moves by more than 3 * unit * sqrt(sum x^2) once in 360,000 times (variables that
are uniform in +-a have tails below 2 exp(-3 t^2 / (2 sum a^2))). A bound here is the smaller of the
two: right for few keys, and not too wide for many.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashattn3.call.operands import Tensors
from flashattn3_bench.checking.fp64_reference import (
    Added,
    added_of_heads,
    heads_of,
    scores_of_head,
)

DEVIATIONS = 3.0
POWERS = (torch.abs, torch.square)
FLOAT32_EPS = torch.finfo(torch.float32).eps


class _Moments:
    """The sum of |x| and that of x^2 over the rounded terms x of each element of a result."""

    def __init__(self, result: Tensor) -> None:
        self.result = torch.zeros_like(result)
        self.sums = {power: torch.zeros_like(result) for power in POWERS}
        self.float32 = torch.zeros_like(result)  # errors of float32, which are not multiplied

    def bound(self, dtype: torch.dtype) -> Tensor:
        """With one rounding more, that of the result, which is stored in dtype."""
        total, squares = self.sums.values()
        likely = torch.minimum(total, DEVIATIONS * squares.sqrt())
        return torch.finfo(dtype).eps / 2 * (_magnitude(self.result, dtype) + likely) + self.float32


def out_rounding(tensors: Tensors, dtype: torch.dtype, **options: float) -> Tensor:
    """Of out, in its shape: P and out are rounded to dtype. The options are ``attention``'s."""
    q, k, v = (x.detach().double() for x in tensors[:3])
    of_out = _Moments(q.new_zeros((*q.shape[:-1], v.shape[-1])))
    for (rows, keys), added in zip(heads_of(tensors), added_of_heads(tensors), strict=True):
        p, _ = _probabilities(q[rows], k[keys], added, **options)
        of_out.result[rows] = p @ v[keys]
        for power in POWERS:
            of_out.sums[power][rows] = power(_magnitude(p, dtype)) @ power(v[keys])
    return of_out.bound(dtype)


def gradient_rounding(
    tensors: Tensors,
    dout: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
    *,
    softmax_scale: float,
    **options: float,
) -> tuple[Tensor | None, ...]:
    """Of what ``gradients`` returns: P, dS and the results are rounded to dtype, and so are P and
    out of the forward, from which delta is computed. With softcap, 1 - tanh^2 has the absolute
    error of a tanh in float32. The other arguments are those of ``gradients``."""
    inputs = [x.detach().double() for x in tensors[:3]]
    of_dq, of_dk, of_dv = moments = [_Moments(x) for x in inputs]
    sinks, bias = (None if x is None else x.detach().double() for x in (tensors[7], tensors[9]))
    of_dsinks, of_dbias = (None if x is None else _Moments(x) for x in (sinks, bias))
    dout = dout.double()
    given = 0.0 * dout[..., 0] if dlse is None else dlse.double().transpose(-1, -2)
    for (rows, keys), added in zip(heads_of(tensors), added_of_heads(tensors), strict=True):
        q, k, v, do = inputs[0][rows], inputs[1][keys], inputs[2][keys], dout[rows]
        p, slope = _probabilities(q, k, added, softmax_scale=softmax_scale, **options)
        dp, out = do @ v.T, p @ v
        delta = (do * out).sum(1, keepdim=True) - given[rows].unsqueeze(1)
        by_slope = softmax_scale * (p * (dp - delta)).abs() * _slope_error(k.shape[0], **options)
        of_dq.float32[rows] += by_slope @ k.abs()
        of_dk.float32[keys] += by_slope.T @ q.abs()
        by_delta = p * slope * softmax_scale  # the derivative of dS by -delta
        ds = by_delta * (dp - delta)
        of_dq.result[rows] += ds @ k
        of_dk.result[keys] += ds.T @ q
        of_dv.result[keys] += p.T @ do
        head, entry = rows[-1], rows[0] if len(rows) == 3 else 0
        p_sink, of_scores = 1.0 - p.sum(1, keepdim=True), p * (dp - delta)
        if of_dsinks is not None:
            of_dsinks.result[head] -= (p_sink * delta).sum()
        if of_dbias is not None:
            place = entry % bias.shape[0], head % bias.shape[1]
            of_dbias.result[place] += of_scores
        rounded = p
        p, ds = _magnitude(p, dtype), _magnitude(ds, dtype)
        for power in POWERS:
            of_delta = power(do * out).sum(1, keepdim=True) + power(rounded * dp).sum(1, True)
            if of_dsinks is not None:
                of_dsinks.sums[power][head] += (of_delta * power(p_sink)).sum()
            if of_dbias is not None:
                of_dbias.sums[power][place] += power(of_scores) + of_delta * power(rounded)
            of_dq.sums[power][rows] += power(ds) @ power(k) + of_delta * power(by_delta @ k)
            of_dk.sums[power][keys] += (power(ds) + of_delta * power(by_delta)).T @ power(q)
            of_dv.sums[power][keys] += power(p).T @ power(do)
    found = [x.bound(dtype) for x in moments]
    if all(x is None for x in tensors[7:10]):
        return tuple(found)
    return (*found, *(x if x is None else x.bound(dtype) for x in (of_dsinks, of_dbias)))


def dropped_values(values: Tensors, scales: Tensor, least: float, **options: float) -> Tensor:
    """By how much out moves where light keys are dropped, which out and the row sum then lack.

    P times V's scale has an absolute error of least times the largest of its row.

    values: what the 8-bit inputs stand for. scales: V's, (..., num_heads_kv, 1), of each key.
    """
    q, k, v = (x.double() for x in values[:3])
    moved = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for rows, keys in heads_of(values):
        p, _ = _probabilities(q[rows], k[keys], **options)
        stored = p * scales[keys].T.abs()
        if stored.numel():
            error = least * stored.amax(1, keepdim=True) / scales[keys].T.abs()
            lost, out = torch.minimum(p, error), p @ v[keys]
            moved[rows] = lost @ v[keys].abs() + lost.sum(1, keepdim=True) * out.abs()
    return moved


def _probabilities(
    q: Tensor,
    k: Tensor,
    added: Added = Added(),  # noqa: B008
    **options: float,
) -> tuple[Tensor, Tensor]:
    """P, 0 in rows that see nothing, and the derivative of the capped score by the score."""
    scores, blind = scores_of_head(q, k, added, **options)
    tanh = 0.0 * q[:, :1]
    if softcap := options.get("softcap"):
        capped, _ = scores_of_head(q, k, **options)
        tanh = torch.where(scores.isfinite(), capped / softcap, 0.0)
    if added.sink is not None and added.sink.isfinite():
        column = added.sink.to(scores).expand(scores.shape[0], 1)
        scores = torch.cat((scores, column), 1)
    blind = blind | (scores == -math.inf).all(1, keepdim=True)  # a bias hides all keys
    p = torch.softmax(scores, 1)[:, : k.shape[0]]
    return p.masked_fill(blind, 0.0), 1.0 - tanh.square()


def _slope_error(num_keys: int, softcap: float = 0.0, **_: int) -> float:
    """What 1 - tanh^2 is off by, where tanh = (lse + log P) / softcap has four roundings of
    float32: lse is at most softcap + log(num_keys), and P keeps its relative precision."""
    if softcap == 0 or num_keys == 0:
        return 0.0
    return 2 * 4 * FLOAT32_EPS * (1 + (1 + math.log(num_keys)) / softcap)


def _magnitude(x: Tensor, dtype: torch.dtype) -> Tensor:
    """|x|, but of numbers too small for dtype's precision that of the smallest normal one."""
    return torch.where(x == 0, 0.0, x.abs().clamp(min=torch.finfo(dtype).tiny))
