"""Cells of the suites of cached calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

SUITES = ("decode", "latency", "paged", "ragged", "chunk", "mixed", "invariant", "kv8", "tree")
SUITES += ("prefix",)
QUICK_LENGTH = 40


@dataclass(frozen=True)
class CachedCell:
    """One measurement. page_size: 0 for a dense cache. heads, heads_kv: of queries and keys.

    seqlen_q: queries of each sequence; ragged: with cu_seqlens_q, one query of each sequence but
    the last, which has seqlen_q. stored: the dtype of caches of 8 bits. descales: "cache", one
    number, or "tokens". appends: seqlen_q new tokens are written behind the others, nothing else.
    prefix: keys in front of those of every sequence.
    """

    suite: str
    row: str
    lengths: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    seqlen_q: int = 1
    page_size: int = 0
    window: int = -1
    sinks: bool = False
    ragged: bool = False
    stored: str = ""
    descales: str = "cache"
    appends: bool = False
    prefix: int = 0

    @property
    def group(self) -> int:
        return self.heads // self.heads_kv

    @property
    def queries(self) -> tuple[int, ...]:
        others = len(self.lengths) - 1
        return (1 if self.ragged else self.seqlen_q,) * others + (self.seqlen_q,)

    @property
    def visible(self) -> int:
        """Keys that are read, of all sequences."""
        if self.window < 0:
            return sum(self.lengths) + self.prefix
        pairs = zip(self.lengths, self.queries, strict=True)
        return sum(min(n, self.window + queries) for n, queries in pairs)

    def num_bytes(self, itemsize: int) -> int:
        """Of what is read, or appended. itemsize: of caches of 16 bits."""
        if self.appends:
            new = len(self.lengths) * self.seqlen_q
            return 2 * new * self.heads_kv * self.head_dim * itemsize
        row = self.head_dim * (1 if self.stored else itemsize)
        row += 4 * (self.descales == "tokens")
        return 2 * self.visible * self.heads_kv * row

    @property
    def flops(self) -> float:
        pairs = zip(self.lengths, self.queries, strict=True)
        scores = sum(queries * n - queries * (queries - 1) // 2 for n, queries in pairs)
        scores += self.prefix * sum(self.queries)
        return 4 * scores * self.heads * self.head_dim

    @property
    def options(self) -> dict[str, object]:
        return {"causal": True, "window_size": (self.window, -1)}


# sequences x keys of 32 query and 8 KV heads, then of others.
SIZES = ((1, 1024), (1, 4096), (1, 16384), (1, 131072), (8, 4096), (32, 4096), (128, 1024))
SIZES += ((64, 16384),)
ONE_HEAD = ((1, 4096), (1, 131072), (32, 8192), (128, 8192))
ALL_HEADS = ((1, 4096), (16, 4096))
PAGES = (1, 16, 64, 256)
SHORT = (128, 256, 512, 1024, 2048, 4096, 8192)  # of a sequence alone
PROMPTS = ((4, 4096), (2, 8192), (1, 16384))  # sequences, tokens
PROMPT_HEADS = (("", 32, 128), ("d64, ", 32, 64), ("d256, ", 16, 256))  # 8 KV heads
CHUNKS = ((1, 2048, 16384), (4, 2048, 8192), (8, 256, 4096))  # sequences, queries, keys
# Queries, heads, KV heads, head dim and page of 32 sequences of 4k keys.
TREES = (
    *((64, 32, 8, 128, size) for size in (0, 16, 256)),
    *((64, 32, 8, 64, size) for size in (0, 16, 256)),
    (64, 16, 8, 128, 16),
    (64, 8, 8, 128, 16),
    (16, 32, 8, 128, 16),
    (4, 32, 8, 128, 16),
)
PREFIXES = ((64, 16), (64, 256), (8, 16), (256, 16))  # sequences, page
# Names, dtypes of caches of 8 bits and their descales.
STORED_PREFIXES = (
    ("", "", "cache"),
    ("e4m3, ", "e4m3", "cache"),
    ("int8, ", "int8", "cache"),
    ("e4m3, of tokens, ", "e4m3", "tokens"),
)
# Heads, KV heads, head dim, queries and size of other cells of 8 bits: up to 16 packed rows.
KV8_OTHERS = (
    *((32, 8, 128, 4, size) for size in ((1, 16384), (32, 4096), (64, 16384))),
    (24, 8, 128, 3, (32, 4096)),
    *((64, 8, 64, queries, size) for queries in (1, 2) for size in ((1, 4096), (32, 4096))),
    *((16, 8, 256, queries, (32, 4096)) for queries in (1, 4)),
)
KV8_CHUNKS = ((1, 2048, 16384), (1, 256, 16384), (8, 256, 4096))
# 64 lengths from 64 to 32k, evenly spaced in their logarithm.
RAGGED = tuple(round(64 * 512 ** (i / 63)) for i in range(64))


def _named(keys: int) -> str:
    return f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)


def _dense_cells() -> Iterator[CachedCell]:
    for heads, heads_kv, sizes in ((32, 8, SIZES), (8, 1, ONE_HEAD), (32, 32, ALL_HEADS)):
        for batch, keys in sizes:
            row = f"{heads}/{heads_kv} heads, {batch} x {_named(keys)}"
            yield CachedCell("decode", row, (keys,) * batch, heads, heads_kv)
    yield CachedCell("decode", "64/8 heads, 1 x 512k", (524288,), 64, 8)
    yield CachedCell("decode", "4 queries, 32 x 4k", (4096,) * 32, seqlen_q=4)
    yield CachedCell(
        "decode", "d64, window 128, sinks, 64/8, 32 x 8k", (8192,) * 32, 64, 8, 64, window=127,
        sinks=True,
    )  # fmt: skip
    yield CachedCell("decode", "d256, 8/1 heads, 32 x 4k", (4096,) * 32, 8, 1, 256)
    # A policy: 51 queries over a prefix of 800 tokens.
    yield CachedCell("decode", "51 queries, d256, 8/1, 1 x 851", (851,), 8, 1, 256, 51)


def _cells_of_8_bits() -> Iterator[CachedCell]:
    """The dense cells and others in both dtypes, two dense ones in pages and with other descales,
    chunks, and appends."""
    dense = list(_dense_cells())[:15]
    for stored in ("e4m3", "int8"):
        for cell in dense:
            yield replace(cell, suite="kv8", row=f"{stored}, {cell.row}", stored=stored)
        for heads, heads_kv, dim, new, (batch, n) in KV8_OTHERS:
            row = f"{stored}, d{dim}, {heads}/{heads_kv}, {new} queries, {batch} x {_named(n)}"
            yield CachedCell("kv8", row, (n,) * batch, heads, heads_kv, dim, new, stored=stored)
    for cell in dense:
        if cell.heads_kv == 8 and cell.lengths in ((4096,) * 32, (16384,) * 64):
            of = replace(cell, suite="kv8", stored="e4m3")
            yield replace(of, row=f"e4m3, of tokens, {cell.row}", descales="tokens")
            for size in (1, 16, 64, 128, 256):
                row = f"e4m3, page {size}, {cell.row}"
                yield replace(of, row=row, page_size=size)
                if size == 16:
                    yield replace(of, row=f"{row}, of tokens", page_size=size, descales="tokens")
    for batch, chunk, keys in KV8_CHUNKS:
        for stored, size in (("e4m3", 16), ("int8", 16), ("e4m3", 0)):
            row = f"{stored}, {batch} x {chunk} of {_named(keys)}" + f", page {size}" * (size > 0)
            yield CachedCell("kv8", row, (keys,) * batch, seqlen_q=chunk, page_size=size,
                             stored=stored)  # fmt: skip
    for stored in ("e4m3", "int8"):
        for new in (64, 8192):
            yield CachedCell(
                "kv8", f"{stored}, append {new}", (16384,), seqlen_q=new, stored=stored,
                descales="tokens", appends=True,
            )  # fmt: skip


def cached_cells(suite: str, quick: bool = False) -> list[CachedCell]:
    """The cells of one of SUITES. quick: the same problems, cut down to a CPU's size."""
    if suite == "decode":
        cells = list(_dense_cells())
    elif suite == "latency":
        cells = [
            CachedCell(suite, f"{heads}/{heads_kv} heads, {_named(n)}", (n,), heads, heads_kv)
            for heads, heads_kv in ((32, 8), (8, 1))
            for n in SHORT
        ]
    elif suite == "invariant":
        cells = [replace(cell, suite=suite) for cell in list(_dense_cells())[:15]]
        cells += [
            CachedCell(
                suite, f"d{dim}, {heads}/8, {batch} x {_named(n)}", (n,) * batch, heads, 8, dim
            )
            for heads, dim in ((32, 64), (16, 256))
            for batch, n in SIZES[:6]
        ]
        cells += [
            CachedCell(
                suite, f"{name}prompt, {batch} x {_named(n)}", (n,) * batch, heads, 8, dim, n
            )
            for name, heads, dim in PROMPT_HEADS
            for batch, n in PROMPTS
        ]
    elif suite == "kv8":
        cells = list(_cells_of_8_bits())
    elif suite == "tree":
        cells = [
            CachedCell(suite, f"{new} tokens, {heads}/{heads_kv}, d{dim}, page {size}",
                       (4096,) * 32, heads, heads_kv, dim, new, size)
            for new, heads, heads_kv, dim, size in TREES
        ]  # fmt: skip
    elif suite == "prefix":
        cells = [
            CachedCell(suite, f"{named}8k, then {batch} x 512, page {size}", (512,) * batch,
                       page_size=size, prefix=8192, stored=stored, descales=descales)
            for named, stored, descales in STORED_PREFIXES
            for batch, size in PREFIXES
        ]  # fmt: skip
    elif suite == "mixed":
        row = "63 x 8k decoded, 2048 of 8k, page"
        of = {"lengths": (8192,) * 64, "seqlen_q": 2048, "ragged": True}
        cells = [CachedCell(suite, f"{row} {size}", **of, page_size=size) for size in (16, 128)]
    elif suite == "paged":
        cells = [
            replace(cell, suite=suite, row=f"page {size}, {cell.row}", page_size=size)
            for cell in list(_dense_cells())[:15]
            for size in PAGES
        ]
    elif suite == "ragged":
        cells = [
            CachedCell(suite, f"{name}, {f'page {size}' if size else 'dense'}", lengths,
                       page_size=size)
            for name, lengths in (("64 of 64 to 32k", RAGGED), ("one 64k", (65536, *(512,) * 31)))
            for size in (0, 16, 128)
        ]  # fmt: skip
    else:
        cells = [
            CachedCell(suite, f"{batch} x {new} of {_named(keys)}, page {size}", (keys,) * batch,
                       seqlen_q=new, page_size=size)
            for batch, new, keys in CHUNKS
            for size in (16, 128)
        ]  # fmt: skip
    if not quick:
        return cells
    # On a CPU a call with a prefix is two, whose results have q's dtype before they are joined: of
    # the 16 bits beside a cache of 8 they are rounded once more than the tolerance allows.
    cells = [cell for cell in cells if not (cell.prefix and cell.stored)]
    return list(dict.fromkeys(map(_cut_down, cells)))


def _cut_down(cell: CachedCell) -> CachedCell:
    lengths = tuple(max(5, min(n, QUICK_LENGTH)) for n in cell.lengths[:2])
    group = min(2, cell.group)
    new = min(cell.seqlen_q, 5)
    name = f"quick {len(lengths)} x {lengths[0]}, d{cell.head_dim}, {new} queries"
    name += f", page {cell.page_size}" * (cell.page_size > 0) + ", ragged" * cell.ragged
    if cell.stored:
        name += f", {cell.stored}, of {cell.descales}" + ", append" * cell.appends
    of_prefix = min(cell.prefix, QUICK_LENGTH)
    of = {"lengths": lengths, "heads": group, "heads_kv": 1, "seqlen_q": new, "prefix": of_prefix}
    return replace(cell, row=name, **of)
