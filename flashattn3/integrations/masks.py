"""The mask function of transformers: which segments a mask consists of.

Left and right padding, the unused rows of a static cache, chunked attention and packed sequences
all divide the rows of a batch into consecutive segments within which attention is plain causal, or
has a window. The mask function finds their limits on the device and waits for nothing; runs of
padding are segments of their own, so no token is moved and none is dropped. ``segments.py`` has
the tensor that carries them to the layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError, shown
from .dense_masks import dense_mask
from .libraries import release
from .refused_models import expect_attention
from .segments import (
    AHEAD,
    HOLES,
    INSTEAD,
    OFF_CHUNKS,
    TOO_MANY,
    Segments,
    edges_of,
    most_packed,
)

REMAP = "remap_positions_for_packed_sequence"
KNOWN = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "packed_sequence_mask_function",
    REMAP,
)
OUTERMOST = "causal_mask_function", "bidirectional_mask_function", "and_mask"  # of and_masks


def mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    config=None,
    device: torch.device | str | None = None,
    use_vmap: bool = False,
    **others,
) -> Tensor | None:
    """The mask of one kind of layer, as transformers' AttentionMaskInterface calls it.

    Args:
        kv_length, q_length: rows of keys and of queries; kv_offset, q_offset: their first positions
            in the sequence. transformers 4.57 passes cache_position, the positions of the queries.
        mask_function: (batch, head, query position, key position) → whether the key is visible.
        attention_mask: (batch, positions), bool, False for padding.
        local_size: width of a window or of a chunk.
        allow_is_causal_skip: False where sequences are packed.
        allow_is_bidirectional_skip: passed for masks that are not causal alone.
        use_vmap: whether the model adds a mask function of its own.

    Returns: None for plain attention, where causal attention has one query or as many as keys;
        ``Segments.as_mask()``; or transformers' own bool mask, if the mask is of another kind. A
        hole between tokens is in its values, which the first layer reads.

    Raises: UnsupportedError: the mask is of another kind, in compiled code.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedError(
            "transformers mask: attention_mask must be 2-dimensional, got "
            f"{shown(attention_mask)}; {INSTEAD}"
        )
    causal, compiling = allow_is_bidirectional_skip is None, torch.compiler.is_compiling()
    given = {"batch_size": batch_size, "kv_length": kv_length, "mask_function": mask_function}
    given |= {"kv_offset": kv_offset, "attention_mask": attention_mask}
    if cache_position is None:
        given |= {"q_length": q_length, "q_offset": q_offset, "device": device}
        given["use_vmap"] = use_vmap
    else:
        given["cache_position"] = cache_position
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        device = cache_position.device
    other = _of_another_kind(mask_function, use_vmap, config, local_size)
    if other is not None:
        if compiling:
            raise UnsupportedError(other)
        return dense_mask(given)  # which any attention reads
    if config is not None and not compiling:
        expect_attention(config, (id(config), get_ident(), causal, local_size))
    made = _mask_of_segments(
        batch_size, kv_length, mask_function, q_length, q_offset, kv_offset, attention_mask,
        local_size, allow_is_causal_skip, config, device, causal,
    )  # fmt: skip
    if made is not None and not compiling:
        made._dense = partial(dense_mask, given)
    return made


def _mask_of_segments(
    batch_size: int,
    kv_length: int,
    mask_function: Callable,
    q_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    attention_mask: Tensor | None,
    local_size: int | None,
    allow_is_causal_skip: bool,
    config,
    device: torch.device | str | None,
    causal: bool,
) -> Tensor | None:
    """The arguments of ``mask``."""
    left, chunk = _window_and_chunk(config, local_size, causal)
    by_row = not causal and left < 0
    visible = kv_length  # a mask of ones that is shorter hides the keys of a row from here on
    if 1 == q_length < kv_length and _is_full(attention_mask, kv_length if by_row else None):
        visible, attention_mask = attention_mask.shape[-1] - kv_offset, None
    first_query = 0 if q_length == kv_length else q_offset - kv_offset
    packed = not allow_is_causal_skip and attention_mask is None and q_length == kv_length
    in_chunks = chunk is not None and chunk < kv_length and _counts_by_row(mask_function)
    reach = left if left < kv_length - 1 else -1
    plain = Segments(causal, reach, in_chunks=in_chunks, lengths=(q_length, kv_length))
    rows = _Rows(batch_size, q_length, kv_length, first_query, visible)
    # A static cache is longer than the keys that it holds.
    ends_early = isinstance(first_query, Tensor) or min(first_query + q_length, visible) < kv_length
    if attention_mask is None and (by_row or not (chunk or ends_early or packed)):
        must_say = causal and q_length > 1 and (q_length != kv_length or _says_otherwise(config))
        return None if plain.left < 0 and not must_say else plain.as_mask(device)
    known = attention_mask is None and not torch.compiler.is_compiling()
    if q_length == 1 and known and not (chunk or packed or plain.left >= 0):
        end = torch.ones(batch_size, dtype=torch.int32, device=device) + first_query
        end = end.clamp(max=visible).int()  # some releases give positions in 64 bits
        return plain._replace(cache_seqlens=end).as_mask(device)
    positions = torch.arange(kv_length, device=device) + kv_offset
    valid = None if attention_mask is None else _valid(attention_mask, positions, batch_size)
    if by_row:
        return _mask_of_rows(plain, rows, valid, known=False)
    if q_length == 1:
        query = torch.arange(1, device=device) + q_offset
        seen = _seen(mask_function, batch_size, query, positions)
        seen = seen.expand(batch_size, -1) if valid is None else seen & valid
        return _mask_of_rows(plain._replace(left=-1), rows, seen, known)
    per_row = 1 + ends_early
    if valid is not None:
        per_row += 2  # padding on both sides
    if chunk is not None:
        per_row += kv_length // chunk + 2
    if packed:
        per_row += (most_packed(kv_length) if torch.compiler.is_compiling() else kv_length) - 1
    if left == 0:
        per_row = kv_length
    limit = batch_size * min(per_row, kv_length)
    if not in_chunks or not packed or _chunks_begin_with_sequences():
        chunk = None
    return _mask_of_function(plain, rows, mask_function, positions, valid, ends_early, chunk, limit)


def _says_otherwise(config) -> bool:
    """Return whether layers without a mask may be bidirectional, although this mask is causal: the
    text of PaliGemma is, and None would show it all tokens."""
    return bool(getattr(config, "use_bidirectional_attention", False))


def _is_full(attention_mask: Tensor | None, length: int | None) -> bool:
    """Return whether the mask of a step of generate is of ones, and of this length. Before 5.18
    generate passes such a mask where nothing is padded. Reading it takes less time than describing
    it and reading the description in the first layer."""
    if attention_mask is None or torch.compiler.is_compiling():
        return False
    if release(sys.modules["transformers"].__version__) >= (5, 18):
        return False
    return length in (None, attention_mask.shape[-1]) and bool(attention_mask.all())


class _Rows(NamedTuple):
    """Sizes of one mask. first_query: index of the first query among the keys of its row. visible:
    number of keys of a row that may be seen."""

    batch: int
    q_length: int
    kv_length: int
    first_query: int | Tensor
    visible: int | Tensor


def _mask_of_rows(plain: Segments, rows: _Rows, seen: Tensor, known: bool) -> Tensor:
    """Segments where all queries of a row see the same keys: one query, or all tokens.

    seen: (batch, kv_length), which keys. known: whether these follow each other.
    """
    begin, count = seen.int().argmax(-1), seen.sum(-1)
    faults = None
    if not known:
        starts = seen & ~seen.roll(1, -1)
        starts[:, 0] = seen[:, 0]
        faults = {HOLES: (starts.sum(-1) > 1).any()}
    end = (begin + count).clamp(max=rows.visible)
    segments = plain._replace(cache_seqlens=end.int(), cache_leftpad=begin.int())
    if rows.q_length > 1:
        segments = segments.packed((rows.q_length, rows.kv_length))
    return segments.as_mask(seen.device, faults)


def _seen(mask_function: Callable, batch_size: int, query: Tensor, key: Tensor) -> Tensor:
    """Which positions of keys the mask function shows to those of queries, (batch or 1, ·)."""
    batch = torch.arange(batch_size, device=key.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=key.device)
    return mask_function(batch, head, query[None], key[None])


def _mask_of_function(
    plain: Segments,
    rows: _Rows,
    mask_function: Callable,
    positions: Tensor,
    valid: Tensor | None,
    ends_early: bool,
    chunk: int | None,
    limit: int,
) -> Tensor | None:
    """Segments where queries and keys are aligned: self-attention that is causal or has a window.

    The mask function itself is asked where they begin: a key that does not see the key before it
    begins one. chunk: its size, where chunks are counted from the beginning of a row of packed
    sequences. limit: most segments that the batch can have; the last ones are empty if it has
    fewer.
    """
    later, earlier = positions[1:], positions[:-1]
    begins = positions.new_ones((rows.batch, rows.kv_length), dtype=torch.bool)
    begins[:, 1:] = ~_seen(mask_function, rows.batch, later, earlier)
    faults = {}
    if plain.causal and torch.compiler.is_compiling():  # which does not see all of the function
        faults[AHEAD] = _seen(mask_function, rows.batch, earlier, later).any()
    if chunk is not None:
        faults[OFF_CHUNKS] = (begins[:, 1:] & (later % chunk != 0)).any()
    if valid is not None:
        begins[:, 1:] |= valid[:, 1:] != valid[:, :-1]
        runs = (valid[:, 1:] & ~valid[:, :-1]).sum(-1) + valid[:, 0]
        faults[HOLES] = (runs > 1).any()
    if ends_early:
        end = rows.first_query + rows.q_length
        begins |= torch.arange(rows.kv_length, device=positions.device) == end
    if torch.compiler.is_compiling():
        faults[TOO_MANY] = begins.sum() > limit
    keys = edges_of(begins, limit)
    if rows.q_length == rows.kv_length:
        queries = keys
    else:
        within = (keys % rows.kv_length - rows.first_query).clamp(0, rows.q_length)
        queries = (keys // rows.kv_length * rows.q_length + within).int()
    segments = plain._replace(cu_seqlens_q=queries, cu_seqlens_k=keys)
    # The unused rows of a static cache alone need no reading.
    known = limit == rows.batch * (1 + ends_early)
    return segments.as_mask(positions.device, None if known else faults)


def _valid(attention_mask: Tensor, positions: Tensor, batch: int) -> Tensor:
    """Which keys are tokens, (batch, kv_length): those past the end of the mask are not."""
    length = attention_mask.shape[-1]
    inside = attention_mask.bool()[:, positions.clamp(max=length - 1)]
    return (inside & (positions < length)).expand(batch, -1)


def _window_and_chunk(config, local_size: int | None, causal: bool) -> tuple[int, int | None]:
    """(keys that a window shows on the left, size of a chunk): -1 and None where there is none."""
    if local_size is None:
        return -1, None
    if getattr(config, "attention_chunk_size", None) == local_size:
        return -1, local_size
    return (local_size - 1 if causal else local_size), None


def _of_another_kind(
    mask_function: Callable, use_vmap: bool, config, local_size: int | None
) -> str | None:
    """Why segments cannot describe a mask, or None. They can if it is composed of transformers' own
    functions for causal masks, windows, chunks and packed sequences. The compiler cannot read
    closures; there the outermost function and ``AHEAD`` decide."""
    if local_size is not None:
        window = getattr(config, "sliding_window", None) == local_size
        if window == (getattr(config, "attention_chunk_size", None) == local_size):
            return (
                f"transformers mask: local_size must be either the config's sliding_window or its "
                f"attention_chunk_size, got {local_size}; {INSTEAD}"
            )
    if torch.compiler.is_compiling():  # the compiler of torch 2.11 reads __name__ alone
        unknown = {mask_function.__name__}.difference(OUTERMOST)
    else:
        unknown = set(_names_in(mask_function)).difference(KNOWN)
    if use_vmap:
        unknown.add("the model's own mask function")
    if not unknown:
        return None
    return (
        "transformers mask: it must be causal or bidirectional, with windows, chunks, padding or "
        f"packed sequences, got {', '.join(sorted(unknown))}; {INSTEAD}"
    )


def _counts_by_row(mask_function: Callable) -> bool:
    """Return whether chunks begin with a row, and not with each packed sequence. The compiler
    cannot tell."""
    return torch.compiler.is_compiling() or REMAP not in _names_in(mask_function)


def _chunks_begin_with_sequences() -> bool:
    """Return whether transformers is 5.23 or newer, where chunks begin with each packed sequence.
    The compiler of torch 2.11 cannot import from transformers."""
    return hasattr(sys.modules["transformers.masking_utils"], REMAP)


def _names_in(function: Callable) -> list[str]:
    """Names of a mask function and of all functions in its closure."""
    names = [function.__qualname__.split(".")[0]]
    for cell in function.__closure__ or ():
        contents = cell.cell_contents
        for inner in contents if isinstance(contents, (tuple, list)) else (contents,):
            if callable(inner) and hasattr(inner, "__qualname__"):
                names += _names_in(inner)
    return names
