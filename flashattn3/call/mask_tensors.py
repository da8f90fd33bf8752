"""The tensors of a ``masks.Mask`` in a call, checked and described without their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import expect, value_error
from .metadata import Metadata
from .tensor_checks import check_device

if TYPE_CHECKING:
    from .fields import Options

ROWS, COLUMNS = 128, 64  # of a block; its bit tile has a word of 64 bits for each row


class BlockMask(NamedTuple):
    """The mask of a problem: its batch and its query heads, each 1 where all share one."""

    batch: int
    heads: int


def check_alone(function: str, options: Options, bias: object, varlen: bool) -> None:
    """Raise for arguments that a mask replaces: it says all that is visible."""
    beside = "beside mask, which is complete"
    if varlen:
        wanted = "None with cu_seqlens: masks.documents(lengths) packs documents into a dense row"
        raise value_error(function, "mask", wanted, "a Mask")
    if options.causal:
        wanted = f"False {beside}: masks.documents has causal, others & masks.window(seqlen, -1)"
        raise value_error(function, "causal", wanted, True)
    window = options.window_left, options.window_right
    if window != (-1, -1):
        wanted = f"(-1, -1) {beside}: pass mask & masks.window(seqlen, left, right)"
        raise value_error(function, "window_size", wanted, window)
    wanted = f"None {beside}: put -inf into the bias instead"
    expect(bias is None, function, "bias", wanted, "a tensor")


def check_mask(
    function: str, q: Metadata, seqlen_k: int, batch: int, tensors: tuple[Metadata, ...]
) -> None:
    """Raise unless the mask's batch, heads, blocks and device fit.

    tensors: entries, work and tiles of queries, then those of keys.
    """
    sizes = batch, q.shape[-2]
    lengths = (q.shape[1], seqlen_k), (seqlen_k, q.shape[1])
    shared = tensors[0].shape[:2]
    for name, found, size in zip(("batch", "heads"), shared, sizes, strict=True):
        fits, wanted = found == size or found == 1, "{} as q's, or 1"
        expect(fits, function, f"mask.{name}", wanted, found, size)
    for (rows, columns), (entries, work, tiles) in zip(
        lengths, (tensors[:3], tensors[3:]), strict=True
    ):
        blocks = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
        shapes = (*shared, *blocks), (*shared, blocks[0], 4), (tiles.shape[0], ROWS)
        dtypes = torch.int32, torch.int32, torch.int64
        for x, shape, dtype in zip((entries, work, tiles), shapes, dtypes, strict=True):
            fits = tuple(x.shape) == tuple(shape) and x.dtype == dtype
            got = x.dtype, tuple(x.shape)
            expect(fits, function, "mask", "{} {}", got, dtype, tuple(shape))
            check_device(function, "mask", x, q.device, "q")


def mask_of(entries: Metadata | None) -> BlockMask | None:
    return None if entries is None else BlockMask(*entries.shape[:2])
