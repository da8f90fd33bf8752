"""Links the operator library of a wheel, which runs on glibc 2.28 and newer, with any torch >= 2.9.

It is linked with empty libraries that have the symbols of symbols.txt and no others, so neither
this machine's glibc and libstdc++ nor torch has to be old, or of the machine that the wheel is for.
A symbol that is not in the list is an error of the linker.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

SYMBOLS = Path(__file__).with_name("symbols.txt")
STATIC = ("-l:libc_nonshared.a", "-lgcc")  # atexit; atomic instructions of old aarch64
AARCH64_GLIBC = "GLIBC_2.17"  # of all these symbols there: glibc's first version on aarch64


@dataclass(frozen=True)
class Portable:
    """machine: such as aarch64. cudart: folder of the static CUDA runtime of that machine.
    stubs: folder for the empty libraries."""

    machine: str
    cudart: Path
    stubs: Path

    glibc = Path(__file__).with_name("glibc_2_28.cpp")

    @property
    def compiler(self) -> str:
        return f"{self.machine}-linux-gnu-g++"

    @property
    def link_flags(self) -> list[str]:
        # No symbol table: it has the compiler's temporary names, which differ in every build.
        flags = ["-shared", "-s", "-nodefaultlibs", "-Wl,--exclude-libs=ALL,--no-undefined"]
        flags += ["-Wl,--build-id=none", f"-L{self.cudart}", "-lcudart_static"]
        stubs = [f"-l:{library}" for library in symbols(self.machine)]
        return [*flags, f"-L{self.stubs}", "-Wl,--no-as-needed", *stubs, *STATIC]


def symbols(machine: str) -> dict[str, dict[str, list[str]]]:
    """The symbols that the library may take, by library and version ("" without one)."""
    libraries: dict[str, dict[str, list[str]]] = {}
    names: list[str] = []
    for line in SYMBOLS.read_text().splitlines():
        if line.startswith(" "):
            names += line.split()
        elif not line.startswith("#"):
            library, version = line.split()
            if machine == "aarch64" and version.startswith("GLIBC_"):
                version = AARCH64_GLIBC
            names = libraries.setdefault(library, {}).setdefault(version.strip("-"), [])
    return libraries


def write_stubs(portable: Portable) -> None:
    """Build the empty libraries with the machine's compiler."""
    portable.stubs.mkdir(parents=True, exist_ok=True)
    for library, versions in symbols(portable.machine).items():
        write_empty_library(portable.stubs / library, versions, portable.compiler)


def write_empty_library(path: Path, versions: dict[str, list[str]], compiler: str) -> None:
    """Build a library whose functions, by version, do nothing and return the error of CUDA that
    says that there is no GPU. Its name is that of the file."""
    source, script = (path.with_name(f"{path.name}.{suffix}") for suffix in ("c", "map"))
    names = [name for of_version in versions.values() for name in of_version]
    aliases = (f'asm(".globl {x}\\n.type {x}, %function\\n.set {x}, no_device");\n' for x in names)
    function = "__attribute__((used)) static int no_device(void) { return 100; }\n"
    source.write_text(function + "".join(aliases))
    nodes = (
        f"{version} {{ {' '.join(f'{name};' for name in of_version)} }};\n"
        for version, of_version in versions.items()
        if version
    )
    script.write_text("".join(nodes))
    command = [compiler, "-shared", "-nostdlib", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path]
    command += ["-x", "c", source]
    command += [f"-Wl,--version-script={script}"] if any(versions) else []
    subprocess.run(command, check=True)
