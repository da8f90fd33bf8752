"""The generated sources: one small unit for each kernel row, and the table that names them all.

They are written into the build folder, never into git, and only when their text has changed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp16": "kFloat16", "bf16": "kBFloat16", "e4m3": "kE4m3", "int8": "kInt8"}
HEADER = "// Written by the build from flashattn3/kernel_table.py.\n"


def load_kernel_table() -> ModuleType:
    """flashattn3.kernel_table without flashattn3, whose __init__ imports torch."""
    path = ROOT / "flashattn3" / "kernel_table.py"
    spec = importlib.util.spec_from_file_location("flashattn3_kernel_table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks for it
    spec.loader.exec_module(module)
    return module


def write_units(folder: Path, pattern: str) -> list[Path]:
    """Write the units of the rows whose name matches the glob, and the registry; their paths.

    Units of other rows go, their objects stay for the next time.
    """
    table = load_kernel_table()
    rows = table.matching(pattern)
    texts = {f"{row.name}.cu": unit(row) for row in rows}
    texts["registry.cpp"] = registry(table, rows)
    folder.mkdir(parents=True, exist_ok=True)
    for present in folder.glob("*.cu"):
        if present.name not in texts:
            present.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in texts]


def unit(row) -> str:
    """A row as a template argument: the fields have the same names here and there."""
    members = "".join(
        f"    .{name} = {_literal(getattr(row, name))},\n"
        for name in load_kernel_table().compiled_fields(type(row))
    )
    kind = row.kind.title()
    return f"""{HEADER}
#include "host/compiled_{row.kind}.cuh"

namespace flashattn3 {{

constexpr {kind}Row kRow = {{
{members}}};

extern const {kind}Kernel {row.name};
const {kind}Kernel {row.name} = compiled_{row.kind}<kRow>("{row.name}");

}}  // namespace flashattn3
"""


def _literal(value: object) -> str:
    if isinstance(value, str):
        return f"ElementType::{DTYPES[value]}"
    return str(value).lower()


def registry(table: ModuleType, compiled) -> str:
    """Every row of the table in its order; null stands for one that is not compiled."""
    declarations = "".join(
        f"extern const {row.kind.title()}Kernel {row.name};\n" for row in compiled
    )
    entries = "".join(
        _entries(kind, rows, compiled)
        for kind, rows in (("Forward", table.ROWS), ("Backward", table.BACKWARD_ROWS))
    )
    return f"""{HEADER}
#include "host/kernel_registry.h"

namespace flashattn3 {{

{declarations}
const char* const kTableHash = "{table.table_hash()}";
{entries}
}}  // namespace flashattn3
"""


def _entries(kind: str, rows, compiled) -> str:
    lines = "".join(
        f'    {{"{row.name}", {f"&{row.name}" if row in compiled else "nullptr"}}},\n'
        for row in rows
    )
    return f"""const int kNum{kind}Entries = {len(rows)};
const {kind}Entry k{kind}Entries[] = {{
{lines}}};
"""
