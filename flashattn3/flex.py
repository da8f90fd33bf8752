"""Attention with a mask object and heads before tokens, and FlexAttention's signature for it, for
calls without score_mod."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .call.arguments import boolean, expect_strided
from .call.fields import CALL, Options
from .call.operands import NO_SCORES, Tensors
from .errors import UnsupportedError, complaint, expect, shown, type_error, value_error
from .masks.arguments_of_calls import call_tensors
from .masks.captured import values_read
from .masks.conversions import from_block_mask
from .masks.mask import Mask
from .modes import is_traced
from .run.bhsd import attend_bhsd
from .run.doors import attend

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

FUNCTION = "flex_attention"
# BlockMask → the values that it was made from, tensors with their versions, and its Mask.
_masks: WeakKeyDictionary = WeakKeyDictionary()


def attend_masked_bhsd(
    options: Options,
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    scores=None,
    mask=None,
) -> Tensor | tuple[Tensor, ...]:
    """``attend_bhsd`` with a mask, which stands beside no cu_seqlens."""
    if mask is None:
        return attend_bhsd(options, q, k, v, cu_seqlens_q, cu_seqlens_k, scores)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        raise value_error(options.function, "mask", "None with cu_seqlens", shown(mask))
    lists = call_tensors(options.function, mask, q, k, axis=2)
    tensors = Tensors(q, k, v, None, None, None, None, *(scores or NO_SCORES), *lists)
    return attend(tensors, options, bhsd=True, mask=mask)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """torch.nn.attention.flex_attention.flex_attention on flashattn3's kernels, with gradients.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim), as in ``flash_attn_func`` otherwise.
        key, value: (batch or 1, num_heads_kv, seqlen_k, ·).
        score_mod: None; ``alibi_slopes`` and ``bias`` of ``flash_attn_func`` change scores.
        block_mask: a ``BlockMask``, converted in its first call (``masks.from_block_mask``) and
            again when its mask_mod, or a tensor, number or string that it holds or its mask_mod
            reads, was replaced or written to, and in every call where a tensor was made in
            inference mode, which hides writes; or a ``masks.Mask``, which code that torch.compile
            traces must pass. None: all keys are visible.
        scale: factor of the scores; None: head_dim ** -0.5.
        enable_gqa: whether num_heads_q may be a multiple of num_heads_kv.
        return_lse: also return the log-sum-exp of each row.
        kernel_options: None or empty: they choose among kernels of torch.
        return_aux: ``AuxRequest(lse=True)`` returns ``AuxOutput`` in place of the lse.

    Returns: out (batch, num_heads_q, seqlen_q, head_dim_v), a transposed view, and lse, float32
        (batch, num_heads_q, seqlen_q), natural.

    Raises:
        UnsupportedError: score_mod, kernel_options, or the largest scores are asked for.
        TypeError, ValueError: as ``flash_attn_func``.
    """
    return_lse = boolean(FUNCTION, "return_lse", return_lse)
    enable_gqa = boolean(FUNCTION, "enable_gqa", enable_gqa)
    with_lse = return_lse or getattr(return_aux, "lse", False)
    _refuse(score_mod, kernel_options, return_lse, return_aux)
    for name, x in (("query", query), ("key", key), ("value", value)):
        expect_strided(FUNCTION, name, x)
        wanted = "(batch, heads, seqlen, head_dim)"
        expect(x.ndim == 4, FUNCTION, f"{name}.shape", wanted, tuple(x.shape))
    if not enable_gqa:
        wanted = f"{query.shape[1]} as query's unless enable_gqa"
        expect(key.shape[1] == query.shape[1], FUNCTION, "key.shape[1]", wanted, key.shape[1])
    if key.shape[0] == value.shape[0] == 1 < query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    given = {"softmax_scale": scale, "return_lse": with_lse}
    options = CALL.convert(FUNCTION, given)
    found = attend_masked_bhsd(options, query, key, value, mask=_mask_of(block_mask))
    if not with_lse:
        return found.transpose(1, 2) if return_aux is None else (found.transpose(1, 2), _aux(None))
    out, lse = found
    return out.transpose(1, 2), lse if return_aux is None else _aux(lse)


def _is_request(value: object) -> bool:
    from torch.nn.attention import flex_attention as of_torch

    return isinstance(value, getattr(of_torch, "AuxRequest", ()))  # torch 2.8 has none


def _aux(lse: Tensor | None) -> AuxOutput:
    from torch.nn.attention.flex_attention import AuxOutput

    return AuxOutput(lse=lse)


def _refuse(score_mod, kernel_options, return_lse: bool, return_aux) -> None:
    """Raise for what torch's function has and this one has not."""
    refused = {
        "score_mod": (score_mod, "alibi_slopes and bias of flash_attn_func change scores"),
        "kernel_options": (kernel_options or None, "they choose among torch's own kernels"),
    }
    for name, (value, reason) in refused.items():
        if value is not None:
            raise UnsupportedError(f"{complaint(FUNCTION, name, None, shown(value))}: {reason}")
    if return_aux is not None and not _is_request(return_aux):
        wanted = "None or an AuxRequest of torch.nn.attention.flex_attention"
        raise type_error(FUNCTION, "return_aux", wanted, shown(return_aux))
    expect(not (return_lse and return_aux is not None), FUNCTION, "return_lse",
           "False beside return_aux", return_lse)  # fmt: skip
    if getattr(return_aux, "max_scores", False):
        sentence = complaint(FUNCTION, "return_aux.max_scores", False, True)
        raise UnsupportedError(f"{sentence}: flash_attn_func has return_max_logit, for each head")


def _mask_of(block_mask: object) -> Mask | None:
    """The mask of the argument; None if it shows all scores."""
    if block_mask is None or isinstance(block_mask, Mask):
        return block_mask
    if torch.compiler.is_compiling():
        wanted = "a flashattn3.masks.Mask in compiled code: masks.from_block_mask(block_mask)"
        raise type_error(FUNCTION, "block_mask", wanted, type(block_mask).__name__)
    try:
        known = _masks.get(block_mask)
    except TypeError:  # of a type without hash or weak references
        known = None
    sources = _sources(block_mask)
    if known is None or not _same(known[0], sources):
        with torch.inference_mode(False):  # the mask outlives the caller's mode
            known = sources, from_block_mask(block_mask, FUNCTION)
        if not is_traced():  # a transform's tensors end with it
            _masks[block_mask] = known
    return known[1]


Sources = list[tuple[object, int | None]]


def _sources(block_mask: object) -> Sources:
    """Return what a block mask holds and its mask_mod reads: values with 0, tensors with their
    versions, which change when they are written to; None: a tensor of inference mode."""
    values = values_read((*getattr(block_mask, "__dict__", {}).values(),))
    return [
        (x, 0 if not isinstance(x, Tensor) else None if x.is_inference() else x._version)
        for x in values
    ]


def _same(sources: Sources, others: Sources) -> bool:
    """Return whether both have the same values, and each tensor in the same version, which is
    known."""
    if len(sources) != len(others):
        return False
    for (x, i), (y, j) in zip(sources, others, strict=True):
        equal = x is y or (type(x) is type(y) and not isinstance(x, Tensor) and x == y)
        if not equal or i != j or i is None:
            return False
    return True
