"""The mask argument of the attention functions."""

from __future__ import annotations

from torch import Tensor

from ..errors import shown, type_error, value_error
from .mask import Mask

_NOTHING = (None,) * 6


def call_tensors(
    function: str, mask: object, q: object, k: object, axis: int = 1
) -> tuple[Tensor | None, ...]:
    """The tensors of a mask in the order of ``Tensors``, after its lengths are compared with those
    of q and k, which its tensors do not have. axis: of the tokens, the second or the third of
    four."""
    if mask is None:
        return _NOTHING
    if not isinstance(mask, Mask):
        wanted = "a flashattn3.masks.Mask (masks.from_bool makes one of a bool tensor)"
        raise type_error(function, "mask", wanted, shown(mask))
    # Other errors are raised where q and k are checked.
    shape_q, shape_k = getattr(q, "shape", ()), getattr(k, "shape", ())
    if len(shape_q) == 4 and shape_q[axis] != mask.seqlen_q:
        raise _other_length(function, "q", shape_q[axis], mask.seqlen_q)
    if len(shape_k) == 4 and shape_k[axis] != mask.seqlen_k:
        raise _other_length(function, "k", shape_k[axis], mask.seqlen_k)
    return mask.tensors


def _other_length(function: str, name: str, wanted: int, length: int) -> ValueError:
    return value_error(function, f"mask.seqlen_{name}", f"{wanted} as {name}'s", length)
