"""Every illegal input is met with its exact sentence before anything is launched; legal input is
normalised."""

from __future__ import annotations

import pytest
import torch

from flashattn3 import (
    flash_attn_func,
)
from flashattn3.backends.registry import BACKENDS

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


def dense(**changes):
    arguments = {"q": zeros(2, 8, 4, 16), "k": zeros(2, 8, 2, 16), "v": zeros(2, 8, 2, 16)}
    return lambda: flash_attn_func(**{**arguments, **changes})


# Calls whose arguments do not fit together; test_odd_calls.py has those with one wrong argument.
VALUE_ERRORS = [
    ({"q": zeros(2, 8, 4, 0), "k": zeros(2, 8, 2, 0)}, "q.shape[-1] must be at least 1, got 0"),
    (
        {"k": zeros(2, 8, 0, 16), "v": zeros(2, 8, 0, 16)},
        "k.shape[-2] must be at least 1 head, got 0",
    ),
    ({"q": zeros(2, 8, 3, 16)}, "q.shape[-2] must be a multiple of k's 2 heads, got 3"),
    (
        {"backend": "hopper3"},
        f"backend must be one of {tuple(b.name for b in BACKENDS)}, got 'hopper3'",
    ),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), VALUE_ERRORS, ids=[s[:40] for _, s in VALUE_ERRORS]
)
def test_illegal_input_gets_its_sentence(changes, sentence):
    with pytest.raises(ValueError) as caught:
        dense(**changes)()
    assert str(caught.value) == f"flash_attn_func: {sentence}"
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("name", ["dropout_p", "q_bias", "masks"])
def test_unknown_arguments_are_named(name):
    with pytest.raises(TypeError, match=name):
        dense(**{name: None})()
