"""The values of a case's inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cases import Case

_LARGE = 50.0  # of q and k each: normal scores times 2500 reach 1e4 in a few thousand draws
# N(0, 1) + N(0, 100) * Bernoulli(0.001), the FlashAttention-3 paper, §4.3
_OUTLIER_RATE, _OUTLIER_STD = 0.001, 10.0
_SHIFT_STD = 2.0
_DOMINANT_RATE, _DOMINANT = 0.02, 3.9


def values(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a case, float64 on the CPU: with one seed the same on every device. Tests give
    them a dtype and a layout (tests/support/inputs.py)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def outliers(shape: torch.Size) -> Tensor:
        chosen = torch.rand(shape, generator=generator) < _OUTLIER_RATE
        return _OUTLIER_STD * normal(*shape) * chosen

    rows_q, rows_k = case.rows
    q = normal(*rows_q, case.num_heads_q, case.head_dim)
    k = normal(*rows_k, case.num_heads_kv, case.head_dim)
    v = normal(*rows_k, case.num_heads_kv, case.head_dim_v)
    match case.distribution:
        case "normal":
            pass
        case "large":
            q, k = q * _LARGE, k * _LARGE
        case "monotone":  # every key scores higher than those before it: the maximum never settles
            ramp = torch.linspace(0.0, 2.0, rows_k[-1], dtype=torch.float64).view(-1, 1, 1)
            q, k = q.abs(), torch.ones_like(k) * ramp
        case "outlier":
            q, k, v = (x + outliers(x.shape) for x in (q, k, v))
        case "shifted":  # all tokens of a head have a vector in common
            k, v = (x + _SHIFT_STD * normal(x.shape[-2], x.shape[-1]) for x in (k, v))
        case "constant":
            q, k, v = (torch.full_like(x, 0.5) for x in (q, k, v))
        case "huge":  # v is brought up to its size in its dtype
            ramp = torch.linspace(2.0, 0.0, rows_k[-1], dtype=torch.float64).view(-1, 1, 1)
            q, k = q.abs(), torch.ones_like(k) * ramp
        case "dominant":  # over as many columns as raw int8 needs, which ends at 4
            columns = max(1, round(math.sqrt(case.head_dim) / 2))
            heavy = torch.rand(k.shape[:-1], generator=generator) < _DOMINANT_RATE
            q[..., :columns] = _DOMINANT
            k[..., :columns] = _DOMINANT * heavy.unsqueeze(-1)
        case "zero-blocks":
            for x in (q, k, v):
                x[..., x.shape[-3] // 3 : x.shape[-3] // 3 * 2, :, :] = 0.0
        case "zero":  # every key weighs the same
            q, k = torch.zeros_like(q), torch.zeros_like(k)
        case other:
            raise ValueError(f"values: case.distribution must be a known one, got {other!r}")
    return q, k, v
