"""Which kernels run a cached call, for the tests of all of them, and calls that each runs."""

from __future__ import annotations

import pytest
import torch
from helpers import needs_hopper
from support.kvcache import CacheCase, CacheInputs, make_cache_inputs

from flashattn3 import explain_with_kvcache

MANY_ROWS = 200
# The backend, and query rows of a sequence, of which Hopper runs many on its forward kernels.
every_kernel = pytest.mark.parametrize(
    ("backend", "rows"),
    [
        *((backend, 2) for backend in ("reference", "triton")),
        *(pytest.param("hopper", rows, marks=needs_hopper) for rows in (2, MANY_ROWS)),
    ],
)
CAUSAL, WINDOW = {"causal": True}, {"causal": True, "window_size": (100, 0)}
G8 = {"num_heads_q": 8, "num_heads_kv": 1, "head_dim": 64, "head_dim_v": 64}
FEW = CacheCase("few", (2000, 30), page_size=16)
PAGED = CacheCase("paged", (700, 64, 331), 64, page_size=16, **G8, options=CAUSAL)
# The sequence of one query runs on a decode kernel.
RAGGED = CacheCase("ragged", (40, 900, 64), (1, 700, 64), page_size=16, options=CAUSAL)


def kernel_of(inputs: CacheInputs, **options) -> str:
    return explain_with_kvcache(**inputs.arguments, **options).config.get("kernel", "")


def inputs_of(case: CacheCase, device, backend: str, dtype=torch.float16) -> CacheInputs:
    """Those of a case, which runs on Hopper's forward kernels where it has many packed rows."""
    inputs = make_cache_inputs(case, device, dtype)
    if backend == "hopper":
        few = max(case.queries) * case.num_heads_q // case.num_heads_kv <= 192
        assert kernel_of(inputs, backend=backend).startswith("decode" if few else "forward")
    return inputs
