"""The masks of transformers as segments: sequences of queries and keys in a row of the batch.

Left and right padding, the unused rows of a static cache, chunked attention and packed sequences
all divide the rows of a batch into consecutive segments within which attention is plain causal, or
has a window. The mask function returns their limits as cu_seqlens; runs of padding are segments of
their own, so no token is moved and none is dropped.

A mask passes through transformers as a tensor, whose *shape* carries what is not data:
(2, 1 + causal, left + 2, 1 + number of segments), int32: cu_seqlens of the queries and of the keys,
expanded along axes 1 and 2; left is the reach of a window in keys, -1 where there is none. No
segment stands for one dense call. Four axes, because transformers leaves only such masks alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError, shown

INSTEAD = "use attn_implementation='sdpa' or 'flex_attention' for this part of the model"
KNOWN = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)


class Segments(NamedTuple):
    """How the rows of one call are divided, and the mask within a segment.

    left: keys visible before the diagonal, and after it if not causal; -1: all.
    cu_seqlens_q, cu_seqlens_k: int32 (segments + 1,) over the flattened batch; None: every row of
        the batch is one segment.
    """

    causal: bool
    left: int = -1
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @staticmethod
    def of_mask(mask: Tensor | None) -> Segments | None:
        """Read what ``as_mask`` returned. None stays None; another mask raises."""
        if mask is None:
            return None
        if mask.dtype != torch.int32 or mask.ndim != 4 or mask.shape[0] != 2:
            raise UnsupportedError(
                "transformers attention: attention_mask must be None, or 2-dimensional where the "
                f"model takes it, got {shown(mask)}: flashattn3 does not support additive and "
                f"4-dimensional masks; {INSTEAD}"
            )
        segments = Segments(mask.shape[1] == 2, mask.shape[2] - 2)
        if mask.shape[3] == 1:
            return segments
        return segments._replace(cu_seqlens_q=mask[0, 0, 0], cu_seqlens_k=mask[1, 0, 0])

    def as_mask(self, device: torch.device) -> Tensor:
        if self.cu_seqlens_q is None:
            edges = torch.zeros(2, 1, 1, 1, dtype=torch.int32, device=device)
        else:
            edges = torch.stack((self.cu_seqlens_q, self.cu_seqlens_k))[:, None, None]
        return edges.expand(2, 1 + self.causal, 2 + self.left, edges.shape[-1])

    def cut_at(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, lengths: tuple) -> Segments:
        """Divide the segments further at the limits of packed sequences.

        lengths: (seqlen_q, seqlen_k) of the call.
        """
        new = cu_seqlens_q.int(), cu_seqlens_k.int()
        if self.cu_seqlens_q is None:
            return self._replace(cu_seqlens_q=new[0], cu_seqlens_k=new[1])
        if not self.causal or lengths[0] != lengths[1]:
            raise UnsupportedError(
                "transformers attention: cu_seq_lens_q must be None where attention_mask masks "
                f"tokens too, unless queries and keys are the same tokens; {INSTEAD}"
            )
        # A limit that both have becomes an empty segment.
        old = self.cu_seqlens_q, self.cu_seqlens_k
        merged = (torch.cat(pair).sort().values for pair in zip(old, new, strict=True))
        return Segments(self.causal, self.left, *merged)

    def at_positions(self, position_ids: Tensor, batch: int, lengths: tuple) -> Segments:
        """Divide rows where position 0 begins a sequence, for models that give their mask function
        no positions.

        lengths: (seqlen_q, seqlen_k) of the call; only where they are equal can rows be packed.
        """
        length = lengths[0]
        packable = length == lengths[1] and length > 1
        if not packable or position_ids.shape not in ((1, length), (batch, length)):
            return self
        edges = _edges_of_positions(position_ids, batch)
        return self._replace(cu_seqlens_q=edges, cu_seqlens_k=edges)


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

    Returns: None for plain attention, or ``Segments.as_mask()``.

    Raises: UnsupportedError: the mask is of another kind. To see a hole between tokens its values
        are read, once; a compiled function checks them on the device instead.
    """
    _refuse_unknown_functions(mask_function, use_vmap)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedError(
            "transformers mask: attention_mask must be 2-dimensional, got "
            f"{shown(attention_mask)}; {INSTEAD}"
        )
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        device = cache_position.device
    causal = allow_is_bidirectional_skip is None
    left, chunk = _window_and_chunk(config, local_size, causal)
    first_query = 0 if q_length == kv_length else q_offset - kv_offset
    plain = Segments(causal, left if left < kv_length - 1 else -1)
    rows = _Rows(batch_size, q_length, kv_length, first_query)
    positions = torch.arange(kv_length, device=device) + kv_offset
    valid = None if attention_mask is None else _valid(attention_mask, positions, batch_size)
    if not causal and left < 0:
        return None if valid is None else _mask_of_rows(plain, rows, valid)

    # A static cache is longer than the keys that it holds.
    ends_early = isinstance(first_query, Tensor) or first_query + q_length < kv_length
    packed = not allow_is_causal_skip and attention_mask is None and q_length == kv_length
    if valid is None and chunk is None and not ends_early and not packed:
        return None if plain.left < 0 else plain.as_mask(positions.device)
    limit = batch_size * kv_length
    if not packed:  # padding on both sides, unused rows, chunks
        limit = batch_size * (4 + (0 if chunk is None else kv_length // chunk + 2))
    return _mask_of_function(plain, rows, mask_function, positions, valid, ends_early, limit)


class _Rows(NamedTuple):
    """Sizes of one mask. first_query: index of the first query among the keys of its row."""

    batch: int
    q_length: int
    kv_length: int
    first_query: int | Tensor


def _mask_of_rows(plain: Segments, rows: _Rows, valid: Tensor) -> Tensor | None:
    """Segments where every query sees all tokens of its row: padding, tokens, padding."""
    starts = valid & ~valid.roll(1, -1)
    starts[:, 0] = valid[:, 0]
    if torch.compiler.is_compiling():
        torch._assert_async((starts.sum(-1) <= 1).all(), HOLES)
    else:
        holes, padding = torch.stack(((starts.sum(-1) > 1).any(), ~valid.all())).tolist()
        if holes:
            raise UnsupportedError(HOLES)
        if not padding:
            return None
    begin = starts.int().argmax(-1)
    end = begin + valid.sum(-1)
    zero, all_keys = torch.zeros_like(begin), torch.full_like(begin, rows.kv_length)
    all_queries = torch.full_like(begin, rows.q_length)
    keys = _flattened(torch.stack((zero, begin, end), -1), rows.kv_length, all_keys)
    queries = _flattened(torch.stack((zero, zero, all_queries), -1), rows.q_length, all_queries)
    return plain._replace(cu_seqlens_q=queries, cu_seqlens_k=keys).as_mask(valid.device)


def _flattened(limits: Tensor, length: int, last: Tensor) -> Tensor:
    """cu_seqlens over the flattened batch from the limits in each row, (batch, segments)."""
    batch = limits.shape[0]
    offsets = torch.arange(batch, device=limits.device)[:, None] * length
    total = last[:1] * batch
    return torch.cat(((limits + offsets).flatten(), total)).int()


def _mask_of_function(
    plain: Segments,
    rows: _Rows,
    mask_function: Callable,
    positions: Tensor,
    valid: Tensor | None,
    ends_early: bool,
    limit: int,
) -> Tensor | None:
    """Segments where queries and keys are aligned: self-attention that is causal or has a window.

    The mask function itself is asked where they begin: a key that does not see the key before it
    begins one. limit: most segments that the batch can have, for compiled functions.
    """
    batch = torch.arange(rows.batch, device=positions.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=positions.device)
    later, earlier = positions[None, 1:], positions[None, :-1]
    begins = positions.new_ones((rows.batch, rows.kv_length), dtype=torch.bool)
    begins[:, 1:] = ~mask_function(batch, head, later, earlier)
    faults = []
    if plain.causal:
        ahead = mask_function(batch, head, earlier, later)
        faults.append((ahead.any(), AHEAD))
    if valid is not None:
        begins[:, 1:] |= valid[:, 1:] != valid[:, :-1]
        runs = (valid[:, 1:] & ~valid[:, :-1]).sum(-1) + valid[:, 0]
        faults.append(((runs > 1).any(), HOLES))
    if ends_early:
        end = rows.first_query + rows.q_length
        begins |= torch.arange(rows.kv_length, device=positions.device) == end
    count = _checked_count(begins, faults, limit)
    if count == rows.batch:
        return None if plain.left < 0 else plain.as_mask(positions.device)
    keys = _edges(begins, count)
    if rows.q_length == rows.kv_length:
        queries = keys
    else:
        within = (keys % rows.kv_length - rows.first_query).clamp(0, rows.q_length)
        queries = (keys // rows.kv_length * rows.q_length + within).int()
    return plain._replace(cu_seqlens_q=queries, cu_seqlens_k=keys).as_mask(positions.device)


HOLES = (
    "transformers mask: the tokens of a row must follow each other, got padding between them; "
    + INSTEAD
)
AHEAD = "transformers mask: a causal mask must not show the next token; " + INSTEAD


def _checked_count(begins: Tensor, faults: list[tuple[Tensor, str]], limit: int) -> int:
    """Number of segments; the one place that waits for the device, once for all faults.

    A compiled function neither waits nor knows the number: it takes limit, with empty segments at
    the end, and checks the faults on the device.
    """
    if torch.compiler.is_compiling():
        for found, message in faults:
            torch._assert_async(~found, message)
        return limit
    flags = [found.long() for found, _ in faults]
    count, *found = torch.stack([begins.sum(), *flags]).tolist()
    for fault, (_, message) in zip(found, faults, strict=True):
        if fault:
            raise UnsupportedError(message)
    return count


def _edges(begins: Tensor, count: int) -> Tensor:
    """cu_seqlens, int32 (count + 1,), of the segments that begin at the True elements."""
    total = begins.numel()
    found = torch.nonzero_static(begins.flatten(), size=count, fill_value=total)
    return torch.nn.functional.pad(found.flatten(), (0, 1), value=total).int()


def _valid(attention_mask: Tensor, positions: Tensor, batch: int) -> Tensor:
    """Which keys are tokens, (batch, kv_length): those past the end of the mask are not."""
    length = attention_mask.shape[-1]
    inside = attention_mask.bool()[:, positions.clamp(max=length - 1)]
    return (inside & (positions < length)).expand(batch, -1)


def _window_and_chunk(config, local_size: int | None, causal: bool) -> tuple[int, int | None]:
    """(keys that a window shows on the left, size of a chunk): -1 and None where there is none."""
    if local_size is None:
        return -1, None
    window = getattr(config, "sliding_window", None) == local_size
    chunk = getattr(config, "attention_chunk_size", None) == local_size
    if window == chunk:
        raise UnsupportedError(
            f"transformers mask: local_size must be either the config's sliding_window or its "
            f"attention_chunk_size, got {local_size}; {INSTEAD}"
        )
    if chunk:
        return -1, local_size
    return (local_size - 1 if causal else local_size), None


def _refuse_unknown_functions(mask_function: Callable, use_vmap: bool) -> None:
    """Raise if the mask is not composed of transformers' own functions for causal masks, windows,
    chunks and packed sequences. The compiler cannot read closures; there the outermost function
    and ``AHEAD`` decide."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return
    if torch.compiler.is_compiling():
        plain = getattr(masking_utils, "bidirectional_mask_function", None)
        names = [] if mask_function is plain else [mask_function.__qualname__.split(".")[0]]
    else:
        names = _names_in(mask_function)
    unknown = set(names).difference(KNOWN)
    if use_vmap:
        unknown.add("the model's own mask function")
    if unknown:
        raise UnsupportedError(
            "transformers mask: it must be causal or bidirectional, with windows, chunks, padding "
            f"or packed sequences, got {', '.join(sorted(unknown))}; {INSTEAD}"
        )


def _names_in(function: Callable) -> list[str]:
    """Names of a mask function and of all functions in its closure."""
    names = [function.__qualname__.split(".")[0]]
    for cell in function.__closure__ or ():
        contents = cell.cell_contents
        for inner in contents if isinstance(contents, (tuple, list)) else (contents,):
            if callable(inner) and hasattr(inner, "__qualname__"):
                names += _names_in(inner)
    return names


# The latest position_ids, their version and their cu_seqlens.
_last_positions: list = [lambda: None, None, None]


def _edges_of_positions(position_ids: Tensor, batch: int) -> Tensor | None:
    """cu_seqlens of the sequences, None if every row is one.

    The positions are read once for all layers of a forward, which pass the same tensor. A compiled
    function cannot read them: there every token may be a sequence.
    """
    if torch.compiler.is_compiling():
        return _edges(_begins(position_ids, batch), batch * position_ids.shape[1])
    version = None if position_ids.is_inference() else position_ids._version
    if _last_positions[0]() is not position_ids or _last_positions[1] != version:
        begins = _begins(position_ids, batch)
        count = int(begins.sum())
        edges = _edges(begins, count) if count > batch else None
        _last_positions[:] = weakref.ref(position_ids), version, edges
    return _last_positions[2]


def _begins(position_ids: Tensor, batch: int) -> Tensor:
    begins = (position_ids == 0).expand(batch, -1).clone()
    begins[:, 0] = True
    return begins
