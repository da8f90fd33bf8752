"""``flashattn3 demo``: the options, the two trainings, the verdict."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import flashattn3
from flashattn3.command_line import choose_device, integer

from ..checking import Case
from ..inputs import make_inputs
from ..memory import peak_bytes
from ..memory_suite import training_step
from ..output import folder, make_folder, require_extras
from ..providers import OURS, naive, ours, sdpa
from .figure import draw
from .model import Attention, Shape
from .text import Corpus
from .training import Recipe, Result, train

TORCH = "torch SDPA"
FIGURE = "demo.png"
CPU_LENGTHS = tuple(2**i for i in range(8, 13))
GPU_LENGTHS = tuple(2**i for i in range(10, 16))
CPU_NOTE = (
    "A CPU run shows that the results agree, not speed or memory: on a CPU flashattn3 is a\n"
    "reference of torch operations, block by block. The kernels need a GPU."
)
MemoryCurves = dict[str, dict[int, int]]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small GPT on English text, with flashattn3 and with torch's attention",
        description="Trains the same byte-level GPT from the same seed twice, once with each "
        "attention, and compares the losses. Exit status 1 if they do not agree.",
    )
    parser.add_argument("--steps", type=integer(1), help="default: 250 on a CPU, 300 on a GPU")
    parser.add_argument(
        "--seqlen", type=integer(1), help="bytes; default: 256 on a CPU, 2048 on a GPU"
    )
    parser.add_argument("--seed", type=integer(0), default=0, help="default: 0")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; default: a GPU if there is one")
    parser.add_argument(
        "--output", type=folder, default=Path("out/demo"), metavar="DIR", help="default: out/demo"
    )
    parser.add_argument(
        "--attention-backend", help="a backend of flashattn3; default: it chooses by the device"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    error = args.parser.error
    require_extras(error)
    recipe = make_recipe(choose_device(args.device, error), args.steps, args.seqlen, args.seed)
    try:
        corpus = Corpus(recipe.shape.seqlen)
        backend = _backend_used(recipe, args.attention_backend)
    except (TypeError, ValueError) as refusal:
        error(str(refusal))
    make_folder(args.output, (FIGURE,), error)
    shape = recipe.shape
    print(
        f"GPT of {shape.num_layers} layers, {shape.num_heads} heads of {shape.head_dim}, "
        f"{shape.seqlen} bytes of context, batch {recipe.batch}, {recipe.dtype}, {recipe.device}; "
        f"attention backend: {backend}"
    )
    with _one_thread():
        results = _train_both(recipe, corpus, args.attention_backend)
        curves = _attention_memory(recipe, args.attention_backend)
    figure = args.output / FIGURE
    draw(results, curves, figure)
    print(_table(results, backend))
    print(f"figure: {figure}")
    if recipe.device.type == "cpu":
        print(CPU_NOTE)
    difference = abs(results[0].validation_loss - results[1].validation_loss)
    agree = difference <= recipe.tolerance  # NaN does not agree
    verdict = "agree" if agree else "DO NOT AGREE"
    print(f"the losses {verdict}: difference {difference:.5f}, tolerance {recipe.tolerance:g}")
    return 0 if agree else 1


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For the CPU: the model is so small that more threads gain little, and where the cores are
    shared they lose much, as every operation waits for whichever thread is not running.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_recipe(device: torch.device, steps: int | None, seqlen: int | None, seed: int) -> Recipe:
    if device.type == "cuda":
        shape = Shape(num_layers=6, num_heads=8, head_dim=64, seqlen=seqlen or 2048)
        return Recipe(device, torch.bfloat16, shape, 8, steps or 300, seed, 1e-3, tolerance=0.05)
    # Rounding moves the loss by up to 6e-4; a wrong window, scale or head, by 3e-2 or more.
    shape = Shape(num_layers=2, num_heads=4, head_dim=32, seqlen=seqlen or 256)
    return Recipe(device, torch.float32, shape, 4, steps or 250, seed, 3e-3, tolerance=0.01)


def _case(shape: Shape, batch: int, seqlen: int) -> Case:
    heads, dims = (shape.num_heads, shape.num_heads), (shape.head_dim, shape.head_dim)
    return Case("demo", batch, seqlen, seqlen, *heads, *dims, causal=True)


def _backend_used(recipe: Recipe, backend: str | None) -> str:
    """The backend that the model's attention will run on. Raises what the call would raise."""
    case = _case(recipe.shape, recipe.batch, recipe.shape.seqlen)
    q, k, v, _ = make_inputs(case, recipe.device, recipe.dtype)
    return flashattn3.explain(q, k, v, causal=True, backend=backend).backend


def _flash(backend: str | None) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashattn3.flash_attn_func(q, k, v, causal=True, backend=backend)

    return attention


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, True)


def _train_both(recipe: Recipe, corpus: Corpus, backend: str | None) -> tuple[Result, Result]:
    from tqdm import tqdm

    with tqdm(total=2 * recipe.steps, unit="step", mininterval=0.5) as bar:

        def reporter(name: str) -> Callable[[float], None]:
            def on_step(loss: float) -> None:
                bar.set_description(name, refresh=False)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()

            return on_step

        with_flash = train(OURS, _flash(backend), recipe, corpus, reporter(OURS))
        with_torch = train(TORCH, _torch_attention, recipe, corpus, reporter(TORCH))
    return with_flash, with_torch


def _attention_memory(recipe: Recipe, backend: str | None) -> MemoryCurves:
    """Peak bytes of one forward and backward pass of attention alone, for lengths that double.

    A GPU that runs out of memory ends that curve.
    """
    from tqdm import tqdm

    lengths = GPU_LENGTHS if recipe.device.type == "cuda" else CPU_LENGTHS
    curves: MemoryCurves = {OURS: {}, "naive": {}}
    with flashattn3.use_backend(backend) if backend else contextlib.nullcontext():
        for seqlen in tqdm(lengths, desc="attention memory", unit="length"):
            inputs = make_inputs(_case(recipe.shape, 1, seqlen), recipe.device, recipe.dtype)
            for name, attention in ((OURS, ours), ("naive", naive)):
                try:
                    step = training_step(attention, inputs, causal=True)
                    curves[name][seqlen] = peak_bytes(step, recipe.device)
                except torch.OutOfMemoryError:
                    continue
    return curves


def _table(results: tuple[Result, Result], backend: str) -> str:
    lines = [f"{'':<24} {'validation loss':>16} {'tokens/s':>10} {'peak memory':>12}"]
    for result in results:
        name = f"{OURS} ({backend})" if result.name == OURS else result.name
        lines.append(
            f"{name:<24} {result.validation_loss:>16.5f} {result.tokens_per_second:>10,.0f} "
            f"{result.peak_bytes / 2**20:>8.1f} MiB"
        )
    note = (
        "loss in nats per byte; peak memory: tensors alive at the peak of one training step, "
        "beyond weights and optimizer state"
    )
    return "\n".join(["", *lines, note, ""])
