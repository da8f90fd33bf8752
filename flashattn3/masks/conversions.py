"""Masks from bools and from FlexAttention's block masks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import shown, type_error, value_error
from . import triton_lists
from .arguments import checked_tensor, without_copies
from .block_lists import BlockLists, Grid
from .captured import captured_tensors
from .construction import MOST_SCORES, of_block_predicate, of_predicate
from .known_code import MOST, key_of, known_code_of, places_of
from .mask import Mask
from .predicates import Code

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def from_bool(visible: Tensor) -> Mask:
    """The mask of a bool tensor, which a GPU reads once.

    Args:
        visible: (seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k) or (batch | 1, heads | 1,
            seqlen_q, seqlen_k), True where a query sees a key. Axes that are expanded (stride 0)
            count as 1.

    Any block may be partial: the mask has room for seqlen_q * seqlen_k / 4 bytes of bits for each
    batch_idx and head of visible.
    """
    axes = "(batch | 1, heads | 1, seqlen_q, seqlen_k)"
    visible = checked_tensor("masks.from_bool", "visible", visible, axes, 2, 3, 4, boolean=True)
    if visible.ndim == 2:
        visible = visible.expand(1, 1, -1, -1)
    elif visible.ndim == 3:
        visible = visible.unsqueeze(1)
    visible = without_copies(visible)
    grid = Grid(*visible.shape)
    if grid.num_scores and triton_lists.serve(visible.device):
        lists = triton_lists.of_bools(grid, visible, (None, None))
        return Mask(*lists, grid.rows, grid.columns)

    def seen(batch_idx: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible[batch_idx, head, query, key]

    return of_predicate(grid, seen, visible)


def from_block_mask(block_mask: BlockMask, function: str = "masks.from_block_mask") -> Mask:
    """The mask of a ``BlockMask`` of torch.nn.attention.flex_attention.

    Its mask_mod is computed in its partial blocks, once. The mask has the batch and heads of the
    block mask, where None became 1, and room for as many partial blocks as there are blocks:
    seqlen_q * seqlen_k / 4 bytes of bits for each batch_idx and head.

    function: named by errors.

    Raises: TypeError: block_mask is no BlockMask. ValueError: its mask_mod reads a tensor on
        another device, or it has fewer blocks than its seq_lengths need, as a part of it may.
    """
    if not isinstance(block_mask, _block_mask_type()):
        wanted = "a BlockMask of torch.nn.attention.flex_attention"
        raise type_error(function, "block_mask", wanted, shown(block_mask))
    indices = block_mask.kv_indices
    by_kernels = triton_lists.serve(indices.device)
    if by_kernels:
        lists = _lists_like_before(block_mask)
        if lists is not None:
            return Mask(*lists, *block_mask.seq_lengths)
    if indices.ndim != 4:
        name = "block_mask.kv_indices.shape"
        raise value_error(function, name, "of four axes", tuple(indices.shape))
    block_q, block_k = block_mask.BLOCK_SIZE
    queries, keys = block_mask.seq_lengths
    for axis, length, size in ((2, queries, block_q), (3, keys, block_k)):
        if indices.shape[axis] * size < length:
            name, needed = f"block_mask.kv_indices.shape[{axis}]", -(-length // size)
            wanted = f"at least {needed}, the blocks of {size} tokens in block_mask.seq_lengths"
            raise value_error(function, name, wanted, indices.shape[axis])
    grid = Grid(*indices.shape[:2], queries, keys)
    by_kernels = by_kernels and 0 < grid.num_scores <= MOST_SCORES
    # Code reads tensors of the device alone.
    code = known_code_of(block_mask.mask_mod, indices.device) if by_kernels else None
    if code is None:
        _expect_same_device(function, block_mask.mask_mod, indices.device)
    if by_kernels and (code is not None or block_k % 8 == 0):
        return Mask(*_lists_by_kernels(block_mask, grid, code), grid.rows, grid.columns)
    partial = _dense(block_mask.kv_num_blocks, indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    mask_mod = block_mask.mask_mod

    def visible(batch_idx: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = batch_idx, head, query // block_q, key // block_k
        return full[place] | (partial[place] & _computed(mask_mod, batch_idx, head, query, key))

    blocks = -(-queries // block_q), -(-keys // block_k)
    partial, full = (x[..., : blocks[0], : blocks[1]] for x in (partial, full))
    return of_block_predicate(grid, visible, partial | full, full, block_q, block_k, (None, None))


@cache
def _block_mask_type() -> type:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask


# The builds of block masks which differ in no more than the values of tensors, and the places of
# their tensors among the variables of mask_mod.
_known: dict[tuple, tuple[triton_lists.BitsBuild, tuple[int, ...]]] = {}


def _key_of(block_mask: BlockMask) -> tuple[tuple | None, list]:
    """That of a build, and what ``key_of`` gives with it. None if tensors are copied first."""
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    full_counts, full_indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    is_partial = full_counts is None
    for x in (counts, indices) if is_partial else (counts, indices, full_counts, full_indices):
        if not _is_plain(x):
            return None, []
    key, variables = key_of(block_mask.mask_mod)
    if key is None:
        return None, []
    sizes = *block_mask.seq_lengths, *block_mask.BLOCK_SIZE
    return (key, sizes, indices.shape, indices.device, is_partial), variables


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.int32 and x.is_contiguous()


def _lists_like_before(block_mask: BlockMask) -> tuple[BlockLists, BlockLists] | None:
    """None for a block mask whose build is not known."""
    key, variables = _key_of(block_mask)
    known = _known.get(key)
    if known is None:
        return None
    build, places = known
    of_blocks = block_mask.kv_num_blocks, block_mask.kv_indices
    of_blocks += block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return build((*[variables[i] for i in places], *of_blocks))


def _lists_by_kernels(
    block_mask: BlockMask, grid: Grid, code: Code | None
) -> tuple[BlockLists, BlockLists]:
    """code: of the mask_mod; None for one that torch.vmap must compute, in blocks of 8 n keys."""
    given = block_mask.kv_num_blocks, block_mask.kv_indices
    given += block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    # BlockMask.from_kv_blocks takes int64 too.
    given = [x if x is None or _is_plain(x) else x.int().contiguous() for x in given]
    lists = triton_lists.BlockMaskLists(*given, *block_mask.BLOCK_SIZE)
    if code is not None:
        key, variables = _key_of(block_mask)
        places = places_of(code, variables) if key is not None and lists.is_whole else None
        if places is not None:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = triton_lists.build_of_code(grid, code, lists, (None, None)), places
        return triton_lists.of_code(grid, code, lists, (None, None))
    from torch.nn.attention.flex_attention import create_mask

    sizes = grid.batch, grid.heads, grid.rows, grid.columns
    visible = create_mask(block_mask.mask_mod, *sizes, device=lists.indices.device)
    return triton_lists.of_bools(grid, visible, (None, None), lists.blocks())


def _dense(counts: Tensor, indices: Tensor) -> Tensor:
    """bool (batch, heads, query blocks, key blocks): the first ``counts`` of the indices."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts.unsqueeze(-1)
    places = torch.where(listed, indices.long(), columns)
    found = listed.new_zeros((*indices.shape[:-1], columns + 1))
    return found.scatter(-1, places, listed)[..., :columns]


def _computed(mask_mod, batch_idx: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """mask_mod, which takes scalars, at (tiles, ·, ·); query or key may be the later axis."""
    from torch.nn.attention.flex_attention import create_mask

    num_tiles, rows = query.shape[0], query.flatten(1)
    of_tile = batch_idx.flatten(), head.flatten(), rows, key.flatten(1)

    def at_tile(tile: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        b, h, q, k = of_tile
        return mask_mod(b[tile], h[tile], q[tile, row], k[tile, column])

    shape = num_tiles, 1, rows.shape[1], of_tile[3].shape[1]
    found = create_mask(at_tile, *shape, device=query.device).squeeze(1)
    return found if query.shape[2] == 1 else found.mT


def _expect_same_device(function: str, mask_mod, device: torch.device) -> None:
    """Raise if mask_mod has captured a tensor on another device."""
    for name, captured in captured_tensors(mask_mod):
        if captured.device != device:
            wanted = f"on {device} as the block mask"
            raise value_error(function, f"{name}, which mask_mod reads,", wanted, captured.device)
