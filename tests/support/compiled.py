"""Triton kernels compiled with no GPU, and that their chip has what they need."""

from __future__ import annotations

from dataclasses import dataclass

import sass

from flashattn3.backends.device import SHARED_MEMORY_KIB, DeviceInfo


@dataclass(frozen=True)
class Report:
    """What became of one kernel. stale: WGMMA instructions with a wrong descriptor."""

    kernel: str
    constants: dict[str, object]
    options: dict[str, object]
    stack_bytes: int
    shared_memory_bytes: int
    ttgir: str
    ptx: str
    stale: list[str]


def compile_launches(launches: dict, device: DeviceInfo, aligned: bool = True) -> list[Report]:
    """Runs in a process of its own, because it imports Triton. launches: of kernels, by name."""
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    reports = []
    for name, launch in launches.items():
        kernel = compile_kernel(launch, device.capability, aligned)
        needs, ptx, stale = resources(kernel), kernel.asm["ptx"], []
        if "wgmma" in ptx:
            stale = sass.stale_descriptors(sass.disassemble(kernel.asm["cubin"]))
        sizes = needs.stack_bytes, needs.shared_memory_bytes
        of = name, launch.constants, launch.options
        reports.append(Report(*of, *sizes, kernel.asm["ttgir"], ptx, stale))
    return reports


def assert_fits(chip: DeviceInfo, report: Report) -> None:
    # What Triton cannot lower may compile all the same, to code that stops at once.
    assert "trap;" not in report.ptx, f"{report.kernel}: compiled to a trap"
    assert not report.stale, f"{report.kernel}: wrong matrix descriptors: {report.stale}"
    needed = report.shared_memory_bytes
    budget = min(SHARED_MEMORY_KIB[chip.lowering] * 1024, chip.shared_memory_bytes)
    assert needed <= budget, f"{report.kernel}: {needed} bytes of shared memory, has {budget}"
