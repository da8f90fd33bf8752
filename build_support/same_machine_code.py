"""Compares the machine code of every kernel in two builds, ignoring names.

``python -m build_support.same_machine_code BEFORE AFTER`` takes operator libraries, objects or
folders of objects. It prints how many kernels are identical, lists the others, and exits with 1 if
there are any. So it shows that a renaming changed nothing on the GPU.

Two kernels are identical if their instructions, relocations, constants, registers, stack, shared
memory, parameters and launch bounds are identical. Names of kernels, symbols and
sections are not compared.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .toolchain import BuildError, find_nvcc

SECTION_TYPE_NOBITS = 8  # has a size and no bytes in the file
TEXT = ".text."
# Attributes of .nv.info.KERNEL: format, id, then a 16-bit value or the payload's size.
FORMAT_WITH_PAYLOAD = 4
ATTRIBUTE_PARAM_CBANK = 0x0A  # its payload begins with a symbol's index


@dataclass(frozen=True)
class Kernel:
    """name: mangled. properties: all other compared data, in a fixed order."""

    name: str
    code: bytes
    properties: tuple

    @property
    def content(self) -> tuple:
        return self.code, self.properties


def find_cuobjdump() -> Path | None:
    """Path of cuobjdump: beside nvcc, else on PATH, else in the triton package."""
    nvcc = find_nvcc()
    if nvcc is not None and (nvcc.parent / "cuobjdump").is_file():
        return nvcc.parent / "cuobjdump"
    found = shutil.which("cuobjdump")
    if found is None:
        spec = importlib.util.find_spec("triton")
        folders = spec.submodule_search_locations if spec is not None else None
        for folder in folders or ():
            bundled = Path(folder, "backends", "nvidia", "bin", "cuobjdump")
            if bundled.is_file():
                return bundled
    return Path(found) if found else None


def kernels_of(path: Path) -> list[Kernel]:
    """The kernels of a library or an object, or of every object in a folder."""
    files = sorted(path.rglob("*.o")) if path.is_dir() else [path]
    return [kernel for file in files for cubin in _cubins(file) for kernel in kernels_in(cubin)]


def _cubins(file: Path) -> list[bytes]:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise BuildError("cuobjdump is missing: it is not beside nvcc, on PATH or in triton")
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump, "-xelf", "all", file.resolve()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        printed = done.stdout + done.stderr
        if done.returncode != 0 and "does not contain device code" not in printed:
            raise BuildError(f"cuobjdump failed on {file}: {printed.strip()}")
        return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    size: int
    link: int
    info: int
    data: bytes


def kernels_in(cubin: bytes) -> Iterator[Kernel]:
    """The kernels of one ELF file of GPU code."""
    sections = list(_sections(cubin))
    by_name = {section.name: section for section in sections}
    symbols = _symbol_names(sections, by_name[".symtab"])
    attributes = _attributes_by_symbol(by_name.get(".nv.info"), symbols)
    shared_constants = tuple(
        (section.name, section.data)
        for section in sections
        if section.name.startswith(".nv.constant") and section.name.count(".") == 2
    )
    for section in sections:
        if not section.name.startswith(TEXT):
            continue
        name = section.name.removeprefix(TEXT)
        own = {
            other.name.removesuffix(f".{name}"): other
            for other in sections
            if other.name.endswith(f".{name}") and other is not section
        }
        relocations = by_name.get(f".rela{section.name}")
        yield Kernel(
            name=name,
            code=section.data,
            properties=(
                # Sizes of shared memory and parameters, bytes of the kernel's constants.
                tuple(
                    (key, own[key].size, own[key].data)
                    for key in sorted(own)
                    if key.startswith((".nv.shared", ".nv.constant", ".nv.local"))
                ),
                _kernel_attributes(own[".nv.info"].data) if ".nv.info" in own else (),
                tuple(sorted(attributes[name])),
                tuple(_relocations(relocations)) if relocations else (),
                shared_constants,
            ),
        )


def _sections(elf: bytes) -> Iterator[_Section]:
    offset = struct.unpack_from("<Q", elf, 0x28)[0]
    entry_size, count, index_of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * entry_size) for i in range(count)
    ]
    names_at = headers[index_of_names][4]
    for name, type_, _, _, at, size, link, info, _, _ in headers:
        data = b"" if type_ == SECTION_TYPE_NOBITS else elf[at : at + size]
        yield _Section(_text(elf, names_at + name), type_, size, link, info, data)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _symbol_names(sections: list[_Section], table: _Section) -> list[str]:
    names = sections[table.link].data
    return [
        _text(names, struct.unpack_from("<I", table.data, at)[0]) for at in range(0, table.size, 24)
    ]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        format_, id_, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = (
            data[at : at + value]
            if format_ == FORMAT_WITH_PAYLOAD
            else bytes([value & 0xFF, value >> 8])
        )
        at += value if format_ == FORMAT_WITH_PAYLOAD else 0
        yield id_, payload


def _kernel_attributes(data: bytes) -> tuple:
    """Launch bounds, cluster size, parameters, offsets of exits: without a symbol's index."""
    return tuple(
        (id_, payload[4:] if id_ == ATTRIBUTE_PARAM_CBANK else payload)
        for id_, payload in _attributes(data)
    )


def _attributes_by_symbol(info: _Section | None, symbols: list[str]) -> dict[str, list]:
    """Registers and stack sizes of each kernel, from .nv.info, whose payloads name a symbol."""
    found: dict[str, list] = defaultdict(list)
    for id_, payload in _attributes(info.data if info else b""):
        if len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            found[symbols[symbol]].append((id_, value))
    return found


def _relocations(section: _Section) -> Iterator[tuple[int, int, int]]:
    for at in range(0, section.size, 24):
        offset, info, addend = struct.unpack_from("<QQq", section.data, at)
        yield offset, info & 0xFFFFFFFF, addend


def differences(before: list[Kernel], after: list[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of each side without an identical partner on the other one."""
    partners: dict[tuple, list[Kernel]] = defaultdict(list)
    for kernel in after:
        partners[kernel.content].append(kernel)
    alone = []
    for kernel in before:
        if partners[kernel.content]:
            partners[kernel.content].pop()
        else:
            alone.append(kernel)
    return alone, [kernel for kernels in partners.values() for kernel in kernels]


def _demangled(names: list[str]) -> list[str]:
    filter_ = shutil.which("c++filt")
    if filter_ is None or not names:
        return names
    done = subprocess.run([filter_], input="\n".join(names), capture_output=True, text=True)
    return done.stdout.splitlines()


def main(before: Path, after: Path) -> int:
    kernels = [kernels_of(path) for path in (before, after)]
    for path, found in zip((before, after), kernels, strict=True):
        if not found:
            print(f"{path} holds no kernel")
            return 1
    alone = differences(*kernels)
    print(f"{len(kernels[0]) - len(alone[0])} of {len(kernels[0])} kernels are identical")
    for path, found in zip((before, after), alone, strict=True):
        for kernel, name in zip(found, _demangled([k.name for k in found]), strict=True):
            print(f"only in {path}: {name}, {len(kernel.code)} bytes of instructions")
    return int(any(alone))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m build_support.same_machine_code BEFORE AFTER")
    missing = [path for path in sys.argv[1:] if not os.path.exists(path)]
    if missing:
        sys.exit(f"{missing[0]} does not exist")
    try:
        sys.exit(main(*map(Path, sys.argv[1:])))
    except BuildError as error:
        sys.exit(str(error))
