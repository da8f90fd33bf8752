"""Numbers in 8 bits, in torch operations: the one definition that all kernels follow."""

from __future__ import annotations

import torch
from torch import Tensor

from . import quantization_limits
from .dtypes import FP8, INT8
from .quantization_limits import SMALLEST_DESCALE

LARGEST = {FP8: quantization_limits.LARGEST["e4m3"], INT8: quantization_limits.LARGEST["int8"]}


def magnitudes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What amax is the largest of. int8 has no NaN: amax = inf represents it and makes the factor
    0."""
    return torch.where(x.isfinite(), x.abs(), torch.inf if dtype == INT8 else 0.0)


def scales(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """descale and its inverse, each rounded once."""
    wanted = torch.full_like(amax, largest)  # torch rounds a division with a number twice
    floored = amax.clamp(min=largest * SMALLEST_DESCALE)
    return floored / wanted, wanted / floored


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, saturated and rounded, ties to even. NaN stays NaN, in int8 it is 0."""
    # The conversion turns values that are, or round, above the range into NaN.
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.round().nan_to_num(0.0) if dtype == INT8 else x).to(dtype)


def with_descale(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in units of a descale for each, which uses the whole range of dtype, and the descales;
    NaN where a number is not finite."""
    amax = magnitudes(x, dtype).amax(-1)
    descale, factor = scales(amax, LARGEST[dtype])
    scaled = (x * factor.unsqueeze(-1)).where(x.isfinite(), torch.nan)
    return scaled, descale.where(amax.isfinite(), torch.nan)
