"""Batch-invariant mode: split_tokens of all calls, and what is refused in it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import same_bits

import flashattn3
from flashattn3 import (
    flash_attn_forward,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_with_kvcache,
    use_backend,
    use_batch_invariant_mode,
)
from flashattn3.call import batch_invariance
from flashattn3.call.fields import Options
from flashattn3.integrations import torch as of_torch
from flashattn3.run.bhsd import attend_bhsd


def test_the_mode_is_split_tokens_of_all_calls(device):
    q = torch.randn(1, 140, 1, 16, generator=torch.Generator().manual_seed(0)).to(device)
    plain, options = flash_attn_func(q, q, q), {"backend": "reference"}
    spans, other = (flash_attn_func(q, q, q, split_tokens=n, **options) for n in (1024, 128))
    assert not same_bits(spans, other)
    bhsd, forward_bhsd = (q.transpose(1, 2),) * 3, torch.ops.flashattn3.forward_bhsd.default
    with use_backend("reference"), use_batch_invariant_mode():
        for found in (
            flash_attn_func(q, q, q),
            flash_attn_with_kvcache(q, q, q),
            flash_attn_qkvpacked_func(torch.stack((q, q, q), 2)),
            flash_attn_forward(q, q, q)[0],
            attend_bhsd(Options(backend="reference", split_tokens=1024), *bhsd),
            forward_bhsd(*bhsd, None, None, None, False, -1, -1, 0.0)[0],
        ):
            assert same_bits(found, spans)
        assert same_bits(flash_attn_func(q, q, q, split_tokens=128), other)
        with use_batch_invariant_mode(split_tokens=128):
            assert same_bits(flash_attn_func(q, q, q), other)
        with use_batch_invariant_mode(enabled=False):
            assert same_bits(flash_attn_func(q, q, q), plain)
        for call in (flash_attn_func, flash_attn_with_kvcache):
            with pytest.raises(ValueError, match="must be 0 with split_tokens and in batch"):
                call(q, q, q, num_splits=1)
        with pytest.raises(
            flashattn3.UnsupportedError, match=r"split_tokens=\d+: a block of tokens"
        ):
            flash_attn_fp8_func(q.half(), q.half(), q.half())
    assert same_bits(flash_attn_func(q, q, q), plain)
    with pytest.raises(
        TypeError, match="use_batch_invariant_mode: enabled must be a bool, got 256"
    ):
        use_batch_invariant_mode(256)


def test_the_mode_counts_when_a_compiled_function_runs():
    q = torch.randn(1, 140, 1, 16)
    wanted = [flash_attn_func(q, q, q, split_tokens=n, backend="reference") for n in (None, 1024)]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(q):
        cached = flash_attn_with_kvcache(q, q, q, backend="reference")
        return flash_attn_func(q, q, q, backend="reference"), cached

    for found, of in zip(both(q), wanted[:1] * 2, strict=True):
        torch.testing.assert_close(found, of)
    with use_batch_invariant_mode():
        assert all(same_bits(found, wanted[1]) for found in both(q))


@pytest.mark.parametrize(
    ("value", "span"), [("", None), ("0", None), ("1", 1024), ("256", 256), ("on", ...), ("7", ...)]
)
def test_the_environment_sets_the_mode(value, span):
    if span is ...:
        with pytest.raises(ValueError, match="BATCH_INVARIANT must be 0, 1 or a multiple of 128"):
            batch_invariance._of_environment(value)
    else:
        assert batch_invariance._of_environment(value) == span


def test_torch_attention_never_falls_back_to_its_own_kernels():
    """Dropout, which flashattn3 leaves to torch, in integrations.torch."""
    former = torch.ones(1)
    kernel = SimpleNamespace(call_boxed=lambda *arguments: former)
    override = of_torch._Override("x", Mock(side_effect=of_torch.NotTaken), kernel)
    assert override(None, former) is former
    with (
        use_batch_invariant_mode(),
        pytest.raises(flashattn3.UnsupportedError, match="aten::x: batch-invariant mode"),
    ):
        override(None, former)
