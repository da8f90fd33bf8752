"""Writes the text of build.ninja."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os.path import relpath
from pathlib import Path
from shlex import join, quote

from .device_checks import KINDS, write_configs
from .toolchain import OLDEST_TORCH_ABI, Toolchain
from .units import ROOT

CSRC = ROOT / "csrc"
DEVICE_TESTS = ROOT / "tests" / "device"
# Programs of DEVICE_TESTS, written to the build folder, built only on request.
KERNEL_CHECKS = tuple(KINDS)
UNIT_CHECK = "unit_check"
EMULATIONS = tuple(
    f"{kind}_emulation" for kind in ("append", "decode", "forward", "widen", "backward")
)
# The operator library over tests/device/host, a CUDA runtime without a GPU.
HOST_LIBRARY = "libflashattn3_host.so"
DEVICE_CHECKS = (*KERNEL_CHECKS, UNIT_CHECK, *EMULATIONS, HOST_LIBRARY)
OPS_LIBRARY = Path("_lib", "libflashattn3_ops.so")
STREAM_COUNTERS = "launch/stream_counters.cpp.o"  # which the checks link too

COMMON_FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall")
DEVICE_FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
)
# These are resolved when the library is loaded, after torch. libtorch.so defines nothing but loads
# libtorch_cuda where there is one, and so the current stream; a linker would drop it as unused.
TORCH_LINK_FLAGS = ("-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu")

RULES = """
rule compile
  command = $nvcc $common $flags -MD -MF $out.d -c $in -o $out > $out.log 2>&1 $
      || (cat $out.log; exit 1)
  description = $out
  depfile = $out.d
  deps = gcc

rule link
  command = $link -o $out $in $flags
  description = $out
"""


def ninja_text(tools: Toolchain, units: Sequence[Path], package: Path) -> str:
    """build.ninja for generated units and fixed sources; outputs go into the package folder.

    The headers with the kernel configs of the checks are written beside the units.
    """
    portable = tools.portable
    host_compiler = ["-ccbin", portable.compiler] if portable else []
    lines = [f"nvcc = {_command(tools.ccache, tools.nvcc, *host_compiler)}"]
    lines.append(f"link = {_command(portable.compiler if portable else tools.nvcc)}")
    common = join([*COMMON_FLAGS, f"-I{CSRC}"])
    lines += [f"common = {common}", RULES]
    library = package / OPS_LIBRARY

    device = [*DEVICE_FLAGS, f"-I{tools.cutlass_include}"]
    torch = [f"-isystem={tools.torch_include}", f"-DTORCH_TARGET_VERSION={OLDEST_TORCH_ABI}"]
    torch.append(f"-I{units[0].parent}")  # with the headers that the build writes
    if portable:  # an error of torch's interface has the path of its header
        torch.insert(0, f"-Xcompiler=-fmacro-prefix-map={tools.torch_include}/=")
    objects = [_compile(lines, unit, device if unit.suffix == ".cu" else ()) for unit in units]
    objects += [_compile(lines, source) for source in sorted((CSRC / "launch").glob("*.cpp"))]
    generated = [*device, torch[-1]]
    shared = [
        _compile(lines, source, generated) for source in sorted((CSRC / "launch").glob("*.cu"))
    ]
    objects += shared
    objects += [
        _compile(lines, source, torch) for source in sorted((CSRC / "torch_binding").glob("*.cpp"))
    ]
    # The CUDA runtime is static and hidden: torch loads its own, which may have another version.
    if portable:
        objects.append(_compile(lines, portable.glibc))
        flags = portable.link_flags
    else:
        flags = ["-shared", "-cudart=static", "-Xlinker=--exclude-libs=ALL", f"-L{tools.torch_lib}"]
        flags += TORCH_LINK_FLAGS
    _link(lines, library, objects, flags)
    if DEVICE_TESTS.is_dir() and not portable:  # absent where kernels are built without tests
        for check in KERNEL_CHECKS:
            num_configs = len(write_configs(units[0].parent, check))
            _kernel_check(lines, check, generated, [*shared, STREAM_COUNTERS], num_configs)
        unit_check = _compile(lines, DEVICE_TESTS / f"{UNIT_CHECK}.cu", device)
        _link(lines, Path(UNIT_CHECK), [unit_check], ["-cudart=static"])
        _emulations(lines, tools, units[0].parent, common.replace("-O3", "-O1"))
        host = DEVICE_TESTS / "host"
        runtime = [_compile(lines, host / "cuda_runtime.cpp", torch)]
        runtime.append(_compile(lines, host / "kernel_arguments.cu", device))
        flags = ["-shared", "-cudart=none", "-Xlinker=-Bsymbolic", f"-L{tools.torch_lib}"]
        _link(lines, Path(HOST_LIBRARY), [*objects, *runtime], [*flags, *TORCH_LINK_FLAGS])
    lines.append(f"default {_escaped(library)}")
    return "\n".join(lines) + "\n"


def _kernel_check(
    lines: list[str], name: str, flags: list[str], shared: list[str], num_configs: int
) -> None:
    """Append the steps that build a program that runs kernels without torch.

    shared: objects of the library that the kernels need.
    """
    objects = [*shared, _compile(lines, DEVICE_TESTS / f"{name}.cu", flags)]
    config, number = DEVICE_TESTS / f"{KINDS[name]}_config.cu", f"-D{name.upper()}_CONFIG"
    objects += [_compile(lines, config, [*flags, f"{number}={i}"], i) for i in range(num_configs)]
    _link(lines, Path(name), objects, ["-cudart=static", "-lpthread"])


def _emulations(lines: list[str], tools: Toolchain, configs: Path, common: str) -> None:
    """Append the steps that build the programs that run kernels on the CPU.

    configs: folder of the headers with the kernel configs. common: flags of the compiler, with -O1,
    as -O3 takes it three times as long and saves seconds of a run.
    """
    # Found before the headers of csrc and CUTLASS. From the build folder, as ccache makes no path
    # relative that nvcc passes on.
    shadows = relpath(DEVICE_TESTS / "emulation", configs.parent)
    before = f"-Xcompiler=-iquote,{shadows},-include,{shadows}/emulation.h"
    before += ",-Wno-unknown-pragmas,-fno-extern-tls-init"  # __shared__ becomes thread_local
    flags = [before, f"-I{shadows}", f"-I{configs}"]
    flags.append(f"-isystem={tools.cutlass_include}")
    for name in EMULATIONS:
        program = _compile(lines, DEVICE_TESTS / f"{name}.cpp", flags)
        lines.append(f"  common = {common}")
        _link(lines, Path(name), [program], ["-cudart=static", "-lpthread"])


def _compile(
    lines: list[str], source: Path, flags: Iterable[str] = (), number: int | None = None
) -> str:
    """Append the step that compiles a source; return the object's name in the build folder.

    number: distinguishes objects of the same source.
    """
    infix = "" if number is None else f".{number}"
    target = f"{source.parent.name}/{source.name}{infix}.o"
    lines += [f"build {target}: compile {_escaped(source)}", f"  flags = {join(flags)}"]
    return target


def _link(lines: list[str], target: Path, objects: Sequence[str], flags: Sequence[str]) -> None:
    lines.append(f"build {_escaped(target)}: link {' '.join(objects)}")
    lines.append(f"  flags = {' '.join(quote(flag) for flag in flags)}")


def _command(*parts: Path | str | None) -> str:
    return join(str(part) for part in parts if part is not None)


def _escaped(path: Path) -> str:
    """Escape a path for ninja."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
