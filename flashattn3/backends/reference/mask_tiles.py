"""What a ``masks.Mask`` shows of a tile of scores, from its lists of blocks and its bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...call.operands import Scaled, Tensors, tensors_of_mask
from ...masks.bits import unpacked
from ...masks.block_lists import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    HIDDEN,
    BlockLists,
    Grid,
    Places,
    kinds_of,
    words_of,
)

if TYPE_CHECKING:
    from ...call.problem import Problem


class MaskTiles:
    """The mask of a dense call. Tiles of scores come as (batch * num_heads_q, queries, keys).

    reads: whether the kinds of blocks are read on the host, so that hidden tiles are skipped.
    """

    def __init__(self, problem: Problem, tensors: Tensors, reads: bool) -> None:
        lists = BlockLists(*tensors_of_mask(tensors)[:3])
        self.shape = problem.batch, problem.num_heads_q
        self.grid = Grid(*problem.mask, problem.seqlen_q, problem.seqlen_k)
        self.words, self.device = words_of(lists), lists.entries.device
        self.seen = _seen_on_host(lists) if reads else None
        self.last: tuple[range, range, Tensor] | None = None

    def sees_any(self, queries: range, keys: range) -> bool:
        """Whether a query of any head may see a key."""
        if self.seen is None:
            return True
        rows, columns = (_blocks(*span) for span in ((queries, BLOCK_ROWS), (keys, BLOCK_COLUMNS)))
        return any(any(self.seen[row][columns.start : columns.stop]) for row in rows)

    def visible(self, queries: range, keys: range) -> Tensor:
        """bool (batch | 1, heads | 1, queries, keys)."""
        if self.last is None or self.last[:2] != (queries, keys):
            self.last = queries, keys, self._visible(queries, keys)
        return self.last[2]

    def _visible(self, queries: range, keys: range) -> Tensor:
        rows, columns = _blocks(queries, BLOCK_ROWS), _blocks(keys, BLOCK_COLUMNS)
        sizes = range(self.grid.batch), range(self.grid.heads), rows, columns
        axes = [torch.arange(of.start, of.stop, device=self.device) for of in sizes]
        places = Places(*(x.flatten() for x in torch.meshgrid(*axes, indexing="ij")))
        tiles = unpacked(self.words(places)).view(*map(len, sizes), BLOCK_ROWS, BLOCK_COLUMNS)
        seen = tiles.transpose(-2, -3).flatten(-2).flatten(2, 3)
        top, left = rows.start * BLOCK_ROWS, columns.start * BLOCK_COLUMNS
        seen = seen[..., queries.start - top : queries.stop - top, :]
        return seen[..., keys.start - left : keys.stop - left]

    def fill_hidden(self, tile: Tensor, queries: range, keys: range, value: float) -> None:
        """Set hidden elements of a tile in place, even where they are NaN."""
        hidden = ~self.visible(queries, keys)
        tile.view(*self.shape, *tile.shape[1:]).masked_fill_(hidden, value)

    def without_hidden(self, values: Tensor, queries: range, keys: range) -> Tensor:
        """The values (batch * num_heads_q, keys, ·) of a tile, 0 where none of the queries sees the
        key, so that NaN there does not reach them."""
        hidden = ~self.visible(queries, keys).any(-2).unsqueeze(-1)
        tile = values.view(*self.shape, *values.shape[1:]).masked_fill(hidden, 0.0)
        return tile.view(values.shape)


def _seen_on_host(lists: BlockLists) -> list[list[bool]]:
    """Which blocks a head of a batch_idx has in its lists."""
    return (kinds_of(lists) != HIDDEN).any(0).any(0).tolist()


def _blocks(span: range, size: int) -> range:
    """The blocks that overlap a span."""
    return range(span.start // size, -(-span.stop // size))


def with_query_heads(problem: Problem, tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """The call with k and v of each query head: heads that share them may see different keys.

    dtype: of k and v; None: their own.
    """

    def repeated(x: Tensor | Scaled) -> Tensor | Scaled:
        if type(x) is Scaled:
            return x._replace(data=repeated(x.data))
        return x.to(dtype or x.dtype).repeat_interleave(problem.qhead_per_kvhead, -2)

    return tensors._replace(k=repeated(tensors.k), v=repeated(tensors.v))
