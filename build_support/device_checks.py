"""The kernel configs of the programs in tests/device, written as a header for each.

Each program checks every kernel config of backends/hopper/kernel_configs.py, and variants,
which no plan selects.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from .units import HEADER, initializer, load_kernel_configs, write_if_changed

KINDS = {"forward_check": "forward", "backward_check": "backward", "decode_check": "decode"}


def write_configs(folder: Path, check: str) -> list:
    """Write the program's header into the folder; return its kernel configs."""
    table, kind = load_kernel_configs(), KINDS[check]
    configs = list(getattr(table, f"{kind.upper()}_CONFIGS"))
    if kind == "forward":
        configs += [*table.CACHED_FORWARD_CONFIGS, *forward_variants(table)]
    if kind == "decode":
        configs += table.BYTE_DECODE_CONFIGS
    write_if_changed(folder / f"{check}_configs.h", header(kind, configs))
    return configs


def forward_variants(table: ModuleType) -> list:
    """Forward configs that were slower than the ones of the table, to time beside them."""
    make = table.ForwardConfig
    return [
        *(make(dtype, 128, 128, False, 192, 96, 5, 3, 2, 32, 768) for dtype in table.EIGHT_BIT),
        *(make("bf16", 128, 128, masked, 192, 80, 3, 3, 2) for masked in (False, True)),
        *(make("bf16", 192, 192, masked, 128, 96, 2, 2, 1) for masked in (False, True)),
        *(make("bf16", 192, 128, masked, 128, 64, 3, 2, 2) for masked in (False, True)),
    ]


def header(kind: str, configs: list) -> str:
    values = "".join(f"{initializer(config)},\n" for config in configs)
    names = "".join(f'    "{config.name}",\n' for config in configs)
    return f"""{HEADER}#pragma once

#include "{kind}/config.h"

namespace flashattn3::{kind} {{

constexpr int kNumCheckConfigs = {len(configs)};
constexpr Config kCheckConfigs[] = {{
{values}}};
constexpr const char* kCheckConfigNames[] = {{
{names}}};

}}  // namespace flashattn3::{kind}
"""
