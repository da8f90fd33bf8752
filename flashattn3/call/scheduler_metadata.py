"""Scheduler metadata: the lengths and options that a cached call was prepared for.

An int32 tensor of metadata_size(batch): HEADER words (magic number, hash of the options), then
PER_SEQUENCE words for each sequence: cached tokens, new tokens, queries, left padding. A call whose
own numbers differ returns NaN rows, so stale metadata never gives plausible numbers. A sequence
without new tokens fits any number of them, as one metadata may serve calls with k and without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cached import DecodeOptions
from .fields import ScoreScale, is_capped

HEADER, PER_SEQUENCE = 2, 4
MAGIC = 0x6B763031
_LARGEST_HASH = 2**31 - 1


def metadata_size(batch: int) -> int:
    return HEADER + PER_SEQUENCE * batch


# Options on which no metadata depends, but that a score may be capped. FlashAttention-3 has no
# split_tokens: metadata for num_splits=0 serves every number.
_FREE = {*ScoreScale._fields, "pack_gqa", "return_lse", "backend", "out_dtype", "function"}
_FREE |= {"split_tokens"}
_SCHEDULED = tuple(name for name in DecodeOptions._fields if name not in _FREE)
_SIZES = "num_heads_q", "num_heads_kv", "headdim", "headdim_v", "page_size"
_MOST_KNOWN = 4096
# Options behind the hashes of this process, so that an error can name the option that differs.
_known: dict[int, dict[str, object]] = {}


def hash_of_options(sizes: tuple[int, ...], dtype: torch.dtype, options: DecodeOptions) -> int:
    """The same in every process, unlike Python's hash of a string.

    sizes: numbers of query and of KV heads, head dims of k and of v, page size, 0 for dense.
    """
    options = options._replace(
        window_right=-1 if options.causal else options.window_right,
        num_splits=max(0, options.num_splits),
    )
    scheduled = {name: getattr(options, name) for name in _SCHEDULED}
    total = sum(str(dtype).encode())
    for number in (*sizes, is_capped(options), *scheduled.values()):
        total = (total * 1_000_003 + int(number) + 2) % _LARGEST_HASH
    if not torch.compiler.is_compiling():
        scheduled["window_size"] = scheduled.pop("window_left"), scheduled.pop("window_right")
        of_tensors = dict(zip(_SIZES, (*sizes[:-1], sizes[-1] or None), strict=True))
        of_tensors |= {"qkv_dtype": dtype}
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[total] = of_tensors | {"has_softcap": is_capped(options)} | scheduled
    return total


def differences(wanted_hash: int, found_hash: int) -> tuple[str, str]:
    """The arguments of get_scheduler_metadata that two hashes differ by, and those wanted."""
    wanted, found = _known.get(wanted_hash), _known.get(found_hash)
    if wanted is None or found is None:
        return "made with the options of this call", "other options"
    names = [name for name in wanted if wanted[name] != found[name]]
    said = [", ".join(f"{name}={of[name]}" for name in names) for of in (wanted, found)]
    return f"made with {said[0]}", said[1]


def make_metadata(
    batch: int,
    options_hash: int,
    cache_seqlens: Tensor | int,
    seqlen_new: int,
    cu_seqlens_k_new: Tensor | None,
    seqlen_q: int,
    cu_seqlens_q: Tensor | None,
    cache_leftpad: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Fill a metadata tensor on the device; nothing is read on the host."""
    found = torch.empty(metadata_size(batch), dtype=torch.int32, device=device)
    found[0], found[1] = MAGIC, options_hash
    columns = found[HEADER:].view(batch, PER_SEQUENCE)
    columns[:, 0] = cache_seqlens
    columns[:, 1] = seqlen_new if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    columns[:, 2] = seqlen_q if cu_seqlens_q is None else cu_seqlens_q.diff()
    columns[:, 3] = 0 if cache_leftpad is None else cache_leftpad
    return found
