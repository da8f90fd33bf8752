"""Real English that comes with every Python: the language reference behind ``help()``."""

from __future__ import annotations

import torch
from torch import Tensor


class Corpus:
    """The text as bytes, its last tenth kept apart for validation.

    Raises ValueError if the validation part is shorter than one window of ``seqlen`` bytes.
    """

    VALIDATION_WINDOWS = 16

    def __init__(self, seqlen: int) -> None:
        # Imported here: some Python distributions leave it out, and only the demo needs it.
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        split = len(data) * 9 // 10
        self.training, self.validation = data[:split], data[split:]
        self.seqlen = seqlen
        if len(self.validation) <= seqlen:
            raise ValueError(f"seqlen must be below {len(self.validation)} bytes, got {seqlen}")

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``size`` random windows: bytes (size, seqlen) and the bytes that follow them, int64."""
        last = len(self.training) - self.seqlen - 1
        starts = torch.randint(last + 1, (size,), generator=generator)
        return _windows(self.training, starts, self.seqlen)

    def validation_windows(self) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the validation part, the same in every run."""
        last = len(self.validation) - self.seqlen - 1
        starts = torch.linspace(0, last, self.VALIDATION_WINDOWS).long()
        return _windows(self.validation, starts, self.seqlen)


def _windows(data: Tensor, starts: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(seqlen + 1)].long()
    return windows[:, :-1], windows[:, 1:]
