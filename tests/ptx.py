"""What compiled kernels say about the chip whose instructions they use."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

# What 9.0 and 10.0 brought: warpgroup products, bulk copies, hardware barriers, register
# reallocation.
NEWER_THAN_AMPERE = ("wgmma", "tcgen05", "cp.async.bulk", "mbarrier", "setmaxnreg", "stmatrix")


def target_of(ptx: str) -> str:
    """``sm_80`` from the line ``.target sm_80``."""
    found = re.search(r"^\.target\s+(sm_\d+a?)", ptx, re.MULTILINE)
    assert found, "PTX without a .target line"
    return found.group(1)


def assert_ampere(ptx: str, what: str, pipelined: bool = True) -> None:
    """Tensor cores through mma.sync, nothing that Hopper brought, and pipelined loads by
    cp.async."""
    assert "mma.sync" in ptx, f"{what}: no mma.sync"
    assert "cp.async" in ptx or not pipelined, f"{what}: no cp.async"
    assert_nothing_newer(ptx, what)


def assert_nothing_newer(ptx: str, what: str) -> None:
    newer = [word for word in NEWER_THAN_AMPERE if word in ptx]
    assert not newer, f"{what}: {newer} in code for 8.x"


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
    """Every kernel in this session's Triton cache is lowered to the chip, as sm80.

    Triton writes the chip that it lowers to into its own GPU dialect (.ttgir). The .target line of
    the PTX stays the GPU's: Triton hands it to ptxas, which must produce code that runs there.
    """
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    capability = int(re.sub(r"\D", "", lowering))
    for path in folder.rglob("*.ttgir"):
        found = re.search(r'ttg\.target = "cuda:(\d+)"', path.read_text())
        assert found and int(found.group(1)) == capability, f"{path} is not for {lowering}: {found}"
    codes = {path: path.read_text() for path in folder.rglob("*.ptx")}
    products = [ptx for ptx in codes.values() if "mma" in ptx]
    assert products, "no kernel with tensor-core instructions was compiled"
    if capability < 90:
        for path, ptx in codes.items():
            assert_nothing_newer(ptx, str(path))
        assert any("mma.sync" in ptx and "cp.async" in ptx for ptx in products), "no mma.sync"


def memory_widths(ptx: str) -> Counter[tuple[str, int]]:
    """How many instructions move how many bytes between global memory and a thread, or, by
    cp.async, shared memory."""
    found = Counter()
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S*\s.*?\],\s*(0x\w+|\d+)", ptx):
        found["cp.async", int(size, 0)] += 1
    access = r"\b(ld|st)\.global(?:\.[a-zA-Z]\w*(?:::\w+)*)*?(?:\.v([248]))?\.[bsuf](8|16|32|64)\b"
    for kind, vector, bits in re.findall(access, ptx):
        found[kind, int(vector or 1) * int(bits) // 8] += 1
    return found


def buffers_of_two_swizzles(ptx: str) -> list[str]:
    """Registers with a shared-memory address from which WGMMA descriptors of different swizzles
    (their two upper bits) are made, the code that ptxas 12.8 assembles wrongly."""
    swizzles: dict[str, set[int]] = {}
    constant = r"\b(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d{12,});"
    for register, value in re.findall(constant, ptx):
        swizzles.setdefault(register, set()).add(int(value) % 2**64 >> 62)
    return [register for register, found in swizzles.items() if len(found) > 1]
