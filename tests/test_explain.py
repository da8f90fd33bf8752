"""``explain``: shapes without memory, names, and where a forced backend comes from."""

from __future__ import annotations

import pytest
import torch
from helpers import A100, run_python

import flashattn3
from flashattn3 import cached_explanation as explanation
from flashattn3.cli import main
from flashattn3.run import operators


def meta(seqlen: int = 64, heads: int = 2) -> torch.Tensor:
    return torch.empty(1, seqlen, heads, 64, dtype=torch.float16, device="meta")


def test_meta_tensors_are_explained_as_real_ones():
    real = torch.empty(1, 64, 2, 64, dtype=torch.float16)
    wanted = flashattn3.explain(real, real, real, causal=True)
    assert flashattn3.explain(*[meta()] * 3, causal=True, device="cpu") == wanted


def test_problems_that_fit_no_memory_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(operators, "describe_device", lambda device: A100)
    explained = flashattn3.explain(*[meta(2**29)] * 3, device="cpu")
    assert explained.backend == "triton"
    assert explained.grid[0] > 10**6
    assert main(["explain", "--device", "cpu", "--seqlen-q", str(2**29)]) == 0
    assert "backend: triton on A100" in capsys.readouterr().out


def test_a_ragged_batch_of_meta_tensors_is_explained():
    q, cu_seqlens = meta()[0], torch.empty(4, dtype=torch.int32, device="meta")
    indices = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    explained = flashattn3.explain(
        q, q, q, **indices, max_seqlen_q=9, max_seqlen_k=9, backend="reference", device="cpu"
    )
    assert explained.backend == "reference"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bogus": 1}, "unexpected keyword argument 'bogus'"),
        ({"max_seqlen_q": 3}, "explain: max_seqlen_q must be None without cu_seqlens_q, got 3"),
        ({"cu_seqlens_k": torch.zeros(2).int()}, "explain: cu_seqlens_k must be None without"),
        ({"return_lse": "x"}, "explain: return_lse must be a bool"),
        ({"device": "cpu"}, "explain: device must be None unless q is on meta, got 'cpu'"),
    ],
)
def test_arguments_that_the_call_would_not_take_are_refused(options, said):
    q = torch.empty(1, 8, 2, 16)
    with pytest.raises((TypeError, ValueError), match=said):
        flashattn3.explain(q, q, q, **options)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="explain: device must be"):
        flashattn3.explain(*[meta()] * 3, device="cuda:99")


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_tensor_on_another_device_than_meta_q_is_refused(name):
    """The message names the device that q has, not the one for which the call is explained."""
    tensors = {"q": meta(), "k": meta(), "v": meta(), name: torch.empty(1, 64, 2, 64).half()}
    said = f"explain: {name}.device must be meta as q's, or xpu, where the call would run, got cpu"
    with pytest.raises(ValueError, match=said):
        flashattn3.explain(**tensors, device="xpu")
    assert flashattn3.explain(**tensors, device="cpu").backend in ("triton", "reference")


@pytest.mark.parametrize("name", ["hopper", "bogus"])
def test_the_error_says_that_the_environment_forces_the_backend(name):
    code = """
import torch, flashattn3
q = torch.ones(1, 8, 2, 16)
names = ("flash_attn_func", "explain", "flash_attn_fp8_func", "flash_attn_with_kvcache")
for call in (getattr(flashattn3, name) for name in names):
    try:
        call(q.half(), q.half(), q.half())
    except ValueError as error:
        print(error)
try:
    flashattn3.flash_attn_func(q, q, q, backend="triton")
except ValueError as error:
    print(error)"""
    *forced, named = run_python(code, FLASHATTN3_BACKEND=name, TRITON_INTERPRET=None).splitlines()
    assert len(forced) == 4
    assert all(line.endswith(f"; FLASHATTN3_BACKEND={name} is set") for line in forced)
    assert "FLASHATTN3_BACKEND" not in named


def cached_call(**changes):
    """A paged call of meta tensors: a chunk of 300 tokens beside single ones."""
    q, cache = meta(303, 8)[0], torch.empty(99, 16, 2, 64, dtype=torch.float16, device="meta")
    ints = {"dtype": torch.int32, "device": "meta"}
    given = {"q": q, "k_cache": cache, "v_cache": cache, "page_table": torch.empty(4, 64, **ints)}
    given |= {"cache_seqlens": torch.empty(4, **ints), "cu_seqlens_q": torch.empty(5, **ints)}
    return {**given, "max_seqlen_q": 300, "causal": True, **changes}


def test_a_cached_call_is_explained(monkeypatch):
    monkeypatch.setattr(explanation, "describe_device", lambda device: A100)
    found = flashattn3.explain_with_kvcache(**cached_call(), device="cpu")
    assert found.backend == "triton" and set(found.declined) == {"hopper", "reference"}
    assert found.config["tile"] == "128 packed rows x 64 keys, short sequences 16 x 128"
    # 2 KV heads, 1212 rows in tiles of 128, up to 4 started ones; parts for two programs on an SM.
    assert found.grid == (2 * (1212 // 128 + 4) + 2 * 108, 1, 1)
    assert found.config["workspace_bytes"] == 2 * 108 * 128 * (64 + 1) * 4
    short = cached_call(max_seqlen_q=1, num_splits=1)
    found = flashattn3.explain_with_kvcache(**short, device="cpu")
    assert found.config["tile"].startswith("16 packed") and not found.config["workspace_bytes"]
    assert "workspace_bytes: 0" in str(found)


def test_explaining_a_cached_call_runs_nothing():
    q, cache = torch.ones(1, 1, 2, 16), torch.zeros(1, 8, 2, 16)
    found = flashattn3.explain_with_kvcache(q, cache, cache, q, q, cache_seqlens=3)
    assert found.backend == found.config["append"] == "reference" and not cache.any()
    with pytest.raises(ValueError, match="flash_attn_with_kvcache: v must be a tensor"):
        flashattn3.explain_with_kvcache(q, cache, cache, q, cache_seqlens=3)
    with pytest.raises(ValueError, match=r"flash_attn_with_kvcache: page_table\.shape\[0\] must"):
        wrong = torch.empty(3, 64, dtype=torch.int32, device="meta")
        flashattn3.explain_with_kvcache(**cached_call(page_table=wrong))
    with pytest.raises(ValueError, match="explain_with_kvcache: device must be None unless q"):
        flashattn3.explain_with_kvcache(q, cache, cache, device="cpu")
    with flashattn3.use_backend("triton"), pytest.raises(flashattn3.UnsupportedError):
        flashattn3.explain_with_kvcache(q, cache, cache)  # float32
