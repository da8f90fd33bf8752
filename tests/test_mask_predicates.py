"""mask_mods computed by broadcast positions: the scores of torch.vmap, or left to it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from flashattn3.masks import predicates

IDS = torch.arange(60) // 7 % 5
OF_BATCH = torch.stack([IDS, IDS + 1])
SHIFT = torch.tensor([3, 250, 7], dtype=torch.uint8)
LIMIT = torch.tensor(260)
WORDS = torch.arange(60 * 4).view(60, 4) % 9


def causal(b, h, q, k):
    return q >= k


# name: mask_mod, whether it is computed at once
MODS = {
    "causal": (causal, True),
    "documents": (lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), True),
    "of batch and head": (lambda b, h, q, k: (OF_BATCH[b, q] != 2) | (k < SHIFT[h]), True),
    "joined": (and_masks(causal, or_masks(causal, lambda b, h, q, k: k % 3 == 0)), True),
    "promotion": (lambda b, h, q, k: SHIFT[h] + LIMIT > 10 * k, True),
    "functions": (lambda b, h, q, k: torch.where(q > 9, (q - k).abs() <= 5, k < 4), True),
    "nothing": (noop_mask, True),
    "an int beside an index": (lambda b, h, q, k: WORDS[q, 1] <= WORDS[k, 1], True),
    "rows of a table": (lambda b, h, q, k: (WORDS[q] == WORDS[k]).any(), False),
    "a vector": (lambda b, h, q, k: ((IDS[:4] == q % 5) & (IDS[:4] <= k)).any(), False),
    "the number of axes": (lambda b, h, q, k: (q >= k) if q.ndim == 0 else (q < k), False),
    "a shape": (lambda b, h, q, k: q >= k + len(q.shape), False),
    "a sum": (lambda b, h, q, k: q.sum() >= k, False),
    "a stack": (lambda b, h, q, k: torch.stack([q >= k, k < 2]).any(0), False),
}
# The same for the vmap of torch 2.9, which takes no int beside an index.
WORD = WORDS[:, 1]
OF_VMAP = {"an int beside an index": lambda b, h, q, k: WORD[q] <= WORD[k]}


@pytest.mark.parametrize("name", MODS)
def test_a_mask_mod_sees_the_scores_that_vmap_sees(name):
    mask_mod, at_once = MODS[name]
    sizes = 2, 3, 60, 50
    found = predicates._broadcast(mask_mod, sizes, torch.device("cpu"))
    assert (found is not None) == at_once
    wanted = create_mask(OF_VMAP.get(name, mask_mod), *sizes, device="cpu")
    assert torch.equal(predicates.seen_by(mask_mod, *sizes, torch.device("cpu")), wanted)


def test_an_error_of_a_mask_mod_is_its_own():
    with pytest.raises(RuntimeError, match="data-dependent"):
        predicates.seen_by(lambda b, h, q, k: q if q > 3 else k, 1, 1, 5, 5, torch.device("cpu"))
