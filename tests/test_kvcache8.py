"""Caches of 8 bits; tests/test_kvcache_float64.py holds their attention to float64."""

from __future__ import annotations

import pytest
import torch
from helpers import CACHE_BACKENDS, SIXTEEN_BIT
from support.kvcache import CacheCase, call_cached, check_cached, make_cache_inputs

import flashattn3
from flashattn3.integrations import flash_attn_3

FP8, INT8 = torch.float8_e4m3fn, torch.int8
BACKENDS = ("reference", "triton")
LENGTHS = (0, 1, 17, 40)
CAUSAL = {"causal": True}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32])
def test_queries_of_8_bits_are_widened_exactly(out_dtype, backend, device):
    case = CacheCase("e4m3-q", (9, 40), 2, page_size=16, stored=FP8, descales="pages")
    inputs = make_cache_inputs(case, device, torch.float16)
    q = inputs.arguments["q"] = inputs.arguments["q"].to(FP8)
    out, lse = call_cached(inputs, backend=backend, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    held = out.half() if out_dtype == torch.float32 else out  # kernels round P to 16 bits
    check_cached(case, inputs, held, lse, backend)
    inputs.arguments["q"] = q.half()
    assert torch.equal(call_cached(inputs, backend=backend)[1], lse)
    given = torch.empty_like(out)
    inputs.arguments["q"] = q
    assert call_cached(inputs, backend=backend, out_dtype=out_dtype, out=given)[0] is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_number_is_the_descale_of_a_whole_cache(shape, backend, device):
    inputs = make_cache_inputs(CacheCase("int8", (9, 40), stored=INT8, descales="heads"), device,
                               torch.float16)  # fmt: skip
    by = {"k": 0.1, "v": 3.0}
    single = {f"{x}_descale": torch.full(shape, value, device=device) for x, value in by.items()}
    results = []
    for descales in (single, {name: x.expand(2, 2) for name, x in single.items()}):
        inputs.arguments |= descales
        results.append(call_cached(inputs, backend=backend))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_code_has_its_value(backend, device):
    """A single key of weight 1 returns what its value holds: all 256 codes of both dtypes."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    like = {"device": device, "dtype": torch.bfloat16}
    q, k = torch.zeros(1, 1, 1, 16, **like), torch.zeros(1, 1, 1, 16, **like)
    for dtype in (FP8, INT8):
        v = codes.view(dtype).view(1, 1, 1, 256)
        descale = torch.ones(1, device=device)
        for math in SIXTEEN_BIT:
            out = flashattn3.flash_attn_with_kvcache(
                q.to(math), k.to(dtype), v, k_descale=descale, v_descale=descale, backend=backend
            )
            torch.testing.assert_close(
                out.flatten().double(), v.flatten().double(), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_every_code_of_a_key_has_its_value(dtype, backend, device):
    """A query of a single 1 has the value of a code as its score, which is lse of a single key."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    values = codes.double().nan_to_num()
    k = torch.where(codes.double().isnan(), 0, codes.view(torch.uint8)).view(dtype)
    q = torch.eye(256, device=device)[None, :, None]
    descale = torch.ones(1, device=device)
    for math in SIXTEEN_BIT:
        for power in (2.0**-90, 1.0, 2.0**90) if math == torch.bfloat16 else (1.0,):
            _, lse = flashattn3.flash_attn_with_kvcache(
                (q * power).to(math), k[None, None, None], k[None, None, None], causal=False,
                softmax_scale=0.5 / power, k_descale=descale, v_descale=descale, backend=backend,
                return_lse=True,
            )  # fmt: skip
            torch.testing.assert_close(lse[0, 0].double(), values / 2, rtol=1e-6, atol=0)


@pytest.mark.interpreted(quick=lambda kind, backend, **_: (kind, backend) != ("heads", "triton"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "kind"), [(FP8, "tokens"), (INT8, "heads")])
def test_with_split_tokens_a_token_has_its_bits_in_a_chunk_and_in_a_batch(
    dtype, kind, backend, device
):
    case = CacheCase("chunk", (150, 40), 3, page_size=16, stored=dtype, descales=kind,
                     options={**CAUSAL, "split_tokens": 128})  # fmt: skip
    inputs = make_cache_inputs(case, device, torch.float16)
    given = inputs.arguments
    out, lse = call_cached(inputs, backend=backend)
    check_cached(case, inputs, out, lse, backend)
    for index, length in enumerate(case.seqlens):
        one = slice(index, index + 1)
        alone = {name: given[name][one] for name in ("q", "page_table", "cache_seqlens")}
        alone["q_descale"] = given["q_descale"][one]
        if kind == "heads":
            alone |= {name: given[name][one] for name in ("k_descale", "v_descale")}
        for row in range(3):
            lengths = torch.tensor([length - 2 + row], dtype=torch.int32, device=device)
            of_row = {"q": alone["q"][:, row, None], "cache_seqlens": lengths}
            found = flashattn3.flash_attn_with_kvcache(
                **{**given, **alone, **of_row}, return_lse=True, backend=backend
            )
            assert torch.equal(found[0][0, 0], out[index, row]), (index, row)
            assert torch.equal(found[1][0, :, 0], lse[index, :, row])


def test_metadata_of_queries_of_8_bits(device):
    case = CacheCase("metadata", (9, 40), 2, stored=FP8)
    inputs = make_cache_inputs(case, device, torch.float16)
    q = inputs.arguments["q"] = inputs.arguments["q"].to(FP8)
    metadata = flashattn3.get_scheduler_metadata(
        2, 2, 43, 4, 2, 32, inputs.arguments["cache_seqlens"], qkv_dtype=q.dtype
    )
    wanted = call_cached(inputs)
    assert all(map(torch.equal, call_cached(inputs, scheduler_metadata=metadata), wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["heads", "tokens"])
def test_a_graph_is_right_for_other_lengths_and_pages(kind, device):
    """Captured at length 1, with an append, and replayed: the bits of eager calls; twenty times."""
    case = CacheCase("graph", (1999, 700, 31), 1, page_size=16, stored=FP8, descales=kind,
                     num_heads_q=8, head_dim=128, head_dim_v=128)  # fmt: skip
    given = make_cache_inputs(case, device, torch.bfloat16).arguments
    new = torch.randn(2, 3, 1, 2, 128, device=device, dtype=torch.bfloat16)
    names = ["k_cache", "v_cache", "k_descale", "v_descale"]
    for name in names[:2]:
        given[name] = given[name].float().nan_to_num().to(FP8)
    lengths, table = given.pop("cache_seqlens"), given.pop("page_table")
    static = torch.ones_like(lengths), table.flip(0).contiguous()

    def call(caches, lengths, table):
        return flashattn3.flash_attn_with_kvcache(
            **{**given, **caches}, k=new[0], v=new[1], cache_seqlens=lengths, page_table=table,
            causal=True,
        )  # fmt: skip

    def fresh():
        return {name: given[name].clone() for name in names}

    eager = fresh()
    wanted = call(eager, lengths - 1, table)
    caches = fresh()
    call(caches, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(caches, *static)
    for target, x in zip(static, (lengths - 1, table), strict=True):
        target.copy_(x)
    for _ in range(20):
        for name, x in fresh().items():
            caches[name].copy_(x)
        graph.replay()
        assert torch.equal(out, wanted)
        for name in names[: 4 if kind == "tokens" else 2]:
            assert torch.equal(caches[name].view(torch.uint8), eager[name].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CACHE_BACKENDS[1:])
@pytest.mark.parametrize("page_size", [0, 16])
def test_caches_of_more_than_2_to_the_31_elements(page_size, backend, device):
    tokens, shape = page_size or 2**16, (2**31 // (2 * 128 * (page_size or 2**16)) + 2, 2, 128)
    caches = [torch.randint(-99, 99, (shape[0], tokens, *shape[1:]), dtype=INT8, device=device)
              for _ in range(2)]  # fmt: skip
    last = shape[0] - 1
    index = torch.tensor([last], dtype=torch.int32, device=device)
    where = {"page_table": index[None]} if page_size else {"cache_batch_idx": index}
    descales = [torch.rand(shape[0], tokens, 2, device=device) / 50 for _ in range(2)]
    q = torch.randn(1, 1, 8, 128, device=device, dtype=torch.bfloat16)
    length = page_size or 999
    given = {"cache_seqlens": length, "k_descale": descales[0], "v_descale": descales[1]}
    found = flashattn3.flash_attn_with_kvcache(q, *caches, **given, **where, backend=backend)
    k, v = (
        (x[last, :length].float() * by[last, :length].unsqueeze(-1))[None]
        for x, by in zip(caches, descales, strict=True)
    )
    wanted = flashattn3.flash_attn_func(q.float(), k, v, backend="reference")
    torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)


def test_pages_of_8_bits_through_flash_attention_3_s_names(device):
    """A block table of varlen calls and the descale of a cache, in e4m3 and under 16 bits."""
    case = CacheCase("fa3", (20, 30), (2, 3), page_size=16, stored=FP8, options=CAUSAL)
    inputs = make_cache_inputs(case, device, torch.float16)
    given = dict(inputs.arguments)
    descales = dict.fromkeys(("k_descale", "v_descale"), torch.tensor(0.5, device=device))
    for q in (given["q"], given["q"].to(FP8)):
        wanted = flashattn3.flash_attn_with_kvcache(**{**given, "q": q}, **descales)
        found = flash_attn_3.flash_attn_varlen_func(
            q, given["k_cache"], given["v_cache"], given["cu_seqlens_q"], None,
            given["max_seqlen_q"], 30, seqused_k=given["cache_seqlens"],
            page_table=given["page_table"], causal=True, **descales,
        )  # fmt: skip
        assert torch.equal(found, wanted) and wanted.isfinite().all()
