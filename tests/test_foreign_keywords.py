"""Keywords of FlashAttention-2 and of torch's attention in calls of the public functions."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import flashattn3
from flashattn3 import (
    UnsupportedError,
    flash_attn_backward,
    flash_attn_func,
    flash_attn_with_kvcache,
    use_backend,
)

X = torch.randn(2, 6, 2, 16, generator=torch.Generator().manual_seed(0))
HALF, ROWS = X.half(), X.flatten(0, 1)
EDGES = torch.tensor([0, 6, 12], dtype=torch.int32)
TABLE = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
VARLEN = EDGES, EDGES, 6, 6
CALLS = {
    "flash_attn_func": (X, X, X),
    "flash_attn_forward": (X, X, X),
    "flash_attn_backward": (X, X, X, X, X, X[..., 0].mT),
    "flash_attn_varlen_func": (ROWS, ROWS, ROWS, *VARLEN),
    "flash_attn_qkvpacked_func": (torch.stack((X, X, X), 2),),
    "flash_attn_kvpacked_func": (X, torch.stack((X, X), 2)),
    "flash_attn_varlen_qkvpacked_func": (torch.stack((ROWS, ROWS, ROWS), 1), EDGES, 6),
    "flash_attn_varlen_kvpacked_func": (ROWS, torch.stack((ROWS, ROWS), 1), *VARLEN),
    "flash_attn_fp8_func": (HALF, HALF, HALF),
    "flash_attn_varlen_fp8_func": (*[ROWS.half()] * 3, *VARLEN),
    "flash_attn_with_kvcache": (X, X, X),
    "explain": (X, X, X),
    "explain_with_kvcache": (X, X, X),
}
TORCH = "the name in torch's scaled_dot_product_attention"
DROPS = "torch.nn.functional.scaled_dot_product_attention drops probabilities"
REFUSED = (
    ({"dropout_p": 0.1}, UnsupportedError, f"must be 0, got 0.1 (float): {DROPS}"),
    ({"dropout_p": None}, TypeError, "must be a float, got None"),
    ({"scale": 0.1}, TypeError, f"must be given as softmax_scale, got {TORCH}"),
    (
        {"is_causal": False},
        TypeError,
        f"must be given as causal, which is aligned to the bottom right, got {TORCH}",
    ),
    (
        {"attn_mask": None},
        TypeError,
        f"must be given as mask (flashattn3.masks), bias, causal or window_size, got {TORCH}",
    ),
    (
        {"enable_gqa": True},
        TypeError,
        f"must be left out: k and v may have fewer heads than q in every call, got {TORCH}",
    ),
)


def same(found, wanted) -> bool:
    if isinstance(wanted, tuple):
        return all(map(torch.equal, found, wanted))
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


def test_every_attention_function_is_in_the_table():
    attention = {name for name in flashattn3.__all__ if name.startswith(("flash_attn", "explain"))}
    assert CALLS.keys() == attention - {"flash_attn_combine"}


@pytest.mark.parametrize("name", CALLS)
def test_neutral_values_of_flash_attention_2_change_nothing(name):
    neutral = {"dropout_p": 0.0, "alibi_slopes": None, "block_table": None}
    call = partial(getattr(flashattn3, name), *CALLS[name])
    with use_backend("reference"):
        assert same(call(**neutral), call())


@pytest.mark.parametrize("name", CALLS)
def test_other_keywords_get_one_sentence(name):
    call = partial(getattr(flashattn3, name), *CALLS[name])
    function = name.replace("explain_with_kvcache", "flash_attn_with_kvcache")
    for given, kind, sentence in REFUSED:
        (keyword,) = given
        message = re.escape(f"{function}: {keyword} {sentence}")
        with pytest.raises(kind, match=message + "$") as caught:
            call(**given)
        assert type(caught.value) is kind
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'cousal'"):
        call(cousal=True)
    if "kvcache" not in function:
        with pytest.raises(UnsupportedError, match="flash_attn_with_kvcache reads keys in pages"):
            call(block_table=TABLE)


def test_what_some_functions_lack_is_taken_at_its_neutral_value():
    """Some callers pass every option to every function: neutral values change no result."""
    neutral, given = {"bias": None, "return_max_logit": False, "mask": None}, X[..., :6]
    assert same(flash_attn_with_kvcache(X, X, X, **neutral), flash_attn_with_kvcache(X, X, X))
    for name, value in (("bias", given), ("return_max_logit", True), ("mask", given)):
        kind = "True" if value is True else "Tensor of shape"
        message = f"flash_attn_with_kvcache: {name} must be {neutral[name]}: flash_attn_func and"
        with pytest.raises(ValueError, match=f"{message} .*, got {kind}"):
            flash_attn_with_kvcache(X, X, X, **{name: value})
    with pytest.raises(ValueError, match="flash_attn_backward: return_max_logit must be False"):
        flash_attn_backward(*CALLS["flash_attn_backward"], return_max_logit=True)


def test_block_table_names_the_page_table_of_a_cached_call():
    q, pages = X[:, :1], X.view(4, 3, 2, 16)[:2]
    given = {"cache_seqlens": 5}
    wanted = flash_attn_with_kvcache(q, pages, pages, page_table=TABLE, **given)
    for named in (
        {"block_table": TABLE},
        {"block_table": TABLE, "page_table": None},
        {"block_table": None, "page_table": TABLE},
    ):
        assert torch.equal(flash_attn_with_kvcache(q, pages, pages, **named, **given), wanted)
    sentence = "block_table must be None with page_table: both name one argument"
    with pytest.raises(ValueError, match=f"flash_attn_with_kvcache: {sentence}"):
        flash_attn_with_kvcache(q, pages, pages, page_table=TABLE, block_table=TABLE)


def test_compiled_calls_take_them_too():
    def attend(x, pages):
        out = flash_attn_func(x, x, x, dropout_p=0.0, alibi_slopes=None)
        return out[:, :1] + flash_attn_with_kvcache(x[:, :1], pages, pages, block_table=TABLE)

    pages = X.view(4, 3, 2, 16)[:2]
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X, pages), attend(X, pages))
