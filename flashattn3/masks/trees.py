"""The order of a depth-first visit of trees, on the device: an ancestor's visit is an interval that
contains those of its descendants."""

from __future__ import annotations

import torch
from torch import Tensor


def visits(parents: Tensor) -> tuple[Tensor, Tensor]:
    """When the visit of each token begins and ends, int64 (batch, seqlen).

    parents: integers (batch, seqlen); negative: none. A later one counts as the token before.

    Sums along the ways to the root take log2(seqlen) steps, each with ancestors twice as far away
    (pointer jumping, Wyllie 1979).
    """
    seqlen = parents.shape[1]
    # Token 0 is above all others. It is its own parent, so that its size counts no tokens.
    before = torch.arange(-1, seqlen - 1, device=parents.device)
    parent = torch.minimum(parents.long(), before).clamp(min=-1)
    parent = torch.nn.functional.pad(parent + 1, (1, 0), value=-1)
    ancestors = [parent.clamp(min=0)]
    for _ in range(seqlen.bit_length() - 1):
        ancestors.append(ancestors[-1].gather(1, ancestors[-1]))
    size = torch.ones_like(parent)
    for ancestor in ancestors:
        size = size.scatter_add(1, ancestor, size)
    siblings, order = parent.sort(dim=-1, stable=True)
    sorted_size = size.gather(1, order)
    before = sorted_size.cumsum(-1) - sorted_size  # of all tokens with a smaller parent, or sibling
    of_group = before.gather(1, torch.searchsorted(siblings, siblings))
    offset = torch.empty_like(size).scatter(1, order, before - of_group + 1)
    offset[:, 0] = 0
    for ancestor in ancestors:
        offset = offset + offset.gather(1, ancestor)
    return offset[:, 1:], offset[:, 1:] + size[:, 1:]
