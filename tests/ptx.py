"""What the PTX of a kernel says about the chip it was compiled for."""

from __future__ import annotations

import os
import re
from pathlib import Path


def target_of(ptx: str) -> str:
    """``sm_80`` from the line ``.target sm_80``."""
    found = re.search(r"^\.target\s+(sm_\d+a?)", ptx, re.MULTILINE)
    assert found, "PTX without a .target line"
    return found.group(1)


def assert_ampere(ptx: str, what: str, pipelined: bool = True) -> None:
    """Tensor cores through mma.sync, nothing that Hopper brought, and pipelined loads by cp.async."""
    assert "mma.sync" in ptx, f"{what}: no mma.sync"
    assert "cp.async" in ptx or not pipelined, f"{what}: no cp.async"
    assert "wgmma" not in ptx, f"{what}: wgmma in code for 8.x"
    assert "cp.async.bulk" not in ptx, f"{what}: TMA in code for 8.x"


def launch_one_problem() -> None:
    """A forward and a backward pass on the current GPU through the Triton backend."""
    import torch

    from flashattn3 import flash_attn_func

    q, k, v = (
        torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    flash_attn_func(q, k, v, causal=True, backend="triton").sum().backward()
    torch.cuda.synchronize()


def assert_cache_is_lowered_to(lowering: str) -> None:
    """Every kernel in this session's Triton cache is for the chip, and some use its tensor cores."""
    wanted = lowering.replace("sm", "sm_")
    codes = {path: path.read_text() for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ptx")}
    wrong = {str(path): target_of(ptx) for path, ptx in codes.items() if target_of(ptx) != wanted}
    assert not wrong, f"asked for {wanted}, but compiled: {wrong}"
    matmuls = {path: ptx for path, ptx in codes.items() if "mma.sync" in ptx or "wgmma" in ptx}
    assert matmuls, "no kernel with tensor-core instructions was compiled"
    if wanted.startswith("sm_8"):
        for path, ptx in matmuls.items():
            assert_ampere(ptx, str(path), pipelined=False)
        assert any("cp.async" in ptx for ptx in matmuls.values()), "no kernel loads by cp.async"
