"""Masks of transformers that no segments describe: bool tensors, and a Mask of each.

A model's own mask function (Gemma 3's images), padding between tokens and a user's 4-dimensional
bools are bool tensors (batch or 1, heads or 1, seqlen_q, seqlen_k), those that transformers makes
for its sdpa attention. The first layer makes a Mask of one, which all others use.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..masks import Mask, from_bool

# Bool tensor → its version, the number of keys, and the Mask of its first keys.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def dense_mask(given: dict[str, object]) -> Tensor:
    """The mask that transformers makes for sdpa. given: arguments of its mask functions."""
    mask = sys.modules["transformers.masking_utils"].sdpa_mask(
        **given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )
    mask._is_new = True
    return mask


def fits(seen: Tensor, batch: int, heads: int, queries: int, keys: int) -> bool:
    """Whether a bool tensor has the sizes of a call."""
    sizes = zip(seen.shape[:2], (batch, heads), strict=True)
    return all(n in (1, size) for n, size in sizes) and seen.shape[2:] == (queries, keys)


def mask_of(seen: Tensor, keys: int) -> Mask:
    """The Mask of the first keys of a bool tensor, made once until the tensor is written to."""
    # A tensor of inference mode has no version: one that a user holds may change unseen.
    unseen = not torch.compiler.is_compiling() and seen.is_inference()
    if torch.compiler.is_compiling() or (unseen and not hasattr(seen, "_is_new")):
        return from_bool(seen[..., :keys])
    known = (-1 if unseen else seen._version), keys
    found = _made.get(seen)
    if found is None or found[0] != known:
        found = _made[seen] = known, from_bool(seen[..., :keys])
    return found[1]
