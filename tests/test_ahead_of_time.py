"""Every Triton kernel of every tile row, compiled for every chip that takes the row, with no GPU.

The kernels of this process may be interpreted, so processes without the interpreter compile: two of them,
which compile ahead; one if pytest-xdist already spreads the tests.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
from helpers import A100, B200, H100, L4, LOWERED_H100, ORIN, RTX3090, RTX5090

import ptx
from flashattn3.device import SHARED_MEMORY_KIB, DeviceInfo
from flashattn3.triton_kernels.configs import ROWS

# The heaviest features, and the plainest: nothing is masked, so every other loop is compiled away.
FEATURES = {
    "varlen-causal-window": {"varlen": True, "causal": True, "window_left": 500},
    "softcap-split": {"softcap": 20.0, "num_splits": 2, "causal": True},
    "full": {},
}
# Bytes of local memory a thread may spill to, by kernel and head dim of the row, on any chip.
SPILL_BOUND_BYTES = {
    "forward": {32: 0, 64: 0, 128: 0, 256: 0},
    "key_value": {32: 0, 64: 0, 128: 0, 256: 0},
    "query": {32: 0, 64: 0, 128: 0, 256: 0},
    "statistics": {32: 0, 64: 0, 128: 0, 256: 0},
    "merge": {32: 0, 64: 0, 128: 0, 256: 0},
}
PRODUCTS = ("forward", "key_value", "query")  # kernels that multiply matrices


@dataclass(frozen=True)
class Report:
    """What became of one kernel."""

    kernel: str
    num_stages: int
    registers: int
    stack_bytes: int
    shared_memory_bytes: int
    ptx: str


def compile_all(device: DeviceInfo, head_dim: int, features: dict, dtype_name: str) -> list[Report]:
    """Runs in a process of its own. Every kernel that the problem may launch on the device."""
    import torch

    from flashattn3.backends.triton import BACKEND
    from flashattn3.backends.triton_launches import all_launches
    from flashattn3.problem import Options, Tensors, describe, metadata_of
    from flashattn3.triton_kernels.ahead_of_time import compile_kernel, resources

    features = dict(features)
    rows = torch.empty(4001, 8, head_dim, device="meta", dtype=getattr(torch, dtype_name))
    tensors = Tensors(rows[None], rows[None], rows[None])
    if features.pop("varlen", False):
        edges = torch.empty(4, device="meta", dtype=torch.int32)
        tensors = Tensors(rows, rows, rows, edges, edges, edges[1:], edges[1:])
    problem = describe(tuple(map(metadata_of, tensors)), Options(**features))
    config = BACKEND.configure(problem, device)
    reports = []
    for name, launch in all_launches(problem, config).items():
        kernel = compile_kernel(launch, device.capability, device.lowering)
        needs = resources(kernel)
        reports.append(
            Report(
                name,
                launch.num_stages,
                needs.registers,
                needs.stack_bytes,
                needs.shared_memory_bytes,
                kernel.asm["ptx"],
            )
        )
    return reports


def forget_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("TRITON_OVERRIDE_ARCH", None)


@pytest.fixture(scope="session")
def compiler(request):
    """compile_all in other processes: a function of its arguments that returns its result."""
    xdist = "PYTEST_XDIST_WORKER" in os.environ
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1 if xdist else 2, context, initializer=forget_interpreter) as pool:
        ahead = {}
        for item in request.session.items:
            if not xdist and "aot_arguments" in getattr(item, "fixturenames", ()):
                arguments = item.callspec.params["aot_arguments"]
                ahead[arguments] = submit(pool, arguments)
        yield lambda arguments: (ahead.pop(arguments, None) or submit(pool, arguments)).result()
        pool.shutdown(cancel_futures=True)


def submit(pool, arguments):
    device, head_dim, features, dtype_name = arguments
    return pool.submit(compile_all, device, head_dim, FEATURES[features], dtype_name)


HEAD_DIMS = sorted({row.head_dim for row in ROWS})
CHIPS = (A100, RTX3090, ORIN, L4, H100, LOWERED_H100, B200, RTX5090)
# Every row on every chip that takes it with the heaviest features; the other sets where code differs most.
ALL = [(chip, d, "varlen-causal-window", "bfloat16") for chip in CHIPS for d in HEAD_DIMS]
ALL += [(chip, d, "full", "float16") for chip in (A100, RTX3090, H100) for d in HEAD_DIMS]
ALL += [(chip, d, "softcap-split", "bfloat16") for chip in (A100, H100) for d in (40, 128)]


def name_of(arguments) -> str:
    chip, head_dim, features, dtype_name = arguments
    lowered = f"-as-{chip.lowering}" * (chip.lowering != chip.capability)
    return f"sm{chip.capability}{lowered}-d{head_dim}-{features}-{dtype_name}"


@pytest.mark.parametrize("aot_arguments", ALL, ids=name_of)
def test_kernels_fit_their_chip(aot_arguments, compiler):
    chip, head_dim, features, _ = aot_arguments
    reports = compiler(aot_arguments)
    kernels = {report.kernel for report in reports}
    assert kernels >= {"forward", "key_value", "statistics"}
    assert ("merge" in kernels) == (features == "softcap-split")
    row_head_dim = min(width for width in HEAD_DIMS if width >= head_dim)
    for report in reports:
        budget = min(SHARED_MEMORY_KIB[chip.lowering] * 1024, chip.shared_memory_bytes)
        found = f"{report.shared_memory_bytes} bytes of shared memory, {budget} are there"
        assert report.shared_memory_bytes <= budget, f"{report.kernel}: {found}"
        bound = SPILL_BOUND_BYTES[report.kernel][row_head_dim]
        assert report.stack_bytes <= bound, (
            f"{report.kernel}: spills {report.stack_bytes} bytes, bound {bound}"
        )
        assert_instructions(chip, report)


def assert_instructions(chip: DeviceInfo, report: Report) -> None:
    """The code is for the chip's generation and uses its tensor cores."""
    suffix = "a" * (chip.lowering >= 90)
    assert ptx.target_of(report.ptx) == f"sm_{chip.lowering}{suffix}", report.kernel
    if report.kernel not in PRODUCTS:
        return
    if chip.lowering < 90:
        ptx.assert_ampere(report.ptx, report.kernel, pipelined=report.num_stages > 1)
    elif chip.lowering == 90:
        assert "wgmma.mma_async" in report.ptx, f"{report.kernel}: no wgmma"
    elif chip.lowering == 100:
        assert "tcgen05.mma" in report.ptx or "mma.sync" in report.ptx, report.kernel
    else:
        assert "mma.sync" in report.ptx and "wgmma" not in report.ptx, report.kernel
