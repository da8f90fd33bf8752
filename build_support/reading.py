"""Counts what a reader of the 16-bit Hopper forward has to read.

``python -m build_support.reading`` prints the files and lines of the main loop and of the whole
forward, and the files that q crosses; tests/test_format.py holds the sizes that csrc/README.md
promises. A file counts if the first one includes it, directly or not. csrc/ptx does not count (one
instruction family per file), nor do the headers of options that a plain kernel config lacks: 8-bit
inputs, capped scores, slopes, a bias, the largest score, listed masks, trees and spans. The others
hold their records and call their hooks, which leave a plain config's scores alone.
"""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
OTHER_CONFIGS = {
    "attention/alibi.cuh",
    "attention/bias.cuh",
    "attention/joined_lists.cuh",
    "attention/largest_score.cuh",
    "attention/list_sizes.h",
    "attention/mask_lists.cuh",
    "attention/score_term.h",
    "attention/tanh.cuh",
    "attention/tree_mask.cuh",
    "attention/descale.cuh",
    "forward/block_rotation.cuh",
    "forward/listed_work_tile.cuh",
    "forward/load_listed.cuh",
    "forward/option_arguments.h",
    "forward/quantized_arguments.h",
    "forward/score_options.cuh",
    "forward/single_key.cuh",
    "forward/traits_options.cuh",
    "tile/permuted_v.h",
    "tile/permuted_v_tile.cuh",
}
# The kernel's arguments hold these records; the main loop reads none of them.
NOT_IN_MAIN_LOOP = {"attention/seqlen.cuh", "attention/sinks.cuh", "attention/tile_scheduler.cuh"}

# The files that q crosses from flash_attn_func to the instruction: each passes q, its address or
# its place in shared memory on to the next one.
PATH_IN_PYTHON = (
    "api.py",
    "call/operands.py",
    "run/doors.py",
    "run/operators.py",
    "backends/hopper/launch.py",
)
PATH_IN_CSRC = (
    "torch_binding/forward_op.cpp",
    "launch/forward.cuh",
    "forward/kernel.cuh",
    "forward/load.cuh",
    "forward/consumer_pipeline.cuh",
    "tile/gemm.cuh",
    "ptx/wgmma.cuh",
)


def files_to_read(first: str, left_out: set[str]) -> dict[str, int]:
    """Lines of the first file and of each that it includes, by their paths in csrc."""
    lines: dict[str, int] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name in lines or name in left_out or name.startswith("ptx/"):
            continue
        if not (CSRC / name).is_file():  # a header of CUTLASS
            continue
        text = (CSRC / name).read_text()
        lines[name] = text.count("\n")
        waiting += INCLUDE.findall(text)
    return lines


def main_loop() -> dict[str, int]:
    return files_to_read("forward/mainloop.cuh", OTHER_CONFIGS | NOT_IN_MAIN_LOOP)


def whole_forward() -> dict[str, int]:
    return files_to_read("forward/kernel.cuh", OTHER_CONFIGS)


def main() -> None:
    for what, files in (("main loop", main_loop()), ("whole forward", whole_forward())):
        print(f"{what}: {len(files)} files, {sum(files.values())} lines")
        for name, lines in sorted(files.items()):
            print(f"  {lines:4} {name}")
    path = (*(f"flashattn3/{name}" for name in PATH_IN_PYTHON), *PATH_IN_CSRC)
    print(f"path of q: {len(path)} files", *path, sep="\n  ")


if __name__ == "__main__":
    main()
