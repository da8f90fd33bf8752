"""Chunks of prompts through caches of 8 bits: the Hopper backend widens the used keys to 16 bits
for its cached forward kernels."""

from __future__ import annotations

import pytest
import torch
from helpers import SIXTEEN_BIT, library_double, needs_hopper
from support.kvcache import CacheCase, CacheInputs, make_cache_inputs
from test_kvcache_prefill import DESCALE, FEW, MANY, floats, plan_of

from flashattn3 import explain_with_kvcache, flash_attn_with_kvcache
from flashattn3.backends.hopper import cached
from flashattn3.backends.hopper.backend import HopperBackend

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CAUSAL = {"causal": True}
WINDOW = {"causal": True, "window_size": (70, 0)}
LENGTHS = (0, 1, 130, 700)
# Each dtype, kind of descales, page size and layout, with options; over 192 packed rows.
CASES = [
    CacheCase("none-dense", LENGTHS, 130, stored=FP8, head_dim=64, head_dim_v=64),
    *(
        CacheCase(f"{of}-{kind}-page-{page}-{layout}-d{dim}", LENGTHS, 130, stored=dtype,
                  descales=kind, page_size=page, layout=layout, head_dim=dim, head_dim_v=dim,
                  others=others, options=CAUSAL)
        for of, dtype in (("e4m3", FP8), ("int8", INT8))
        for kind, page, layout, dim, others in (
            ("heads", 0, "nhd", 128, 2), ("heads", 16, "hnd", 64, 0), ("pages", 16, "nhd", 128, 3),
            ("pages", 1, "nhd", 128, 0), ("tokens", 64, "one", 128, 0),
            ("tokens", 0, "hnd", 256, 2), ("tokens", 1, "hnd", 64, 0),
            ("pages", 0, "one", 64, 1), ("heads", 64, "nhd", 256, 0),
        )
    ),
    CacheCase("window-leftpad", (700, 300, 40), 200, stored=FP8, descales="tokens", page_size=16,
              leftpad=(100, 290, 3), options=WINDOW, head_dim=128, head_dim_v=128),
    CacheCase("sinks-softcap", (700, 33), 200, stored=INT8, descales="pages", page_size=48,
              sinks=True, options={"causal": True, "softcap": 5.0}, head_dim=96, head_dim_v=48),
    CacheCase("not-causal", (900, 5), 300, stored=FP8, descales="heads", head_dim=80,
              head_dim_v=80),
    CacheCase("8-to-1", (900, 450), 64, num_heads_q=8, num_heads_kv=1, stored=FP8,
              descales="tokens", page_size=16, options=CAUSAL, head_dim=128, head_dim_v=128),
    CacheCase("ragged", (500, 300, 0, 90), (200, 40, 33, 90), stored=FP8, descales="tokens",
              page_size=16, options=CAUSAL, head_dim=128, head_dim_v=128),
    CacheCase("300-sequences", (40, 70, 3) * 100, 100, stored=INT8, descales="heads", page_size=16,
              options=CAUSAL, head_dim=64, head_dim_v=64, num_heads_q=2, num_heads_kv=1),
    CacheCase("decodes-beside", (500, 300, 0, 90), (300, 1, 1, 4), stored=FP8, descales="tokens",
              page_size=16, options=CAUSAL, head_dim=128, head_dim_v=128),
]  # fmt: skip
BESIDE = CASES[-1]


def bytes_of(tokens=4096, page_size=0, width=16, dtype=FP8, batch=4):
    """Caches and their table, without memory."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = [empty(99 if page_size else batch, page_size or tokens, 8, 128) for _ in "kv"]
    given = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    table = {"page_table": empty(batch, width, dtype=torch.int32)} if page_size else {}
    return given | table


def named(**given):
    return given | {"options": {"backend": "hopper"}}


AGAIN = "reads the keys again for every 64 rows, over 192 only with backend='hopper'"
TOO_LONG = "those of 8388608 tokens take 4096 MiB"
CHOICES = [
    ({}, FEW),
    ({"seqlen_q": 48}, FEW),
    ({"k_descale": floats(4, 1, 8), "v_descale": floats(4, 4096, 8)}, FEW),
    ({"seqlen_q": 49}, MANY),
    ({"seqlen_q": 2048, "k_descale": DESCALE, "v_descale": DESCALE}, MANY),
    ({"seqlen_q": 2048, "k_descale": floats(4, 1, 8), "v_descale": floats(4, 4096, 8)}, MANY),
    ({"seqlen_q": 300, "sinks": floats(32)}, MANY),
    ({"seqlen_q": 300, **bytes_of(page_size=16, width=1 << 16)}, MANY),
    (named(seqlen_q=300, q_descale=DESCALE), "decode: forward kernels take no q_descale"),
]


@pytest.mark.parametrize(("of", "said"), CHOICES, ids=str)
def test_which_kernels_run_a_call(of, said):
    plan = plan_of(**(bytes_of() | of))
    assert plan.backend.name == "hopper"
    described = plan.launch.describe()
    assert described["kernel"] == said
    assert ("widened first" in described) == (said == MANY)
    assert plan.launch.kernel_launch.handle.record.byte_cache


def test_a_cache_whose_16_bit_form_would_be_large_is_left_to_triton():
    """2**22 tokens of 128 columns take 2 GiB of a head."""
    for width, said in ((1 << 16, None), ((1 << 16) + 1, TOO_LONG)):
        plan = plan_of(seqlen_q=300, **bytes_of(page_size=16, width=width))
        assert plan.backend.name == ("triton" if said else "hopper")
        if said:
            reason = dict(plan.declined)["hopper"]
            assert said in reason and AGAIN in reason
    # Few rows read 8 bits.
    assert plan_of(**bytes_of(page_size=16, width=1 << 20)).backend.name == "hopper"


def test_a_kernel_that_no_gpu_has_run_is_asked_for_by_name(monkeypatch):
    careful = HopperBackend(library=library_double)
    for measured, options, wanted in (
        ("", {}, "triton"),
        ("", {"backend": "hopper"}, "hopper"),
        ("a GPU", {}, "hopper"),
    ):
        monkeypatch.setattr(cached, "WIDEN_MEASURED", measured)
        plan = plan_of(options, seqlen_q=300, hopper=careful, **bytes_of())
        assert plan.backend.name == wanted
        if wanted == "hopper":
            assert plan.launch.describe()["kernel"] == MANY


def test_a_plan_serves_caches_of_similar_sizes():
    def problem(width, seqlen_q=300):
        caches = bytes_of(page_size=16, width=width)
        return plan_of(seqlen_q=seqlen_q, **caches).problem

    assert problem(1000) == problem(1024) != problem(1025)
    assert problem(1000, 1) == problem(4000, 1)
    assert plan_of(**{"seqlen_q": 300}).problem.cached_tokens == 0


def inputs_of(case: CacheCase, device, dtype) -> CacheInputs:
    """Without q_descale, which no forward kernel takes."""
    inputs = make_cache_inputs(case, device, dtype)
    inputs.arguments.pop("q_descale", None)
    return inputs


def in_16_bits(case: CacheCase, arguments: dict, dtype: torch.dtype) -> dict:
    """The call on the dequantized cache, rounded once."""
    wide = dict(arguments)
    for side in "kv":
        cache, descale = wide[f"{side}_cache"].float(), wide.pop(f"{side}_descale", None)
        if descale is None:
            pass
        elif descale.ndim == 3:
            cache = cache * descale.unsqueeze(-1)
        else:
            cache = by_sequence(case, arguments, cache, descale)
        wide[f"{side}_cache"] = cache.to(dtype)
    return wide


def by_sequence(case: CacheCase, arguments: dict, cache, descale):
    """Every sequence's pages times its descales."""
    factors = torch.ones(cache.shape[0], 1, cache.shape[2], 1, device=cache.device)
    rows = arguments.get("cache_batch_idx", torch.arange(case.batch)).tolist()
    for row, own in zip(rows, descale, strict=True):
        places = [row]
        if case.page_size:
            places = [page for page in arguments["page_table"][row].tolist() if page >= 0]
        factors[places] = own.view(1, -1, 1)
    return cache * factors


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_dequantized_cache(case, dtype, device, poisoned_memory):
    inputs = inputs_of(case, device, dtype)
    given = inputs.arguments
    explained = explain_with_kvcache(**given, return_lse=True)
    assert explained.backend == "hopper"
    assert "widened first" in explained.config
    found = flash_attn_with_kvcache(**given, return_lse=True)
    wide = in_16_bits(case, given, dtype)
    wanted = flash_attn_with_kvcache(**wide, return_lse=True, backend="hopper")
    if case is BESIDE:  # short sequences have the decode kernel of 8 bits, which rounds no key
        rows = case.queries[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)
        found, wanted = ((out[:rows], lse[:, :rows]) for out, lse in (found, wanted))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("stored", [FP8, INT8])
def test_a_captured_call_is_right_at_other_lengths(stored, device):
    case = CacheCase("graph", (700, 512), 150, stored=stored, descales="tokens", page_size=16,
                     options=CAUSAL, head_dim=128, head_dim_v=128)  # fmt: skip
    given = inputs_of(case, device, torch.bfloat16).arguments
    lengths = given["cache_seqlens"]
    lengths.fill_(1)
    flash_attn_with_kvcache(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(**given)
    for seqlens in ((700, 512), (0, 300), (129, 1)):
        lengths.copy_(torch.tensor(seqlens))
        graph.replay()
        wide = in_16_bits(case, given, torch.bfloat16)
        assert torch.equal(out, flash_attn_with_kvcache(**wide, backend="hopper"))


@pytest.mark.gpu
@needs_hopper
def test_appended_tokens_are_attended_to(device):
    case = CacheCase("append", (700, 512), 150, stored=FP8, descales="tokens", page_size=16,
                     options=CAUSAL, head_dim=128, head_dim_v=128)  # fmt: skip
    given = inputs_of(case, device, torch.bfloat16).arguments
    given["cache_seqlens"] -= 150
    k, v = torch.randn(2, 2, 150, 2, 128, device=device).bfloat16()
    out = flash_attn_with_kvcache(**given, k=k, v=v)
    given["cache_seqlens"] += 150
    wide = in_16_bits(case, given, torch.bfloat16)
    assert torch.equal(out, flash_attn_with_kvcache(**wide, backend="hopper"))


@pytest.mark.gpu
@needs_hopper
def test_heads_take_turns_where_the_workspace_would_be_large(device):
    """K and V of 8 heads and 2**19 tokens would take 2 GiB."""
    case = CacheCase("turns", (900, 300), 60, num_heads_q=32, num_heads_kv=8, stored=FP8,
                     descales="pages", page_size=64, options=CAUSAL, sinks=True, head_dim=128,
                     head_dim_v=128)  # fmt: skip
    given = inputs_of(case, device, torch.bfloat16).arguments
    whole = flash_attn_with_kvcache(**given, return_lse=True)
    table = given["page_table"]
    given["page_table"] = torch.full((2, 1 << 12), -1, dtype=torch.int32, device=device)
    given["page_table"][:, : table.shape[1]] = table
    explained = explain_with_kvcache(**given, return_lse=True)
    assert 1 << 29 < explained.config["workspace_bytes"] <= 1 << 30
    found = flash_attn_with_kvcache(**given, return_lse=True)
    assert all(map(torch.equal, found, whole))
