"""Cached calls with ``tree_mask`` and with ``alibi_slopes``."""

from __future__ import annotations

import pytest
import torch
from helpers import needs_hopper, words
from support.kvcache import CacheCase, call_cached, make_cache_inputs, words_of

import flashattn3
from flashattn3 import flash_attn_func, flash_attn_with_kvcache

CAUSAL = {"causal": True}


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_path_of_a_tree_is_a_sequence(backend, device):
    """Two branches behind a common node: each leaf has the result of its own path of tokens."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 1, 24, 2, 32, generator=generator).to(device, torch.float16)).unbind()
    paths = ([0], [0, 1], [0, 2], [0, 1, 3])
    seen = torch.zeros(1, 4, 4, dtype=torch.bool)
    for node, path in enumerate(paths):
        seen[0, node, path] = True
    tree = words_of(seen).to(device)
    out = flash_attn_with_kvcache(q[:, 20:], k, v, causal=True, tree_mask=tree, backend=backend)
    for node, path in enumerate(paths):
        keys = [*range(20), *(20 + token for token in path)]
        alone = flash_attn_func(q[:, 20 + node, None], k[:, keys], v[:, keys], backend="reference")
        torch.testing.assert_close(out[:, node], alone[:, 0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("rows", "longest"), [(None, None), (0, 0), (0, 5), (2, 0), (2, 5)])
def test_a_tree_without_queries(rows, longest, backend, device):
    """Their mask has no words. Rows of no sequence get zeros. rows: None: q is dense."""
    pytest.importorskip("triton")
    cache = torch.ones(2, 24, 2, 32, dtype=torch.float16, device=device)
    call = {"q": cache[:, :0], "tree_mask": words(2, 0, 0)}
    if rows is not None:
        edges = torch.zeros(3, dtype=torch.int32, device=device)
        call = {"q": cache[0, :rows], "cu_seqlens_q": edges, "max_seqlen_q": longest}
        call["tree_mask"] = words(rows, min(longest, 1))
    call |= {"tree_mask": call["tree_mask"].to(device), "causal": True, "backend": backend}
    out = flash_attn_with_kvcache(**call, k_cache=cache, v_cache=cache)
    assert out.shape == call["q"].shape and not out.any()


def test_a_length_that_is_not_read_leaves_one_or_two_words():
    """A max_seqlen_q on a GPU, or as here on the meta device. A mask without words has no bits."""
    cache = torch.zeros(2, 80, 2, 64, device="meta")
    edges = words(3).to("meta")
    call = {"q": cache[0, :8], "k_cache": cache, "v_cache": cache, "cu_seqlens_q": edges}
    call |= {"max_seqlen_q": torch.zeros((), dtype=torch.int32, device="meta"), "device": "cpu"}
    for number in (1, 2):
        tree = words(8, number).to("meta")
        flashattn3.explain_with_kvcache(**call, causal=True, tree_mask=tree)
    for number, wanted in ((0, 1), (3, 2)):
        tree = words(8, number).to("meta")
        with pytest.raises(ValueError, match=rf"tree_mask.shape must be \(8, {wanted}\)"):
            flashattn3.explain_with_kvcache(**call, causal=True, tree_mask=tree)


@pytest.mark.parametrize(
    ("backend", "slopes"),
    [
        *(
            (backend, axes)
            for backend in ("reference", "triton")
            for axes in ("heads", "batch heads")
        ),
        pytest.param("hopper", "", marks=needs_hopper),
    ],
)
def test_strided_sinks_and_slopes_are_copied(backend, slopes, device):
    case = CacheCase("strided", (40, 17), 2, slopes=slopes, sinks=True, options=CAUSAL)
    inputs = make_cache_inputs(case, device, torch.float16)
    wanted = call_cached(inputs, backend=backend)
    for name in {"sinks", "alibi_slopes"} & inputs.arguments.keys():
        given = inputs.arguments[name]
        inputs.arguments[name] = torch.stack([given, torch.rand_like(given)], -1)[..., 0]
    assert all(map(torch.equal, call_cached(inputs, backend=backend), wanted))
