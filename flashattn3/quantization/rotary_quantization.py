"""From a projection's output to the 8-bit tensors of attention, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..call.arguments import integer
from ..call.block_scaled import BlockScaled, of_own_tensors
from ..call.operands import key_of
from ..call.value_checks import is_checked
from ..modes import (
    USUAL,
    has_dual_level,
    is_plain,
    is_transformed,
    needs_gradient,
    refuse_gradients,
    refuse_vmap,
)
from .embedding import Embedding, Lengths
from .embedding_checks import FUNCTION, Scheme, checked

_PLAIN = (int, float, bool, torch.dtype, type(None))
_MOST_KNOWN = 4096
# What the checks have found for calls with the same metadata; the oldest are forgotten.
_known: dict[tuple, tuple[int | None, Scheme]] = {}


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

    Returns: q, k and v, or q alone, as ``flash_attn_func`` takes them. Tensors in them may be parts
        of one allocation, which lives as long as one of them: clone those that are kept alone.

    Differentiable with respect to q, k, v and the norms' weights where attention takes the results:
    its gradient at the quantized values passes straight through the rounding. A norm keeps its
    input in 16 bits for it. ``dequantize()`` of a result has no gradient.

    Raises: TypeError, ValueError; UnsupportedError for tables that require a gradient, under
    torch.func's transforms and for forward-mode differentiation.
    """
    tensors = q, k, v, rotary_cos, rotary_sin, positions, q_norm, k_norm, cu_seqlens
    options = rotary_interleaved, norm_eps, block, hadamard, qk_dtype, smooth_k
    call = tensors, num_heads_q, max_seqlen, options
    plain, found, differentiably, of_tables = is_plain(), None, False, False
    if torch.is_grad_enabled() and needs_gradient(tensors):
        differentiably = needs_gradient((q, k, v, q_norm, k_norm))
        of_tables = needs_gradient((rotary_cos, rotary_sin))
    if plain and not of_tables:
        scheme, found = _at_once()(*call, differentiably)
        if found is not None and not differentiably:
            return _records(of_own_tensors, found, scheme, cu_seqlens, v)
    if found is None:
        longest, scheme = (_checked if plain else checked)(*call)
        _refuse(tensors)
    else:
        longest = None if cu_seqlens is None else min(max_seqlen, q.shape[0])
    if num_heads_q is not None:
        of_q = integer(FUNCTION, "num_heads_q", num_heads_q)
        of_kv = (q.shape[-2] - of_q) // 2
        q, k, v = torch.split_with_sizes(q, (of_q, of_kv, of_kv), -2)
    tables = rotary_cos, rotary_sin, positions
    embedding = Embedding(q_norm, k_norm, *tables, scheme.interleaved, scheme.eps)
    given = (q, k, v), embedding, Lengths(cu_seqlens, longest)
    if found is None:
        from .embedding_dispatch import rotate_and_quantize as run  # it imports Triton

        with torch.no_grad():
            found = run(*given, *scheme[2:])
    gradients = ()
    if differentiably:
        gradients = (_gradients_of() if plain else _imported_gradients_of())(*given)
    make = of_own_tensors if plain else BlockScaled
    return _records(make, found, scheme, cu_seqlens, v, *gradients)


def _records(
    make: Callable,
    found: tuple[Tensor | None, ...],
    scheme: Scheme,
    cu_seqlens: Tensor | None,
    v: Tensor | None,
    gradient_of_q: Tensor | None = None,
    gradient_of_k: Tensor | None = None,
    gradient_of_v: Tensor | None = None,
) -> BlockScaled | tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Return the records of the call. found: data and descale of q, k and v, and k's mean. v: None
    where its heads, behind those of q and k, have their head dim."""
    q_data, of_q, k_data, of_k, v_data, of_v, mean = found
    _, _, block, hadamard, _, _ = scheme
    of = block, hadamard, cu_seqlens, "rows"
    made = make(q_data, of_q, *of, q_data.shape, None, gradient_of_q)
    if k_data is None:
        return made
    k_shape = k_data.shape
    v_shape = k_shape if v is None else v.shape
    layout = "rows" if v_data.ndim == len(v_shape) else "permuted"
    return (
        made,
        make(k_data, of_k, *of, k_shape, mean, gradient_of_k),
        make(v_data, of_v, block, False, cu_seqlens, layout, v_shape, None, gradient_of_v),
    )


def _imported_gradients_of() -> Callable:
    from .embedding_gradient import gradients_of  # it imports the backends

    return gradients_of


_gradients_of = cache(_imported_gradients_of)  # which torch.compile would warn of


@cache
def _at_once() -> Callable:
    from .hopper_launch import rotate_and_quantize_at_once  # it imports the backends

    return rotate_and_quantize_at_once


def _checked(*call: object) -> tuple[int | None, Scheme]:
    """``checked``, once for calls with the same metadata."""
    key = _key_of(*call)
    found = None if key is None else _known.get(key)
    if found is None:
        found = checked(*call)
        if key is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.pop(next(iter(_known)), None)
            _known[key] = found
    return found


def _key_of(tensors: tuple, *others: object) -> tuple | None:
    """Under which _known has the call; None where values are checked or an argument is odd."""
    *lengths, options = others
    types = tuple(map(type, (*lengths, *options)))
    if tensors[0] is None or not USUAL.issuperset(map(type, tensors)):
        return None
    if is_checked(tensors[0].device) or not all(of in _PLAIN for of in types):
        return None
    try:
        return key_of(tensors), others, types
    except (AttributeError, RuntimeError):
        return None


def _refuse(tensors: tuple[Tensor | None, ...]) -> None:
    """Raise for a tensor that vmap maps, and where a gradient cannot pass."""
    q, k, v, cos, sin, _, q_norm, k_norm, _ = tensors
    if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
        refuse_vmap(FUNCTION, *tensors)
        refuse_gradients(FUNCTION, q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm)
    refuse_gradients(FUNCTION, rotary_cos=cos, rotary_sin=sin)
