"""Rotary position embedding under FlashAttention-2's names, in torch operations.

A position outside the tables gives NaN, where FlashAttention-2 leaves a row as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.reference.rotary import rotated
from ..errors import expect


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first 2 * cos.shape[1] columns of every head.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos, sin: (positions, rotary_dim / 2).
        seqlen_offsets: the position of each sequence's first token, an int or (batch,).
        cu_seqlens: int32 (batch + 1,). max_seqlen is not needed.
        interleaved: pairs are columns (2i, 2i + 1); else (i, i + rotary_dim / 2).
        inplace: x is written and returned.
        conjugate: rotate the other way round.
    """
    expect(cos.shape == sin.shape, "apply_rotary", "sin.shape", f"{(*cos.shape,)}", (*sin.shape,))
    if cu_seqlens is None:
        rows, positions = x.flatten(0, 1), _positions(x, seqlen_offsets)
    else:
        rows, positions = x, _positions_in_rows(x, cu_seqlens, seqlen_offsets)
    result = rotated(rows, cos, -sin if conjugate else sin, positions, interleaved)
    result = result.to(x.dtype).view(x.shape)
    return x.copy_(result) if inplace else result


def _positions(x: Tensor, offsets: int | Tensor) -> Tensor:
    """(batch * seqlen,)"""
    steps = torch.arange(x.shape[1], device=x.device)
    if isinstance(offsets, Tensor):
        offsets = offsets[:, None]
    return (steps + offsets).expand(x.shape[:2]).flatten()


def _positions_in_rows(x: Tensor, cu_seqlens: Tensor, offsets: int | Tensor) -> Tensor:
    """(total,); rows behind the last sequence count as its own."""
    rows = torch.arange(x.shape[0], device=x.device)
    sequence = torch.bucketize(rows, cu_seqlens[1:-1].long(), right=True)
    offsets = offsets[sequence] if isinstance(offsets, Tensor) else offsets
    return rows - cu_seqlens[sequence] + offsets


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """``apply_rotary`` with FlashAttention-2's other order; differentiable with respect to x."""
    lengths = seqlen_offsets, cu_seqlens, max_seqlen
    return apply_rotary(x, cos, sin, *lengths, interleaved, inplace)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in place and return qkv.

    qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_kv,
    head_dim) with num_heads_q. cos_k, sin_k: of k, where they differ.
    """
    function = "apply_rotary_emb_qkv_"
    if qkv.ndim == 5:
        expect(qkv.shape[2] == 3, function, "qkv.shape[2]", 3, qkv.shape[2])
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        expect(num_heads_q is not None, function, "num_heads_q", "given where qkv has 4 axes", None)
        rest = qkv.shape[2] - num_heads_q
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + rest // 2]
    _rotate(q, cos, sin, interleaved, seqlen_offsets)
    tables = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    _rotate(k, *tables, interleaved, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate k in place and return kv (batch, seqlen, 2, heads, head_dim)."""
    expect(kv.shape[2] == 2, "apply_rotary_emb_kv_", "kv.shape[2]", 2, kv.shape[2])
    _rotate(kv[:, :, 0], cos, sin, interleaved, seqlen_offsets)
    return kv


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offsets: int | Tensor) -> None:
    apply_rotary(x, cos, sin, offsets, interleaved=interleaved, inplace=True)


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k in place, with tables that grow to the longest call.

    Subclasses and decoding code read the tables, so these have FlashAttention-2's names.

    Args:
        dim: rotated columns of a head.
        base: of the frequencies, base ** (-2i / dim).
        interleaved: as in ``apply_rotary``.
        scale_base: not None: xPos (arXiv 2212.10554), which scales q up and k down with their
            positions.
        device: of the frequencies.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device).float() / self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make tables of at least this length; those of k only with scale_base."""
        cos = self._cos_cached
        if cos is not None and cos.device == device and cos.dtype == dtype:
            stale = self.training and cos.is_inference()
            if seqlen <= self._seq_len_cached and not stale:
                return
        self._seq_len_cached = seqlen
        # A model in 16 bits has rounded the buffer: the frequencies are computed again.
        exact = self.inv_freq.dtype == torch.float32
        inverse = self.inv_freq if exact else self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device).float()
        angles = torch.outer(positions, inverse.to(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        columns = torch.arange(0, self.dim, 2, device=device).float()
        grown = (columns + 0.4 * self.dim) / (1.4 * self.dim)
        scale = grown ** ((positions - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = ((x * scale).to(dtype) for x in (cos, sin))
        self._cos_k_cached, self._sin_k_cached = ((x / scale).to(dtype) for x in (cos, sin))

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return qkv, or q and kv, rotated in place.

        qkv: as in ``apply_rotary_emb_qkv_``; with kv (batch, seqlen, 2, heads, head_dim) it is q.
        seqlen_offset: of the first token; with a tensor (batch,) max_seqlen sizes the tables.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        wanted = "given where seqlen_offset is a tensor and no table is there"
        expect(self._cos_cached is not None, "RotaryEmbedding", "max_seqlen", wanted, None)
        of_q = of_k = self._cos_cached, self._sin_cached
        if self.scale_base is not None:
            of_k = self._cos_k_cached, self._sin_k_cached
        if kv is None:
            how = self.interleaved, seqlen_offset, num_heads_q
            return apply_rotary_emb_qkv_(qkv, *of_q, *of_k, *how)
        _rotate(qkv, *of_q, self.interleaved, seqlen_offset)
        return qkv, apply_rotary_emb_kv_(kv, *of_k, self.interleaved, seqlen_offset)


NAMES = {
    "apply_rotary_emb": apply_rotary_emb,
    "apply_rotary_emb_func": apply_rotary_emb,
    "apply_rotary_emb_qkv_": apply_rotary_emb_qkv_,
    "apply_rotary_emb_kv_": apply_rotary_emb_kv_,
    "RotaryEmbedding": RotaryEmbedding,
}
