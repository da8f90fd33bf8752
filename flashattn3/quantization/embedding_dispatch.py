"""Selects the implementation that normalizes, rotates and quantizes q, k and v: one launch of the
Hopper library or of Triton, or torch operations and then a quantization of each."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..backends.device import describe_device
from ..call import permuted_v
from ..call.dtypes import FP8
from . import dispatch, hopper_launch
from .embedding import DENSE, Embedding, Lengths, RotaryCall, embedded, mean_of_embedded

MAX_TILE_BELOW_90 = 128 * 128


Sides = tuple[Tensor, Tensor | None, Tensor | None]


def rotate_and_quantize(
    sides: Sides,
    embedding: Embedding,
    lengths: Lengths,
    block: int,
    hadamard: bool,
    qk_dtype: torch.dtype,
    smooth_k: bool,
) -> tuple[Tensor | None, ...]:
    """Return data and descale of q, k and v, which are None where k and v are, and k's mean."""
    q, k, v = sides
    given = q, k, v, *embedding, *lengths, block, hadamard, qk_dtype, smooth_k
    found = _rotate_and_quantize(*given)
    data = found[:6] if k is not None else (*found[:2], *(None,) * 4)
    return *data, found[6] if smooth_k else None


def rotated(
    x: Tensor,
    y: Tensor | None,
    embedding: Embedding,
    lengths: Lengths = DENSE,
    back: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """x and, if there is one, y of the same tokens rotated, without a norm, in their dtype. Rows of
    no sequence are anything. back: by the negative angles."""
    if dispatch.is_opaque(x) or not dispatch.on_triton(x, x.shape[-1]):
        embedding = embedding._replace(sin=-embedding.sin) if back else embedding
        of = None, embedding, lengths.cu_seqlens
        x, y = (None if z is None else embedded(z, *of).to(z.dtype) for z in (x, y))
        return x, y
    return _launch().rotated(x, y, embedding, lengths, back)


@cache
def _launch() -> ModuleType:
    from . import embedding_launch  # imports Triton

    return embedding_launch


def _run(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    block: int,
    hadamard: bool,
    qk_dtype: torch.dtype,
    smooth_k: bool,
) -> list[Tensor]:
    """Data and descale of q, k and v, and k's mean; what is not asked for has no elements."""
    embedding = Embedding(q_norm, k_norm, cos, sin, positions, interleaved, eps)
    nothing = q.new_empty(0, dtype=torch.float32)
    mean = None
    if smooth_k:  # the sample is of rotated keys
        mean = mean_of_embedded(k, embedding, cu_seqlens, max_seqlen)
    of_mean = nothing if mean is None else mean
    widest = q if k is None or q.shape[-1] >= v.shape[-1] else v
    lengths = Lengths(cu_seqlens, max_seqlen)
    call = RotaryCall(q, k, v, embedding, lengths, block, hadamard, qk_dtype, mean)
    if dispatch.on_hopper(widest):
        found = hopper_launch.rotate_and_quantize(call)
        if found is not None:
            return [*(nothing if x is None else x for x in found), of_mean]
    if dispatch.on_triton(widest, widest.shape[-1]) and _fits_on_chip(widest, block):
        permuted = k is not None and dispatch.layout_of_v(v) == "permuted"
        return [*_launch().rotate_and_quantize(call, permuted), of_mean]
    how = block, hadamard, cu_seqlens, max_seqlen
    found = [
        *dispatch.quantize(embedded(q, q_norm, embedding, cu_seqlens), *how, "rows", qk_dtype, None)
    ]
    if k is None:
        return [*found, *(nothing,) * 5]
    wide_k = embedded(k, k_norm, embedding, cu_seqlens)
    found += dispatch.quantize(wide_k, *how, "rows", qk_dtype, mean)
    of_v = block, False, cu_seqlens, max_seqlen, dispatch.layout_of_v(v), FP8, None
    return [*found, *dispatch.quantize(v, *of_v), of_mean]


def _fits_on_chip(x: Tensor, block: int) -> bool:
    """Whether one launch takes blocks of x. Below compute capability 9.0 the tile of partners in a
    rotation goes through shared memory, of which chips have 99 KB and more."""
    device = describe_device(x.device)
    columns = 1 << (x.shape[-1] - 1).bit_length()
    return not 0 < (device.lowering or 0) < 90 or block * columns <= MAX_TILE_BELOW_90


def _fake(q, k, v, q_norm, k_norm, cos, sin, positions, interleaved, eps, cu_seqlens, max_seqlen,
          block, hadamard, qk_dtype, smooth_k):  # fmt: skip
    nothing = q.new_empty(0, dtype=torch.float32)
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.shape[0] - 1, max_seqlen) if varlen else q.shape[:2]
    found = []
    for x, dtype in ((q, qk_dtype), (k, qk_dtype), (v, FP8)):
        if x is None:
            found += [nothing, nothing]
            continue
        permuted = x is v and dispatch.layout_of_v(v) == "permuted"
        shape = permuted_v.shape_of(x.shape, cu_seqlens) if permuted else x.shape
        descale = (batch, x.shape[-2], -(-seqlen // block))
        found += [x.new_empty(shape, dtype=dtype), nothing.new_empty(descale)]
    of_mean = nothing.new_empty((batch, *k.shape[-2:])) if smooth_k else nothing.new_empty(0)
    return [*found, of_mean]


_rotate_and_quantize = dispatch.opaque(
    "rotate_and_quantize",
    _run,
    "(Tensor q, Tensor? k, Tensor? v, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, "
    "Tensor? positions, bool interleaved, float eps, Tensor? cu_seqlens, SymInt? max_seqlen, "
    "int block, bool hadamard, ScalarType qk_dtype, bool smooth_k) -> Tensor[]",
    _fake,
    dispatch.in_own_memory,
)
