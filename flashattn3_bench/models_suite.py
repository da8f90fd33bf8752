"""Whole transformers models: tokens per second of training, of a prompt and of decoding, and how
often a forward pass with padding waits for the GPU. Weights are random; nothing is downloaded.

The gate: the logits of the first tokens, or their gradient at the embedding, may differ from those
of a float32 copy of the model with eager attention by at most twice (gradients three times) what
eager attention differs in the model's own precision, plus a floor.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flashattn3.integrations import transformers as integration

from .checking import FORWARD_FACTOR, GRADIENT_FACTOR
from .providers import OURS, SDPA_BACKENDS
from .runner import ABSENT, FAILED, OK, Record, Settings, described, first_line
from .timing import Timing

SUITE = "models"
CHOSEN_BY_TORCH, FA3 = "sdpa", "fa3 package"  # torch's own choice; the flash-attn-3 distribution
IMPLEMENTATIONS = {OURS: "fa3", FA3: "flash_attention_3"}  # of others: "sdpa"
GATE_TOKENS, FLOOR = 256, 1e-3
STEPS_PER_SAMPLE, TURNS = 3, 4  # TURNS: samples of a provider in each round, at least
SECONDS_PER_ROUND = 8.0  # a case is measured at least so long, where the host's noise is large
NEW_TOKENS = 64  # in one step of decoding, which is a sample

# Kinds of work of a ModelCase, with the mode of torch.compile.
COMPILED = {"compiled": "reduce-overhead", "compiled-no-graphs": "default"}
WORKS = "train", *COMPILED, "prefill", "decode", "padding"
Model = torch.nn.Module


@dataclass(frozen=True)
class ModelCase:
    """work: "train" (forward, backward and the optimizer's step), "compiled" (the same with
    torch.compile and CUDA graphs), "compiled-no-graphs", "prefill" (a prompt without gradients),
    "decode" (NEW_TOKENS after a prompt, with a cache) or "padding" (counts waits)."""

    name: str
    work: str
    batch: int
    seqlen: int
    layers: int
    hidden: int
    heads: int
    heads_kv: int
    intermediate: int
    vocabulary: int = 32000

    @property
    def trains(self) -> bool:
        return self.work == "train" or self.work in COMPILED

    @property
    def tokens(self) -> int:
        return self.batch * (NEW_TOKENS if self.work == "decode" else self.seqlen)


_1B = (16, 2048, 32, 8, 8192, 128256)
CASES = (
    *(
        ModelCase(name, work, *sizes)
        for work in ("train", *COMPILED)
        for name, *sizes in (
            ("12x768", 8, 1024, 12, 768, 12, 12, 2048),
            ("6x384", 4, 256, 6, 384, 6, 6, 1024),
            ("16x2048", 1, 8192, 16, 2048, 16, 16, 5504),
        )
    ),
    ModelCase("llama-1b", "train", 4, 4096, *_1B),
    ModelCase("llama-1b", "prefill", 1, 8192, *_1B),
    ModelCase("llama-1b", "decode", 1, 4096, *_1B),
    ModelCase("12x768", "padding", 8, 1024, 12, 768, 12, 12, 2048),
)
QUICK_CASES = tuple(ModelCase(f"quick-{work}", work, 2, 32, 1, 32, 4, 2, 48, 97) for work in WORKS)


def run_model(case: ModelCase, settings: Settings) -> Iterator[Record]:
    """A record per provider. One model, and in training one optimizer, serves them all."""
    integration.register()
    names = [OURS, CHOSEN_BY_TORCH]
    if case.work not in COMPILED:  # which would not see that the choice changes
        names += [x for x in settings.baselines if x in SDPA_BACKENDS]
    names += [FA3] if settings.device.type == "cuda" else []
    model = _model(case, settings)
    ids = torch.randint(1, case.vocabulary, (case.batch, case.seqlen), device=settings.device)
    refused = _refused(case, model, ids, names)
    working = [name for name in names if name not in refused]
    if case.work == "padding":
        outcomes = {name: _waits(name, model, ids) for name in working}
    else:
        outcomes = _times(case, model, working, ids, settings)
    for name in names:
        kind = "waits" if case.work == "padding" else "tokens"
        place = {"column": f"{case.batch} x {case.seqlen}", "direction": case.work}
        yield {
            **described(kind, f"{SUITE} {kind}", f"{case.work} {case.name}", case.name, **place),
            "dtype": settings.dtype_name,
            **{key: value for key, value in asdict(case).items() if key not in ("name", "work")},
            "provider": name,
            **(refused[name] if name in refused else {"status": OK, **outcomes[name]}),
        }


def _refused(case: ModelCase, model: Model, ids: Tensor, names: list[str]) -> dict[str, Record]:
    """Status and reason of the providers that do not run or do not pass the gate."""
    refused = {}
    gate = _Gate(case, model, ids)
    run = _as_run(case, model)
    for name in names:
        try:
            with _selected(name, model):
                gate.check(run)
        except Exception as error:  # whatever it is, the other providers go on
            status = FAILED if name == OURS else ABSENT
            refused[name] = {"status": status, "reason": first_line(error)}
    return refused


def _model(case: ModelCase, settings: Settings) -> Model:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads_kv,
        max_position_embeddings=case.seqlen + NEW_TOKENS,
    )
    torch.manual_seed(0)
    with settings.device:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=settings.dtype
        )


def _as_run(case: ModelCase, model: Model) -> Model:
    """The model, compiled if the case says so: each shape and implementation apart. The host limits
    a small model without CUDA graphs."""
    if case.work not in COMPILED:
        return model
    torch.compiler.reset()  # what other models compiled counts towards the compiler's limit
    if model.device.type != "cuda":
        return torch.compile(model, dynamic=False, backend="aot_eager")
    return torch.compile(model, dynamic=False, mode=COMPILED[case.work])


class _Gate:
    """Logits, and for training the embedding's gradient, of the first tokens of the inputs."""

    def __init__(self, case: ModelCase, eager: Model, ids: Tensor) -> None:
        self.case, self.ids = case, ids[:1, :GATE_TOKENS]
        # Rotary embeddings keep float32 tables, so the copy is exact but for its own rounding.
        self.reference = self._results(copy.deepcopy(eager).float())
        self.baseline = self._results(eager)

    def check(self, model: Model) -> None:
        factors = {"logits": FORWARD_FACTOR, "gradient": GRADIENT_FACTOR}
        results = self._results(model)
        for name, found in results.items():
            wanted = self.reference[name]
            error, allowed = (
                (x.float() - wanted).abs().max().item() for x in (found, self.baseline[name])
            )
            bound = factors[name] * allowed + FLOOR * wanted.abs().max().item()
            assert error <= bound, f"{self.case.name}: {name} differ by {error:.3g} > {bound:.3g}"

    def _results(self, model: Model) -> dict[str, Tensor]:
        model.train(self.case.trains)
        with torch.set_grad_enabled(self.case.trains):
            logits = model(self.ids, use_cache=False).logits
        results = {"logits": logits.detach()}
        if self.case.trains:
            weight = model.get_input_embeddings().weight
            loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), self.ids[0, 1:])
            (results["gradient"],) = torch.autograd.grad(loss, weight)
        return results


def _selected(name: str, model: Model) -> AbstractContextManager:
    """Makes the model use a provider; within the context also torch."""
    model.set_attn_implementation(IMPLEMENTATIONS.get(name, "sdpa"))
    return sdpa_kernel(SDPA_BACKENDS[name]) if name in SDPA_BACKENDS else nullcontext()


def _times(
    case: ModelCase, model: Model, names: list[str], ids: Tensor, settings: Settings
) -> dict[str, Record]:
    """Wall time, since small models are limited by the host. Each sample is a few steps; providers
    take turns, in another order each time, because the host's speed changes within seconds. So a
    ratio is the median over the turns of the ratio of two samples of a turn."""
    call = _work(case, model, ids)
    wait = partial(torch.cuda.synchronize, settings.device)
    if settings.device.type != "cuda":
        wait = lambda: None  # noqa: E731
    samples: dict[str, list[float]] = {name: [] for name in names}
    full = settings.round_ms > 1
    turns = settings.rounds * (TURNS if full else 1)
    end = time.perf_counter() + settings.rounds * SECONDS_PER_ROUND * full
    turn = 0
    while turn <= turns or time.perf_counter() < end:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with _selected(name, model):
                found = _sample(call, wait, 1 if case.work == "decode" else STEPS_PER_SAMPLE)
            samples[name] += [found] if turn else []  # the first turn warms up
        turn += 1
    return {name: _outcome(case, name, samples) for name in names}


def _outcome(case: ModelCase, name: str, samples: dict[str, list[float]]) -> Record:
    timing = Timing.of(samples[name])
    ratios = {
        other: median(b / a for a, b in zip(samples[name], found, strict=True))
        for other, found in samples.items()
        if other != name
    }
    return {
        **asdict(timing),
        "tokens_per_second": case.tokens / timing.median_ms * 1e3,
        "speed_ratio": ratios,
    }


def _sample(call: Callable[[], object], wait: Callable[[], None], steps: int) -> float:
    """Milliseconds of a step."""
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    wait()
    return (time.perf_counter() - start) * 1e3 / steps


def _work(case: ModelCase, model: Model, ids: Tensor) -> Callable[[], object]:
    if case.trains:
        fused = ids.device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
        model.train()
        run = _as_run(case, model)

        def step() -> None:
            run(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    model.eval()
    if case.work == "prefill":
        return torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1))
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def _waits(name: str, model: Model, ids: Tensor) -> Record:
    """Synchronizations with the GPU of one forward pass whose first row has padding on the left.
    transformers' own are among them."""
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 4] = 0
    model.eval()
    with torch.no_grad(), _selected(name, model):
        run = partial(model, ids, attention_mask=mask, use_cache=False)
        run()
        if ids.device.type != "cuda":
            return {"waits": 0}
        former = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode(former)
    found = [x for x in told if "synchronizing CUDA operation" in str(x.message)]
    places = sorted({f"{x.filename.rsplit('/', 1)[-1]}:{x.lineno}" for x in found})
    return {"waits": len(found), "places": places}
