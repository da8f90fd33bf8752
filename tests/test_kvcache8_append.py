"""Appends to caches of 8 bits beside numbers that are not finite, within a cached call, and by a
kernel bit for bit; tests/test_kvcache_append.py holds what they store to float64."""

from __future__ import annotations

import pytest
import torch
from test_kvcache_append import FP8, INT8, LARGEST, AppendCase, make

import flashattn3

BACKENDS = ("reference", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_what_is_not_finite(dtype, backend, device):
    """A descale divides, what is over the range saturates, NaN stays; int8 has no NaN, so that a
    computed descale is NaN where a number is not finite."""
    k = torch.zeros(1, 3, 1, 16, device=device).half()
    k[0, 0, 0, :4] = torch.tensor([3e4, -3e4, float("inf"), float("nan")])
    k[0, 1, 0, :2] = torch.tensor([1.0, -2.0])
    caches = [torch.zeros(1, 3, 1, 16, device=device).to(dtype) for _ in range(2)]
    given = torch.full((1, 1), 0.5, device=device)
    flashattn3.append_kvcache(
        k, k, *caches, cache_seqlens=0, k_descale=given, v_descale=given, backend=backend
    )
    largest = LARGEST[dtype]
    found = caches[0][0, :, 0].float()
    assert found[0, :3].tolist() == [largest, -largest, largest]
    assert found[0, 3].isnan() if dtype == FP8 else found[0, 3] == 0
    assert found[1, :2].tolist() == [2, -4] and not found[2].any()
    own = [torch.zeros(1, 3, 1, device=device) for _ in range(2)]
    flashattn3.append_kvcache(
        k, k, *caches, cache_seqlens=0, k_descale=own[0], v_descale=own[1], backend=backend
    )
    real = caches[0][0, :, 0].float() * own[0][0]
    assert real[0, 2:4].isnan().all() and (dtype == FP8 or own[0][0, 0].isnan())
    assert real[1, :2].tolist() == pytest.approx([1.0, -2.0], rel=0.01) and not real[2].any()
    assert own[0][0, 2] == 2.0**-126


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["heads", "tokens"])
def test_a_call_appends_and_attends(kind, backend, device):
    """Rotated, quantized and read in one call, as in two; a compiled call writes the descales."""
    case = AppendCase("call", (0, 15, 7), 2, 16, rotary_dim=24, dims=(32, 32), stored=FP8,
                      descales=kind)  # fmt: skip
    q = torch.randn(3, 2, 4, 32, device=device).half()
    k, v, _, arguments = make(case, device)
    given = {name: arguments.pop(name).nan_to_num(1.0) for name in ("k_descale", "v_descale")}
    results = []
    for way in ("one", "two", "compiled"):
        caches = make(case, device)[2]
        descales = {name: x.clone() for name, x in given.items()}
        if kind == "heads":  # a number that a server keeps for a whole cache
            descales = {name: x[:1, :1].expand(3, 2) for name, x in descales.items()}

        def call(q, k, v, k_cache, v_cache, k_descale, v_descale):
            return flashattn3.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, **arguments, k_descale=k_descale, v_descale=v_descale,
                causal=True, backend=backend,
            )  # fmt: skip

        if way == "two":
            q_out = flashattn3.append_kvcache(
                k, v, *caches, **arguments, **descales, q=q, backend=backend
            )
            lengths = {name: arguments[name] for name in ("cache_seqlens", "page_table")}
            lengths["cache_seqlens"] = lengths["cache_seqlens"] + 2
            out = flashattn3.flash_attn_with_kvcache(
                q_out, *caches, **lengths, **descales, causal=True, backend=backend
            )
        else:
            run = call
            if way == "compiled":
                torch._dynamo.reset()
                run = torch.compile(call, fullgraph=True, backend="aot_eager")
            out = run(q, k, v, *caches, *descales.values())
        results.append([out, *(x.view(torch.uint8) for x in caches), *descales.values()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert results[0][0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_a_kernel_appends_what_torch_does(dtype, device):
    """Without rotation, which a kernel may fuse: the same bits, at every kind of descales."""
    for kind, page_size in (("heads", 0), ("pages", 16), ("tokens", 16), ("tokens", 3)):
        case = AppendCase("same", (0, 15, 7), (2, 0, 5), page_size, dims=(32, 32), stored=dtype,
                          descales=kind)  # fmt: skip
        results = []
        for backend in ("triton", "reference"):
            k, v, caches, arguments = make(case, device)
            flashattn3.append_kvcache(k, v, *caches, **arguments, backend=backend)
            held = *caches, arguments["k_descale"], arguments["v_descale"]
            results.append([x.view(torch.uint8) for x in held])
        assert all(map(torch.equal, *results)), kind
