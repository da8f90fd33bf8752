"""8-bit attention of data that trained models have: one heavy key, a sink, padding, values with a
mean.

A case builds q, k and v in 8 bits, so that only the kernel is measured. ``reference`` is the
attention of these bytes in float64. ``honest`` is the same attention with P rounded to e4m3, its
maximum at 2^8, and exact sums: the error that 8 bits have in any case. On tensor cores large e4m3
scores are truncated besides, which ``allowance`` adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashattn3.call.block_scaled import BlockScaled
from flashattn3.call.dtypes import FP8
from flashattn3.call.operands import Tensors
from flashattn3.quantization import quantize_block_fp8

from .rounding import E4M3_TRUNCATION, score_rounding

ROWS, HEADS = 128, 2  # query rows, the sequence's last, and heads of every case; batch 1
POSITIONS = ("first", "middle", "last")
SELF = "self"  # position: of each query the key of its own token, under a causal mask
HONEST_FACTOR = 1.3
_HONEST_MAXIMUM = 2.0**8
_OUTLIER_RATE, _OUTLIER_STD = 0.001, 10.0
_SHIFT_STD = 2.0
_SINK_VALUE = 0.05  # factor on the values of a sink


class Bounds(NamedTuple):
    """Of ``Errors``; where ``honest`` has more, 1.3 times of honest's. inf: not held."""

    error: float = math.inf
    bias: float = math.inf
    lse: float = math.inf


class Errors(NamedTuple):
    """error: RMS of the difference over RMS of the fp64 reference. bias: mean of the difference
    along the sign of the fp64 reference, over the fp64 reference's mean magnitude. lse, lse_rms:
    largest and RMS absolute error of the log-sum-exp. NaN where the result is not finite.
    """

    error: float
    bias: float
    lse: float
    lse_rms: float


class Inputs(NamedTuple):
    """The positional arguments of ``flash_attn_func``."""

    q: BlockScaled
    k: BlockScaled
    v: BlockScaled
    softmax_scale: float
    causal: bool = False


@dataclass(frozen=True)
class DistributionCase:
    """One set of q (1, ROWS, HEADS, head_dim), k and v (1, seqlen_k, HEADS, head_dim).

    spread: standard deviation of the light keys' scores, in nats.
    heavy: nats by which one key's score is above the mean of the others; 0: there is none.
    position: of the heavy key, one of POSITIONS or its index; SELF: each query has one.
    light_at_zero: the light keys' scores are around 0, else the heavy key's is 0.
    v_mean, v_std: of normal values; the heavy key's are multiplied with heavy_value.
    zero_half: "first" or "last" half of the values that is zero, or "".
    outliers: q, k and v have N(0, 100) added to one element in a thousand.
    shifted: k and v of a head have a vector from N(0, 4) in common.
    v_descale: "blocks" as quantized; "zero": 0 for head 0; "signs": alternating over the blocks of
        head 0, negative in head 1.
    """

    name: str
    seqlen_k: int
    head_dim: int
    bounds: Bounds
    spread: float = 1.0
    heavy: float = 0.0
    position: str | int = "first"
    light_at_zero: bool = True
    v_mean: float = 0.0
    v_std: float = 1.0
    heavy_value: float = 1.0
    zero_half: str = ""
    outliers: bool = False
    shifted: bool = False
    v_descale: str = "blocks"

    @property
    def id(self) -> str:
        return f"{self.name}-{self.seqlen_k}-d{self.head_dim}"

    @property
    def heavy_keys(self) -> Tensor:
        """Of every query row, the index of its heavy key."""
        last = self.seqlen_k - 1
        if self.position == SELF:
            return torch.arange(last + 1 - ROWS, last + 1)
        places = dict(zip(POSITIONS, (0, self.seqlen_k // 2, last), strict=True))
        return torch.full((ROWS,), places.get(self.position, self.position))

    @property
    def causal(self) -> bool:
        return self.position == SELF

    def tensors(self, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in float32, for the default softmax_scale; without v_descale."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        q = normal(1, ROWS, HEADS, self.head_dim)
        k, v = (normal(1, self.seqlen_k, HEADS, self.head_dim) for _ in range(2))
        q *= self.spread * math.sqrt(self.head_dim) / q.norm(dim=-1, keepdim=True)
        v = self.v_mean + self.v_std * v
        if self.position == SELF:
            k[:, -ROWS:] = q * (self.heavy / math.sqrt(self.head_dim))
        elif self.heavy:
            heavy_key = self.heavy_keys[0]
            # Column 0 alone decides how far the heavy key is from the others. It is the largest of
            # its block, which quantization keeps.
            offset = math.sqrt(self.heavy * math.sqrt(self.head_dim))
            q[..., 0] = offset
            k[..., 0] = 0.0 if self.light_at_zero else -offset
            k[:, heavy_key] = 0.0
            k[:, heavy_key, :, 0] = offset if self.light_at_zero else 0.0
            v[:, heavy_key] *= self.heavy_value
        if self.outliers:
            for x in (q, k, v):
                chosen = torch.rand(x.shape, generator=generator, device=device) < _OUTLIER_RATE
                x += _OUTLIER_STD * normal(*x.shape) * chosen
        if self.shifted:
            for x in (k, v):
                x += _SHIFT_STD * normal(HEADS, self.head_dim)
        half = self.seqlen_k // 2
        if self.zero_half:
            v[:, slice(half) if self.zero_half == "first" else slice(half, None)] = 0.0
        return q, k, v

    def build(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """dtype: of quantized q and k, torch.int8 or torch.float8_e4m3fn."""
        q, k, v = self.tensors(device, seed)
        q, k = (quantize_block_fp8(x, kind=kind, dtype=dtype) for x, kind in ((q, "q"), (k, "k")))
        v = quantize_block_fp8(v, kind="v")
        if self.v_descale != "blocks":
            factor = torch.ones_like(v.descale)
            if self.v_descale == "zero":
                factor[:, 0] = 0.0
            else:
                factor[:, 0, 1::2] = factor[:, 1] = -1.0
            v = replace(v, descale=v.descale * factor)
        return Inputs(q, k, v, self.head_dim**-0.5, self.causal)

    def misses(self, found: Errors, honest: Errors) -> list[str]:
        """A sentence for each bound that the result breaks. honest: or ``allowance``."""
        broken = []
        for name, bound in self.bounds._asdict().items():
            value = abs(getattr(found, name))
            allowed = max(bound, HONEST_FACTOR * abs(getattr(honest, name)))
            if not value <= allowed:  # NaN too
                broken.append(f"{name} {value:.3g} > {allowed:.3g}")
        return broken


def cases(lengths: Iterable[int], head_dims: Iterable[int]) -> list[DistributionCase]:
    """Every case at every length and head dim."""
    return [
        replace(case, head_dim=head_dim)
        for head_dim in head_dims
        for seqlen_k in lengths
        for case in (*_heavy(seqlen_k), *_selves(seqlen_k), *_sinks(seqlen_k), *_others(seqlen_k))
    ]


def _heavy_bounds(seqlen_k: int) -> Bounds:
    """Where one key outweighs all others.

    The keys of its own block are truncated beside it; with fewer than 2048 keys a block of 128
    weighs more than a sixteenth.
    """
    return Bounds(error=0.03, lse=0.02 if seqlen_k >= 2048 else 0.04)


def _heavy(seqlen_k: int) -> list[DistributionCase]:
    """One key has probability p; the sum of the others' exponentials is that of a normal."""
    return [
        DistributionCase(
            f"heavy-p{p}-{position}-{'noise' if spread else 'same'}"
            f"-{'light0' if light_at_zero else 'heavy0'}-v{mean}",
            seqlen_k,
            0,
            _heavy_bounds(seqlen_k),
            spread=spread,
            heavy=math.log(p / (1 - p) * (seqlen_k - 1)) + spread**2 / 2,
            position=position,
            light_at_zero=light_at_zero,
            v_mean=mean,
            v_std=std,
        )
        for p in (0.5, 0.9)
        for spread in (0.0, 1.0)
        for light_at_zero in (True, False)
        for mean, std in ((0.0, 1.0), (0.5, 0.5))
        for position in POSITIONS
    ]


def _selves(seqlen_k: int) -> list[DistributionCase]:
    """A token that looks at itself with a probability of about p."""
    return [
        DistributionCase(
            f"self-p{p}",
            seqlen_k,
            0,
            _heavy_bounds(seqlen_k),
            heavy=math.log(p / (1 - p) * seqlen_k) + 0.5,
            position=SELF,
            v_mean=0.5,
            v_std=0.5,
        )
        for p in (0.5, 0.9)
    ]


def _sinks(seqlen_k: int) -> list[DistributionCase]:
    """The first key's weight is a power of two times a typical key's, its values are small."""
    bounds = Bounds(error=0.03, bias=0.01, lse=0.02)
    values = {"v_mean": 0.5, "heavy_value": _SINK_VALUE}
    return [
        DistributionCase(f"sink-2^{log2}", seqlen_k, 0, bounds, heavy=log2 * math.log(2), **values)
        for log2 in (10, 13, 16)
    ]


def _others(seqlen_k: int) -> list[DistributionCase]:
    half, plain = Bounds(error=0.05, lse=0.02), Bounds(error=0.04, lse=0.02)
    # Few keys share a row, and the errors of their codes, 0.03 to 0.04 RMS, do not average out.
    few = Bounds(error=0.04, lse=0.04)
    ones, mean = Bounds(bias=0.01, lse=0.02), Bounds(error=0.03, bias=0.01, lse=0.02)
    described = {
        "zero-first-half": {"bounds": half, "zero_half": "first"},
        "zero-last-half": {"bounds": half, "zero_half": "last"},
        "v-descale-zero": {"bounds": plain, "v_descale": "zero"},
        "v-descale-signs": {"bounds": plain, "v_descale": "signs"},
        "ones": {"bounds": ones, "v_mean": 1.0, "v_std": 0.0},
        "mean-1": {"bounds": mean, "v_mean": 1.0},
        "normal": {"bounds": plain},
        "outlier": {"bounds": plain, "outliers": True},
        "shifted": {"bounds": plain, "shifted": True},
        "peaky": {"bounds": few, "spread": 3.0},
    }
    return [DistributionCase(name, seqlen_k, 0, **how) for name, how in described.items()]


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (1, ROWS, HEADS, head_dim) and lse (1, HEADS, ROWS) in float64."""
    return attend(inputs, lambda p: p)


def honest(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The same with P rounded to e4m3, its maximum at 2^8; the sums are exact."""
    return attend(inputs, lambda p: (p * _HONEST_MAXIMUM).to(FP8).double() / _HONEST_MAXIMUM)


def allowance(inputs: Inputs, wanted: tuple[Tensor, Tensor]) -> Errors:
    """The errors of ``honest``, and what e4m3 tensor cores truncate of the scores in lse. wanted:
    of ``reference``."""
    errors = compare(honest(inputs), wanted)
    if inputs.q.data.dtype != FP8:
        return errors
    q, k, v = (x.in_rows().dequantize().double() for x in inputs[:3])
    unit = E4M3_TRUNCATION * q.shape[-1]
    moved = score_rounding(Tensors(q, k, v), unit=unit, softmax_scale=inputs.softmax_scale)
    return errors._replace(lse=errors.lse + float(moved.max()))


def compare(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Errors:
    """Of out and lse against those of ``reference``."""
    (out, lse), (reference_out, reference_lse) = found, wanted
    difference, lse_difference = out.double() - reference_out, (lse.double() - reference_lse).abs()
    return Errors(
        float((difference.square().mean() / reference_out.square().mean()).sqrt()),
        float((difference * reference_out.sign()).mean() / reference_out.abs().mean()),
        float(lse_difference.max()),
        float(lse_difference.square().mean().sqrt()),
    )


def heavy_probability(case: DistributionCase, inputs: Inputs, lse: Tensor) -> float:
    """Of the rows' heavy keys, the mean; lse is the fp64 reference's."""
    keys = case.heavy_keys.to(lse.device)
    scores = [
        (_head(inputs.q, head) * _head(inputs.k, head)[keys]).sum(-1) for head in range(HEADS)
    ]
    return float((torch.stack(scores) * inputs.softmax_scale - lse[0]).exp().mean())


def attend(inputs: Inputs, rounded: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Attention in float64 with ``rounded`` P, whose maximum is 1."""
    heads = ([_head(x.in_rows(), head) for x in inputs[:3]] for head in range(HEADS))
    return attend_heads(heads, inputs.softmax_scale, inputs.causal, rounded)


def attend_heads(
    heads: Iterable[Sequence[Tensor]],
    softmax_scale: float,
    causal: bool,
    rounded: Callable[[Tensor], Tensor] = lambda p: p,
) -> tuple[Tensor, Tensor]:
    """The same of q, k and v (length, head_dim) of each head, in their dtype."""
    outs, lses = [], []
    for q, k, v in heads:
        scores = (q * softmax_scale) @ k.mT
        if causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu_(len(k) - len(q) + 1)
            scores.masked_fill_(hidden, -math.inf)
        largest = scores.amax(-1, keepdim=True)
        p = rounded(scores.sub_(largest).exp_())
        total = p.sum(-1, keepdim=True)
        outs.append(p @ v / total)
        lses.append((total.log() + largest).squeeze(-1))
    return torch.stack(outs, dim=1).unsqueeze(0), torch.stack(lses).unsqueeze(0)


def _head(x: BlockScaled, head: int) -> Tensor:
    """(seqlen, head_dim) in float64, where the product with the descale is exact."""
    return x.data[0, :, head].double() * x.token_descale()[0, :, head, None].double()
