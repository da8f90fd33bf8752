"""Which cells each suite is made of. The shapes are those of flashattn3_bench.checking.cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .checking import Case
from .checking.shapes import (
    FEW_QUERIES,
    GROUPED_GRID,
    NAMED_SHAPES,
    ODD_DIMS,
    OTHER_DIMS,
    PAPER_GRID,
    ROBOT_SHAPES,
    SCORE_SHAPES,
)

DIRECTIONS = ("fwd", "bwd")
SCORES = "scores"
CASES = {
    "grid": PAPER_GRID,
    "dims": OTHER_DIMS,
    "odd-dims": ODD_DIMS,
    "shapes": NAMED_SHAPES,
    "robot": ROBOT_SHAPES,
    "few-queries": FEW_QUERIES,
    "gqa": GROUPED_GRID,
    "deterministic": PAPER_GRID,
    "captured": PAPER_GRID,
    "fp8": PAPER_GRID,
    SCORES: SCORE_SHAPES,
    "rotary": tuple(case for case in PAPER_GRID if case.seqlen_k >= 1024),
    "ladder": tuple(
        replace(case, layout="bhsd")
        for case in PAPER_GRID
        if case.head_dim <= 128 and case.seqlen_k >= 1024
    ),
}
BY_NAME = ("shapes", "robot", "few-queries", SCORES)  # suites in which a row is one case
BY_HEADS = ("dims", "gqa")  # suites whose rows always name the heads; else grouped ones do


@dataclass(frozen=True)
class Cell:
    """One measurement of every provider. row and column place it in the table and the figure."""

    suite: str
    case: Case
    direction: str

    @property
    def row(self) -> str:
        case = self.case
        if self.suite in BY_NAME:
            return f"{self.direction} {case.name}"
        mask = "causal" if case.causal else "full"
        named = self.suite in BY_HEADS or case.num_heads_q != case.num_heads_kv
        heads = f" {case.num_heads_q}/{case.num_heads_kv} heads" * named
        return f"{self.direction} d{_dims(case)} {mask}{heads}"

    @property
    def column(self) -> str:
        return "" if self.suite in BY_NAME else str(self.case.seqlen_k)

    @property
    def with_all_heads(self) -> Cell:
        """The same, each query head with a head of k and v of its own: as many FLOPs."""
        return replace(self, case=replace(self.case, num_heads_kv=self.case.num_heads_q))

    @property
    def flops(self) -> float:
        """As the papers count: two products forward, five backward, half of them if causal, and
        with a window of causal calls those of visible scores."""
        case = self.case
        of_one = (case.seqlen_q,), (case.seqlen_k,)
        lengths = (case.seqlens_q, case.seqlens_k) if case.varlen else of_one
        scores = sum(_num_scores(case, *of) for of in zip(*lengths, strict=True))
        products = scores * case.num_heads_q * (1 if case.varlen else case.batch)
        forward = 2 * products * (case.head_dim + case.head_dim_v)
        return forward * (2.5 if self.direction == "bwd" else 1.0)


def _num_scores(case: Case, seqlen_q: int, seqlen_k: int) -> float:
    """Of one sequence and head."""
    left = case.window[0]
    if case.causal and left >= 0:
        seen = min(left + 1, seqlen_q)
        return seen * (seqlen_q - (seen - 1) / 2)
    return seqlen_q * seqlen_k / (2 if case.causal else 1)


def cells(
    suite: str,
    directions: Iterable[str] = DIRECTIONS,
    head_dims: Iterable[int] | None = None,
    seqlens: Iterable[int] | None = None,
    quick: bool = False,
) -> list[Cell]:
    """The cells of one of CASES. quick: the same problems, cut down to a CPU's size."""
    cases = CASES[suite]
    if quick:
        cases = tuple(dict.fromkeys(_cut_down(case) for case in cases))
    return [
        Cell(suite, case, direction)
        for direction in directions
        for case in cases
        if head_dims is None or case.head_dim in head_dims
        if seqlens is None or case.seqlen_k in seqlens
    ]


QUICK_SEQLEN = 128


def _cut_down(case: Case) -> Case:
    """One sequence of at most QUICK_SEQLEN tokens, or a short one behind it, and few heads."""
    heads_kv = min(case.num_heads_kv, 2)
    qhead_per_kvhead = min(case.num_heads_q // case.num_heads_kv, 2)
    seqlen_q, seqlen_k = min(case.seqlen_q, QUICK_SEQLEN), min(case.seqlen_k, QUICK_SEQLEN)
    mask = "causal" if case.causal else "full"
    lengths = (seqlen_q, 40) if case.varlen else None
    return replace(
        case,
        name=f"quick-d{_dims(case)}-{mask}-{seqlen_q}x{seqlen_k}-h{heads_kv * qhead_per_kvhead}"
        + "-varlen" * case.varlen,
        batch=1,
        seqlens_q=lengths,
        seqlens_k=lengths,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_kv * qhead_per_kvhead,
        num_heads_kv=heads_kv,
    )


def _dims(case: Case) -> str:
    same = case.head_dim == case.head_dim_v
    return str(case.head_dim) if same else f"{case.head_dim}/{case.head_dim_v}"
