"""From a projection's output to the 8-bit tensors of attention, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.arguments import boolean, expect_strided, integer, real
from ..call.block_scaled import BlockScaled
from ..call.dtypes import EIGHT_BIT, SIXTEEN_BIT, best_qk_dtype
from ..call.hadamard import is_rotatable
from ..call.quantization_limits import BLOCKS
from ..call.value_checks import is_checked
from ..errors import expect, shown, type_error
from ..modes import is_traced, refuse_gradients
from .embedding import Embedding
from .lengths import checked_lengths

_FUNCTION = "rotate_and_quantize"


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
    """Normalize and rotate q and k by their positions, and quantize q, k and v: in one launch where
    Triton runs, below compute capability 9.0 up to 16384 elements (block * head_dim). Everything
    between the 16 bits that are read and the 8 bits that are written is float32.

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

    Raises: TypeError, ValueError; UnsupportedError for an input that requires a gradient, unless
    under ``torch.no_grad()``.
    """
    q, k, v = _sides(q, k, v, num_heads_q)
    block, eps = integer(_FUNCTION, "block", block), real(_FUNCTION, "norm_eps", norm_eps)
    hadamard = boolean(_FUNCTION, "hadamard", hadamard)
    smooth_k = boolean(_FUNCTION, "smooth_k", smooth_k)
    interleaved = boolean(_FUNCTION, "rotary_interleaved", rotary_interleaved)
    if qk_dtype is None:
        qk_dtype = best_qk_dtype(q.shape[-1], hadamard)
    expect(qk_dtype in EIGHT_BIT, _FUNCTION, "qk_dtype", f"one of {(None, *EIGHT_BIT)}", qk_dtype)
    expect(block in BLOCKS, _FUNCTION, "block", f"one of {BLOCKS}", block)
    fits = not hadamard or is_rotatable(q.shape[-1])
    expect(fits, _FUNCTION, "q.shape[-1]", "a power of two with hadamard=True", q.shape[-1])
    expect(not (smooth_k and k is None), _FUNCTION, "smooth_k", "False without k", smooth_k)
    expect(k_norm is None or k is not None, _FUNCTION, "k_norm", "None without k", "a tensor")
    longest = checked_lengths(_FUNCTION, "q", q, cu_seqlens, max_seqlen)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _expect_tensor(name, weight, q, (q.shape[-1],))
    _check_rotary(q, rotary_cos, rotary_sin, positions, cu_seqlens, longest)
    refuse_gradients(_FUNCTION, q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm)
    from .embedding_dispatch import Lengths  # its custom operators import Triton
    from .embedding_dispatch import rotate_and_quantize as run

    embedding = Embedding(q_norm, k_norm, rotary_cos, rotary_sin, positions, interleaved, eps)
    lengths = Lengths(cu_seqlens, longest)
    with torch.no_grad():
        found = run((q, k, v), embedding, lengths, block, hadamard, qk_dtype, smooth_k)
    of_q = BlockScaled(*found[:2], block, hadamard, cu_seqlens)
    if k is None:
        return of_q
    of_k = BlockScaled(*found[2:4], block, hadamard, cu_seqlens, mean=found[6])
    layout = "rows" if found[4].shape == v.shape else "permuted"
    return of_q, of_k, BlockScaled(*found[4:6], block, False, cu_seqlens, layout, v.shape)


def _sides(q, k, v, num_heads_q) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, k and v, checked, and taken apart where they are one tensor."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) and (name == "q" or x is not None):
            raise type_error(_FUNCTION, name, "a torch.Tensor", shown(x))
        if x is not None:
            expect_strided(_FUNCTION, name, x)
            expect(x.ndim >= 3, _FUNCTION, f"{name}.ndim", "3 or 4", x.ndim)
    if q.dtype not in SIXTEEN_BIT:
        raise type_error(_FUNCTION, "q.dtype", f"one of {SIXTEEN_BIT}", q.dtype)
    if num_heads_q is not None:
        expect(k is v is None, _FUNCTION, "num_heads_q", "None with k and v", num_heads_q)
        heads, rest = integer(_FUNCTION, "num_heads_q", num_heads_q), q.shape[-2]
        fits = 0 < heads < rest and (rest - heads) % 2 == 0
        wanted = f"such that an even number of {rest} heads is left for k and v"
        expect(fits, _FUNCTION, "num_heads_q", wanted, heads)
        q, k, v = q.split((heads, (rest - heads) // 2, (rest - heads) // 2), -2)
    if (k is None) != (v is None):
        raise type_error(_FUNCTION, "v" if v is None else "k", "given with the other", None)
    if k is not None:
        heads, rows = k.shape[-2], tuple(q.shape[:-2])
        _expect_tensor("k", k, q, (*rows, heads, q.shape[-1]), (q.dtype,))
        _expect_tensor("v", v, q, (*rows, heads, v.shape[-1]), (q.dtype,))
        divides = heads > 0 and q.shape[-2] % heads == 0
        expect(divides, _FUNCTION, "k.shape[-2]", f"a divisor of {q.shape[-2]}", heads)
    expect(q.shape[-1] >= 1, _FUNCTION, "q.shape[-1]", "at least 1", q.shape[-1])
    return q, k, v


def _expect_tensor(
    name: str,
    x: object,
    q: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *SIXTEEN_BIT),
) -> None:
    if not isinstance(x, Tensor):
        raise type_error(_FUNCTION, name, "a torch.Tensor", shown(x))
    if x.dtype not in dtypes:
        raise type_error(_FUNCTION, f"{name}.dtype", f"one of {dtypes}", x.dtype)
    expect(tuple(x.shape) == shape, _FUNCTION, f"{name}.shape", shape, tuple(x.shape))
    expect(x.device == q.device, _FUNCTION, f"{name}.device", f"{q.device} as q's", x.device)


def _check_rotary(q, cos, sin, positions, cu_seqlens, longest: int | None) -> None:
    if (cos is None) != (sin is None):
        name = "rotary_sin" if sin is None else "rotary_cos"
        raise type_error(_FUNCTION, name, "given with the other", None)
    if cos is None:
        expect(positions is None, _FUNCTION, "positions", "None without rotary_cos", "a tensor")
        return
    shape = tuple(cos.shape) if isinstance(cos, Tensor) and cos.ndim == 2 else (0, 0)
    _expect_tensor("rotary_cos", cos, q, shape)
    _expect_tensor("rotary_sin", sin, q, shape, (cos.dtype,))
    half, most = shape[1], q.shape[-1] // 2
    expect(1 <= half <= most, _FUNCTION, "rotary_cos.shape[1]", f"between 1 and {most}", half)
    if positions is not None:
        _expect_tensor("positions", positions, q, q.shape[:-2], (torch.int32, torch.int64))
        if is_checked(q.device) and not is_traced() and positions.numel():
            low, high = (int(x) for x in positions.aminmax())
            fits = low >= 0 and high < shape[0]
            wanted = f"between 0 and {shape[0] - 1}, rows of rotary_cos"
            expect(fits, _FUNCTION, "positions", wanted, f"{low} to {high}")
        return
    needed = q.shape[1] if cu_seqlens is None else longest
    wanted = f">= {needed}, the longest sequence"
    expect(needed <= shape[0], _FUNCTION, "rotary_cos.shape[0]", wanted, shape[0])
