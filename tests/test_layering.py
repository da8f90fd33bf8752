"""The arrows of the architecture: who may import whom, and what product code must not do."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from helpers import ROOT, run_python

PACKAGE = ROOT / "flashattn3"
# Folder or module of the library → what it imports besides itself when it runs; ``a.*`` stands for
# the modules in a folder. CONTRIBUTING.md, "How the code flows", has the reasons.
BASE = {"errors", "modes"}
CALL = BASE | {"call.*"}
BACKENDS = {"backends", "backends.*"}
LISTS = {"masks.block_lists", "masks.bits"}
MAY_IMPORT = {
    "errors": set(),
    "modes": {"errors"},
    "call": CALL,
    "backends.triton.kernels": {"backends.triton.kernels.*"},
    "backends": CALL | BACKENDS | LISTS,
    "masks": BASE
    | {"call.arguments", "call.value_checks", "masks.*", "backends.triton.kernels.*"}
    | {"backends.triton.kernels"},
    "quantization": CALL | BACKENDS | {"quantization.*"},
    "run": CALL | {"backends.registry", "backends.base", "backends.device", "quantization", "run.*"}
    | {"quantization.dispatch"},
    "explanation": CALL | LISTS
    | {"backends.registry", "backends.base", "backends.device", "run.*"},
    "api": CALL | {"run.*", "explanation", "quantization", "masks.*"},
    "kvcache_api": CALL | {"run.*"},
    "flex": CALL | {"run.*", "masks.*"},
    "cached_explanation": CALL | {"backends.registry", "backends.device", "run.*"}
    | {"explanation", "kvcache_api"},
}  # fmt: skip
TORCH_FREE = (
    "errors",
    "run.planner",
    "backends.base",
    "backends.hopper.kernel_configs",
    "call.quantization_limits",
    "backends.triton.columns",
    "backends.triton.tile_configs",
)
WAITING_CALLS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}
# Run on a CPU or under FLASHATTN3_CHECK=1; read a number that the caller passed as a tensor; once;
# read a tensor that is on the CPU; draw or explain a mask.
MAY_WAIT = {
    *("check_values", "check_edges", "check_same_values"),
    *("check_decode_values", "check_append_values", "check_lengths"),
    *("_check_pages", "_check_metadata_values"),
    *("_scalar", "_listed"),
    *("_kept_or_made", "kernel_info"),
    *("text", "figure", "summary", "_seen_on_host"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
CORE_MODULES = [name for name in MODULES if name.split(".")[0] in MAY_IMPORT]


def runtime_nodes(tree: ast.AST):
    """Every node except those under ``if TYPE_CHECKING``, which never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(name: str) -> set[str]:
    """Full dotted names of the modules that a module imports; flashattn3's own start with a dot."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    found = set()
    for node in runtime_nodes(tree_of(path)):
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


def row_of(name: str) -> str:
    """The row of a module: the longest prefix of its name that MAY_IMPORT has."""
    while name not in MAY_IMPORT:
        name = name.rpartition(".")[0]
    return name


def test_core_modules_import_only_what_their_folder_may():
    wrong = [
        f"{name} must not import {module[1:]}"
        for name in CORE_MODULES
        for module in sorted(imports(name))
        if module.startswith(".")
        if not any(fnmatch(module[1:], allowed) for allowed in MAY_IMPORT[row_of(name)])
    ]
    assert not wrong, "\n".join(wrong)


def all_that_run(name: str) -> set[str]:
    """The modules that run when one is imported: those that it names, and their packages."""
    found = {module[1:] for module in imports(name) if module.startswith(".")}
    for module in tuple(found):
        while "." in module:
            module = module.rpartition(".")[0]
            if not f"{name}.".startswith(f"{module}."):  # its own packages have begun to run
                found.add(module)
    return found & MODULES.keys() - {name}


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes from which a way leads back to themselves, or to such a node."""
    left = set(graph)
    while leaves := {name for name in left if not graph[name] & left}:
        left -= leaves
    return left


def test_no_import_circle():
    """Imports inside functions count: they are there because Triton is imported late."""
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}
    assert not circles({name: all_that_run(name) for name in MODULES})


def third_party(name: str) -> set[str]:
    roots = {module.split(".")[0] for module in imports(name) if not module.startswith(".")}
    return roots - set(sys.stdlib_module_names) - {"flashattn3"}


def test_core_modules_need_only_torch_and_triton():
    def allowed(name: str) -> set[str]:
        if name in TORCH_FREE:
            return set()
        if name == "masks.figure":
            return {"matplotlib"}
        return {"torch", "triton"} if name.startswith("backends.triton.") else {"torch"}

    wrong = {name: third_party(name) - allowed(name) for name in CORE_MODULES}
    assert not any(wrong.values()), {name: found for name, found in wrong.items() if found}


def roots(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages outside of this file's own that the nodes import."""
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)


def test_the_build_needs_the_standard_library_alone():
    """It runs before anything is installed; only the hooks that pip calls know setuptools."""
    for path in (ROOT / "build_support").glob("*.py"):
        hooks = {"setuptools"} if path.name == "backend.py" else set()
        found = roots(list(ast.walk(tree_of(path))))
        assert found <= {"build_support", "third_party"} | hooks, f"{path.name}: {found}"


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


def test_no_core_module_waits_for_a_device_or_leaves_the_process():
    forbidden = WAITING_CALLS | {"exit", "_exit", "abort"}
    found = {
        (name, holder, call)
        for name in CORE_MODULES
        if name != "backends.reference.buckets"
        for holder, call in calls(tree_of(MODULES[name]))
        if call in forbidden and holder not in MAY_WAIT
    }
    assert not found


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


def test_integrations_import_their_library_only_when_called():
    for name in MODULES:
        if name.startswith("integrations."):
            found = roots(tree_of(MODULES[name]).body)
            assert found <= {"torch"}, f"{name}: {found}"
