"""The demo's picture: both loss curves, and attention memory against sequence length."""

from __future__ import annotations

from pathlib import Path

from ..figure import curves, pyplot
from .training import Result


def draw(results: tuple[Result, Result], memory: dict[str, dict[int, int]], path: Path) -> None:
    """memory: bytes by attention and sequence length. Writes a PNG."""
    plt = pyplot()
    figure, (loss_panel, memory_panel) = plt.subplots(1, 2, figsize=(11, 4.2))
    for result, style in zip(results, ("-", "--"), strict=True):
        loss_panel.plot(result.losses, style, label=f"{result.name}: {result.validation_loss:.4f}")
    loss_panel.set_title("training loss (in the legend: validation loss)")
    loss_panel.set_xlabel("step")
    loss_panel.set_ylabel("nats per byte")
    loss_panel.legend()
    mebibytes = {
        name: {str(seqlen): found / 2**20 for seqlen, found in by_length.items()}
        for name, by_length in memory.items()
    }
    curves(memory_panel, mebibytes)
    memory_panel.set_title("attention, forward and backward: peak memory")
    memory_panel.set_ylabel("MiB")
    memory_panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
