"""The launch of the Hopper kernel that normalizes, rotates and quantizes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.dtypes import INT8
from ..call.hadamard import signs
from .dispatch import on_hopper
from .embedding import Embedding

VECTOR = 8  # elements of 16 bytes
ALIGNED = 16  # bytes
HALVES = (32, 64, 128)  # of rotated columns, with pairs in two halves


def runs(q: Tensor, k: Tensor | None, v: Tensor | None, embedding: Embedding) -> bool:
    """Whether the kernel runs on the tensors' device and reads them."""
    widest = q if v is None or q.shape[-1] >= v.shape[-1] else v
    return on_hopper(widest) and fits(q, k, embedding)


def fits(q: Tensor, k: Tensor | None, embedding: Embedding) -> bool:
    """Whether the kernel reads these tensors: in whole vectors, pairs in a thread's columns."""
    cos = embedding.cos
    if cos is not None:
        positions, half = cos.shape
        in_vectors = half % (VECTOR // 2) == 0 if embedding.interleaved else half in HALVES
        if not (in_vectors and positions and cos.dtype in (torch.float32, q.dtype)):
            return False
    if any(x is not None and x.data_ptr() % ALIGNED for x in (cos, *embedding[:2], embedding.sin)):
        return False
    return _in_vectors(q) and (k is None or _in_vectors(k))


def _in_vectors(x: Tensor) -> bool:
    *strides, last = x.stride()
    whole = all(stride % VECTOR == 0 for stride in strides)
    return last == 1 and whole and x.shape[-1] % VECTOR == 0 and x.data_ptr() % ALIGNED == 0


def rotate_and_quantize(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    embedding: Embedding,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    block: int,
    hadamard: bool,
    qk_dtype: torch.dtype,
    mean: Tensor | None,
) -> tuple[Tensor, ...]:
    """Data and descale of q, k and v, without elements where k and v are None."""
    q_norm, k_norm, cos, sin, positions, interleaved, eps = embedding
    return torch.ops.flashattn3_hopper.rotate_and_quantize.default(
        *(q, k, v if v is None or v.stride(-1) == 1 else v.contiguous(), mean),
        signs(q.shape[-1], q.device) if hadamard else None,
        *(None if weight is None else weight.float().contiguous() for weight in (q_norm, k_norm)),
        *(None if table is None else table.contiguous() for table in (cos, sin, positions)),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        *(interleaved, eps, block, max_seqlen or 0, qk_dtype == INT8),
    )
