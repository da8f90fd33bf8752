"""What all subcommands share: a parser whose errors are one line, types of options, the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

import torch

Refuse = Callable[[str], NoReturn]  # Parser.error
LARGEST = 2**63 - 1  # of torch's integers
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Parser(argparse.ArgumentParser):
    """Exits with status 2 and one line; argparse prints the usage before it."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} ({self.prog} --help has the options)\n")


def integer(smallest: int, largest: int = LARGEST) -> Callable[[str], int]:
    """The type of an option that is an integer of a range."""

    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not smallest <= value <= largest:
            wanted = f"an integer of at least {smallest}"
            if largest < LARGEST or (value or 0) > largest:
                wanted += f" and at most {largest}"
            raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")
        return value

    return parsed


def choose_device(name: str | None, error: Refuse) -> torch.device:
    """The named device, or a GPU if there is one. Calls error(message) if it is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        error(f"--device must be cuda, cuda:N or cpu, got {name!r}")
    if device.type not in ("cuda", "cpu"):
        error(f"--device must be cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            error(f"--device {name}: torch sees {count} CUDA devices")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
