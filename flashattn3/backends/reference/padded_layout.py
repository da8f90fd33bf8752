"""The heads-first layout in which the reference backend computes, and its conversions.

The layout is (batch * heads, seqlen, head_dim), so that one batched GEMM covers all heads. The
batch of a varlen call is a bucket: sequences of one length, computed together like a dense problem.

If the lengths cannot be read on the host, one bucket holds all sequences, padded *in front*. All of
them then end at the same position, so a mask aligned to the bottom right is the same as in a dense
problem, and the same tiles can be skipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class PaddedLayout:
    """The tokens of q, or of k and v, of one bucket.

    rows: indices of the bucket's tokens in the packed tensors: a slice, or int64 (batch * seqlen,)
        in which the total number of tokens marks padding. None for dense tensors.
    first: int64 (batch,), the position at which each padded sequence begins; None without padding.
    batch_indices: indices of the bucket's sequences in the call.
    """

    def __init__(
        self,
        batch: int,
        seqlen: int,
        rows: slice | Tensor | None = None,
        first: Tensor | None = None,
        batch_indices: slice | list[int] = slice(None),
    ) -> None:
        self.batch, self.seqlen = batch, seqlen
        self.rows, self.first, self.batch_indices = rows, first, batch_indices

    def fold(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert to (batch * heads, seqlen, dim), without a copy if strides and dtype allow.

        x: (batch, seqlen, heads, dim), or (total, heads, dim) of a varlen call.
        """
        heads, dim = x.shape[-2:]
        if self.rows is not None:
            x = x if self.first is None else F.pad(x, (0, 0, 0, 0, 0, 1))
            x = x[self.rows].view(self.batch, self.seqlen, heads, dim)
        x = x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
        return x.reshape(self.batch * heads, self.seqlen, dim)

    def unfold(self, x: Tensor, result: Tensor) -> None:
        """The inverse of ``fold``: write x into the rows of this bucket, in result's dtype.

        result: (batch, seqlen, heads, dim) or (total, heads, dim), of any strides.
        """
        heads, dim = result.shape[-2:]
        x = x.view(self.batch, heads, self.seqlen, dim).transpose(1, 2)
        if self.rows is None:
            result.copy_(x)
        elif isinstance(self.rows, slice):
            result[self.rows].view(x.shape).copy_(x)
        elif self.first is None:
            result.index_copy_(0, self.rows, x.flatten(0, 1).to(result.dtype))
        else:
            padded = F.pad(result, (0, 0, 0, 0, 0, 1))
            padded.index_copy_(0, self.rows, x.flatten(0, 1).to(result.dtype))
            result.copy_(padded[:-1])

    def spread(self, descale: Tensor, block: int, heads: int) -> Tensor:
        """The descale of every folded token: (batch * heads, seqlen, 1).

        descale: (batch of the call, heads or a divisor of heads, num_blocks), one per ``block``
            tokens of a sequence.
        """
        descale = descale[self.batch_indices]
        position = torch.arange(self.seqlen, device=descale.device).expand(self.batch, 1, -1)
        if self.first is not None:
            position = (position - self.first.view(-1, 1, 1)).clamp(min=0)
        place = (position // block).clamp(max=descale.shape[2] - 1)
        rows = descale.gather(2, place.expand(-1, descale.shape[1], -1))
        rows = rows.repeat_interleave(heads // descale.shape[1], dim=1)
        return rows.view(self.batch * heads, self.seqlen, 1)


def padded(seqlen: int, total: int, cu_seqlens: Tensor, seqused: Tensor | None) -> PaddedLayout:
    """Pad all sequences of a varlen call to seqlen tokens. No value is read on the host.

    Padding, and tokens that an invalid cu_seqlens puts out of bounds, read as zero and are dropped
    when written.
    """
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    length = end - begin if seqused is None else torch.minimum(end - begin, seqused)
    first = seqlen - length.clamp(0, seqlen)
    position = torch.arange(seqlen, device=first.device) - first.unsqueeze(1)
    row = begin.unsqueeze(1) + position
    real = (position >= 0) & (row >= 0) & (row < total)
    return PaddedLayout(len(begin), seqlen, torch.where(real, row, total).flatten(), first)
