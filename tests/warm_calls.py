"""Counts what a warm call runs of the package: files with a function that it enters, and calls of
Python functions of any file. Triton's interpreter stands for a GPU and is not counted.

python tests/warm_calls.py
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from test_host_work import profiled

import flashattn3
from flashattn3 import flash_attn_fp8_func, flash_attn_func, flash_attn_with_kvcache

PACKAGE = str(Path(flashattn3.__file__).parent) + os.sep
NOT_COUNTED = os.sep + "triton" + os.sep


def counted(call) -> tuple[int, int]:
    """Files of the package, and Python calls, of a prepared call."""
    files, calls, inside = set(), 0, 0

    def observe(frame, event, argument):
        nonlocal calls, inside
        name = frame.f_code.co_filename
        if NOT_COUNTED in name:
            inside += (event == "call") - (event == "return")
        elif event == "call" and not inside:
            calls += 1
            if name.startswith(PACKAGE):
                files.add(name)

    profiled(call, observe)
    return len(files), calls


def main() -> None:
    q = torch.zeros(1, 16, 2, 16).half()
    cache, new = torch.zeros(1, 32, 2, 16).half(), torch.zeros(1, 1, 2, 16).half()
    length = torch.tensor([3], dtype=torch.int32)
    triton = {"backend": "triton"}
    calls = {
        "Triton forward": lambda: flash_attn_func(q, q, q, **triton),
        "FP8": lambda: flash_attn_fp8_func(q, q, q, **triton),
        "cached decode": lambda: flash_attn_with_kvcache(
            new, cache, cache, cache_seqlens=length, **triton
        ),
        "append + decode": lambda: flash_attn_with_kvcache(
            new, cache, cache, new, new, cache_seqlens=length, **triton
        ),
    }
    print(f"{'a warm call':<16} files calls")
    for name, call in calls.items():
        files, number = counted(call)
        print(f"{name:<16} {files:5} {number:5}")


if __name__ == "__main__":
    main()
