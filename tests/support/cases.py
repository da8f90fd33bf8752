"""The cases that the forward tests of all backends share, and the public call of a case."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashattn3.api import flash_attn_func, flash_attn_varlen_func
from flashattn3.call.operands import Tensors
from flashattn3_bench.checking.cases import Case, dense, varlen


def call(case: Case, tensors: Tensors, **more: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The case through the public interface; ``more`` adds or replaces arguments."""
    q, k, v, *rest = tensors
    named = zip(tensors._fields[3:], rest, strict=True)  # with descales where tests pass ``Given``
    given = {name: x for name, x in named if x is not None}
    if not case.varlen:
        return flash_attn_func(q, k, v, **{**case.options(), **given, **more})
    longest = {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    return flash_attn_varlen_func(q, k, v, **{**case.options(), **given, **longest, **more})


# Small but nasty: every feature, and the edges where tiles, masks and lengths meet.
FORWARD_CASES: tuple[Case, ...] = (
    # lengths around the tiles
    dense("one-token", (1, 1)),
    dense("one-query", (1, 129)),
    dense("one-key", (65, 1)),
    dense("under-tile", (63, 63), causal=True),
    dense("over-tile", (65, 65), causal=True),
    dense("odd", (129, 113)),
    dense("tile-exact", (128, 256), causal=True),
    # causal with unequal lengths; more queries than keys leaves rows that see nothing
    dense("causal", causal=True),
    dense("causal-longer-keys", (65, 193), causal=True),
    dense("causal-empty-rows", (193, 65), causal=True),
    dense("causal-one-query", (1, 113), causal=True),
    # windows
    dense("window-both", (129, 129), window=(17, 9)),
    dense("window-left", (129, 129), window=(31, -1)),
    dense("window-right", (129, 129), window=(-1, 31)),
    dense("window-diagonal", (129, 129), window=(0, 0)),
    dense("window-causal", (113, 177), window=(40, -1), causal=True),
    dense("window-empty-rows", (193, 65), window=(5, 5)),
    dense("window-longer-keys", (33, 257), window=(64, 0)),
    # softcap
    dense("softcap", softcap=5.0, distribution="outlier"),
    dense("softcap-causal", (129, 97), softcap=20.0, causal=True, heads=(4, 2)),
    dense("softcap-small", (129, 193), heads=(4, 2), dims=(128, 128), softcap=0.5, causal=True),
    dense("softcap-small-dim-192", (129, 193), dims=(192, 192), softcap=0.5, causal=True),
    dense("softcap-small-dim-v-256", (129, 193), dims=(64, 256), softcap=1.0),
    dense("softcap-small-dim-256", (129, 193), dims=(256, 256), softcap=4.0, batch=1),
    dense("softcap-tiny", (65, 97), softcap=1e-3),
    dense("softcap-lowest", (65, 97), softcap=1e-40),
    dense("softcap-1e4", (129, 193), dims=(128, 128), softcap=1e4),
    dense("softcap-1e6", (129, 193), softcap=1e6, causal=True),
    dense("softcap-1e8", (129, 193), dims=(256, 256), softcap=1e8, batch=1),
    dense("softcap-1e15", (65, 97), softcap=1e15),
    dense("softcap-highest", (65, 97), softcap=1e39),
    # groups of query heads
    dense("gqa-2", heads=(4, 2), causal=True),
    dense("gqa-8", (65, 97), heads=(8, 1), causal=True),
    dense("gqa-16", (33, 65), heads=(16, 1), batch=1),
    dense("mqa-one-query", (1, 129), heads=(8, 1)),
    # head dims, and v's own
    dense("dim-8", dims=(8, 8), causal=True),
    dense("dim-16", dims=(16, 16)),
    dense("dim-33", dims=(33, 33), causal=True),
    dense("dim-40", dims=(40, 40), causal=True),
    dense("dim-72", dims=(72, 72)),
    dense("dim-80", dims=(80, 80), causal=True),
    dense("dim-96", dims=(96, 96)),
    dense("dim-128", dims=(128, 128), causal=True),
    dense("dim-160", dims=(160, 160)),
    dense("dim-192", dims=(192, 192), causal=True),
    dense("dim-256", dims=(256, 256), causal=True, batch=1),
    dense("dim-v-wider", dims=(64, 128), causal=True),
    dense("dim-v-narrower", dims=(128, 64)),
    dense("dim-192-128", dims=(192, 128), causal=True),
    dense("dim-192-64", (129, 257), dims=(192, 64), heads=(4, 2), causal=True),
    dense("dim-136-128", (193, 129), dims=(136, 128), window=(40, 9)),
    dense("dim-136-192", (65, 193), dims=(136, 192), batch=1),
    dense("dim-72-40", dims=(72, 40), heads=(4, 2)),
    dense("dim-40-24", (129, 193), dims=(40, 24), causal=True),
    dense("dim-24-40", dims=(24, 40), causal=True),
    dense("dim-72-56", dims=(72, 56), causal=True),
    dense("dim-56-8", (129, 193), dims=(56, 8)),
    dense("dim-104-72", dims=(104, 72), causal=True),
    dense("dim-33-17", (129, 193), dims=(33, 17), causal=True),
    # scale
    dense("scale-negative", softmax_scale=-0.3, causal=True),
    dense("scale-zero", softmax_scale=0.0),
    # strides
    dense("layout-bhsd", layout="bhsd", causal=True),
    dense("layout-packed", heads=(4, 2), layout="packed", causal=True),
    dense("layout-padded", layout="padded"),
    dense("layout-unaligned", layout="unaligned", causal=True),
    dense("layout-unaligned-64-32", (129, 193), dims=(64, 32), layout="unaligned", causal=True),
    dense("layout-unaligned-128-16", (129, 193), dims=(128, 16), layout="unaligned"),
    dense("layout-padded-64-32", (129, 193), dims=(64, 32), layout="padded"),
    # values
    dense("large-scores", (129, 257), distribution="large"),
    dense("monotone-scores", (65, 321), distribution="monotone"),
    dense("outliers", (129, 257), distribution="outlier", causal=True),
    dense("constant", distribution="constant", causal=True),
    dense("zero-scores", distribution="zero"),
    dense("zero-blocks", (129, 257), distribution="zero-blocks", heads=(4, 2)),
    dense("huge-values", (129, 321), distribution="huge", batch=1),
    dense("huge-values-causal", (257, 321), dims=(128, 128), distribution="huge", causal=True),
    # ragged sequences
    varlen("varlen", (65, 1, 113), (65, 1, 113), causal=True),
    varlen("varlen-cross", (17, 129, 64), (113, 33, 64), heads=(4, 2)),
    varlen("varlen-causal-cross", (113, 33, 64), (17, 129, 64), causal=True, heads=(4, 1)),
    varlen("varlen-empty-sequences", (0, 65, 0, 33, 7), (5, 65, 0, 0, 97), causal=True),
    varlen("varlen-no-keys", (33, 17), (0, 0)),
    varlen("varlen-no-queries", (0, 0), (33, 17)),
    varlen("varlen-tail-rows-alone", (0, 0), (33, 17), tail_rows=19),
    varlen("varlen-no-sequence", (), (), tail_rows=19),
    varlen(
        "varlen-seqused", (65, 113), (97, 113), seqused_q=(65, 40), seqused_k=(0, 99), causal=True
    ),
    varlen("varlen-tail-rows", (33, 65), (65, 33), tail_rows=19, layout="padded", window=(20, 10)),
    varlen("varlen-packed", (33, 70), (33, 70), layout="packed", causal=True, softcap=10.0),
    varlen("varlen-dim-192", (65, 1, 193), (113, 33, 64), (4, 2), (192, 192), causal=True),
    varlen("varlen-dim-192-128", (33, 130), (300, 64), (4, 1), (192, 128), seqused_k=(257, 0)),
    varlen(
        "varlen-gqa-seqused",
        *((65, 0, 33, 7), (130, 33, 0, 97)),
        *((8, 2), (128, 128)),
        seqused_k=(99, 33, 0, 97),
        tail_rows=19,
        causal=True,
    ),
    varlen(
        "varlen-gqa-dim-256",
        *((0, 70, 5), (33, 130, 9)),
        *((4, 1), (256, 256)),
        seqused_k=(33, 65, 0),
        tail_rows=7,
    ),
    varlen("varlen-splits", (5, 70), (130, 257), num_splits=3, causal=True, dims=(72, 40)),
    # nothing to do, and splits
    dense("no-keys", (33, 0)),
    dense("no-queries", (0, 33)),
    dense("no-batch", batch=0),
    dense("splits", (17, 321), num_splits=3),
    dense("splits-causal", (129, 257), num_splits=3, causal=True, heads=(4, 2)),
)
