"""What ``describe`` makes of a legal call."""

from __future__ import annotations

import pytest
import torch
from helpers import described, meta_qkv

from flashattn3.call.operands import Tensors


def problem(sq=8, sk=8, heads_q=4, heads_kv=2, d=16, dv=16, **options):
    of = meta_qkv(2, sq, sk, (heads_q, heads_kv), d, dv, torch.float16)
    return described(of, **options)


def varlen_problem(**options):
    rows = torch.empty(10, 2, 16, dtype=torch.bfloat16)
    edges = torch.tensor([0, 4, 10], dtype=torch.int32)
    return described(Tensors(rows, rows, rows, edges, edges), **options)


@pytest.mark.parametrize(
    ("options", "sq", "sk", "window"),
    [
        ({}, 8, 8, (-1, -1)),
        ({"causal": True}, 8, 8, (-1, 0)),
        ({"causal": True, "window_right": 5}, 8, 8, (-1, 0)),
        ({"causal": True, "window_left": 3}, 8, 8, (3, 0)),
        ({"causal": True}, 1, 8, (-1, -1)),  # the only query sees every key
        ({"window_left": 6}, 8, 8, (6, -1)),
        ({"window_left": 7}, 8, 8, (-1, -1)),  # the last query sees the first key
        ({"window_left": 100}, 8, 8, (-1, -1)),
        ({"window_right": 6}, 8, 8, (-1, 6)),
        ({"window_right": 7}, 8, 8, (-1, -1)),  # the first query sees the last key
        ({"window_right": 7}, 9, 8, (-1, 7)),
        ({"window_left": 7}, 8, 9, (7, -1)),
        ({"window_left": 0, "window_right": 0}, 8, 8, (0, 0)),
    ],
)
def test_windows_become_plain_bounds(options, sq, sk, window):
    found = problem(sq, sk, **options)
    assert (found.window_left, found.window_right) == window
    assert found.masked == (window != (-1, -1))


@pytest.mark.parametrize(
    ("softcap", "scale", "found"),
    [
        (0.0, 1.0, 0.0),
        (5.0, 1.0, 5.0),
        (1e15, 1.0, 1e15),
        (1e39, 1.0, 0.0),  # changes no score
        (1e5, 2.0**-40, 0.0),
        (1e5, 0.0, 0.0),
        (1e-40, 1.0, 2.0**-50),  # all weights are alike
        (1e-40, 2.0**5, 2.0**-45),
        (1e-40, 2.0**90, 2.0**-40),
    ],
)
def test_softcaps_that_float32_does_not_hold_are_brought_into_its_range(softcap, scale, found):
    assert problem(softcap=softcap, softmax_scale=scale).score_scale.softcap == found


def test_varlen_lengths_are_bounded_by_the_rows():
    assert (varlen_problem().seqlen_q, varlen_problem().batch) == (10, 2)
    assert varlen_problem(max_seqlen_q=6).seqlen_q == 6
    assert varlen_problem(max_seqlen_k=600).seqlen_k == 10
    assert varlen_problem().q.stride == (0, 32, 16)


def test_a_problem_is_a_value():
    first, second = problem(causal=True), problem(window_right=0)
    assert first == second and hash(first) == hash(second)
    assert problem(softcap=1.0) != first
