"""The order of a depth-first visit of trees, on the device: an ancestor's visit is an interval that
contains those of its descendants."""

from __future__ import annotations

import torch
from torch import Tensor


def visits(parents: Tensor) -> tuple[Tensor, Tensor]:
    """When the visit of each token begins and ends, int64 (batch, seqlen).

    parents: int64 (batch, seqlen), before their children; negative: none.

    Sums along the ways to the root take log2(seqlen) steps, each with ancestors twice as far away
    (pointer jumping, Wyllie 1979).
    """
    seqlen = parents.shape[1]
    # Token 0 is a root above all, its own parent.
    above = torch.nn.functional.pad(parents.clamp(min=-1) + 1, (1, 0), value=0)
    steps = seqlen.bit_length()
    size = torch.ones_like(above)
    ancestor = above
    is_root = torch.zeros_like(above, dtype=torch.bool)
    is_root[:, 0] = True
    for _ in range(steps):
        # What reaches the root or passes it is counted at an extra place, and dropped.
        place = torch.where(ancestor == 0, seqlen + 1, ancestor)
        room = torch.nn.functional.pad(size, (0, 1))
        size = room.scatter_add(1, place, size)[:, :-1]
        ancestor = ancestor.gather(1, ancestor)
    order = torch.where(is_root, -1, above).argsort(dim=-1, stable=True)
    sorted_size = size.gather(1, order)
    before = sorted_size.cumsum(-1) - sorted_size  # of all tokens with a smaller parent, or sibling
    siblings = above.gather(1, order)
    begins = torch.ones_like(siblings, dtype=torch.bool)
    begins[:, 1:] = siblings[:, 1:] != siblings[:, :-1]
    begins[:, 1:2] = True
    of_group = torch.where(begins, before, 0).cummax(-1).values
    offset = torch.zeros_like(size).scatter(1, order, before - of_group + 1)
    offset = torch.where(is_root, 0, offset)
    ancestor = above
    for _ in range(steps):
        offset = offset + offset.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    return offset[:, 1:], offset[:, 1:] + size[:, 1:]
