"""Trains one model; called twice with the same seed and a different attention."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ..memory import peak_bytes
from .model import GPT, Attention, Shape
from .text import Corpus


@dataclass(frozen=True)
class Recipe:
    """What is trained, alike for both attentions.

    tolerance: nats per byte by which the two validation losses may differ. The two runs sum the
    same numbers in another order, so their weights drift apart by rounding alone.
    """

    device: torch.device
    dtype: torch.dtype
    shape: Shape
    batch: int
    steps: int
    seed: int
    learning_rate: float
    tolerance: float

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.seqlen

    def autocast(self) -> AbstractContextManager:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled)


@dataclass(frozen=True)
class Result:
    """losses: training loss after each step, nats per byte. peak_bytes: of one training step."""

    name: str
    losses: list[float]
    validation_loss: float
    tokens_per_second: float
    peak_bytes: int


def train(
    name: str,
    attention: Attention,
    recipe: Recipe,
    corpus: Corpus,
    on_step: Callable[[float], None],
) -> Result:
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.shape, attention).to(recipe.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_then_cosine(recipe.steps))
    batches = torch.Generator().manual_seed(recipe.seed)

    def loss_and_gradients() -> torch.Tensor:
        text, target = (x.to(recipe.device) for x in corpus.batch(recipe.batch, batches))
        with recipe.autocast():
            loss = model(text, target)
        loss.backward()
        return loss.detach()

    losses, seconds = [], []
    for _ in range(recipe.steps):
        start = time.perf_counter()
        loss = loss_and_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())  # waits for the device, so the time is that of the whole step
        seconds.append(time.perf_counter() - start)
        on_step(losses[-1])
    return Result(
        name,
        losses,
        validation_loss=_validate(model, recipe, corpus),
        tokens_per_second=recipe.tokens_per_step / statistics.median(seconds),
        peak_bytes=peak_bytes(loss_and_gradients, recipe.device),
    )


def _warmup_then_cosine(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return factor


@torch.no_grad()
def _validate(model: GPT, recipe: Recipe, corpus: Corpus) -> float:
    """Mean over the validation windows, a batch at a time."""
    texts, targets = (x.to(recipe.device) for x in corpus.validation_windows())
    with recipe.autocast():
        losses = [
            model(text[None], target[None]).item()
            for text, target in zip(texts, targets, strict=True)
        ]
    return statistics.fmean(losses)
