"""Every illegal input is met with its exact sentence before anything is launched; legal input is
normalised."""

from __future__ import annotations

import pytest
import torch

import flashattn3
from flashattn3 import (
    UnsupportedError,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flashattn3.backends.registry import BACKENDS
from flashattn3.call.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("nothing_runs")


@pytest.fixture
def nothing_runs(monkeypatch):
    """A call that gets as far as a backend fails the test."""

    def reached(self, *arguments):
        pytest.fail(f"the {self.name} backend was reached")

    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "prepare", reached)


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def index(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype).to(device)


def dense(**changes):
    arguments = {"q": zeros(2, 8, 4, 16), "k": zeros(2, 8, 2, 16), "v": zeros(2, 8, 2, 16)}
    return lambda: flash_attn_func(**{**arguments, **changes})


def varlen(**changes):
    arguments = {
        "q": zeros(8, 4, 16),
        "k": zeros(8, 2, 16),
        "v": zeros(8, 2, 16),
        "cu_seqlens_q": index(0, 3, 8),
        "cu_seqlens_k": index(0, 3, 8),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    return lambda: flash_attn_varlen_func(**{**arguments, **changes})


def packed(*shape, **changes):
    return lambda: flash_attn_qkvpacked_func(zeros(*shape), **changes)


LAYOUT = "(batch, seqlen, heads, head_dim)"
VALUE_ERRORS = [
    (dense(q=zeros(8, 4, 16)), f"q.shape must be {LAYOUT}, got (8, 4, 16)"),
    (
        dense(q=zeros(2, 8, 4, 16, dtype=torch.int32)),
        f"q.dtype must be one of {DTYPES}, got torch.int32",
    ),
    (
        dense(k=zeros(2, 8, 2, 16, dtype=torch.bfloat16)),
        "k.dtype must be torch.float16 as q's, got torch.bfloat16",
    ),
    (dense(v=zeros(2, 8, 2, 16, device="meta")), "v.device must be cpu as q's, got meta"),
    (dense(k=zeros(3, 8, 2, 16)), "k.shape[0] must be 2 (q's batch), got 3"),
    (dense(v=zeros(2, 7, 2, 16)), "v.shape[-3] must be 8 (k's seqlen), got 7"),
    (dense(v=zeros(2, 8, 4, 16)), "v.shape[-2] must be 2 (k's heads), got 4"),
    (dense(k=zeros(2, 8, 2, 24)), "k.shape[-1] must be 16 (q's head_dim), got 24"),
    (dense(q=zeros(2, 8, 4, 0), k=zeros(2, 8, 2, 0)), "q.shape[-1] must be at least 1, got 0"),
    (dense(v=zeros(2, 8, 2, 0)), "v.shape[-1] must be at least 1, got 0"),
    (
        dense(k=zeros(2, 8, 0, 16), v=zeros(2, 8, 0, 16)),
        "k.shape[-2] must be at least 1 head, got 0",
    ),
    (dense(q=zeros(2, 8, 0, 16)), "q.shape[-2] must be at least 1 head, got 0"),
    (dense(q=zeros(2, 8, 3, 16)), "q.shape[-2] must be a multiple of k's 2 heads, got 3"),
    (dense(softmax_scale=10**400), "softmax_scale must be finite, got 1" + 59 * "0" + "... (int)"),
    (dense(sm_margin=2**63), "sm_margin must be an int of 64 bits, got 9223372036854775808 (int)"),
    (
        dense(backend="hopper3"),
        f"backend must be one of {tuple(b.name for b in BACKENDS)}, got 'hopper3'",
    ),
]
VARLEN_VALUE_ERRORS = [
    (varlen(q=zeros(1, 8, 4, 16)), "q.shape must be (total, heads, head_dim), got (1, 8, 4, 16)"),
    (varlen(cu_seqlens_q=zeros(3)), "cu_seqlens_q.dtype must be torch.int32, got torch.float16"),
    (
        varlen(cu_seqlens_q=index(0, 8)[None]),
        "cu_seqlens_q.shape must be one-dimensional, got (1, 2)",
    ),
    (varlen(cu_seqlens_k=index(0, 8)), "cu_seqlens_k.shape[0] must be 3 (batch + 1), got 2"),
    (varlen(cu_seqlens_q=index()), "cu_seqlens_q.shape[0] must be batch + 1 >= 1, got 0"),
    (
        varlen(cu_seqlens_q=index(0, 3, 8, device="meta")),
        "cu_seqlens_q.device must be cpu as q's, got meta",
    ),
    (varlen(seqused_q=index(3)), "seqused_q.shape[0] must be 2 (batch), got 1"),
    (varlen(max_seqlen_k=torch.tensor(-3)), "max_seqlen_k must be >= 0, got -3"),
]
PACKED_SHAPE = "(batch, seqlen, 3, heads, head_dim) without num_heads_q"
PACKED_HEADS = "(batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with num_heads_q"
PACKED_VALUE_ERRORS = [
    (packed(2, 8, 12, 16), f"qkv.shape must be {PACKED_SHAPE}, got (2, 8, 12, 16)"),
    (packed(2, 8, 2, 4, 16), f"qkv.shape must be {PACKED_SHAPE}, got (2, 8, 2, 4, 16)"),
    (
        packed(2, 8, 3, 4, 16, num_heads_q=4),
        "num_heads_q must be None where qkv has five axes, got 4",
    ),
    (packed(8, 12, 16, num_heads_q=4), f"qkv.shape must be {PACKED_HEADS}, got (8, 12, 16)"),
    *(
        (
            packed(2, 8, 8, 16, num_heads_q=heads),
            "num_heads_q must be at least 1 and leave an even number of qkv's 8 heads for k and v, "
            f"got {heads}",
        )
        for heads in (0, 3, 8)
    ),
]
TYPE_ERRORS = [
    (dense(q=[1.0]), "q must be a torch.Tensor, got [1.0] (list)"),
    (
        dense(softmax_scale=True),
        "softmax_scale must be a float, got True (bool); pass softmax_scale and causal by name, "
        "FlashAttention-2 has them elsewhere",
    ),
    (
        dense(window_size=(1, 2, 3)),
        "window_size must be a pair (left, right), got (1, 2, 3) (tuple)",
    ),
    (dense(window_size=(1, True)), "window_size[1] must be an int, got True (bool)"),
]
VARLEN_TYPE_ERRORS = [
    (
        varlen(max_seqlen_q=torch.tensor([5])),
        "max_seqlen_q must be an int, got Tensor of shape (1,) and dtype torch.int64",
    ),
    (varlen(cu_seqlens_q=None), "cu_seqlens_q must be a torch.Tensor, got None"),
]
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func")
ILLEGAL = [
    (error, f"{function}: {sentence}", call)
    for error, function, table in (
        (ValueError, FUNCTIONS[0], VALUE_ERRORS),
        (ValueError, FUNCTIONS[1], VARLEN_VALUE_ERRORS),
        (ValueError, FUNCTIONS[2], PACKED_VALUE_ERRORS),
        (TypeError, FUNCTIONS[0], TYPE_ERRORS),
        (TypeError, FUNCTIONS[1], VARLEN_TYPE_ERRORS),
    )
    for call, sentence in table
]


@pytest.mark.parametrize(
    ("error", "sentence", "call"), ILLEGAL, ids=[s[:70] for _, s, _ in ILLEGAL]
)
def test_illegal_input_gets_its_sentence(error, sentence, call):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == sentence
    assert type(caught.value) is error


def test_packed_input_must_be_a_tensor():
    with pytest.raises(TypeError) as caught:
        flash_attn_qkvpacked_func([1])
    sentence = "flash_attn_qkvpacked_func: qkv must be a torch.Tensor, got [1] (list)"
    assert str(caught.value) == sentence


REFUSED = {
    "qv": zeros(2, 8, 4, 16),
    "attention_chunk": 128,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", [dense, varlen], ids=FUNCTIONS[:2])
def test_what_nothing_supports_is_refused_by_name(call, name):
    sentence = f"_func: {name} must be .*, got .*: it is not supported yet by any backend$"
    with pytest.raises(UnsupportedError, match=sentence):
        call(**{name: REFUSED[name]})()


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "qv"])
def test_packed_refuses_the_same_arguments(name):
    sentence = f": {name} must be 0, got 128 .*: it is not supported yet by any backend$"
    with pytest.raises(UnsupportedError, match=sentence):
        packed(2, 8, 3, 4, 16, **{name: REFUSED[name]})()


@pytest.mark.parametrize("name", ["dropout_p", "q_bias", "masks"])
def test_unknown_arguments_are_named(name):
    with pytest.raises(TypeError, match=name):
        dense(**{name: None})()


def test_explain_checks_what_the_call_checks():
    q, k = zeros(2, 8, 3, 16), zeros(2, 8, 2, 16)
    with pytest.raises(
        ValueError, match=r"q\.shape\[-2\] must be a multiple of k's 2 heads, got 3"
    ):
        flashattn3.explain(q, k, k)
