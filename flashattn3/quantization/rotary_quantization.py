"""From a projection's output to the 8-bit tensors of attention, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.block_scaled import BlockScaled, of_own_tensors
from ..call.operands import key_of
from ..call.value_checks import is_checked
from ..modes import (
    has_dual_level,
    is_plain,
    is_transformed,
    needs_gradient,
    refuse_gradients,
)
from .embedding import Embedding, Lengths
from .embedding_checks import FUNCTION, Checked, checked

_PLAIN = (int, float, bool, torch.dtype, type(None))
_MOST_KNOWN = 4096
# What the checks have found for calls with the same metadata; the oldest are forgotten.
_known: dict[tuple, Checked] = {}


def rotate_and_quantize(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    num_heads_q: int | None = None,
    rotary_interleaved: bool = False,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
) -> BlockScaled | tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Normalize and rotate q and k by their positions, and quantize q, k and v: in one launch on
    Hopper and where Triton runs, below compute capability 9.0 up to 16384 elements (block *
    head_dim). Everything between the 16 bits that are read and the 8 bits that are written is
    float32.

    Args:
        q, k, v: float16 or bfloat16 (batch, seqlen, heads, ·) of any strides, with cu_seqlens
            (total, heads, ·), of the same tokens. q alone: of a call whose k and v are elsewhere;
            with num_heads_q q, k and v in one tensor, whose heads are those of q, of k and of v.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32, float16 or bfloat16; None: no
            rotary embedding. Columns from rotary_dim on are not rotated. A position outside the
            tables gives NaN; on a CPU it is an error.
        rotary_interleaved: pairs are columns (2i, 2i + 1); else (i, i + rotary_dim / 2).
        positions: int32 or int64 (batch, seqlen) or (total,), rows of the tables; None: the place
            of a token in its sequence.
        q_norm, k_norm: weights (head_dim,) of an RMSNorm of q or k before the rotation.
        norm_eps: added to the mean square.
        cu_seqlens, max_seqlen, block, hadamard: as in ``quantize_block_fp8``.
        qk_dtype, smooth_k: as in ``flash_attn_fp8_func``; the mean is that of rotated keys.

    Returns: q, k and v, or q, as ``flash_attn_func`` takes them.

    Differentiable with respect to q, k, v and the norms' weights where attention takes the results:
    its gradient at the quantized values passes straight through the rounding. A norm keeps its
    input in 16 bits for it. ``dequantize()`` of a result has no gradient.

    Raises: TypeError, ValueError; UnsupportedError for tables that require a gradient, under
    torch.func's transforms and for forward-mode differentiation.
    """
    tensors = q, k, v, rotary_cos, rotary_sin, positions, q_norm, k_norm, cu_seqlens
    options = num_heads_q, rotary_interleaved, norm_eps, max_seqlen
    options = (*options, block, hadamard, qk_dtype, smooth_k)
    plain = is_plain()
    key = _key_of(tensors, options) if plain else None
    how = None if key is None else _known.get(key)
    if how is None:
        how = checked(tensors, options)
        if key is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.pop(next(iter(_known)), None)
            _known[key] = how
    if how.heads is not None:
        q, k, v = torch.split_with_sizes(q, how.heads, -2)
    given = q, k, v, q_norm, k_norm
    differentiably = needs_gradient(given)
    if not plain or needs_gradient((rotary_cos, rotary_sin)):
        _refuse(given, rotary_cos, rotary_sin)
    embedding = Embedding(
        q_norm, k_norm, rotary_cos, rotary_sin, positions, how.interleaved, how.eps
    )
    scheme = how.block, how.hadamard, how.qk_dtype
    gradients = None, None, None
    if differentiably:
        from .embedding_gradient import rotate_and_quantize_differentiably

        found, gradients = rotate_and_quantize_differentiably(
            (q, k, v), embedding, Lengths(cu_seqlens, how.longest), *scheme, how.smooth_k
        )
    elif how.on_hopper:
        from .hopper_launch import rotate_and_quantize as run

        found = *run(q, k, v, embedding, cu_seqlens, how.longest, *scheme, None), None
    else:
        from .embedding_dispatch import rotate_and_quantize as run  # it imports Triton

        found = run((q, k, v), embedding, Lengths(cu_seqlens, how.longest), *scheme, how.smooth_k)
    make = of_own_tensors if plain else BlockScaled
    of = how.block, how.hadamard, cu_seqlens, "rows"
    of_q = make(*found[:2], *of, q.shape, None, gradients[0])
    if k is None:
        return of_q
    layout = "rows" if found[4].shape == v.shape else "permuted"
    return (
        of_q,
        make(*found[2:4], *of, k.shape, found[6], gradients[1]),
        make(*found[4:6], how.block, False, cu_seqlens, layout, v.shape, None, gradients[2]),
    )


def _key_of(tensors: tuple, options: tuple) -> tuple | None:
    """Under which _known has the call; None where values are checked or an argument is odd."""
    types = tuple(map(type, options))
    if not isinstance(tensors[0], Tensor) or is_checked(tensors[0].device):
        return None
    if not all(of in _PLAIN for of in types):
        return None
    try:
        return key_of(tensors), options, types
    except (AttributeError, RuntimeError):
        return None


def _refuse(given: tuple[Tensor | None, ...], cos: Tensor | None, sin: Tensor | None) -> None:
    """Raise where a gradient cannot pass."""
    if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
        names = "q", "k", "v", "q_norm", "k_norm"
        refuse_gradients(FUNCTION, **dict(zip(names, given, strict=True)))
    refuse_gradients(FUNCTION, rotary_cos=cos, rotary_sin=sin)
