"""Training memory against sequence length: what one forward and backward pass needs at its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .checking import Case
from .inputs import Inputs, make_inputs
from .memory import peak_bytes
from .providers import PROVIDERS, Attention
from .runner import ABSENT, OK, Record, Settings

SEQLENS = tuple(2**i for i in range(10, 17))  # 1k to 64k
QUICK_SEQLENS = (128, 256, 512)
NUM_HEADS, HEAD_DIM = 16, 128


def run_length(seqlen: int, settings: Settings, given_up: set[str]) -> Iterator[Record]:
    """A record per provider. Who runs out of memory is added to given_up and not asked again."""
    case = _case(seqlen)
    inputs = make_inputs(case, settings.device, settings.dtype)
    for name in settings.providers:
        outcome = {"status": ABSENT, "reason": "out of memory"}
        if name not in given_up:
            try:
                step = training_step(PROVIDERS[name], inputs, causal=True)
                outcome = {"status": OK, "peak_bytes": peak_bytes(step, settings.device)}
            except torch.OutOfMemoryError:
                given_up.add(name)
            except RuntimeError as error:  # torch's way to refuse a problem
                outcome["reason"] = str(error).splitlines()[0]
        yield {
            "record": "memory",
            "suite": "memory",
            "row": "training memory",
            "column": str(seqlen),
            "dtype": settings.dtype_name,
            "batch": case.batch,
            "seqlen_k": seqlen,
            "num_heads_q": NUM_HEADS,
            "head_dim": HEAD_DIM,
            "causal": True,
            "provider": name,
            **outcome,
        }


def training_step(attention: Attention, inputs: Inputs, causal: bool) -> Callable[[], object]:
    """Forward and backward on given inputs, so that only what attention allocates is measured.

    That is its output, what it keeps for the backward pass, its temporaries and the gradients.
    """

    def step() -> tuple[torch.Tensor, ...]:
        leaves = inputs.leaves
        return torch.autograd.grad(attention(*leaves, causal), leaves, inputs.dout)

    return step


def _case(seqlen: int) -> Case:
    heads, dims = (NUM_HEADS, NUM_HEADS), (HEAD_DIM, HEAD_DIM)
    return Case(f"memory-{seqlen}", 1, seqlen, seqlen, *heads, *dims, causal=True)
