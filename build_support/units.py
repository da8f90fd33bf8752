"""Writes the generated sources: a unit for the forward configs of a dtype and head dim, one for the
decode configs of dtypes and a head dim, one for each backward config, and a registry of all.

They go into the build folder, never into git, and only when their text has changed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp16": "kFloat16", "bf16": "kBFloat16", "e4m3": "kE4m3", "int8": "kInt8"}
LIMITS_HEADER = "quantize_limits.h"
TENSORS_HEADER = "call_tensors.h"
HEADER = "// Written by the build from flashattn3/backends/hopper/kernel_configs.py.\n"


def load_kernel_configs() -> ModuleType:
    return _load("backends/hopper", "kernel_configs")


def load_config_types() -> ModuleType:
    return _load("backends/hopper", "config_types")


def _load(folder: str, name: str) -> ModuleType:
    """A module of flashattn3 without flashattn3, whose __init__ imports torch: its folder is then a
    package of its own."""
    package = ModuleType(f"flashattn3_{folder.replace('/', '_')}")
    package.__path__ = [str(ROOT / "flashattn3" / folder)]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


def write_units(folder: Path, pattern: str) -> list[Path]:
    """Write the units of the configs that match the glob, and the registry; return their paths.

    A compiler reads the headers for three times as long as it compiles a config, so a unit has
    several. Backward kernels would get other machine code beside each other (shared memory of one
    function in two kernels lies elsewhere), and so would decode kernels of 8-bit caches beside
    others. Units of other configs are deleted; their objects stay for the next build.
    LIMITS_HEADER and TENSORS_HEADER are written beside the units.
    """
    table = load_kernel_configs()
    configs = table.matching(pattern)
    units: dict[str, list] = {}
    for config in configs:
        units.setdefault(unit_name(config), []).append(config)
    texts = {f"{name}.cu": unit(members) for name, members in units.items()}
    texts["registry.cpp"] = registry(table, configs)
    folder.mkdir(parents=True, exist_ok=True)
    for present in folder.glob("*.cu"):
        if present.name not in texts:
            present.unlink()
    for name, text in texts.items():
        write_if_changed(folder / name, text)
    write_if_changed(folder / LIMITS_HEADER, limits_header(load_config_types().MAX_HEAD_DIM))
    write_if_changed(folder / TENSORS_HEADER, tensors_header())
    return [folder / name for name in texts]


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def tensors_header() -> str:
    """The tensors of a call, and what a plan depends on, as lists of C++ macros."""
    table = _load("call", "tensor_fields")
    kinds = {kind: name for name, kind in vars(table).items() if isinstance(kind, table.Kind)}

    def need_of(field: object) -> str:
        return "OPTIONAL" if field.is_optional else "REQUIRED"

    def macro(name: str, fields: tuple, kind_of: Callable = need_of) -> str:
        items = " ".join(f"{kind_of(field)}({field.name})" for field in fields)
        taken = dict.fromkeys(map(kind_of, fields))
        return f"#define FLASHATTN3_{name}({', '.join(taken)}) {items}\n"

    return (
        "// Written by the build from flashattn3/call/tensor_fields.py.\n#pragma once\n\n"
        "// The tensors of a call, those that change scores apart; those of a call whose launch\n"
        "// is found from its tensors; and both of these by kind.\n"
        + macro("TENSORS", table.TENSORS)
        + macro("SCORE_TENSORS", table.FOUND_SCORES)
        + macro("FOUND_TENSORS", table.FOUND_ROWS)
        + macro("FOUND_PLAN", table.FOUND, lambda field: kinds[field.kind])
        + "// The tensors of a cached call and of an append.\n"
        + macro("DECODE_TENSORS", table.DECODE_TENSORS)
        + macro("APPEND_TENSORS", table.APPEND_TENSORS)
        + "// All as arguments of an operator.\n"
        + f'#define FLASHATTN3_DECODE_SCHEMA "{table.schema(table.DECODE_TENSORS, "=None")}"\n'
        + f'#define FLASHATTN3_APPEND_SCHEMA "{table.schema(table.APPEND_TENSORS)}"\n'
        + f'#define FLASHATTN3_SCHEMA "{table.schema()}"\n'
        + f'#define FLASHATTN3_SCORES "{table.schema(table.FOUND_SCORES, "=None")}"\n'
        + f'#define FLASHATTN3_FOUND_SCHEMA "{table.schema(table.FOUND_ROWS, "=None")}"\n'
        + "// What of a cached call a plan depends on.\n#define FLASHATTN3_CACHED_PLAN(FIELD) "
        + " ".join(f"FIELD({name})" for name in table.CACHED_PLAN)
        + "\n"
    )


def limits_header(max_head_dim: int) -> str:
    """The limits of block quantization as C++ constants."""
    limits = _load("call", "quantization_limits")
    *first, last = map(str, limits.BLOCKS)
    return f"""// Written by the build from flashattn3/call/quantization_limits.py.
#pragma once

namespace flashattn3::quantize {{

constexpr float kLargestE4m3 = {limits.LARGEST["e4m3"]}f;
constexpr float kLargestInt8 = {limits.LARGEST["int8"]}f;
constexpr float kSmallestScale = {limits.SMALLEST_DESCALE.hex()}f;
constexpr int kBlocks[] = {{{", ".join([*first, last])}}};
constexpr char kBlocksText[] = "{", ".join(first)} or {last}";
constexpr int kSample = {limits.SAMPLE};
constexpr float kSignificant = {float(limits.SIGNIFICANT)}f;
constexpr int kMaxHeadDim = {max_head_dim};

}}  // namespace flashattn3::quantize
"""


def unit_name(config) -> str:
    if config.kind == "backward":
        return config.name
    reads_bytes = config.kind == "decode" and config.num_byte_tiles > 0
    return f"{_launch(config)}_{config.dtype}{'_bytes' * reads_bytes}_d{config.head_dim}"


def unit(configs: list) -> str:
    """A unit with the configs as template arguments; all of them have one name of a unit."""
    return f"""{HEADER}
#include "launch/compiled_{_launch(configs[0])}.cuh"

namespace flashattn3 {{
{"".join(map(_entry, configs))}
}}  // namespace flashattn3
"""


def _entry(config) -> str:
    kernel = _kernel_type(config)
    return f"""
namespace of_{config.name} {{
constexpr {config.kind}::Config kConfig = {initializer(config)};
{_checks(config)}}}  // namespace of_{config.name}
extern const {kernel} {config.name};
const {kernel} {config.name} =
    compiled_{_launch(config)}<of_{config.name}::kConfig>("{config.name}");
"""


def _launch(config) -> str:
    return "forward_cached" if _is_cached_forward(config) else config.kind


def _is_cached_forward(config) -> bool:
    return config.kind == "forward" and config.cached


def _kernel_type(config) -> str:
    """The C++ type of the registry's entry: both kinds of cached calls have one."""
    return f"{'Decode' if _is_cached_forward(config) else config.kind.title()}Kernel"


def _checks(config) -> str:
    """What Python says of a kernel besides its config holds in C++."""
    if config.kind == "forward":
        return ""
    if config.kind == "decode":
        rows = load_config_types().DECODE_TILE_ROWS
        return (
            f"static_assert(decode::kBlockM == {rows});\n"
            f"static_assert(decode::warp_kernel_rows(kConfig) == {config.warp_kernel_rows});\n"
            f"static_assert(decode::warp_block_n(kConfig) == {config.warp_block_n});\n"
        )
    block_m = load_config_types().BACKWARD_BLOCK_M
    return (
        f"static_assert(backward::kBlockM == {block_m});\n"
        f"static_assert(backward::block_n(kConfig) == {config.block_n});\n"
        f"static_assert(backward::uses_cluster2(kConfig) == {_literal(config.uses_cluster2)});\n"
    )


def initializer(config) -> str:
    """The value of a C++ Config; both have the same field names."""
    members = "".join(
        f"    .{name} = {_literal(getattr(config, name), name)},\n"
        for name in load_kernel_configs().compiled_fields(type(config))
    )
    return f"{{\n{members}}}"


def _literal(value: object, field: str = "") -> str:
    if field == "term":
        return f"ScoreTerm::k{value.title() or 'None'}"
    if isinstance(value, str):
        return f"ElementType::{DTYPES[value]}"
    return str(value).lower()


def registry(table: ModuleType, compiled) -> str:
    """The registry of all kernel configs in order; null: not compiled."""
    declarations = "".join(
        f"extern const {_kernel_type(config)} {config.name};\n" for config in compiled
    )
    entries = "".join(
        _entries(kind, configs, compiled)
        for kind, configs in (
            ("Forward", table.FORWARD_CONFIGS),
            ("Backward", table.BACKWARD_CONFIGS),
            ("Decode", table.CACHED_CONFIGS),
        )
    )
    return f"""{HEADER}
#include "launch/registry.h"

namespace flashattn3 {{

{declarations}
const char* const kConfigsHash = "{table.configs_hash()}";
{entries}
}}  // namespace flashattn3
"""


def _entries(kind: str, configs, compiled) -> str:
    lines = "".join(
        f'    {{"{config.name}", {f"&{config.name}" if config in compiled else "nullptr"}}},\n'
        for config in configs
    )
    return f"""const int kNum{kind}Entries = {len(configs)};
const {kind}Entry k{kind}Entries[] = {{
{lines}}};
"""
