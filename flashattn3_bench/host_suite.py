"""Measures the host time of one small call: the forward pass without and with gradients, both
passes, and the forward pass with quantization to 8 bits; on a GPU also with sinks, with a mask
object and behind a rotary embedding. There a call ends when its launches return; on a CPU the time
includes the computation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flashattn3 import masks
from flashattn3.quantization.embedding import Embedding

from .checking import Case
from .gate import Gate
from .inputs import Inputs, make_inputs, prepare
from .providers import OURS, PROVIDERS, SDPA_BACKENDS, WHOLE_INT8, Attention, with_options
from .rotary_suite import ATTENTION, check_results, tables
from .runner import FAILED, OK, Record, Settings, described, times_of
from .suites import Cell
from .timing import Timing

CASES = {
    "cuda": Case("host-1x128x8x128", 1, 128, 128, 8, 8, 128, 128),
    "cpu": Case("host-1x4x1x8", 1, 4, 4, 1, 1, 8, 8),
}
WARM_UP_CALLS, CALLS_PER_SAMPLE, SAMPLES = 50, 20, 50

Call = Callable[[], object]


def _forward(attend: Attention, inputs: Inputs) -> Call:
    q, k, v, _ = inputs
    return lambda: attend(q, k, v, False)


def _forward_with_gradients(attend: Attention, inputs: Inputs) -> Call:
    q, k, v = inputs.leaves
    return lambda: attend(q, k, v, False)


def _both_passes(attend: Attention, inputs: Inputs) -> Call:
    leaves, dout = inputs.leaves, inputs.dout
    return lambda: torch.autograd.grad(attend(*leaves, False), leaves, dout)


BOTH = "forward + backward"
WORK = {"forward": _forward, "forward with gradients": _forward_with_gradients, BOTH: _both_passes}
ROTARY_WORK = {f"rotary embedding, {work}": of for work, of in WORK.items()}
OPTIONS = "sinks", "mask"
OPTION_WORK = {f"{name}, {work}": (name, of) for name in OPTIONS for work, of in WORK.items()}


def run_host(work: str, settings: Settings) -> Iterator[Record]:
    """A record per provider for one of WORK; "naive" is left out, as it is no single launch."""
    case = CASES[settings.device.type]
    inputs = make_inputs(case, settings.device, settings.dtype)
    names = [name for name in settings.providers if name == OURS or name in SDPA_BACKENDS]
    if work == "forward":
        names.insert(1, WHOLE_INT8)
    cell = Cell("host", case, "bwd" if work == BOTH else "fwd")
    errors = {name: _error_of(_check, cell, name, _of(name, inputs)) for name in names}
    calls = {name: _call(work, name, inputs) for name in names if errors[name] is None}
    yield from timed(work, case.name, calls, settings, errors)


def run_rotary_host(work: str, settings: Settings) -> Iterator[Record]:
    """A record for the rotary embedding and attention in 16 bits, two or three calls, and in 8, the
    pair of rotate_and_quantize and attention."""
    case = CASES[settings.device.type]
    inputs = _of(WHOLE_INT8, make_inputs(case, settings.device, settings.dtype))
    cos_sin = tables(case.seqlen_k, case.head_dim, settings.device)
    embedding = Embedding(None, None, *cos_sin, None, False, 0.0)
    of_work, calls, errors = ROTARY_WORK[work], {}, {}
    cell = Cell("host", case, "bwd" if of_work is _both_passes else "fwd")
    for name, of in ATTENTION.items():
        attend = partial(_rotated, of, embedding)
        calls[name] = of_work(attend, inputs)
        results = calls[name]()
        results = results if isinstance(results, tuple) else (results,)
        errors[name] = _error_of(check_results, cell, name, inputs, embedding, results)
    calls = {name: call for name, call in calls.items() if errors[name] is None}
    yield from timed(work, case.name, calls, settings, errors)


def run_option_host(work: str, settings: Settings) -> Iterator[Record]:
    """A record for our call without an option and one for the call with it: sinks, which get a
    gradient where q, k and v do, or a mask object that shows every score. Suites scores and masks
    hold the results."""
    case = CASES[settings.device.type]
    inputs = make_inputs(case, settings.device, settings.dtype)
    option, of_work = OPTION_WORK[work]
    if option == "sinks":
        given = torch.zeros(case.num_heads_q, device=settings.device)
        given.requires_grad_(of_work is not _forward)
    else:
        given = masks.window(case.seqlen_k, -1, -1, device=settings.device)
    attend = with_options(**{option: given})
    calls = {OURS: of_work(PROVIDERS[OURS], inputs), option: of_work(attend, inputs)}
    yield from timed(work, case.name, calls, settings, dict.fromkeys(calls))


def _rotated(attend: Callable, embedding: Embedding, q, k, v, causal: bool) -> Tensor:
    return attend(embedding, causal, q, k, v)


def timed(
    work: str, case: str, calls: dict[str, Call], settings: Settings, errors: dict[str, str | None]
) -> Iterator[Record]:
    """Time the calls in turn. A record for each provider of ``errors``; None: its call is right."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name, call in calls.items():
            with _selected(name):
                samples[name] += _host_ms(call, settings.device)
    timings = {name: Timing.of(found) for name, found in samples.items()}
    for name, error in errors.items():
        more = {"direction": work, "dtype": settings.dtype_name, "provider": name}
        record = described("time", "host", f"host time: {work}", case, **more)
        if error is not None:
            yield {**record, "status": FAILED, "reason": error}
        else:
            yield {**record, "status": OK, **times_of(name, timings)}


def _error_of(check: Callable[..., None], *of: object) -> str | None:
    """The error of a check of results, None if they are right."""
    try:
        check(*of)
    except AssertionError as error:
        return str(error)
    return None


def _check(cell: Cell, name: str, inputs: Inputs) -> None:
    Gate(cell, inputs).check(name, prepare(PROVIDERS[name], cell, inputs)())


def _of(name: str, inputs: Inputs) -> Inputs:
    """Convert float32 inputs to bfloat16 for the provider that quantizes."""
    if name == WHOLE_INT8 and inputs.q.dtype == torch.float32:
        return Inputs(*(x.bfloat16() for x in inputs))
    return inputs


def _call(work: str, name: str, inputs: Inputs) -> Call:
    if name not in SDPA_BACKENDS:
        return WORK[work](PROVIDERS[name], _of(name, inputs))
    # SDPA expects heads first. Its time excludes the transposes.
    padded_layout = Inputs(*(x.transpose(1, 2) for x in inputs))
    return WORK[work](_sdpa, padded_layout)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _selected(name: str) -> contextlib.AbstractContextManager:
    # Entered once and not per call: the peers are timed without what the selection itself costs.
    return sdpa_kernel(SDPA_BACKENDS[name]) if name in SDPA_BACKENDS else contextlib.nullcontext()


def _host_ms(call: Call, device: torch.device) -> list[float]:
    """Milliseconds per call; a sample is over so few calls that the launch queue never fills."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for _ in range(WARM_UP_CALLS):
        call()
    found = []
    for _ in range(SAMPLES):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS_PER_SAMPLE):
            call()
        found.append((time.perf_counter() - start) * 1e3 / CALLS_PER_SAMPLE)
    return found
