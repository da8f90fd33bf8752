"""The checks of ``get_scheduler_metadata``, before its tensor is filled."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.arguments import integer
from ..call.cached import DECODE
from ..call.cached_checks import DTYPES, MAX_CAPACITY, check_options, check_tensors
from ..call.dtypes import FP8
from ..call.scheduler_metadata import hash_of_options, make_metadata
from ..errors import expect, shown, value_error


def scheduler_metadata(
    given: dict[str, object],
    tensors: dict[str, Tensor | None],
    batch_size: int,
    qkv_dtype: torch.dtype,
    lengths: dict[str, int],
    sizes: dict[str, int],
    page_size: int | None,
) -> Tensor:
    """given: options of the call; the others are arguments under the names of the function's."""
    function = "get_scheduler_metadata"
    options = DECODE.convert(function, given)
    check_tensors(function, 1, **tensors)
    cache_seqlens = tensors["cache_seqlens"]
    batch = _counted(function, "batch_size", batch_size, 0)
    for name, x in tensors.items():
        if x is not None:
            entries = (batch + name.startswith("cu_"),)
            expect(tuple(x.shape) == entries, function, f"{name}.shape", entries, tuple(x.shape))
            expect(x.dtype == torch.int32, function, f"{name}.dtype", torch.int32, x.dtype)
            wanted = cache_seqlens.device
            expect(x.device == wanted, function, f"{name}.device", wanted, x.device)
    check_options(options)
    legal = *DTYPES, FP8
    if qkv_dtype not in legal:
        raise value_error(function, "qkv_dtype", f"one of {legal}", shown(qkv_dtype))
    lengths = {name: _counted(function, name, x, 0) for name, x in lengths.items()}
    sizes = {name: _counted(function, name, x, 1) for name, x in sizes.items()}
    heads_kv = sizes["num_heads_kv"]
    fits, wanted = sizes["num_heads_q"] % heads_kv == 0, f"a multiple of num_heads_kv, {heads_kv}"
    expect(fits, function, "num_heads_q", wanted, sizes["num_heads_q"])
    page_size = 0 if page_size is None else _counted(function, "page_size", page_size, 1)
    return make_metadata(
        batch,
        hash_of_options((*sizes.values(), page_size), qkv_dtype, options),
        cache_seqlens,
        lengths["max_seqlen_k_new"],
        tensors["cu_seqlens_k_new"],
        lengths["max_seqlen_q"],
        tensors["cu_seqlens_q"],
        tensors["cache_leftpad"],
        cache_seqlens.device,
    )


def _counted(function: str, name: str, number: object, least: int) -> int:
    """A number of 32 bits."""
    count = integer(function, name, number)
    wanted = f"between {least} and {MAX_CAPACITY}"
    expect(least <= count <= MAX_CAPACITY, function, name, wanted, count)
    return count
