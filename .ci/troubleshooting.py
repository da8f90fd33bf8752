"""Writes docs/troubleshooting.md: each entry makes a mistake, and the error that it raises is the
heading. Run it after a change of a message; a test compares.

python .ci/troubleshooting.py
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flashattn3  # noqa: E402
from flashattn3 import flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_func  # noqa: E402

PAGE = ROOT / "docs" / "troubleshooting.md"
HEAD = """# Troubleshooting

Look for the sentence of your error. A message names the function, the argument, the value that it
must have and the value that it has; the numbers in yours differ. The sentences on this page were
raised by the code, by `python .ci/troubleshooting.py`.

`flashattn3 doctor` answers most questions about an installation; add its output to a bug report.
"""


class Entry(NamedTuple):
    mistake: Callable[[], object]
    advice: str


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def varlen(cu_seqlens: list[int], longest: int) -> None:
    (x,) = tensors((10, 2, 64))
    edges = torch.tensor(cu_seqlens, dtype=torch.int32)
    flash_attn_varlen_func(x, x, x, edges, edges, longest, longest)


QKV = tensors(*[(2, 128, 8, 64)] * 3)
SECTIONS: dict[str, list[Entry]] = {
    "Shapes and dtypes": [
        Entry(
            lambda: flash_attn_func(*tensors((2, 128, 8, 64), *[(2, 128, 3, 64)] * 2)),
            "Each KV head serves the same number of query heads (GQA). Check that the tensors are "
            "(batch, seqlen, heads, head_dim): torch's own attention has heads before seqlen.",
        ),
        Entry(
            lambda: flash_attn_func(QKV[0], QKV[1].bfloat16(), QKV[2]),
            "q, k and v have one dtype: convert the others. torch.autocast converts all three.",
        ),
        Entry(
            lambda: flash_attn_func(QKV[0], QKV[1], QKV[2][:, :100]),
            "k and v are the same keys: they agree in batch, length and heads.",
        ),
        Entry(
            lambda: flash_attn_func(QKV[0][0], QKV[1], QKV[2]),
            "A batch has four axes. For packed sequences, call flash_attn_varlen_func.",
        ),
        Entry(
            lambda: flash_attn_func(*(x.float().numpy() for x in QKV)),
            "Convert with torch.from_numpy.",
        ),
    ],
    "Options": [
        Entry(
            lambda: flash_attn_func(*QKV, 0.0, None),
            "flash_attn 2 has dropout_p at the fourth place, so softmax_scale and causal are one "
            "place further. Pass options by name ([migrating](migrating.md)).",
        ),
        Entry(
            lambda: flash_attn_func(*QKV, window_size=256),
            "A window is a pair (left, right) of keys on each side of the diagonal; -1 is open.",
        ),
        Entry(
            lambda: flash_attn_func(*QKV, softcap=-1.0),
            "0 turns softcap off.",
        ),
        Entry(
            lambda: flash_attn_func(*QKV, attention_chunk=128),
            "No backend has this option yet, and none ignores it.",
        ),
        Entry(
            lambda: flash_attn_func(*QKV, qv=QKV[0]),
            "No backend has this argument yet, and none ignores it.",
        ),
    ],
    "Packed sequences": [
        Entry(
            lambda: varlen([0, 4, 12], 8),
            "cu_seqlens are the edges of the sequences: from 0, never falling, and at most the "
            "number of rows. On a GPU they are read only with FLASHATTN3_CHECK=1; without it wrong "
            "values give wrong numbers, but nothing outside of the tensors is read or written.",
        ),
        Entry(
            lambda: varlen([0, 4, 10], 5),
            "max_seqlen is at least the longest sequence. A larger number is allowed.",
        ),
    ],
    "Backends": [
        Entry(
            lambda: flash_attn_func(*QKV, backend="hopper"),
            "A named backend never falls back. Leave `backend` out, or see `flashattn3 doctor` for "
            "what this machine has ([installation](install.md)). FLASHATTN3_BACKEND in the "
            "environment names a backend too.",
        ),
        Entry(
            lambda: flash_attn_func(*QKV, backend="cuda"),
            "The names are those of `flashattn3.available_backends()`, where the machine has them.",
        ),
    ],
    "8 bits": [
        Entry(
            lambda: flashattn3.quantize_block_fp8(QKV[0].clone().requires_grad_()),
            "Tensors in 8 bits have no gradient. flash_attn_fp8_func quantizes 16 bits itself and "
            "has one.",
        ),
        Entry(
            lambda: flash_attn_fp8_func(*tensors(*[(1, 64, 2, 96)] * 3)),
            "The rotation needs a power of two: pass hadamard=False, or use 16 bits.",
        ),
        Entry(
            lambda: flash_attn_fp8_func(*(x.float() for x in QKV)),
            "It quantizes 16-bit tensors. For tensors that are e4m3 already, call flash_attn_func "
            "with descales ([FP8](fp8.md)).",
        ),
        Entry(
            lambda: flash_attn_fp8_func(*QKV, smooth_k=True, softcap=30.0),
            "Smoothing moves all scores of a row alike; a cap does not keep that.",
        ),
    ],
    "Derivatives": [
        Entry(
            lambda: torch.func.jvp(lambda q: flash_attn_func(q, *QKV[1:]), (QKV[0],), (QKV[0],)),
            "Reverse mode works, with torch.func too: grad, vjp, jacrev.",
        ),
    ],
}
TAIL = """## Symptoms without an error

| symptom | reason and remedy |
| --- | --- |
| the first call takes seconds | Triton compiles the kernel, once, and keeps it on disk |
| a Hopper GPU runs Triton | the Hopper kernels were not compiled: the warning has the command |
| float32 is slow on a GPU | only the reference backend takes float32: use 16 bits |
| results differ from torch where sq ≠ sk | causal is aligned to the [bottom right](migrating.md) |
| rows of zeros | these rows see no key: a causal call with more queries than keys |
| NaN in rows that do not see a NaN key | kernels multiply [whole tiles](algorithm.md#the-mask) |
| a GPU profile has `…_for_cpu` or `…_overrideable` | the autograd nodes of dense Hopper calls |
| gradients differ from run to run | [deterministic=True](training.md) |
"""


def sentence(mistake: Callable[[], object]) -> str:
    """The error of a call, in one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mistake()
        except (TypeError, ValueError) as error:
            kind = "UnsupportedError" if isinstance(error, flashattn3.UnsupportedError) else None
            return f"{kind or type(error).__name__}: {' '.join(str(error).split())}"
    raise AssertionError("an entry of the page raises no error")


def page() -> str:
    parts = [HEAD]
    for title, entries in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        for entry in entries:
            error = fill(sentence(entry.mistake), 96, break_on_hyphens=False)
            advice = fill(entry.advice, 96, break_on_hyphens=False)
            parts.append(f"\n```text\n{error}\n```\n\n{advice}\n")
    return "".join([*parts, "\n", TAIL])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
