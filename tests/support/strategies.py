"""Random cases for property-based tests. Needs hypothesis, which only the tests depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from flashattn3.call.hadamard import is_rotatable
from flashattn3_bench.checking.cases import Case, dense, varlen

from .fp8 import FORMS

LAYOUTS = ("bshd", "unaligned", "bhsd", "padded")
DISTRIBUTIONS = (
    "normal", "large", "monotone", "outlier", "constant", "zero", "zero-blocks", "huge",
)  # fmt: skip
FP8_DISTRIBUTIONS = (
    "normal", "monotone", "outlier", "constant", "zero", "zero-blocks", "dominant",
)  # fmt: skip
SCORE_DISTRIBUTIONS = ("normal", "outlier", "constant", "zero", "zero-blocks")
V_FACTORS = (1.0, 1.0, 1.0, 2.0**-60, 2.0**60, -1.0)
SOFTCAPS = (0.0, 0.0, 0.0, 0.0, 10.0, 0.5, 1e-3, 1e4, 1e8, 1e39)


@st.composite
def random_cases(
    draw: st.DrawFn, max_seqlen: int = 200, head_dims: tuple[int, ...] | range = range(8, 129)
) -> Case:
    """Any legal combination of the features of the interface, kept small; name "random".

    head_dims: what head_dim and head_dim_v are drawn from.
    """
    lengths = st.integers(0, max_seqlen)
    num_heads_kv, qhead_per_kvhead = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3, 8)))
    head_dim = draw(st.sampled_from(head_dims))
    shape = {
        "heads": (num_heads_kv * qhead_per_kvhead, num_heads_kv),
        "dims": (head_dim, draw(st.just(head_dim) | st.sampled_from(head_dims))),
    }
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.tuples(*[st.just(-1) | st.integers(0, max_seqlen)] * 2)),
        "softcap": draw(st.sampled_from(SOFTCAPS)),
        "softmax_scale": draw(
            st.none() | st.just(0.0) | st.floats(1e-20, 0.5) | st.floats(-0.5, -1e-20)
        ),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "distribution": draw(st.sampled_from(DISTRIBUTIONS)),
        "num_splits": draw(st.sampled_from((0, 0, 1, 3))),
    }
    if draw(st.booleans()):
        seqlens = draw(lengths), draw(lengths)
        return dense("random", seqlens, batch=draw(st.integers(1, 3)), **shape, **options)
    sequences = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4))
    seqlens_q, seqlens_k = (tuple(side) for side in zip(*sequences, strict=True))
    used = {"seqused_q": draw(_used(seqlens_q)), "seqused_k": draw(_used(seqlens_k))}
    tail_rows = draw(st.sampled_from((0, 0, 5)))
    return varlen("random", seqlens_q, seqlens_k, tail_rows=tail_rows, **used, **shape, **options)


@st.composite
def random_score_cases(
    draw: st.DrawFn, max_seqlen: int = 200, head_dims: tuple[int, ...] | range = range(8, 129)
) -> Case:
    """Those of ``random_cases`` with sinks, slopes and a bias."""
    case = draw(random_cases(max_seqlen, head_dims))
    biases = ("", "full", "rows", "heads", "shared")
    return replace(
        case,
        distribution=draw(st.sampled_from(SCORE_DISTRIBUTIONS)),
        sinks=draw(st.sampled_from(("", "normal", "own", "mixed"))),
        slopes=draw(st.sampled_from(("", "heads", "batch"))),
        bias=draw(st.just("") if case.varlen else st.sampled_from(biases)),
    )


class Fp8Problem(NamedTuple):
    """form: one of FORMS. v_factor: on all descales of V, and so on out."""

    case: Case
    form: str
    v_factor: float


@st.composite
def random_fp8_problems(
    draw: st.DrawFn, max_seqlen: int = 200, head_dims: tuple[int, ...] | range = range(8, 129)
) -> Fp8Problem:
    """Those of ``random_cases`` in 8 bits, in every form that fits."""
    case = draw(random_cases(max_seqlen, head_dims))
    case = replace(case, distribution=draw(st.sampled_from(FP8_DISTRIBUTIONS)))
    rotatable = is_rotatable(case.head_dim)
    forms = [form for form in FORMS if rotatable or "rotated" not in form]
    return Fp8Problem(case, draw(st.sampled_from(forms)), draw(st.sampled_from(V_FACTORS)))


def _used(seqlens: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return st.none() | st.tuples(*(st.integers(0, length) for length in seqlens))
