"""What caches of 8 bits cost in accuracy, and that no key is lost in a long one."""

from __future__ import annotations

import pytest
import torch
from helpers import CACHE_BACKENDS, GPU, needs_hopper
from support.cached_distributions import cases, misses, needle, needle_error, store

from flashattn3 import flash_attn_with_kvcache

FP8, INT8 = torch.float8_e4m3fn, torch.int8
BACKENDS = CACHE_BACKENDS[1:] if GPU else CACHE_BACKENDS[:1]
LENGTHS = [
    256,
    pytest.param(512, marks=pytest.mark.slow),
    *(pytest.param(length, marks=pytest.mark.gpu) for length in (8192, 32768, 131072)),
]


@pytest.mark.parametrize("per", ["tokens", "heads"])
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_is_that_of_storing_k_and_v(backend, length, dtype, per, device):
    """A heavy key, a sink, outliers, values with a mean or of one sign."""
    broken = {}
    of_length = cases((length,), (64, 128) if GPU else (64,))
    for case in of_length[:: 1 if length > 256 else 8]:
        stored = store(case, device, dtype, per, backend)
        found = flash_attn_with_kvcache(**stored.arguments, return_lse=True, backend=backend)
        broken |= {case.id: missed} if (missed := misses(found, stored)) else {}
    assert not broken


NEEDLES = [
    ("reference", 2048, (0, 15, 16, 1000, 2047)),
    pytest.param("triton", 300, (0, 130, 299), marks=() if GPU else pytest.mark.slow),
    *(
        pytest.param(backend, 131072, (0, 1, 4097, 70000, 131071), marks=[pytest.mark.gpu, *marks])
        for backend, marks in (("triton", ()), ("hopper", [needs_hopper]))
    ),
]


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(("backend", "length", "places"), NEEDLES)
def test_a_key_of_half_the_weight_is_found_anywhere(backend, length, places, dtype, device):
    """In pages of 16, with one scale for each head."""
    for place in places:
        case = needle(length, 64, place)
        stored = store(case, device, dtype, "heads", backend)
        found = flash_attn_with_kvcache(**stored.arguments, return_lse=True, backend=backend)
        assert needle_error(found, stored).error <= 0.02, place
        # Half of its own values is in out: without it there is nothing of them.
        v = case.tensors(device)[2][0, place].double()
        share = (found[0][0].double() * v).sum(-1) / v.square().sum(-1)
        assert (share - 0.5).abs().max() < 0.15, place
