"""A server's loop: chunked prefill, preemption, shared pages, CUDA graphs, 8-bit caches. In
batch-invariant mode every sequence has the bits of itself served alone.

What a token's out is decides the next token, so that one other bit changes the rest of a sequence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from helpers import GPU, TRITON_DTYPES, needs_hopper
from torch import Tensor

from flashattn3 import (
    append_kvcache,
    flash_attn_with_kvcache,
    use_backend,
    use_batch_invariant_mode,
)

HEADS, HEADS_KV, DIM, VOCABULARY = 4, 2, 64, 50
E4M3 = torch.float8_e4m3fn


class Model(NamedTuple):
    """One layer of attention: the rows of q, k and v of each token, (VOCABULARY, heads, ·)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def of(device, dtype: torch.dtype) -> Model:
        generator = torch.Generator().manual_seed(0)
        rows = (
            torch.randn(VOCABULARY, heads, DIM, generator=generator).to(device, dtype)
            for heads in (HEADS, HEADS_KV, HEADS_KV)
        )
        return Model(*rows)


def next_token(out: Tensor) -> int:
    """A token that every bit of out, (heads, DIM), decides."""
    bits = out.contiguous().view({2: torch.int16, 4: torch.int32}[out.element_size()]).long()
    weights = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits.flatten() * weights).sum() % VOCABULARY)


@dataclass
class Sequence:
    tokens: list[int]  # of the prompt, then those that were generated
    wanted: int  # tokens at the end
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Server:
    """chunk: tokens of prompts in a step. slots: sequences in a step. captures: whether steps of
    one token for each sequence are replays of a graph.
    """

    def __init__(
        self, model: Model, stored, captures, page_size: int, num_pages: int, chunk: int, slots: int
    ):
        self.model, self.page_size, self.chunk, self.slots = model, page_size, chunk, slots
        self.device = model.q.device
        self.preemptions = self.shared = self.replays = 0
        shape = num_pages, page_size, HEADS_KV, DIM
        self.caches = [torch.zeros(shape, device=self.device).to(stored) for _ in range(2)]
        self.descales = {}
        if stored == E4M3:
            heads = torch.tensor([0.5, 1.5], device=self.device)
            self.descales = {"k_descale": heads.expand(slots, 2).contiguous()}
            self.descales["v_descale"] = self.descales["k_descale"]
        self.num_pages = num_pages
        self.prefixes: dict[tuple[int, ...], int] = {}  # tokens up to the end of a page → the page
        self.graph, self.captures = None, captures

    def serve(self, sequences: list[Sequence]) -> None:
        waiting, running = list(sequences), []
        while waiting or running:
            while waiting and len(running) < self.slots:
                running.append(waiting.pop(0))
                self._share(running[-1])
            self._make_room(running, waiting)
            self._step(running)
            for sequence in [x for x in running if len(x.tokens) == x.wanted]:
                running.remove(sequence)

    def _share(self, sequence: Sequence) -> None:
        """Begin with the pages that others have written of the same tokens."""
        for end in range(self.page_size, len(sequence.tokens), self.page_size):
            page = self.prefixes.get(tuple(sequence.tokens[:end]))
            if page is None:
                break
            sequence.pages.append(page)
            sequence.cached = end
            self.shared += 1

    def _make_room(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Lend pages for a step; without any the newest sequence has to wait and begin again."""
        for sequence in list(running):
            end = min(len(sequence.tokens), sequence.cached + self.chunk)
            while sequence in running and len(sequence.pages) * self.page_size < end:
                used = {0}.union(*(x.pages for x in running))  # 0: of slots without a sequence
                free = [page for page in range(self.num_pages) if page not in used]
                if free:  # those last that others may begin with
                    page = min(free, key=lambda page: page in self.prefixes.values())
                    self.prefixes = {key: of for key, of in self.prefixes.items() if of != page}
                    sequence.pages.append(page)
                else:
                    newest = running.pop()
                    newest.pages, newest.cached = [], 0
                    waiting.insert(0, newest)
                    self.preemptions += 1

    def _step(self, running: list[Sequence]) -> None:
        chunks = [x.tokens[x.cached : x.cached + self.chunk] for x in running]
        if self.captures and all(len(chunk) == 1 for chunk in chunks):
            out = self._replay(running, chunks)
        else:
            out = self._attend(*self._inputs(running, chunks, len(running), ragged=True))
            out = out[[end - 1 for end in accumulate(map(len, chunks))]]
        for sequence, chunk, row in zip(running, chunks, out, strict=False):
            full = sequence.cached // self.page_size
            sequence.cached += len(chunk)
            for index in range(full, sequence.cached // self.page_size):
                written = tuple(sequence.tokens[: (index + 1) * self.page_size])
                self.prefixes.setdefault(written, sequence.pages[index])
            if sequence.cached == len(sequence.tokens):
                sequence.tokens.append(next_token(row))

    def _inputs(self, running, chunks, slots: int, ragged: bool) -> tuple[Tensor, ...]:
        """Tokens, edges of the chunks or None, cached lengths and the page table."""
        empty = slots - len(running)
        tokens = [token for chunk in chunks for token in chunk] + [0] * empty
        width = max(len(x.pages) for x in running) if ragged else self.num_pages
        table = [x.pages + [0] * (width - len(x.pages)) for x in running] + [[0] * width] * empty
        edges = [0, *accumulate(map(len, chunks))] if ragged else None
        lengths = [x.cached for x in running] + [0] * empty
        given = tokens, edges, lengths, table
        of = {"dtype": torch.int32, "device": self.device}
        return tuple(None if x is None else torch.tensor(x, **of) for x in given)

    def _attend(self, tokens, edges, lengths, table) -> Tensor:
        q, k, v = (rows[tokens.long()] for rows in self.model)
        descales = {name: x[: len(lengths)] for name, x in self.descales.items()}
        place = {"page_table": table, **descales}
        if edges is None:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            append_kvcache(k, v, *self.caches, cache_seqlens=lengths, **place)
            out = flash_attn_with_kvcache(
                q, *self.caches, cache_seqlens=lengths + 1, causal=True, **place
            )
            return out[:, 0]
        ragged = {"cu_seqlens_q": edges, "cu_seqlens_k_new": edges, "max_seqlen_q": len(tokens)}
        return flash_attn_with_kvcache(
            q, *self.caches, k, v, cache_seqlens=lengths, causal=True, **ragged, **place
        )

    def _replay(self, running: list[Sequence], chunks: list[list[int]]) -> Tensor:
        """A step of one token of each sequence as the replay of a graph."""
        found = self._inputs(running, chunks, self.slots, ragged=False)
        if self.graph is None:
            self.inputs = [None if x is None else torch.zeros_like(x) for x in found]
            self._attend(*self.inputs)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._attend(*self.inputs)
        for x, new in zip(self.inputs, found, strict=True):
            if x is not None:
                x.copy_(new)
        self.graph.replay()
        self.replays += 1
        return self.out


def requests(number: int, longest: int) -> list[Sequence]:
    """Half of the prompts begin alike."""
    draw = random.Random(3)
    alike = [draw.randrange(VOCABULARY) for _ in range(longest)]
    found = []
    for index in range(number):
        own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]
        tokens = alike[: longest // 2] * ((index + 1) % 2) + own
        found.append(Sequence(tokens, len(tokens) + draw.randint(1, 5)))
    return found


CASES = [
    pytest.param("reference", torch.float32, torch.float32, 3, 140, id="reference"),
    pytest.param("reference", torch.float16, E4M3, 3, 140, id="reference-e4m3",
                 marks=pytest.mark.slow),
    *(
        pytest.param("triton", dtype, stored, 24 if GPU else 3, 900 if GPU else 18,
                     id=f"triton-{str(stored)[6:]}", marks=pytest.mark.slow)
        for dtype, stored in ((TRITON_DTYPES[0], TRITON_DTYPES[0]), (torch.float16, E4M3))
    ),
    pytest.param("hopper", torch.bfloat16, torch.bfloat16, 40, 1500, id="hopper",
                 marks=needs_hopper),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype", "stored", "number", "longest"), CASES)
def test_a_sequence_has_the_bits_of_itself_alone(backend, dtype, stored, number, longest, device):
    model, captures = Model.of(device, dtype), GPU and backend != "reference"
    together = requests(number, longest)
    with use_backend(backend), use_batch_invariant_mode(split_tokens=128):
        page_size = 16 if longest > 100 else 8
        pages = 1 + -(-max(x.wanted for x in together) // page_size)  # 0, and for the longest one
        slots = min(4, number - 1)
        server = Server(model, stored, captures, page_size, pages, chunk=48, slots=slots)
        server.serve(together)
        replays = server.replays
        for sequence, alone in zip(together, requests(number, longest), strict=True):
            pages = 2 + 3 * longest // 256
            other = Server(model, stored, captures, 256, pages, chunk=4 * longest, slots=1)
            other.serve([alone])
            replays += other.replays
            assert sequence.tokens == alone.tokens
    assert server.preemptions > 0 and server.shared > 0
    assert (replays > 0) == captures
