"""Problems by name. A case holds no tensor: ``values`` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One attention problem.

    seqlens_q, seqlens_k: rows of each sequence; given for varlen only, where batch, seqlen_q and
        seqlen_k are their number and their largest.
    seqused_q, seqused_k: rows of each varlen sequence that count; None counts all.
    tail_rows: rows of q, k and v after the last varlen sequence, which belong to none.
    layout: "bshd" contiguous, "unaligned" the same one element further, "bhsd" heads before rows,
        "padded" a gap after each row, "packed" views of one tensor (same lengths and head dims).
    distribution: "normal", "large" (scores up to 1e4), "monotone" (scores rise along the keys),
        "outlier", "shifted" (k and v have a mean), "constant", "zero" (all scores 0), "zero-blocks"
        (a stretch of tokens is 0), "huge" (v up to 2**110, or to the type's limit, and scores that
        fall along the keys), "dominant" (one key in 50 scores about 8 above the others at
        the default scale).
    softmax_scale: None for head_dim ** -0.5. window: (left, right), -1 open. The rest as in the
        interface.
    sinks: "" none, "normal" in float32, "own" in q's dtype, "mixed" float32, of which by turns one
        lies far above all scores, one far below, one is -inf and one is normal.
    slopes: "" none, "heads" one for each head, "batch" one for each sequence and head.
    bias: "" none, "full", "rows" the same for the batch, "heads" the same for all heads, "shared"
        the same for both.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    tail_rows: int = 0
    layout: str = "bshd"
    distribution: str = "normal"
    num_splits: int = 0
    sinks: str = ""
    slopes: str = ""
    bias: str = ""

    @property
    def id(self) -> str:
        return self.name

    @property
    def varlen(self) -> bool:
        return self.seqlens_q is not None

    @property
    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The leading axes of q, and of k and v: (batch, seqlen) or (total,)."""
        if not self.varlen:
            return (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        return (sum(self.seqlens_q) + self.tail_rows,), (sum(self.seqlens_k) + self.tail_rows,)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the public functions, apart from tensors and lengths."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "num_splits": self.num_splits,
        }

    def reference_options(self) -> dict[str, Any]:
        """Keyword arguments of ``reference.attention`` and ``reference.gradients``, apart from
        dtype.
        """
        left, right = self.window
        return {
            "softmax_scale": self.head_dim**-0.5
            if self.softmax_scale is None
            else self.softmax_scale,
            "window_left": left,
            "window_right": 0 if self.causal else right,
            "softcap": self.softcap,
        }


def dense(
    name: str,
    seqlens: tuple[int, int] = (113, 113),
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    batch: int = 2,
    **rest: Any,
) -> Case:
    """seqlens (q, k), heads (q, kv), dims (qk, v)."""
    return Case(name, batch, *seqlens, *heads, *dims, **rest)


def varlen(
    name: str,
    seqlens_q: tuple[int, ...],
    seqlens_k: tuple[int, ...],
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    **rest: Any,
) -> Case:
    longest = max(seqlens_q, default=0), max(seqlens_k, default=0)
    varlen = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    return Case(name, len(seqlens_q), *longest, *heads, *dims, **varlen, **rest)
