"""What machine code says about the WGMMA instructions of compiled kernels: Triton's nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
ELSEWHERE = frozenset({"a kernel argument or no value"})


def disassemble(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def stale_descriptors(sass: str) -> list[str]:
    """WGMMA instructions whose matrix descriptor comes from a kernel argument or from a uniform
    register that nothing wrote.

    A descriptor is an address in shared memory and constants; no argument belongs there. ptxas 12.8
    drops the copy that a second group of descriptors starts from, and they start from what its
    register held before: mostly a stride. Registers are followed in the order of the listing.
    """
    origins: dict[int, frozenset[str]] = {}

    def origin_of(register: int) -> frozenset[str]:
        return origins.get(register, ELSEWHERE)

    stale = []
    for line in sass.splitlines():
        found = INSTRUCTION.match(line)
        if not found:
            continue
        name, operands = found[1], [x.strip() for x in found[2].split(",")]
        described = re.search(r"gdesc\[UR(\d+)\]", found[2])
        if name.startswith("HGMMA") and described:
            # Four registers: the descriptor of A, unused where A is in registers, then that of B.
            first = int(described[1])
            used = range(first + 2 * bool(re.match(r"R\d", operands[1])), first + 4)
            if any(origin_of(register) >= ELSEWHERE for register in used):
                stale.append(line.strip())
            continue
        target = re.fullmatch(r"UR(\d+)", operands[0])
        if not target:
            continue
        for offset in range(1 + (".64" in name or ".WIDE" in name)):
            if name.startswith("ULDC"):
                origin = ELSEWHERE
            else:
                read = [int(x) for x in re.findall(r"\bUR(\d+)", " ".join(operands[1:]))]
                step = offset if ".64" in name else 0
                origin = frozenset().union(*(origin_of(register + step) for register in read))
            origins[int(target[1]) + offset] = origin
    return stale
