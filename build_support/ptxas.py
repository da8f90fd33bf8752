"""Reads ptxas's output for each unit of kernel configs and checks it against limits.

``python -m build_support.ptxas`` prints registers and spills of the last build and fails on a spill
over 32 bytes or on a warning of the C75xx group (serialized WGMMA, ignored setmaxnreg). 8-bit
kernel configs may spill 192 bytes, those of head dim 256 448 with e4m3 and 832 with int8, which is
not the default there: the accumulators take all but 25 registers, so masks, softcap, rescaling and
promotion spill, as do the producer warps of head dim 256, which have 24 registers each. A forward
with spans may spill 96 bytes at head dim 256: of them the main loop reads two words in a step.
Decode kernels of a cache of 8 bits may spill 40, outside of their main loops.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_SPILL_BYTES = 32
MAX_SPILL_BYTES_8_BIT = 192
MAX_SPILL_BYTES_D256 = {"e4m3": 448, "int8": 832}
MAX_SPILL_BYTES_SPANS = 96
MAX_SPILL_BYTES_CACHE = 40
LOG_SUFFIX = ".cu.o.log"


def max_spill_bytes(name: str) -> int:
    if of_d256 := re.search("_(e4m3|int8)_d256", name):
        return MAX_SPILL_BYTES_D256[of_d256[1]]
    # A unit has all cached forward kernels of a head dim, those with spans too.
    if re.fullmatch("forward_(cached_.*_d256|.*_d256_.*_spans)", name):
        return MAX_SPILL_BYTES_SPANS
    if re.fullmatch("decode_.*_bytes_d128", name):
        return MAX_SPILL_BYTES_CACHE
    return MAX_SPILL_BYTES_8_BIT if re.search("_(e4m3|int8)_", name) else MAX_SPILL_BYTES


@dataclass(frozen=True)
class Report:
    """The largest values over the kernels of one compiled unit."""

    name: str
    registers: int
    spill_bytes: int
    warnings: tuple[str, ...]

    @property
    def error(self) -> str | None:
        if self.warnings:
            return self.warnings[0]
        allowed = max_spill_bytes(self.name)
        if self.spill_bytes > allowed:
            return f"{self.spill_bytes} bytes of spills, allowed are {allowed}"
        return None


def read(log: Path) -> Report:
    """The report of a unit from the output of ``nvcc -Xptxas -v``."""
    text = log.read_text()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.findall(r"Used (\d+) registers", text)
    if not registers:
        raise ValueError(f"{log} says nothing of registers")
    return Report(
        name=log.name.removesuffix(LOG_SUFFIX),
        registers=max(map(int, registers)),
        spill_bytes=max((int(count) for pair in spills for count in pair), default=0),
        warnings=tuple(
            line.strip() for line in text.splitlines() if re.search(r"\bC75\d\d\b", line)
        ),
    )


def read_all(folder: Path) -> list[Report]:
    """The reports of all units of the last build in the folder."""
    return [read(unit.with_suffix(LOG_SUFFIX)) for unit in sorted(folder.glob("*.cu"))]


def main(folder: Path) -> int:
    reports = read_all(folder)
    if not reports:
        print(f"{folder} holds no compiled kernel config")
        return 1
    for report in reports:
        sentence = f"{report.registers} registers, {report.spill_bytes} bytes of spills"
        print(f"{report.name:<48} {sentence}{f'  WRONG: {report.error}' if report.error else ''}")
    return int(any(report.error for report in reports))


if __name__ == "__main__":
    from .build import UNITS_FOLDER

    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else UNITS_FOLDER))
