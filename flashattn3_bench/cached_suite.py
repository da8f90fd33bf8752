"""Cached calls: a few queries that read a cache, dense, paged and ragged; chunks of a prompt.

Every provider runs as a CUDA graph on a GPU, so no time of the host is in a number. "read" is a
kernel that only reads as many bytes as the visible keys and values have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import flashattn3
from flashattn3.call.operands import Tensors

from . import cached_eight_bits as eight_bits
from .cached_cells import CachedCell
from .checking import FORWARD_FACTOR, attention, check
from .cuda_graph import captured
from .host_suite import timed
from .inputs import normal_numbers
from .providers import OURS, SDPA_BACKENDS
from .read_kernel import prepare_read
from .runner import OK, Record, Settings, described, refusal, times_of
from .timing import Timing, interleave, make_clock

READ, DENSE, APART, SPANS = "read", "dense", "apart", "split_tokens=1024"
TREE, TRITON, TWO_CALLS = "tree_mask", "triton", "two calls"


@dataclass
class CachedInputs:
    """q: (batch, seqlen_q, heads, head_dim), of a ragged cell (total_q, heads, head_dim). k, v: of
    each sequence, (length, heads_kv, head_dim), dense: views of one cache.

    pages: (k_cache, v_cache, page_table) of the same tokens, where the cell has pages. stored: the
        caches of 8 bits and their descales, of which all others have the values. prefix: the page
        table of the keys in front of those of every sequence, and these keys and values.
    """

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    dense: tuple[Tensor, Tensor] | None
    pages: tuple[Tensor, Tensor, Tensor] | None
    seqlens: Tensor
    sinks: Tensor | None
    stored: eight_bits.Arguments | None = None
    prefix: tuple[Tensor, Tensor, Tensor] | None = None


def make_cached_inputs(cell: CachedCell, settings: Settings) -> CachedInputs:
    device, lengths = settings.device, cell.lengths
    normal = normal_numbers(device, settings.dtype)
    batch, heads_kv, dim = len(lengths), cell.heads_kv, cell.head_dim
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    lead = (sum(cell.queries),) if cell.ragged else (batch, cell.seqlen_q)
    q = normal(*lead, cell.heads, dim)
    sinks = torch.randn(cell.heads, device=device) if cell.sinks else None
    if not cell.page_size:
        caches = [normal(batch, max(lengths), heads_kv, dim) for _ in range(2)]
        q, stored = _in_8_bits(cell, q, caches)
        k, v = ([x[i, :n] for i, n in enumerate(lengths)] for x in caches)
        return CachedInputs(q, k, v, tuple(caches), None, seqlens, sinks, stored)
    size = cell.page_size
    needed = [-(-n // size) for n in (*lengths, cell.prefix)]
    generator = normal.keywords["generator"]
    order = torch.randperm(sum(needed), device=device, generator=generator).int()
    caches = [normal(sum(needed), size, heads_kv, dim) for _ in range(2)]
    q, stored = _in_8_bits(cell, q, caches)
    pages_of = order.split(needed)
    table = torch.full((batch, max(needed[:-1])), -1, dtype=torch.int32, device=device)
    k, v = [], []
    for index, (pages, count) in enumerate(zip(pages_of[:-1], needed, strict=False)):
        table[index, :count] = pages
        k.append(caches[0][pages.long()].flatten(0, 1)[: lengths[index]])
        v.append(caches[1][pages.long()].flatten(0, 1)[: lengths[index]])
    dense = None
    if len(set(lengths)) == 1:
        dense = torch.stack(k), torch.stack(v)
        k, v = (list(x) for x in dense)
    prefix = None
    if cell.prefix:
        of_prefix = (x[pages_of[-1].long()].flatten(0, 1)[: cell.prefix] for x in caches)
        prefix = pages_of[-1][None], *of_prefix
    return CachedInputs(q, k, v, dense, (*caches, table), seqlens, sinks, stored, prefix)


def _in_8_bits(
    cell: CachedCell, q: Tensor, caches: list[Tensor]
) -> tuple[Tensor, eight_bits.Arguments | None]:
    """q and, of a cell of 8 bits, what stores the caches, which get its values."""
    if not cell.stored:
        return q, None
    q, stored = eight_bits.query(q), eight_bits.store(cell, caches)
    caches[:] = [eight_bits.values(stored, name).to(q.dtype) for name in "kv"]
    return q, stored


Call = Callable[[], Tensor]


def _calls(cell: CachedCell, inputs: CachedInputs, settings: Settings) -> dict[str, Call]:
    """Provider → its call, which returns out in q's shape."""
    if cell.ragged:
        return _mixed_calls(cell, inputs)
    if inputs.prefix:
        return _prefix_calls(cell, inputs)
    q, options = inputs.q, {**cell.options, "sinks": inputs.sinks}
    cached = partial(flashattn3.flash_attn_with_kvcache, q, cache_seqlens=inputs.seqlens, **options)
    calls: dict[str, Call] = {}
    mine = eight_bits.WIDE if inputs.stored else OURS
    if inputs.stored:
        table = inputs.pages[2] if inputs.pages else None
        calls[OURS] = partial(cached, page_table=table, **inputs.stored)
    if inputs.pages:
        k_cache, v_cache, table = inputs.pages
        calls[mine] = partial(cached, k_cache, v_cache, page_table=table)
    elif inputs.dense:
        calls[mine] = partial(cached, *inputs.dense)
    if cell.suite == "chunk":
        calls[DENSE] = partial(flashattn3.flash_attn_func, q, *inputs.dense, causal=True)
    elif cell.suite == "invariant":
        calls[SPANS] = partial(cached, *inputs.dense, split_tokens=1024)
    elif cell.suite == "paged":
        calls[DENSE] = partial(cached, *inputs.dense)
    elif cell.suite == "tree":
        calls[TREE] = partial(calls[OURS], tree_mask=_chain(cell, q.device))
        calls[TRITON] = partial(calls[TREE], backend=TRITON)
    plain = cell.window < 0 and not cell.sinks and cell.seqlen_q == 1
    if cell.suite in ("decode", "latency", "kv8") and plain:
        for name in settings.baselines:
            if name in SDPA_BACKENDS:
                calls[name] = partial(_sdpa, name, q, *inputs.dense)
    return calls


def _chain(cell: CachedCell, device: torch.device) -> Tensor:
    """A ``tree_mask`` whose bits show what causal shows; kernels take as long with any others."""
    seen = torch.ones(cell.seqlen_q, cell.seqlen_q, dtype=torch.bool, device=device).tril()
    seen = F.pad(seen, (0, -cell.seqlen_q % 32)).unflatten(1, (-1, 32))
    words = (seen.long() << torch.arange(32, device=device)).sum(2)
    return words.to(torch.int32).repeat(len(cell.lengths), 1, 1)


def _mixed_calls(cell: CachedCell, inputs: CachedInputs) -> dict[str, Call]:
    """All sequences in one call; the single tokens and the chunk in a call each."""
    q, (k_cache, v_cache, table), seqlens = inputs.q, inputs.pages, inputs.seqlens
    edges = torch.tensor([0, *accumulate(cell.queries)], dtype=torch.int32, device=q.device)
    attend = partial(flashattn3.flash_attn_with_kvcache, causal=True)
    whole = {"cu_seqlens_q": edges, "max_seqlen_q": cell.seqlen_q}
    whole |= {"cache_seqlens": seqlens, "page_table": table}
    out, others = torch.empty_like(q), len(cell.lengths) - 1

    def apart() -> Tensor:
        for lead, rows in (((others, 1), slice(others)), ((1, -1), slice(others, None))):
            attend(
                q[rows].unflatten(0, lead), k_cache, v_cache, cache_seqlens=seqlens[rows],
                page_table=table[rows], out=out[rows].unflatten(0, lead),
            )  # fmt: skip
        return out

    return {OURS: partial(attend, q, k_cache, v_cache, **whole), APART: apart}


def _prefix_calls(cell: CachedCell, inputs: CachedInputs) -> dict[str, Call]:
    """The prefix and the sequences in one call; in a call each, whose results are combined."""
    q, (k_cache, v_cache, table), (pages, *_) = inputs.q, inputs.pages, inputs.prefix
    of_16_bits = {"k_cache": k_cache, "v_cache": v_cache}
    attend = partial(flashattn3.flash_attn_with_kvcache, **inputs.stored or of_16_bits)
    own = {"cache_seqlens": inputs.seqlens, "page_table": table, "causal": True}
    of_prefix = {"cache_seqlens": cell.prefix, "page_table": pages, "return_lse": True}

    def two_calls() -> Tensor:
        (first, first_lse), (out, lse) = (
            attend(q.flatten(0, 1)[None], **of_prefix), attend(q, **own, return_lse=True)
        )  # fmt: skip
        first_lse = first_lse[0].unflatten(1, q.shape[:2]).transpose(0, 1)
        outs = torch.stack((first.view(out.shape), out))
        lses = torch.stack((first_lse, lse)).transpose(-1, -2)
        return flashattn3.flash_attn_combine(outs, lses)[0]

    one = partial(attend, q, **own, prefix_page_table=pages, prefix_len=cell.prefix)
    calls = {OURS: one, TWO_CALLS: two_calls}
    if inputs.stored:
        calls[eight_bits.WIDE] = partial(one, **of_16_bits, k_descale=None, v_descale=None)
    return calls


def _sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPA_BACKENDS[name]):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _offered(
    cell: CachedCell, settings: Settings
) -> tuple[dict[str, Call], Callable[[object, str], None]]:
    """The calls of a cell and a check of (what a call returned, its provider)."""
    if cell.appends:
        return eight_bits.append_calls(cell, settings)
    inputs = make_cached_inputs(cell, settings)
    return _calls(cell, inputs, settings), partial(_check, cell, inputs)


def run_cached(cell: CachedCell, settings: Settings) -> list[Record]:
    """A record for each provider, with the bytes of the visible keys and what they take."""
    calls: dict[str, Call] = {}
    refused: dict[str, Record] = {}
    offered, check_of = _offered(cell, settings)
    for name, call in offered.items():
        try:
            check_of(call(), name)
            calls[name] = captured(lambda call=call: call, settings.device)
        except Exception as error:  # whatever it is, the other providers and cells go on
            refused[name] = refusal(name, error)
    num_bytes = cell.num_bytes(settings.dtype.itemsize)
    if cell.suite != "chunk" and not cell.appends:
        read = prepare_read(num_bytes, settings.device)
        calls[READ] = captured(lambda: read, settings.device)
    clock = make_clock(settings.device, num_bytes)
    timings = interleave(calls, clock, settings.rounds, settings.round_ms)
    return [_record(cell, name, settings, timings, refused) for name in (*timings, *refused)]


def _check(cell: CachedCell, inputs: CachedInputs, out: Tensor, name: str) -> None:
    """Hold the last KV head of the first and the last sequence to the tolerance rule."""
    for index in {0, len(cell.lengths) - 1}:
        expected = [_sample(cell, inputs, dtype, index) for dtype in (torch.float64, out.dtype)]
        found = _rows(cell, out, index)
        check("out", found, *expected, FORWARD_FACTOR, cell.row, name)


def _rows(cell: CachedCell, x: Tensor, index: int) -> Tensor:
    """Queries of a sequence with the query heads of the last KV head, of q or of out."""
    begin = sum(cell.queries[:index])
    return x.view(-1, *x.shape[-2:])[begin : begin + cell.queries[index], -cell.group :]


def _sample(cell: CachedCell, inputs: CachedInputs, dtype: torch.dtype, index: int) -> Tensor:
    """out of a sequence and the last KV head, (queries, group, head_dim), computed in ``dtype``."""
    q, k, v = _rows(cell, inputs.q, index), inputs.k[index][:, -1:], inputs.v[index][:, -1:]
    if inputs.prefix:
        k, v = (torch.cat((x[:, -1:], y)) for x, y in zip(inputs.prefix[1:], (k, v), strict=True))
    sinks = None if inputs.sinks is None else inputs.sinks[-cell.group :]
    options = {"softmax_scale": cell.head_dim**-0.5, "window_left": cell.window}
    tensors = Tensors(*(x.unsqueeze(0) for x in (q, k, v)), sinks=sinks)
    return attention(tensors, **options, window_right=0, dtype=dtype)[0].squeeze(0)


def _record(
    cell: CachedCell,
    name: str,
    settings: Settings,
    timings: dict[str, Timing],
    refused: dict[str, Record],
) -> Record:
    record = {
        **described("latency", cell.suite, cell.row, cell.row),
        "dtype": settings.dtype_name,
        "batch": len(cell.lengths),
        "seqlen_q": cell.seqlen_q,
        "num_heads_q": cell.heads,
        "num_heads_kv": cell.heads_kv,
        "head_dim": cell.head_dim,
        "page_size": cell.page_size,
        "num_bytes": cell.num_bytes(settings.dtype.itemsize),
        "provider": name,
    }
    if name in refused:
        return record | refused[name]
    median_ms = timings[name].median_ms
    return {
        **record,
        "status": OK,
        **times_of(name, timings),
        "tflops": cell.flops / median_ms / 1e9,
        "gb_per_s": record["num_bytes"] / median_ms / 1e6,
    }


# What one small cached call has besides.
HOST_OPTIONS = "", "paged", "append", "8 bits", "sinks", "metadata", "split_tokens"
HOST_WORK = tuple("cached call" + f", {option}" * bool(option) for option in HOST_OPTIONS)


def run_cached_host(work: str, settings: Settings) -> Iterator[Record]:
    """Host time of one small cached call; torch's attention reads a dense 16-bit cache."""
    on_gpu = settings.device.type == "cuda"
    lengths, dim = ((256,), 128) if on_gpu else ((8,), 16)
    option = HOST_OPTIONS[HOST_WORK.index(work)]
    cell = CachedCell(
        "host", work, lengths, 8 if on_gpu else 1, 8 if on_gpu else 1, dim,
        page_size=16 * (option == "paged"), sinks=option == "sinks",
        stored="e4m3" * (option == "8 bits"),
    )  # fmt: skip
    inputs = make_cached_inputs(cell, settings)
    call = _calls(cell, inputs, settings)[OURS]
    calls = {OURS: call}
    if option == "append":
        new = torch.zeros_like(inputs.dense[0][:, :1])
        last = inputs.seqlens - 1
        attend = partial(flashattn3.flash_attn_with_kvcache, inputs.q, *inputs.dense, new, new)
        calls = {OURS: partial(attend, cache_seqlens=last, causal=True)}
    elif option == "metadata":
        sizes = 1, 1, lengths[0], cell.heads, cell.heads_kv, dim
        of = {"qkv_dtype": inputs.q.dtype, "causal": True}
        metadata = flashattn3.get_scheduler_metadata(*sizes, inputs.seqlens, **of)
        calls = {OURS: partial(call, scheduler_metadata=metadata)}
    elif option == "split_tokens":
        calls = {OURS: partial(call, split_tokens=128)}
    if inputs.dense and option != "append":
        transposed = [x.transpose(1, 2) for x in (inputs.q, *inputs.dense)]
        attend = partial(F.scaled_dot_product_attention, *transposed)
        calls |= {name: attend for name in settings.baselines if name in SDPA_BACKENDS}
    out = calls[OURS]()  # the append, if there is one, comes before what is right
    _check(cell, inputs, out, OURS)
    yield from timed(work, f"{lengths[0]} keys", calls, settings, dict.fromkeys(calls))
