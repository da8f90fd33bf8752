"""The kernels of the ladder, steps 4 and 5 of examples/learn, as providers.

They take heads before rows: views of one storage where the inputs lie so (layout "bhsd").
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import flashattn3


@cache
def program(name: str) -> ModuleType:
    """A module of examples/learn."""
    folder = Path(flashattn3.__file__).resolve().parents[1] / "examples" / "learn"
    if not folder.is_dir():
        raise RuntimeError("the programs of the ladder, examples/learn, are in a checkout alone")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("needs a GPU, or TRITON_INTERPRET=1 in the environment")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def block_of(device: torch.device) -> int:
    """Rows and keys of a block; fewer in Triton's interpreter."""
    return 64 if device.type == "cuda" else 32


def fa1(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Step 4. Under a causal mask the blocks above the diagonal are masked as blocks."""
    block = block_of(q.device)
    shape = -(-q.shape[1] // block), -(-k.shape[1] // block)
    mask = torch.ones(shape, dtype=torch.uint8, device=q.device)
    attend = program("step4_flash_attention_1").FlashAttention1.apply
    heads = (_heads_merged(x) for x in (q, k, v))
    return _heads_apart(attend(*heads, mask.tril() if causal else mask, block, causal), q)


def fa2(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Step 5."""
    attend = program("step5_flash_attention_2").FlashAttention2.apply
    heads = (_heads_merged(x) for x in (q, k, v))
    return _heads_apart(attend(*heads, block_of(q.device), causal), q)


def _heads_merged(x: Tensor) -> Tensor:
    """(batch, seqlen, heads, d) → (batch * heads, seqlen, d)."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads_apart(out: Tensor, q: Tensor) -> Tensor:
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
