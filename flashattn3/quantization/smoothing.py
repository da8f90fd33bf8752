"""The mean of K's tokens, estimated from a sample, to be subtracted before K is quantized.

It changes no weight, as it adds the same to every score of a row (Zhang et al., SageAttention,
arXiv 2410.02367).
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 128  # tokens, spread evenly over the sequence
# In squares: three standard errors. Less is noise, and so is one outlier of the sample.
SIGNIFICANT = 9


def sample_mean(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """float32 (batch, heads, head_dim), near the mean of each sequence's tokens or, where that does
    not stand out of the noise, 0. Always finite, as is x - mean where x is.

    x: (batch, seqlen, heads, head_dim) float16, bfloat16 or float32; with cu_seqlens (total, heads,
        head_dim). What is not finite counts as 0.

    Each operation is rounded once and the order of sums is fixed: the bits are the same everywhere.
    """
    varlen = cu_seqlens is not None
    batch = cu_seqlens.numel() - 1 if varlen else x.shape[0]
    if x.numel() == 0:
        return x.new_zeros((batch, *x.shape[-2:]), dtype=torch.float32)
    start, length = _sequences(x, cu_seqlens, max_seqlen)
    slot = torch.arange(SAMPLE, device=x.device)
    token = torch.where(length <= SAMPLE, slot, slot * length // SAMPLE)
    token = (start + token).clamp(max=x.shape[-3] - 1)
    values = (x[token] if varlen else x[:, token[0]]).float()
    values = values.where(values.isfinite() & (slot < length)[..., None, None], 0.0)
    total, squares = _tree_sum(values), _tree_sum(values * values)
    # Divided by a tensor, not by a number: see torch_operations.scales.
    count = length.clamp(max=SAMPLE).float()[..., None]
    square = total * total
    spread, mean = squares - square / count, total / count
    # Not where squares are infinite, as they are where the mean is 2**71 or more.
    return mean.where(square > SIGNIFICANT * spread, 0.0).contiguous()


def _sequences(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None):
    """Where each begins and how long it is, within the tensor: int64 (batch, 1), or (1, 1) if they
    are all alike."""
    num_tokens = x.shape[-3]
    if cu_seqlens is None:
        length = torch.full((1, 1), num_tokens, device=x.device)
        return torch.zeros_like(length), length
    edges = cu_seqlens.long()[:, None].clamp(0, num_tokens)
    start, end = edges[:-1], edges[1:]
    return start, (end - start).clamp(0, max_seqlen)


def _tree_sum(x: Tensor) -> Tensor:
    """Over axis 1, a power of two long: pairs half of it apart, then a quarter and so on."""
    while x.shape[1] > 1:
        first, second = x.chunk(2, dim=1)
        x = first + second
    return x[:, 0]
