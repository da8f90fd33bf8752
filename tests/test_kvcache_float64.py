"""Cached attention of every backend against float64: layouts, pages, lengths, head dims, masks,
trees, slopes, caches of 8 bits."""

from __future__ import annotations

import pytest
import torch
from helpers import SIXTEEN_BIT, TRITON_DTYPES, is_twin, needs_hopper
from support.kvcache import CacheCase, call_cached, check_cached, make_cache_inputs

from flashattn3 import UnsupportedError
from flashattn3.call.cache_descales import OF_KEYS

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CAUSAL = {"causal": True}
SPANS = CAUSAL | {"split_tokens": 128}
LENGTHS = (0, 1, 17, 40)
CASES = (
    CacheCase("dense", LENGTHS),
    CacheCase("dense-hnd", LENGTHS, layout="hnd"),
    CacheCase("dense-one-tensor", LENGTHS, layout="one"),
    CacheCase("dense-full", (40, 40), capacity=40),
    *(
        CacheCase(f"page-{size}", (0, 1, size - 1, size, size + 1, 40)[:: 2 - (size > 1)],
                  page_size=size)
        for size in (1, 3, 8, 16, 64)
    ),
    CacheCase("page-256", (1, 255, 256, 257), page_size=256),
    CacheCase("page-8-hnd", LENGTHS, page_size=8, layout="hnd"),
    CacheCase("page-16-one-tensor", LENGTHS, page_size=16, layout="one"),
    CacheCase("page-16-two-queries", (2, 19, 40), 2, page_size=16, options={"causal": True}),
    CacheCase("causal-more-queries-than-keys", (0, 2, 9), 5, options={"causal": True}),
    CacheCase("group-1", LENGTHS, num_heads_q=2),
    CacheCase("group-5", LENGTHS, num_heads_q=5, num_heads_kv=1),
    CacheCase("group-7", (17, 40), 3, num_heads_q=7, num_heads_kv=1, options={"causal": True}),
    CacheCase("group-16", LENGTHS, num_heads_q=16, num_heads_kv=1),
    CacheCase("group-128", (40,), num_heads_q=128, num_heads_kv=1),
    CacheCase("ragged", (40, 17, 3, 64, 0), (2, 0, 5, 17, 1), page_size=16,
              options={"causal": True}),
    CacheCase("ragged-dense", (40, 17, 3), (2, 5, 1), options={"causal": True}),
    CacheCase("sixty-four-queries", (64, 90), 64, page_size=16, options={"causal": True}),
    CacheCase("many-queries", (300, 333), 300, page_size=16, num_heads_kv=1,
              num_heads_q=2, options={"causal": True}),
    CacheCase("window", (0, 1, 17, 40, 200), options={"window_size": (16, 0)}, page_size=8),
    CacheCase("window-both", (40, 200), 7, options={"window_size": (20, 3)}),
    CacheCase("window-causal", (40, 200), 7, options={"window_size": (9, -1), "causal": True}),
    CacheCase("softcap", LENGTHS, options={"softcap": 2.0}),
    CacheCase("softcap-high", LENGTHS, options={"softcap": 500.0}),
    CacheCase("scale-negative", LENGTHS, options={"softmax_scale": -0.3}),
    CacheCase("scale-zero", LENGTHS, options={"softmax_scale": 0.0}),
    CacheCase("leftpad", (9, 40, 200), leftpad=(0, 7, 130), page_size=16),
    CacheCase("leftpad-all", (9, 40), leftpad=(9, 40), page_size=256),
    CacheCase("batch-idx", LENGTHS, others=3),
    CacheCase("batch-idx-paged", LENGTHS, others=3, page_size=16),
    CacheCase("sinks", LENGTHS, sinks=True),
    CacheCase("descales", LENGTHS, descales="heads"),
    CacheCase("dim-40-24", LENGTHS, head_dim=40, head_dim_v=24),
    CacheCase("dim-24-56", LENGTHS, head_dim=24, head_dim_v=56, page_size=3),
    CacheCase("dim-72-56", LENGTHS, head_dim=72, head_dim_v=56, page_size=16),
    CacheCase("dim-56-8", LENGTHS, head_dim=56, head_dim_v=8),
    CacheCase("dim-104-72", LENGTHS, head_dim=104, head_dim_v=72, page_size=1),
    CacheCase("dim-256", (1, 40), head_dim=256, head_dim_v=256, page_size=16),
    CacheCase("every-option", (40, 17, 130), (3, 1, 5), page_size=16, others=2, sinks=True,
              descales="heads", leftpad=(3, 0, 20), layout="hnd",
              options={"causal": True, "window_size": (60, 0), "softcap": 3.0}),
    CacheCase("spans", (0, 1, 127, 128, 129, 400), page_size=16, sinks=True,
              options={"split_tokens": 128}),
    CacheCase("spans-every-option", (40, 17, 330), (3, 1, 5), page_size=16, others=2, sinks=True,
              descales="heads", leftpad=(3, 0, 20), layout="hnd",
              options={**SPANS, "window_size": (200, 0), "softcap": 3.0}),
    CacheCase("no-batch", (), capacity=8),
    CacheCase("no-queries", (9,), 0),
)  # fmt: skip
# Each kind of descales, layout and page size, and every option of a call.
OF_8_BITS = (
    CacheCase("no-descales", LENGTHS, stored=FP8),
    CacheCase("no-descales-paged", LENGTHS, page_size=16, layout="hnd", stored=FP8),
    *(
        CacheCase(f"{of}-{kind}-{page}-{layout}", LENGTHS, page_size=page, layout=layout,
                  stored=dtype, descales=kind, others=others)
        for (of, dtype), (kind, page, layout, others) in zip(
            2 * (("e4m3", FP8), ("int8", INT8)),
            (("heads", 0, "nhd", 2), ("pages", 16, "hnd", 0), ("tokens", 16, "one", 3),
             ("tokens", 0, "hnd", 2)),
            strict=True,
        )
    ),
    CacheCase("e4m3-pages-dense", LENGTHS, stored=FP8, descales="pages", others=2),
    CacheCase("int8-heads-one-tensor", LENGTHS, stored=INT8, descales="heads", layout="one"),
    *(
        CacheCase(f"int8-tokens-page-{page}", LENGTHS, page_size=page, stored=INT8,
                  descales="tokens")
        for page in (1, 3, 64)
    ),
    CacheCase("e4m3-pages-of-8", (40, 33), 5, page_size=8, stored=FP8, descales="pages",
              num_heads_q=7, num_heads_kv=1, options=CAUSAL),
    CacheCase("e4m3-dim-40-24", LENGTHS, stored=FP8, descales="tokens", head_dim=40, head_dim_v=24,
              page_size=16),
    CacheCase("int8-prefill", (90, 64), 64, page_size=16, stored=INT8, descales="tokens",
              options=CAUSAL),
    CacheCase("16-bits-tokens", LENGTHS, page_size=16, descales="tokens"),
    CacheCase("16-bits-pages", LENGTHS, descales="pages", others=1),
    *(
        CacheCase(f"{of}-every-option", (40, 17, 130), (3, 1, 5), page_size=16, others=2,
                  sinks=True, stored=dtype, descales=kind, leftpad=(3, 0, 20), layout="hnd",
                  options={"causal": True, "window_size": (60, 0), "softcap": 3.0})
        for of, dtype, kind in (("e4m3", FP8, "tokens"), ("int8", INT8, "pages"))
    ),
)  # fmt: skip
TREES_AND_SLOPES = (
    CacheCase("tree-one-word", (40, 17, 3), 7, page_size=16, tree=True, options=CAUSAL),
    CacheCase("tree-two-words", (64, 140), 64, page_size=16, tree=True, options=CAUSAL),
    CacheCase("tree-ragged", (40, 17, 70), (3, 1, 50), tree=True, sinks=True, options=CAUSAL),
    CacheCase("tree-more-queries-than-keys", (0, 2, 9), 5, tree=True, options=CAUSAL),
    CacheCase("tree-window", (300, 90), 50, num_heads_q=8, head_dim=64, head_dim_v=64, tree=True,
              options={"causal": True, "window_size": (15, 0)}),
    CacheCase("tree-spans", (300, 40), 33, tree=True, options=SPANS),
    CacheCase("slopes", (40, 17, 0, 1), slopes="heads"),
    CacheCase("slopes-both-sides", (140, 65), 7, page_size=16, slopes="batch heads", others=2),
    CacheCase("slopes-ragged", (40, 17, 700), (2, 0, 5), slopes="heads", sinks=True,
              leftpad=(9, 0, 3),
              options={"causal": True, "window_size": (60, 0), "softcap": 3.0, "num_splits": 3}),
    CacheCase("slopes-spans", (300, 40), 33, slopes="batch heads",
              options=SPANS | {"softmax_scale": -0.3}),
)  # fmt: skip
# A Hopper kernel has the head dims 64 and 128, and multiplies 64 or 192 packed rows.
OF_HOPPER = (
    CacheCase("tree-paged", (640, 64, 65), 64, num_heads_q=8, page_size=16, tree=True,
              options=CAUSAL),
    CacheCase("tree-mixed", (40, 317, 70), (3, 1, 64), num_heads_q=16, tree=True, options=CAUSAL),
    CacheCase("tree-wide", (700, 2), 9, head_dim=128, head_dim_v=96, tree=True, options=CAUSAL),
)  # fmt: skip
# The interpreter takes a second for what a GPU does in a microsecond: one of each kind is quick.
QUICK = (
    *("dense", "page-3", "page-64", "group-5", "ragged", "window", "leftpad", "every-option"),
    *("no-batch", "no-queries", "dim-40-24", "tree-one-word", "slopes-ragged"),
    *("no-descales-paged", "int8-pages-16-hnd", "e4m3-every-option", "16-bits-tokens"),
)
ALL = (*CASES, *OF_8_BITS, *TREES_AND_SLOPES)
BACKENDS = [("reference", dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
BACKENDS += [("triton", dtype) for dtype in TRITON_DTYPES]
RUNS = [
    *((case, *of) for case in ALL for of in BACKENDS if of[1].itemsize == 2 or not case.stored),
    *(
        pytest.param(case, "hopper", dtype, marks=needs_hopper)
        for case in (*ALL, *OF_HOPPER)
        for dtype in SIXTEEN_BIT
    ),
]


def hopper_declines(case: CacheCase) -> bool:
    of_tree = case.tree and "split_tokens" in case.options
    of_8_bits = case.head_dim % 16 if case.stored else case.descales in OF_KEYS
    return bool(case.slopes or of_tree or of_8_bits)


@pytest.mark.interpreted(
    quick=lambda case, backend, dtype: (
        case.name in QUICK or (backend, dtype) == ("reference", torch.float16)
    ),
    sweep=lambda case, **of: case.name not in QUICK and is_twin(**of),
)
@pytest.mark.parametrize(
    ("case", "backend", "dtype"),
    RUNS,
    ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")),
)
def test_against_float64(case, backend, dtype, device, poisoned_memory):
    inputs = make_cache_inputs(case, device, dtype)
    assert inputs.arguments["k_cache"].dtype == (case.stored or dtype)
    if backend == "hopper" and hopper_declines(case):
        with pytest.raises(UnsupportedError):
            call_cached(inputs, backend=backend)
        return
    check_cached(case, inputs, *call_cached(inputs, backend=backend), backend)
