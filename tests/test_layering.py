"""The arrows of the architecture: who may import whom, and what product code must not do."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_python

PACKAGE = ROOT / "flashattn3"
CORE = (
    "errors",
    "modes",
    "call",
    "dispatch",
    "operator_rules",
    "ops",
    "gradient",
    "autograd",
    "bhsd",
    "api",
    "passes",
    "explanation",
    "quantized",
    "backends",
    "quantization",
    "kvcache",
)

# Module or package of flashattn3 → what of flashattn3 it may import when it runs.
MAY_IMPORT = {
    "call": set(),
    "dispatch": set(),
    "errors": set(),
    "modes": {"errors"},
    "dispatch.device": set(),
    "dispatch.backend": set(),
    "dispatch.planned": set(),
    "dispatch.launch_cache": set(),
    "dispatch.selection": {"dispatch.backend", "errors"},
    "dispatch.kernel_configs": set(),
    "call.arguments": {"errors"},
    "call.spec": {"call.arguments", "dispatch.selection", "errors"},
    "call.foreign": {"call.spec", "errors"},
    "call.public": {"call.foreign", "call.spec", "dispatch.selection"},
    "call.dtypes": {"dispatch.kernel_configs"},
    "call.metadata": set(),
    "call.tensor_checks": {"call.metadata", "errors"},
    "call.quantization_limits": set(),
    "call.descales": {"errors", "call.dtypes", "call.quantization_limits"},
    "call.value_checks": {"errors"},
    "call.inputs": {
        "call.metadata",
        "call.arguments",
        "call.spec",
        "call.value_checks",
        "errors",
        "modes",
        "quantization",
    },
    "call.problem": {
        "call.tensor_checks",
        "modes",
        "call.metadata",
        "call.descales",
        "call.dtypes",
        "call.inputs",
        "call.spec",
        "errors",
        "quantization",
    },
    "dispatch.planner": {
        "dispatch.backend",
        "dispatch.device",
        "dispatch.selection",
        "errors",
        "call.problem",
        "call.spec",
    },
    "backends.reference.padded_layout": set(),
    "backends.reference.backend": {
        "backends.conversions",
        "dispatch.backend",
        "backends.reference.padded_layout",
        "dispatch.device",
        "call.inputs",
        "call.problem",
        "call.spec",
        "call.descales",
        "call.dtypes",
    },
    "backends.hopper.launch_record": {"call.spec", "call.cached"},
    # Shared by the backends whose kernels of cached calls run forwards of few query rows.
    "backends.results": {"call.problem"},
    "backends.packed": {
        "backends.results",
        "call.dtypes",
        "call.inputs",
        "call.problem",
        "dispatch.device",
        "call.cached",
    },
    "backends.hopper.packing": {
        "backends.packed",
        "call.problem",
        "dispatch.device",
        "dispatch.kernel_configs",
    },
    "backends.hopper.decode_launch": {
        "backends.hopper.launch_record",
        "call.dtypes",
        "dispatch.backend",
        "dispatch.kernel_configs",
        "dispatch.planned",
        "kvcache.planned",
        "call.cached",
    },
    "backends.hopper.append_launch": {
        "call.dtypes",
        "dispatch.backend",
        "dispatch.kernel_configs",
    },
    "backends.hopper.autograd_node": {"dispatch.launch_cache"},
    "backends.hopper.library": {
        "backends.hopper.autograd_node",
        "backends.hopper.launch_record",
        "dispatch.kernel_configs",
        "_kernel_info",
    },
    "backends.gpu_limits": {"dispatch.backend", "call.dtypes", "call.problem"},
    "backends.conversions": {"call.inputs", "call.problem", "quantization"},
    "backends.hopper.launch": {
        "call.metadata",
        "dispatch.backend",
        "dispatch.launch_cache",
        "backends.conversions",
        "backends.hopper.launch_record",
        "call.value_checks",
        "dispatch.kernel_configs",
        "call.inputs",
        "call.problem",
        "call.descales",
        "call.dtypes",
    },
    "backends.hopper.backend": {
        "backends.conversions",
        "backends.hopper.decode_launch",
        "backends.hopper.launch",
        "backends.packed",
        "backends.hopper.library",
        "backends.hopper.packing",
        "backends.gpu_limits",
        "backends.triton.backend",
        "dispatch.device",
        "errors",
        "dispatch.kernel_configs",
        "call.inputs",
        "call.problem",
        "call.descales",
        "call.dtypes",
    },
    # The two halves of one backend: what is decided without Triton, and what needs it.
    "backends.triton.backend": {
        "backends.conversions",
        "backends.gpu_limits",
        "backends.triton.launch",
        "dispatch.device",
        "call.inputs",
        "call.problem",
        "call.descales",
        "call.dtypes",
        "backends.triton.cache_tiles",
        "backends.packed",
        "backends.triton.kvcache_launch",
        "backends.triton.columns",
        "backends.triton.tile_configs",
    },
    "backends.triton.cache_tiles": {
        "call.cached",
        "backends.triton.columns",
        "backends.triton.tile_configs",
        "dispatch.device",
    },
    "backends.triton.launch": {
        "backends.conversions",
        "backends.results",
        "backends.triton.columns",
        "backends.triton.tile_configs",
        "backends.gpu_limits",
        "backends.triton.backend",
        "call.inputs",
        "call.problem",
        "call.spec",
        "call.descales",
        "call.dtypes",
        "backends.triton.kernels",
    },
    "backends.triton.columns": set(),
    "backends.triton.tile_configs": set(),
    # Cached calls have a backend of their own beside each of the others.
    "backends.hopper.kvcache": {
        "backends.hopper.append_launch",
        "backends.hopper.backend",
        "backends.hopper.decode_launch",
        "backends.triton.kvcache",
        "dispatch.device",
        "dispatch.kernel_configs",
        "dispatch.planned",
        "call.cached",
    },
    "backends.triton.kvcache": {
        "call.cached",
        "backends.triton.tile_configs",
        "backends.triton.backend",
        "backends.triton.cache_tiles",
        "backends.triton.kvcache_launch",
        "call.dtypes",
        "dispatch.backend",
        "dispatch.device",
    },
    "backends.triton.kvcache_launch": {
        "backends.triton.kernels",
        "backends.triton.cache_tiles",
        "call.dtypes",
        "backends.triton.columns",
        "backends.triton.launch",
    },
    "backends.reference.kvcache": {
        "call.cached",
        "backends.reference.rotary",
        "call.spec",
        "dispatch.backend",
        "call.scheduler_metadata",
    },
    "backends.reference.rotary": set(),
    "kvcache": set(),
    "call.cached": {"call.metadata", "call.arguments", "call.spec"},
    "kvcache.planned": {"dispatch.planned", "call.cached"},
    "call.scheduler_metadata": {"call.spec", "call.cached"},
    "call.cached_checks": {
        "call.cached",
        "call.tensor_checks",
        "call.metadata",
        "call.arguments",
        "call.dtypes",
        "errors",
        "call.scheduler_metadata",
        "modes",
    },
    "call.cached_value_checks": {
        "call.value_checks",
        "errors",
        "call.scheduler_metadata",
        "call.cached",
    },
    "kvcache.backends": {
        "backends.hopper.kvcache",
        "backends.reference.kvcache",
        "backends.triton.kvcache",
    },
    "kvcache.ops": {
        "call.cached",
        "call.cached_checks",
        "call.cached_value_checks",
        "call.scheduler_metadata",
        "call.metadata",
        "call.value_checks",
        "dispatch.device",
        "dispatch.planner",
        "dispatch.selection",
        "errors",
        "kvcache",
        "modes",
        "operator_rules",
    },
    "kvcache.explanation": {
        "call.cached",
        "call.cached_checks",
        "call.cached_value_checks",
        "call.scheduler_metadata",
        "call.metadata",
        "dispatch.device",
        "dispatch.planner",
        "explanation",
        "kvcache",
    },
    "kvcache.calls": {
        "call.cached",
        "call.cached_checks",
        "call.cached_value_checks",
        "call.scheduler_metadata",
        "call.metadata",
        "call.arguments",
        "errors",
        "kvcache",
        "modes",
        "operator_rules",
    },
    "kvcache.api": {
        "call.cached",
        "call.cached_checks",
        "call.cached_value_checks",
        "call.scheduler_metadata",
        "call.metadata",
        "call.arguments",
        "call.public",
        "dispatch.selection",
        "errors",
        "kvcache",
        "modes",
        "operator_rules",
    },
    "backends.triton.kernels": {"backends.triton.kernels"},
    "backends": {
        "backends.hopper.backend",
        "backends.reference.backend",
        "backends.triton.backend",
        "dispatch.backend",
    },
    "quantization": {
        "call.arguments",
        "call.value_checks",
        "errors",
        "modes",
        "quantization",
        "call.descales",
        "call.dtypes",
        "call.quantization_limits",
        "dispatch.kernel_configs",
    },
    "quantization.dispatch": {
        "backends",
        "dispatch.device",
        "dispatch.kernel_configs",
        "modes",
        "call.problem",
        "quantization",
        "call.descales",
        "call.dtypes",
    },
    "quantization.triton_launch": {
        "quantization",
        "call.dtypes",
        "call.quantization_limits",
        "backends.triton.kernels",
    },
    "operator_rules": {"call.inputs"},
    "ops": {
        "operator_rules",
        "backends",
        "call",
        "call.value_checks",
        "dispatch.device",
        "dispatch.planner",
        "dispatch.selection",
        "modes",
        "call.inputs",
        "call.spec",
        "call.problem",
        "call.descales",
        "call.dtypes",
    },
    "gradient": {"call.inputs", "call.metadata", "errors", "modes", "ops"},
    "autograd": {
        "call.dtypes",
        "call.inputs",
        "call.spec",
        "dispatch.launch_cache",
        "gradient",
        "modes",
        "operator_rules",
        "ops",
    },
    "bhsd": {
        "autograd",
        "call.inputs",
        "call.public",
        "call.spec",
        "call.value_checks",
        "dispatch.launch_cache",
        "dispatch.selection",
        "errors",
        "gradient",
        "modes",
        "operator_rules",
        "ops",
    },
    "explanation": {
        "backends",
        "call.arguments",
        "call.inputs",
        "call.spec",
        "dispatch.device",
        "dispatch.planner",
        "errors",
        "ops",
    },
    "quantized": {
        "call.arguments",
        "operator_rules",
        "autograd",
        "backends",
        "call.value_checks",
        "dispatch.device",
        "errors",
        "modes",
        "call.inputs",
        "call.spec",
        "dispatch.planner",
        "call.problem",
        "quantization",
        "call.descales",
        "call.dtypes",
    },
    "passes": {
        "call.arguments",
        "call.dtypes",
        "call.inputs",
        "call.problem",
        "call.spec",
        "errors",
        "modes",
        "ops",
    },
    "api": {
        "call.arguments",
        "autograd",
        "call.inputs",
        "call.public",
        "call.spec",
        "errors",
        "explanation",
        "passes",
        "quantization",
        "quantized",
    },
}
TORCH_FREE = (
    "errors",
    "dispatch.planner",
    "dispatch.kernel_configs",
    "dispatch.backend",
    "call.quantization_limits",
    "backends.triton.columns",
    "backends.triton.tile_configs",
)
WAITING_CALLS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}
# Run on a CPU or under FLASHATTN3_CHECK=1; read a number that the caller passed as a tensor; once;
# read a tensor that is on the CPU.
MAY_WAIT = {
    *("check_values", "check_edges", "check_same_values"),
    *("check_decode_values", "check_append_values", "check_lengths"),
    *("_check_pages", "_check_metadata_values"),
    *("_scalar", "_listed"),
    *("_kept_signs", "_values_of"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
CORE_MODULES = [name for name in MODULES if name.split(".")[0] in CORE]


def runtime_nodes(tree: ast.AST):
    """Every node except those under ``if TYPE_CHECKING``, which never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def imports(name: str) -> set[str]:
    """Full dotted names of the modules that a module imports; flashattn3's own start with a dot."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    found = set()
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            base = ".".join(part for part in base if part)
            members = {f"{base}.{alias.name}".strip(".") for alias in node.names}
            modules = members & MODULES.keys()
            found |= {f".{module}" for module in modules or {base}}
    return {re.sub(r"^flashattn3\b\.?", ".", module) for module in found}


def layer_of(name: str) -> str:
    """The longest prefix of a module's name that MAY_IMPORT holds."""
    while name and name not in MAY_IMPORT:
        name = name.rpartition(".")[0]
    return name


def allowed_for(name: str) -> set[str]:
    """Naming a package allows all of its modules."""
    allowed = MAY_IMPORT[layer_of(name)]
    return allowed | {
        other for other in MODULES if any(other.startswith(f"{package}.") for package in allowed)
    }


@pytest.mark.parametrize("name", CORE_MODULES)
def test_core_modules_import_only_what_lies_below_them(name):
    own = {module[1:] for module in imports(name) if module.startswith(".")}
    wrong = own - allowed_for(name)
    assert not wrong, f"{name} must not import {wrong}"


def test_every_core_module_has_a_place_in_the_layers():
    missing = {name for name in CORE_MODULES if layer_of(name) not in MAY_IMPORT}
    assert not missing
    assert {layer_of(name) for name in CORE_MODULES} >= {
        "api",
        "ops",
        "call.problem",
        "dispatch.planner",
        "dispatch.device",
    }


def third_party(name: str) -> set[str]:
    roots = {module.split(".")[0] for module in imports(name) if not module.startswith(".")}
    return roots - set(sys.stdlib_module_names) - {"flashattn3"}


@pytest.mark.parametrize("name", CORE_MODULES)
def test_core_modules_need_only_torch_and_triton(name):
    triton_allowed = name.startswith("backends.triton.")
    allowed = {"torch", "triton"} if triton_allowed else {"torch"}
    if name in TORCH_FREE:
        allowed = set()
    assert third_party(name) <= allowed


@pytest.mark.parametrize(
    "path", sorted((ROOT / "build_support").glob("*.py")), ids=lambda p: p.name
)
def test_the_build_needs_the_standard_library_alone(path):
    """It runs before anything is installed; only the hooks that pip calls know setuptools."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    allowed = {"build_support", "third_party"}
    if path.name == "backend.py":
        allowed |= {"setuptools"}
    assert {name.split(".")[0] for name in found} <= allowed | set(sys.stdlib_module_names)


def test_only_the_command_line_draws_or_measures():
    """Attention itself imports neither the command line nor an integration of another library, and
    of the library only the command line imports the benchmarks."""
    for name in CORE_MODULES:
        outside = {module for module in imports(name) if re.match(r"\.(cli|integrations)", module)}
        assert not outside, f"{name} imports {outside}"
    measures = {name for name in MODULES for module in imports(name) if "_bench" in module}
    assert measures == {"cli"}


def test_import_brings_nothing_but_torch():
    """Not even Triton, which is imported when its first kernel is launched."""
    code = """
import sys, torch
roots = lambda: {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
before = roots()
import flashattn3
print(sorted(roots() - before))"""
    assert run_python(code, TRITON_INTERPRET=None).strip() == "['flashattn3']"


def calls(tree: ast.AST, inside: str = ""):
    """(function that holds the call, called attribute or name) of every call in a module."""
    for node in ast.iter_child_nodes(tree):
        holder = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else inside
        if isinstance(node, ast.Call):
            called = node.func
            yield (
                holder,
                called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""),
            )
        yield from calls(node, holder)


@pytest.mark.parametrize("name", [n for n in CORE_MODULES if n != "backends.reference.backend"])
def test_no_core_module_waits_for_a_device_or_leaves_the_process(name):
    forbidden = WAITING_CALLS | {"exit", "_exit", "abort"}
    tree = ast.parse(MODULES[name].read_text())
    found = {
        (holder, call)
        for holder, call in calls(tree)
        if call in forbidden and holder not in MAY_WAIT
    }
    assert not found, f"{name}: {found}"


# csrc: ptx ← tile ← attention ← the kernels' folders ← launch ← torch_binding, and torch's headers
# only in the last.
CSRC_PRIMITIVES = {"ptx", "tile", "attention"}
CSRC_KERNELS = ("forward", "backward", "decode", "append", "quantize", "varlen")
CSRC_MAY_INCLUDE = {
    "ptx": {"ptx"},
    "tile": {"ptx", "tile"},
    "attention": CSRC_PRIMITIVES,
    **{kernel: {kernel, *CSRC_PRIMITIVES} for kernel in CSRC_KERNELS},
    "launch": {"launch", *CSRC_KERNELS, *CSRC_PRIMITIVES},
    "torch_binding": {"launch", "torch_binding"},
    "python_binding": {"launch", "python_binding"},
}


def wrong_includes(csrc: Path) -> list[str]:
    """ "file includes header" for every #include that goes against the arrows."""
    wrong = []
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cu", ".cpp", ".hpp"):
            continue
        layer = path.relative_to(csrc).parts[0]
        for header in re.findall(
            r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE
        ):
            top = header.removeprefix("../").split("/")[0]
            torch_header = re.match(r"(torch|ATen|c10)/", header) and layer != "torch_binding"
            layer_header = top in CSRC_MAY_INCLUDE and top not in CSRC_MAY_INCLUDE.get(layer, ())
            if torch_header or layer_header:
                wrong.append(f"{path.relative_to(csrc)} includes {header}")
    return wrong


def test_csrc_includes_follow_the_arrows(tmp_path):
    assert wrong_includes(ROOT / "csrc") == []
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "mask.h").write_text(
        '#include "forward/kernel.cuh"\n#include <torch/all.h>\n'
    )
    assert wrong_includes(tmp_path) == [
        "attention/mask.h includes forward/kernel.cuh",
        "attention/mask.h includes torch/all.h",
    ]


INTEGRATIONS = [name for name in MODULES if name.startswith("integrations.")]


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations_import_their_library_only_when_called(name):
    tree = ast.parse(MODULES[name].read_text())
    roots = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots.add(node.module.split(".")[0])
    assert roots <= {"torch", "__future__", *sys.stdlib_module_names}
