"""What an option that changes scores costs: our call with it, in turn with the call without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashattn3
from flashattn3.call.operands import Tensors

from .checking import Case
from .gate import check_results, expected_results
from .inputs import RESULTS, Call, Inputs, make_inputs, normal_numbers
from .providers import OURS
from .runner import Record, Settings, run_providers
from .suites import SCORES, Cell
from .timing import make_clock

SUITE = SCORES
SINKS, SLOPES, BIAS, LARGEST = "sinks", "slopes", "bias", "max logit"
# The argument of each, under the name that it has among the tensors of a call.
TENSOR_OF = {SINKS: "sinks", SLOPES: "alibi_slopes", BIAS: "bias"}


def providers_of(cell: Cell) -> tuple[str, ...]:
    """The call without options comes first. The largest score has no backward, and a bias is as
    large as all scores, so only cases that name it have one."""
    largest = (LARGEST,) if cell.direction == "fwd" else ()
    return (OURS, SINKS, SLOPES, *largest, *((BIAS,) if cell.case.bias else ()))


def run_scores(cell: Cell, settings: Settings) -> list[Record]:
    """A record for each of ``providers_of``."""
    inputs = make_inputs(_in_one_row(cell.case), settings.device, settings.dtype)

    def checked(name: str) -> tuple[Call, Record]:
        given = _given(name, inputs)
        call = _prepared(cell, inputs, given, return_max_logit=name == LARGEST)
        _check(cell, name, inputs, given, call())
        return call, {}

    clock = make_clock(settings.device, inputs.num_bytes)
    return run_providers(cell, providers_of(cell), checked, settings, clock)


def _in_one_row(case: Case) -> Case:
    """The sequences of a varlen case, if it is one, side by side."""
    if not case.varlen:
        return case
    total = sum(case.seqlens_q)
    sizes = {"batch": 1, "seqlen_q": total, "seqlen_k": total}
    return replace(case, **sizes, seqlens_q=None, seqlens_k=None)


def _function(case: Case, device: torch.device) -> Call:
    """Of q, k and v with an axis of sequences; that of a varlen call has one."""
    if not case.varlen:
        return flashattn3.flash_attn_func
    edges = torch.tensor([0, *case.seqlens_q]).cumsum(0, dtype=torch.int32).to(device)
    longest = (case.seqlen_q,) * 2

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        rows = (x.squeeze(0) for x in (q, k, v))
        found = flashattn3.flash_attn_varlen_func(*rows, edges, edges, *longest, **options)
        more = options["return_max_logit"]
        return (found[0].unsqueeze(0), found[1]) if more else found.unsqueeze(0)

    return attend


def _given(name: str, inputs: Inputs) -> dict[str, Tensor]:
    """The tensor of an option: normal sinks and bias, and the slopes of the ALiBi paper."""
    (_, seqlen_q, heads, _), seqlen_k = inputs.q.shape, inputs.k.shape[1]
    normal = normal_numbers(inputs.q.device, seed=1)
    if name == SINKS:
        return {TENSOR_OF[name]: normal(heads)}
    if name == SLOPES:
        exponents = torch.arange(1, heads + 1, device=inputs.q.device) * (-8 / heads)
        return {TENSOR_OF[name]: torch.exp2(exponents)}
    if name == BIAS:
        return {TENSOR_OF[name]: normal(1, heads, seqlen_q, seqlen_k, dtype=inputs.q.dtype)}
    return {}


def _prepared(cell: Cell, inputs: Inputs, given: dict[str, Tensor], **more: Any) -> Call:
    """The work to time, as ``inputs.prepare`` has it; a bias and sinks have their gradients too."""
    q, k, v, dout = inputs
    options = {"causal": cell.case.causal, "window_size": cell.case.window, **more}
    if cell.direction == "fwd":
        attend = partial(_function(cell.case, q.device), q, k, v, **options, **given)
        return lambda: (attend()[0] if more["return_max_logit"] else attend(),)
    leaves = inputs.leaves
    given = {n: x.requires_grad_(n != TENSOR_OF[SLOPES]) for n, x in given.items()}
    out = _function(cell.case, q.device)(*leaves, **options, **given)
    leaves += [x for x in given.values() if x.requires_grad]
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _check(
    cell: Cell, name: str, inputs: Inputs, given: dict[str, Tensor], results: tuple[Tensor, ...]
) -> None:
    """AssertionError if a result of the last sequence and KV head breaks the tolerance rule."""
    last, case = slice(-1, None), cell.case
    rows = slice(-case.seqlens_q[-1] if case.varlen else 0, None)  # of the last sequence
    group = slice(-(case.num_heads_q // case.num_heads_kv), None)  # the query heads of a KV head
    places = {"out": group, "dq": group, "dk": last, "dv": last}
    q, dout = (x[last, rows, group] for x in (inputs.q, inputs.dout))
    k, v = (x[last, rows, last] for x in (inputs.k, inputs.v))
    of_head = {n: (x[:, group] if n == "bias" else x[group]).detach() for n, x in given.items()}
    tensors = Tensors(q, k, v, **of_head)
    expected = [expected_results(cell, tensors, dout, of) for of in (torch.float64, q.dtype)]
    named = zip(RESULTS[cell.direction], results, strict=False)  # not the gradients of sinks, bias
    check_results(cell, name, [x[last, rows, places[of]] for of, x in named], *expected)
