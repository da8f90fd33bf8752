"""Cached calls with ``tree_mask`` and with ``alibi_slopes``."""

from __future__ import annotations

import pytest
import torch
from helpers import SIXTEEN_BIT, TRITON_DTYPES, needs_hopper
from support.kvcache import CacheCase, call_cached, check_cached, make_cache_inputs, words_of

import flashattn3
from flashattn3 import flash_attn_func, flash_attn_with_kvcache

CAUSAL = {"causal": True}
CASES = (
    CacheCase("one-word", (40, 17, 3), 7, page_size=16, tree=True, options=CAUSAL),
    CacheCase("two-words", (64, 140), 64, page_size=16, tree=True, options=CAUSAL),
    CacheCase("ragged", (40, 17, 70), (3, 1, 50), tree=True, sinks=True, options=CAUSAL),
    CacheCase("more-queries-than-keys", (0, 2, 9), 5, tree=True, options=CAUSAL),
    CacheCase("window", (300, 90), 50, num_heads_q=8, head_dim=64, head_dim_v=64, tree=True,
              options={"causal": True, "window_size": (15, 0)}),
    CacheCase("spans", (300, 40), 33, tree=True, options={"causal": True, "split_tokens": 128}),
    CacheCase("slopes", (40, 17, 0, 1), slopes="heads"),
    CacheCase("slopes-both-sides", (140, 65), 7, page_size=16, slopes="batch heads", others=2),
    CacheCase("slopes-ragged", (40, 17, 700), (2, 0, 5), slopes="heads", sinks=True,
              leftpad=(9, 0, 3),
              options={"causal": True, "window_size": (60, 0), "softcap": 3.0, "num_splits": 3}),
    CacheCase("slopes-spans", (300, 40), 33, slopes="batch heads",
              options={"causal": True, "split_tokens": 128, "softmax_scale": -0.3}),
)  # fmt: skip
# A Hopper kernel has the head dims 64 and 128, and multiplies 64 or 192 packed rows.
OF_HOPPER = (
    CacheCase("paged", (640, 64, 65), 64, num_heads_q=8, page_size=16, tree=True, options=CAUSAL),
    CacheCase("mixed", (40, 317, 70), (3, 1, 64), num_heads_q=16, tree=True, options=CAUSAL),
    CacheCase("wide", (700, 2), 9, head_dim=128, head_dim_v=96, tree=True, options=CAUSAL),
)  # fmt: skip
BACKENDS = [("reference", torch.float16), *(("triton", dtype) for dtype in TRITON_DTYPES)]
RUNS = [
    *((case, *of) for case in CASES for of in BACKENDS),
    *(
        pytest.param(case, "hopper", dtype, marks=needs_hopper)
        for case in (*CASES, *OF_HOPPER)
        for dtype in SIXTEEN_BIT
        if case.tree and case.name != "spans"
    ),
]


@pytest.mark.interpreted(
    quick=lambda case, backend, dtype: (
        case.name in ("one-word", "slopes-ragged") or backend == "reference"
    )
)
@pytest.mark.parametrize(
    ("case", "backend", "dtype"),
    RUNS,
    ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")),
)
def test_against_float64(case, backend, dtype, device, poisoned_memory):
    inputs = make_cache_inputs(case, device, dtype)
    check_cached(case, inputs, *call_cached(inputs, backend=backend), backend)


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


def words(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


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
