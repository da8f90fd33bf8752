"""Packed sequences that a layer finds by position_ids, in models that give their mask function no
positions."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import TOO_MANY, edges_of, most_packed


class _ReadPositions(NamedTuple):
    """The position_ids that were read last, for a batch of rows of a length, and their cu_seqlens.

    version: of the tensor; an inference tensor has none. layer: that read them, and its index.
    """

    position_ids: weakref.ref
    version: int | None
    batch: int
    length: int
    layer: weakref.ref
    layer_idx: int | None
    edges: Tensor | None


_last_positions: list[_ReadPositions] = []  # at most one


def edges_of_positions(
    position_ids: Tensor, batch: int, length: int, layer: torch.nn.Module
) -> Tensor | None:
    """cu_seqlens of packed sequences, for models that give their mask function no positions: a
    sequence begins where a position is not the one before it plus 1, as transformers has it. None
    if every row is one sequence, and for positions of another shape.

    The first layer of a forward reads the positions for all, which get the same tensor. In the next
    forward their values may have changed. A compiled function cannot read them: there may be
    ``most_packed`` sequences.
    """
    if position_ids.shape not in ((1, length), (batch, length)):
        return None
    if torch.compiler.is_compiling():
        begins, count = _begins(position_ids, batch), batch * most_packed(length)
        torch._assert_async(begins.sum() <= count, TOO_MANY)
        return edges_of(begins, count)
    index = getattr(layer, "layer_idx", None)
    version = None if position_ids.is_inference() else position_ids._version
    for of, of_version, of_batch, of_length, reader, reader_index, edges in _last_positions:
        if of() is position_ids and (of_version, of_batch, of_length) == (version, batch, length):
            ordered = index is not None and reader_index is not None
            later = index > reader_index if ordered else reader() is not layer
            if later and reader() is not None:
                return edges
    begins = _begins(position_ids, batch)
    count = int(begins.sum())
    edges = None if count == batch else edges_of(begins, count)
    of = weakref.ref(position_ids), version, batch, length
    _last_positions[:] = [_ReadPositions(*of, weakref.ref(layer), index, edges)]
    return edges


def _begins(position_ids: Tensor, batch: int) -> Tensor:
    later = (position_ids.diff(dim=-1) != 1).expand(batch, -1)
    return torch.nn.functional.pad(later, (1, 0), value=True)
