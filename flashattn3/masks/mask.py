"""The mask of attention: which keys each query sees, as lists of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree

from ..errors import expect, shown, type_error
from . import drawing
from .block_lists import (
    BLOCK_COLUMNS,
    FULL,
    PARTIAL,
    BlockLists,
    Grid,
    Places,
    assembled,
    bools_of,
    kinds_of,
    num_visible,
    words_of,
)


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees: an object that is built once, for all layers and both passes.

    The functions of ``flashattn3.masks`` build masks; ``&``, ``|`` and ``~`` combine them. A mask
    is a pytree of tensors and lives on one device. It holds, for each block of 128 queries, the
    list of the blocks of 64 keys that one of them sees, a tile of 1 KB of bits for each block that
    has visible and hidden scores, and the same for blocks of 128 keys and 64 queries, which the
    backward reads. ``nbytes`` says how much memory that takes: 4 bytes for each block, and 1 KB for
    each tile that there is room for.

    seqlen_q, seqlen_k: the lengths that q and k must have.
    of_queries, of_keys: the lists of blocks of queries, and those of blocks of keys.
    """

    of_queries: BlockLists
    of_keys: BlockLists
    seqlen_q: int
    seqlen_k: int

    @property
    def batch(self) -> int:
        """1: the mask is that of every batch_idx."""
        return self.of_queries.entries.shape[0]

    @property
    def heads(self) -> int:
        """Query heads; 1: the mask is that of every head."""
        return self.of_queries.entries.shape[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch | 1, heads | 1, seqlen_q, seqlen_k)."""
        return self.batch, self.heads, self.seqlen_q, self.seqlen_k

    @property
    def device(self) -> torch.device:
        return self.of_queries.entries.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The six tensors of the mask: entries, work and tiles of queries, then those of keys."""
        q, k = self.of_queries, self.of_keys
        return q.entries, q.work, q.tiles, k.entries, k.work, k.tiles

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(x.numel() * x.element_size() for x in self.tensors)

    @property
    def density(self) -> Tensor:
        """The share of visible scores, float32 () on the mask's device."""
        grid = self.grid
        visible = num_visible(self.of_queries, grid).float()  # not torch's default dtype
        return visible / max(1, grid.rows * grid.columns) / max(1, grid.batch * grid.heads)

    @property
    def grid(self) -> Grid:
        return Grid(*self.shape)

    def to(self, device: torch.device | str) -> Mask:
        """The mask with its tensors on a device."""
        return _pytree.tree_map(lambda x: x.to(device), self)

    def to_bool(self) -> Tensor:
        """bool (batch | 1, heads | 1, seqlen_q, seqlen_k), True where a query sees a key."""
        return bools_of(self.of_queries, self.grid)

    def __and__(self, other: Mask) -> Mask:
        return _combined("&", self, other, torch.minimum, torch.bitwise_and)

    def __or__(self, other: Mask) -> Mask:
        return _combined("|", self, other, torch.maximum, torch.bitwise_or)

    __iand__, __ior__ = __and__, __or__  # torch.compile of 2.11 needs the names

    def __invert__(self) -> Mask:
        return self.inverse()

    def inverse(self) -> Mask:
        """``~mask``, also in code that torch.compile traces, which knows no ``~`` of objects."""
        return _by_side(_inverse, self.grid, self)

    def __bool__(self) -> bool:
        raise TypeError("Mask: a mask is neither true nor false; combine masks by &, | and ~")

    def __str__(self) -> str:
        return drawing.text(self)

    def __repr__(self) -> str:
        return f"Mask({drawing.summary(self)})"


def _by_side(lists_of: Callable[..., BlockLists], grid: Grid, *masks: Mask) -> Mask:
    """The mask whose lists of either side ``lists_of`` computes from those of the masks."""
    of_queries = lists_of(grid, *(mask.of_queries for mask in masks))
    of_keys = lists_of(grid.transposed, *(mask.of_keys for mask in masks))
    return Mask(of_queries, of_keys, grid.rows, grid.columns)


def _inverse(grid: Grid, lists: BlockLists) -> BlockLists:
    kinds, bits = FULL - kinds_of(lists), words_of(lists)
    most = lists.tiles.shape[0]
    if grid.columns % BLOCK_COLUMNS:  # a block that overhangs is partial unless it is hidden
        most += grid.num_blocks // grid.shape[-1]
        kinds[..., -1] = PARTIAL
    return assembled(grid, kinds, lambda at: ~bits(at), most)


def _combined(name: str, mask: Mask, other: object, of_kinds: Callable, of_bits: Callable) -> Mask:
    if not isinstance(other, Mask):
        raise type_error("Mask", f"the right side of {name}", "a Mask", shown(other))
    lengths = mask.seqlen_q, mask.seqlen_k
    _expect_same(name, "(seqlen_q, seqlen_k)", lengths, (other.seqlen_q, other.seqlen_k))
    _expect_same(name, "device", mask.device, other.device)
    sizes = []
    for axis, own, size in zip(("batch", "heads"), mask.shape, other.shape, strict=False):
        if own != 1 and size != 1:
            _expect_same(name, axis, own, size)
        sizes.append(own if size == 1 else size)

    def lists_of(grid: Grid, *sides: BlockLists) -> BlockLists:
        words = [words_of(side) for side in sides]
        kinds = of_kinds(*(kinds_of(side) for side in sides))
        copies = [grid.batch * grid.heads // max(1, _num_lists(side)) for side in sides]
        most = sum(n * side.tiles.shape[0] for n, side in zip(copies, sides, strict=True))

        def bits(at: Places) -> Tensor:
            return of_bits(*(of(at) for of in words))

        return assembled(grid, kinds, bits, most)

    return _by_side(lists_of, Grid(*sizes, *lengths), mask, other)


def _num_lists(lists: BlockLists) -> int:
    return lists.entries.shape[0] * lists.entries.shape[1]


def _expect_same(name: str, what: str, own: object, got: object) -> None:
    side = (
        f"the right side's {what}" if what != "lengths" else "the right side's (seqlen_q, seqlen_k)"
    )
    expect(own == got, f"mask {name} mask", side, f"{own} as the left side's", got)


def _register(cls: type, children: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    """Make a dataclass a pytree of its children; the other fields are plain values."""

    def flatten(x: object) -> tuple[list, list]:
        return [getattr(x, name) for name in children], [getattr(x, name) for name in others]

    def flatten_with_keys(x: object) -> tuple[list, list]:
        values, context = flatten(x)
        return [(_pytree.GetAttrKey(k), v) for k, v in zip(children, values, strict=True)], context

    _pytree.register_pytree_node(
        cls,
        flatten,
        lambda values, context: cls(*values, *context),
        serialized_type_name=f"flashattn3.masks.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


_register(BlockLists, ("entries", "work", "tiles"))
_register(Mask, ("of_queries", "of_keys"), ("seqlen_q", "seqlen_k"))
