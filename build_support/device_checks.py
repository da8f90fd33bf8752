"""The kernel configs of the programs in tests/device, written as a header for each.

Each program checks every kernel config of flashattn3/dispatch/kernel_configs.py, and variants,
which no plan selects.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from .units import HEADER, initializer, load_kernel_configs, write_if_changed

# block_m, block_n, num_stages, num_mma_warpgroups, num_q_buffers
FORWARD_TILES_192_128 = (
    (128, 96, 2, 2, 2),
    (128, 112, 2, 2, 1),
    (128, 128, 2, 2, 1),
    (128, 64, 3, 2, 2),
    (192, 64, 2, 3, 2),
    (192, 80, 2, 3, 1),
)

KINDS = {"forward_check": "forward", "backward_check": "backward", "decode_check": "decode"}


def write_configs(folder: Path, check: str) -> list:
    """Write the program's header into the folder; return its kernel configs."""
    table, kind = load_kernel_configs(), KINDS[check]
    configs = list(getattr(table, f"{kind.upper()}_CONFIGS"))
    if kind == "forward":
        configs += table.CACHED_FORWARD_CONFIGS
        configs += forward_variants(table)
    if kind == "backward":
        configs += backward_variants(table)
    write_if_changed(folder / f"{check}_configs.h", header(kind, configs))
    return configs


def forward_variants(table: ModuleType) -> list:
    """Forward configs to time beside those of the table: some that were slower, and those of 128
    columns of V at head dim 192, until a GPU has measured them.
    """
    make = table.ForwardConfig
    return [
        *(make(dtype, 128, 128, False, 192, 96, 5, 3, 2, 32, 768) for dtype in table.EIGHT_BIT),
        *(make("bf16", 128, 128, masked, 192, 80, 3, 3, 2) for masked in (False, True)),
        *(make("bf16", 192, 192, masked, 128, 96, 2, 2, 1) for masked in (False, True)),
        *(
            make(dtype, 192, 128, masked, *tile)
            for tile in FORWARD_TILES_192_128
            for masked in (False, True)
            for dtype in (table.SIXTEEN_BIT if tile == (128, 112, 2, 2, 1) else ("bf16",))
        ),
    ]


def backward_variants(table: ModuleType) -> list:
    """Backward configs for head dims 129 to 192, until a GPU has measured them: three Q buffers,
    where they fit, and other schedules (csrc/backward/config.h).
    """
    variants = ((192, 2, 1), (192, 2, 2), (192, 2, 3), (128, 2, 3), (128, 3, 0), (128, 3, 2))
    return [
        table.BackwardConfig("bf16", 192, head_dim_v, num_stages, 2, schedule)
        for head_dim_v, num_stages, schedule in variants
    ]


def header(kind: str, configs: list) -> str:
    values = "".join(f"{initializer(config)},\n" for config in configs)
    names = "".join(f'    "{config.name}",\n' for config in configs)
    return f"""{HEADER}#pragma once

#include "{kind}/config.h"

namespace flashattn3 {{

constexpr int kNumCheckConfigs = {len(configs)};
constexpr {kind}::Config kCheckConfigs[] = {{
{values}}};
constexpr const char* kCheckConfigNames[] = {{
{names}}};

}}  // namespace flashattn3
"""
