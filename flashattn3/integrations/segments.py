"""Segments: sequences of queries and keys in the rows of a batch, and the tensor that carries them
from transformers' mask function to its layers.

A mask passes through transformers as a tensor, whose *shape* carries what is not data. It has four
axes, because transformers leaves only such masks alone, and int32 data viewed as uint32, ``DTYPE``:
torch adds no such tensor to scores and selects none by it, so a model that computes with the mask
itself gets an error. Data is expanded along the axes that it does not have. left is the reach of a
window in keys, -1 where there is none; flags are those below.

| made | shape | data |
|---|---|---|
| for one query in each row | (1 to 3, 1 + flags, extent, batch) | cache_seqlens, cache_leftpad |
| else, eager | (2 or 3, 1 + flags, left + 2, edges) | cu_seqlens of the queries and of the keys |
| else, compiled | (4 or 4 + q, 1 + flags + 16 · (left + 1), extent, 2 · edges) | the same |

extent: seqlen_q + seqlen_k + 1; q: seqlen_q where it is not seqlen_k. So these shapes say for which
lengths a mask is made, and compiled code compares them as it compiles. An eager mask of several
queries is copied by generate, so its size must not depend on the lengths: eager code compares an
attribute, compiled code the last edges, by an assertion on the device. A ``PLAIN`` mask is one
dense call; its data are the lengths. A third row says which fault the mask has, so it is not
checked yet.

A mask that a user made for a call has the call's seqlen_q or 1 in axis 2 and seqlen_k or 1 in axis
3. Ours never has both: extent is greater than seqlen_q, and an eager mask of several queries gets
as many edges that axis 3 has neither.

The first layer that meets an unchecked mask reads it, with all others of its forward: one wait for
the device, whatever the number of masks and layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock, get_ident
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import UnsupportedError, shown, value_error

DTYPE = torch.uint32
INSTEAD = "use attn_implementation='sdpa' or 'flex_attention' for this part of the model"
HOLES = (
    "transformers mask: the tokens of a row must follow each other, got padding between them; "
    + INSTEAD
)
AHEAD = "transformers mask: a causal mask must not show the next token; " + INSTEAD
OFF_CHUNKS = (
    "transformers mask: packed sequences must begin at multiples of attention_chunk_size, because "
    "transformers before 5.23 counts chunks from the beginning of a row; use transformers 5.23 or "
    "newer, or pass each sequence in a row of its own"
)
FAULTS = HOLES, AHEAD, OFF_CHUNKS
MISFIT = (
    "transformers attention: attention_mask must be for the lengths of the call: its layer does "
    "not use the mask that its model made for it; " + INSTEAD
)
CAUSAL, CHUNKED, ONE_QUERY, PLAIN = 1, 2, 4, 8  # flags
COMPILED = 4  # in axis 0, of a mask of several queries that compiled code made; others have less
FEW_OF_A_ROW, TOKENS_OF_ANOTHER = 8, 16
TOO_MANY = (
    f"transformers mask: compiled code takes {FEW_OF_A_ROW} packed sequences in a row, and one "
    f"more for every {TOKENS_OF_ANOTHER} tokens, on average over the batch; pass cu_seq_lens_q and "
    "cu_seq_lens_k, which have no limit, or do not compile the model"
)
IN_CHUNKS = (
    "transformers attention: cu_seq_lens_q must be None where attention is in chunks, which are "
    "counted from the beginning of a row; pass position_ids with use_cache=False and no "
    "attention_mask, to transformers 5.23 or newer"
)


class Segments(NamedTuple):
    """How the rows of one call are divided, and the mask within a segment.

    left: keys visible before the diagonal, and after it if not causal; -1: all.
    cu_seqlens_q, cu_seqlens_k: int32 (segments + 1,) over the flattened batch; None: every row of
        the batch is one segment.
    in_chunks: whether segments are chunks that are counted from the beginning of a row. In compiled
        code: whether they are chunks.
    cache_seqlens, cache_leftpad: int32 (batch,), of one query in each row, in place of cu_seqlens:
        where the keys that it sees end and begin; None: at the last, at the first.
    lengths: (seqlen_q, seqlen_k) that a mask is made for. A call compares its own.
    dense: a bool mask in place of all others, where there are faults (dense_masks.py).
    """

    causal: bool
    left: int = -1
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    in_chunks: bool = False
    cache_seqlens: Tensor | None = None
    cache_leftpad: Tensor | None = None
    lengths: tuple[int, int] | None = None
    dense: Tensor | None = None

    @staticmethod
    def of_mask(mask: Tensor, batch: int, lengths: tuple[int, int], layer: object) -> Segments:
        """Read what ``as_mask`` returned. Another mask raises, and so does one with a fault or of
        other lengths.

        batch: number of rows of the call. lengths: its (seqlen_q, seqlen_k). layer: for messages.
        """
        sizes = mask.shape
        if mask.dtype != DTYPE or len(sizes) != 4 or _fits_scores(sizes, *lengths):
            raise UnsupportedError(
                "transformers attention: attention_mask must be None, or 2-dimensional where the "
                f"model takes it, or 4-dimensional with bools or floats, got {shown(mask)}; "
                f"{INSTEAD}"
            )
        compiling = torch.compiler.is_compiling()
        made_for = _lengths_in(sizes)
        if made_for is None and not compiling:
            made_for = getattr(mask, "_segments_of", None)
        data = mask.view(torch.int32)
        if made_for is None:
            count = 1 if _flags(sizes) & PLAIN else batch
            same = [data[i, 0, 0, -1] == count * n for i, n in enumerate(lengths)]
            torch._assert_async(same[0] & same[1], MISFIT)
        elif made_for[0] != lengths[0] or made_for[1] != lengths[1]:
            raise _misfit(made_for, lengths, layer)
        if sizes[0] == 3:
            checked = None if compiling else _checked(mask, batch)
            if checked is not None:
                return checked
            torch._assert_async(data[2, 0, 0, 0] == 0, " or ".join(FAULTS))
        return _segments(sizes, data)

    def as_mask(self, device: torch.device, faults: dict[str, Tensor] | None = None) -> Tensor:
        """The tensor for transformers. lengths must be set.

        faults: a bool tensor for each of FAULTS that the mask may have: whether it does. None: the
            mask has none, and nothing in it must be read. A compiled function asserts on the device
            that it has none.
        """
        queries, keys = self.lengths
        extent, compiling = queries + keys + 1, torch.compiler.is_compiling()
        flags, reach = CAUSAL * self.causal + CHUNKED * self.in_chunks, 2 + self.left
        if self.cache_seqlens is not None:
            rows = [x for x in (self.cache_seqlens, self.cache_leftpad) if x is not None]
            flags, reach = flags + ONE_QUERY, extent
        elif self.cu_seqlens_q is None:
            rows = [torch.full((2,), n, dtype=torch.int32, device=device) for n in self.lengths]
            flags += PLAIN
        else:
            rows = [self.cu_seqlens_q, self.cu_seqlens_k]
        to_read = faults is not None and not compiling
        if to_read:
            found = torch.zeros_like(rows[0])
            for message, flag in faults.items():
                found |= flag.int() << FAULTS.index(message)
            rows.append(found)
        elif faults:
            for message, flag in faults.items():
                torch._assert_async(~flag, message)
        if not compiling and not flags & ONE_QUERY and len(rows[0]) == keys:
            rows = [torch.cat((x, x[-1:])) for x in rows]  # one more segment, which is empty
        data = torch.stack(rows).view(DTYPE)[:, None, None]
        if compiling and not flags & ONE_QUERY:
            data = data.reshape(1, 1, 1, -1)
            others = 0 if queries == keys else queries
            return data.expand(COMPILED + others, 1 + flags + 16 * (1 + self.left), extent, -1)
        mask = data.expand(-1, 1 + flags, reach, -1)
        if not compiling:
            mask._segments_of = self.lengths
        if to_read:
            with _lock:
                _readings[mask] = _Unread(get_ident())
        return mask

    def packed(self, lengths: tuple[int, int]) -> Segments:
        """The same with cu_seqlens in place of cache_seqlens and cache_leftpad: in each row the
        keys that no query sees, those that all queries of the row see, and those that none sees.

        lengths: (seqlen_q, seqlen_k) of the call.
        """
        end = self.cache_seqlens
        if end is None:
            return self
        zero = torch.zeros_like(end)
        begin = zero if self.cache_leftpad is None else self.cache_leftpad
        queries = _flattened((zero, zero, torch.full_like(end, lengths[0])), lengths[0])
        keys = _flattened((zero, begin, end), lengths[1])
        return Segments(self.causal, self.left, queries, keys, self.in_chunks, lengths=lengths)

    def hidden_in(self, bias: Tensor, batch: int) -> Tensor:
        """A bias of the scores (batch or 1, ·, seqlen_q, seqlen_k), with -inf where a query does
        not see a key."""
        queries, keys = (torch.arange(n, device=bias.device) for n in bias.shape[2:])
        rows = torch.arange(batch, device=bias.device)[:, None]
        if self.cu_seqlens_q is None:
            after_query, after_key = bias.shape[2] - queries[None], bias.shape[3] - keys[None]
            seen = torch.ones((1, *bias.shape[2:]), dtype=torch.bool, device=bias.device)
        else:
            segments, to_end = [], []
            for tokens, edges in ((queries, self.cu_seqlens_q), (keys, self.cu_seqlens_k)):
                place = (rows * len(tokens) + tokens).int()
                segment = torch.searchsorted(edges[1:], place, right=True, out_int32=True)
                segments.append(segment)
                to_end.append(edges[1:][segment.long()] - place)
            after_query, after_key = to_end
            seen = segments[0][:, :, None] == segments[1][:, None]
        distance = after_key[:, None] - after_query[:, :, None]  # of a key before its query
        if self.causal:
            seen = seen & (distance >= 0)
        if self.left >= 0:
            seen = seen & (distance <= self.left)
            if not self.causal:
                seen = seen & (distance >= -self.left)
        return bias.masked_fill(~seen[:, None], -torch.inf)

    def cut_at(
        self, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, lengths: tuple
    ) -> Segments:
        """Divide the segments further at the limits of packed sequences.

        lengths: (seqlen_q, seqlen_k) of the call.
        """
        if cu_seqlens_q is None or cu_seqlens_k is None:
            missing = "cu_seq_lens_q" if cu_seqlens_q is None else "cu_seq_lens_k"
            wanted = "a tensor: cu_seq_lens_q and cu_seq_lens_k belong together"
            raise value_error("transformers attention", missing, wanted, None)
        new = cu_seqlens_q.int(), cu_seqlens_k.int()
        if self.in_chunks and torch.compiler.is_compiling():
            # Chunks are right where every sequence begins with one.
            torch._assert_async(torch.isin(new[0], self.cu_seqlens_q).all(), IN_CHUNKS)
        elif self.in_chunks:
            raise UnsupportedError(IN_CHUNKS)
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


def _misfit(made_for: tuple[int, int], lengths: tuple[int, int], layer: object) -> UnsupportedError:
    return UnsupportedError(
        f"transformers attention: attention_mask must be for the lengths of the call, {lengths} "
        f"queries and keys, got one for {made_for}: {type(layer).__name__} does not use the mask "
        f"that its model made for it; {INSTEAD}"
    )


def is_plain(mask: Tensor) -> bool:
    """Return whether a mask of ``as_mask`` is one dense call, without segments."""
    return bool(_flags(mask.shape) & PLAIN)


def _flags(sizes: Sequence[int]) -> int:
    return (sizes[1] - 1) & 15


def _fits_scores(sizes: Sequence[int], queries: int, keys: int) -> bool:
    """Return whether a mask of these sizes is one of a user, for scores of (queries, keys)."""
    if sizes[0] >= COMPILED or _flags(sizes) & ONE_QUERY:
        return sizes[2] == 1 or sizes[2] == queries
    return sizes[0] == 1 or sizes[3] == 1 or sizes[3] == keys


def _lengths_in(sizes: Sequence[int]) -> tuple[int, int] | None:
    """(seqlen_q, seqlen_k) that a mask of these sizes is made for; None if they do not say."""
    total = sizes[2] - 1
    if sizes[0] == COMPILED:
        return total // 2, total // 2
    if sizes[0] > COMPILED:
        return sizes[0] - COMPILED, total - (sizes[0] - COMPILED)
    return (1, total - 1) if _flags(sizes) & ONE_QUERY else None


def _segments(sizes: Sequence[int], data: Tensor) -> Segments:
    """sizes, data: of a mask, the data as int32."""
    flags = _flags(sizes)
    causal, in_chunks = bool(flags & CAUSAL), bool(flags & CHUNKED)
    if flags & ONE_QUERY:
        rows = (data[0, 0, 0],) if sizes[0] == 1 else data[:2, 0, 0]
        return Segments(causal, -1, None, None, in_chunks, *rows)
    compiled = sizes[0] >= COMPILED
    left = (sizes[1] - 1) // 16 - 1 if compiled else sizes[2] - 2
    if flags & PLAIN:
        return Segments(causal, left, in_chunks=in_chunks)
    rows = data[0, 0, 0].view(2, -1) if compiled else data[:2, 0, 0]
    return Segments(causal, left, *rows, in_chunks)


def _flattened(limits: tuple[Tensor, ...], length: int) -> Tensor:
    """cu_seqlens over the flattened batch from the limits in each row of so many tokens."""
    batch = limits[0].shape[0]
    offsets = torch.arange(batch, device=limits[0].device)[:, None] * length
    within = (torch.stack(limits, -1) + offsets).flatten()
    return torch.nn.functional.pad(within, (0, 1), value=batch * length).int()


class _Reading(NamedTuple):
    """What a mask says. fault: its message, or None. segments: without the empty ones at the end.
    filled: number of segments with keys."""

    fault: str | None
    segments: Segments
    filled: int


class _Unread(NamedTuple):
    """thread: identifier of the thread that made the mask, so that another thread, whose stream may
    be another one, does not read the mask beside its own."""

    thread: int


# Masks of eager forwards, and what a layer has read in them. An entry goes with its mask, so it
# serves no other one.
_readings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = Lock()


def _checked(mask: Tensor, batch: int) -> Segments | None:
    """The segments of a mask, none if every row of the batch is one; None if the mask is a copy of
    one that was read, such as the copies for layers on other devices."""
    with _lock:
        reading = _readings.get(mask)
        if reading is None:
            known = [of for of, found in _known_masks() if type(found) is _Reading]
            if any(of.shape == mask.shape for of in known):
                return None
        if type(reading) is not _Reading:
            _readings[mask] = _Unread(get_ident())
            _read_masks(mask.device)
            reading = _readings[mask]
    fault, segments, filled = reading
    if fault:
        raise UnsupportedError(fault)
    if segments.dense is not None:
        return segments
    whole = segments._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    return whole if filled == batch else segments


def _known_masks() -> Iterator[tuple[Tensor, _Reading | _Unread]]:
    """The masks that live, and what was read in them. A list of the references is made at once:
    masks of other threads end meanwhile, and with them their entries."""
    for reference in _readings.keyrefs():
        mask = reference()
        if mask is not None:
            yield mask, _readings[mask]


def _read_masks(device: torch.device) -> None:
    """Read this thread's masks on the device that no layer has read, in one wait for it."""
    own = _Unread(get_ident())
    unread = [m for m, reading in _known_masks() if reading == own and m.device == device]
    numbers = torch.stack([_numbers_of(mask) for mask in unread]).tolist()
    for mask, (fault, end, filled) in zip(unread, numbers, strict=True):
        message = next((text for i, text in enumerate(FAULTS) if fault >> i & 1), None)
        has_holes = fault == 1 << FAULTS.index(HOLES)  # and no other fault
        if has_holes and hasattr(mask, "_dense"):  # which a copy does not have
            _readings[mask] = _Reading(None, Segments(False, dense=mask._dense()), filled)
            continue
        kept = None if _flags(mask.shape) & ONE_QUERY else end + 1
        edges = mask.view(torch.int32)[..., :kept][:, :1, :1].clone()  # a view would keep the mask
        _readings[mask] = _Reading(message, _segments(mask.shape, edges), filled)


def _numbers_of(mask: Tensor) -> Tensor:
    """(3,): the fault, the number of segments before the empty ones at the end, and the number of
    segments with keys; of one query in each row: the fault and zeros."""
    data = mask.view(torch.int32)
    if _flags(mask.shape) & ONE_QUERY:
        return torch.nn.functional.pad(data[2, 0, 0, :1].long(), (0, 2))
    edges = data[:2, 0, 0]
    inside = (edges < edges[:, -1:]).any(0)
    return torch.stack((data[2, 0, 0, 0].long(), inside.sum(), edges[1].diff().count_nonzero()))


def most_packed(length: int) -> int:
    """Most packed sequences in a row of so many tokens, on average over the batch, where nothing
    can be read: in compiled code. The kernels' workspace and their time grow with this number, so
    it is not the number of tokens. ``TOO_MANY`` is the error."""
    return min(length, FEW_OF_A_ROW + length // TOKENS_OF_ANOTHER)


def edges_of(begins: Tensor, count: int) -> Tensor:
    """cu_seqlens, int32 (count + 1,), of the segments that begin at the True elements; the last
    ones are empty if there are fewer than count."""
    total = begins.numel()
    found = torch.nonzero_static(begins.flatten(), size=count, fill_value=total)
    return torch.nn.functional.pad(found.flatten(), (0, 1), value=total).int()
