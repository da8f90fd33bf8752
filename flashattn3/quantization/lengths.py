"""The checks of cu_seqlens and max_seqlen of what is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.arguments import expect_local, length
from ..call.tensor_checks import check_device
from ..call.value_checks import check_edges, check_longest, is_checked
from ..errors import expect, shown, type_error, value_error
from ..modes import is_traced


def checked_lengths(
    function: str, of: str, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | Tensor | None
) -> int | None:
    """Check and return max_seqlen of a varlen batch, at most the total; None for a dense batch.

    x: a tensor to quantize, of this name in errors.
    """
    varlen, name = cu_seqlens is not None, "cu_seqlens"
    if varlen:
        expect_local(function, name, cu_seqlens)
    wanted = "3 with cu_seqlens" if varlen else "4 without cu_seqlens"
    expect(x.ndim == 4 - varlen, function, f"{of}.ndim", wanted, x.ndim)
    if varlen != (max_seqlen is not None):
        wanted = "given with cu_seqlens and only then"
        raise value_error(function, "max_seqlen", wanted, shown(max_seqlen))
    if not varlen:
        return None
    if cu_seqlens.dtype != torch.int32:
        raise type_error(function, f"{name}.dtype", torch.int32, cu_seqlens.dtype)
    shape, wanted = tuple(cu_seqlens.shape), "(batch + 1,), at least (1,)"
    expect(len(shape) == 1 and shape[0] >= 1, function, f"{name}.shape", wanted, shape)
    check_device(function, name, cu_seqlens, x.device, of)
    longest = length(function, "max_seqlen", max_seqlen)
    if is_checked(x.device) and not is_traced():
        lengths = check_edges(function, name, cu_seqlens, x.shape[0])
        check_longest(function, "max_seqlen", longest, lengths)
    return x.shape[0] if longest is None else min(longest, x.shape[0])
