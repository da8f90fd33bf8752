"""The layout in which the reference backend computes, and the way there and back.

Heads come first, so that a product over all heads is one batched matrix product. The query heads
that share a key-value head become neighbouring rows: K and V are never repeated, and a range of
tokens is a range of rows.

Ragged sequences are padded *in front*. All of them then end at the same position, and a window
aligned to the bottom right lies where it lies in a dense problem: the same tiles can be skipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadsFirst:
    """The rows of the queries, or of the keys and values, of one call.

    first: int64 (batch,), where each padded sequence begins; None for dense tensors.
    """

    def __init__(
        self,
        axes: tuple[int, int, int, int],
        total: int,
        cu_seqlens: Tensor | None = None,
        seqused: Tensor | None = None,
    ) -> None:
        """axes: (batch, seqlen, num_heads_kv, group). total: rows of a ragged tensor."""
        self.axes, self.total = axes, total
        self.first = self._index = None
        if cu_seqlens is not None:
            self.first, self._index = _padding(axes[1], total, cu_seqlens, seqused)

    def fold(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """To (batch * num_heads_kv, seqlen * group, ·), not copied if strides and dtype allow.

        x: (batch, seqlen, heads, ·), or (total, heads, ·) where ragged.
        """
        batch, seqlen, num_heads_kv, group = self.axes
        if self._index is not None:
            x = F.pad(x, (0, 0, 0, 0, 0, 1)).index_select(0, self._index)
        dim = x.shape[-1]
        x = x.view(*self.axes, dim).movedim(2, 1)
        return x.reshape(batch * num_heads_kv, seqlen * group, dim).to(dtype)

    def spread(self, descale: Tensor, block: int) -> Tensor:
        """The descale of every folded row: (batch * num_heads_kv, seqlen * group, 1).

        descale: (batch, heads, num_blocks), one for each ``block`` rows of a sequence; heads are
            those of the tensor or num_heads_kv.
        """
        batch, seqlen, num_heads_kv, group = self.axes
        position = torch.arange(seqlen, device=descale.device).expand(batch, seqlen)
        if self.first is not None:
            position = (position - self.first.unsqueeze(1)).clamp(min=0)
        place = (position // block).clamp(max=descale.shape[2] - 1)
        place = place.view(batch, 1, 1, seqlen).expand(batch, num_heads_kv, group, seqlen)
        members = descale.unflatten(1, (num_heads_kv, -1)).expand(-1, -1, group, -1)
        rows = members.gather(3, place).transpose(2, 3)
        return rows.reshape(batch * num_heads_kv, seqlen * group, 1)

    def unfold(self, x: Tensor, dtype: torch.dtype, outside: float = 0.0) -> Tensor:
        """The inverse of ``fold``, contiguous. Rows of no sequence are filled with ``outside``."""
        batch, seqlen, num_heads_kv, group = self.axes
        heads, dim = num_heads_kv * group, x.shape[-1]
        x = x.view(batch, num_heads_kv, seqlen, group, dim).movedim(1, 2).to(dtype)
        if self._index is None:
            return x.reshape(batch, seqlen, heads, dim).contiguous()
        rows = x.new_full((self.total + 1, heads, dim), outside)
        rows.index_copy_(0, self._index, x.reshape(batch * seqlen, heads, dim))
        return rows[: self.total]


def _padding(
    seqlen: int, total: int, cu_seqlens: Tensor, seqused: Tensor | None
) -> tuple[Tensor, Tensor]:
    """first (batch,), and for each of the batch * seqlen padded rows the row of the packed tensor.

    Padding points at one extra row, ``total``: zero when read, dropped when written. So does
    whatever a corrupt cu_seqlens would put out of bounds.
    """
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    length = end - begin if seqused is None else torch.minimum(end - begin, seqused)
    first = seqlen - length.clamp(0, seqlen)
    position = torch.arange(seqlen, device=first.device) - first.unsqueeze(1)
    row = begin.unsqueeze(1) + position
    real = (position >= 0) & (row >= 0) & (row < total)
    return first, torch.where(real, row, total).flatten()
