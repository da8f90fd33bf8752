"""Writes the types of the public functions, flashattn3/api.pyi and kvcache_api.pyi, from their
sources.

A function that returns the log-sum-exp on request has an overload for each answer, which would
stand four times in the source. ``python .ci/stubs.py`` writes; a test compares.
"""

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "flashattn3"
STUBBED = ("api", "kvcache_api")
POSITIONAL_FLAGS = ("return_attn_probs", "return_softmax_lse")
FLAGS = (*POSITIONAL_FLAGS, "return_lse", "return_max_logit")
PLAIN, WITH_LSE, WITH_MORE = "Tensor", "tuple[Tensor, Tensor]", "tuple[Tensor, ...]"
# The flags that are literal, and what then is returned; the last takes bools known at run time.
OVERLOADS = (
    (dict.fromkeys(FLAGS, False), PLAIN),
    *(
        ({flag: True, "return_max_logit": False}, WITH_LSE)
        for flag in ("return_lse", *POSITIONAL_FLAGS)
    ),
    ({"return_max_logit": True}, WITH_MORE),
    ({}, None),
)


def stub(source: str) -> str:
    """The text of a .pyi: imports, classes and public functions without their bodies."""
    lines = ["from typing import Literal, overload"]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            lines += map(ast.unparse, overloads(node))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            node.body = [bodiless(item) for item in node.body if not isinstance(item, ast.Expr)]
            lines.append(ast.unparse(node))
    return formatted("\n".join(lines))


def overloads(function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    if not function.name.startswith("flash_attn_") or "return_lse" not in names:
        function.decorator_list = []
        yield bodiless(function)
        return
    for literals, returned in OVERLOADS:
        if all(flag in names for flag, value in literals.items() if value):
            returned = returned or ast.unparse(function.returns)
            yield overload(copy.deepcopy(function), literals, returned)


def overload(function: ast.FunctionDef, literals: dict[str, bool], returned: str):
    """With these flags literal; one that must be given has no default, so only a keyword may be."""
    function.decorator_list = [ast.Name("overload")]
    function.returns = ast.parse(returned).body[0].value
    given = function.args
    for flag in POSITIONAL_FLAGS:
        if not literals.get(flag):
            continue
        position = [argument.arg for argument in given.args].index(flag)
        given.kwonlyargs.insert(0, given.args.pop(position))
        given.defaults.pop()
        given.kw_defaults.insert(0, None)
    for argument in (*given.args, *given.kwonlyargs):
        if argument.arg in literals:
            argument.annotation = ast.parse(f"Literal[{literals[argument.arg]}]").body[0].value
    for index, argument in enumerate(given.kwonlyargs):
        if literals.get(argument.arg):
            given.kw_defaults[index] = None
    return bodiless(function)


def bodiless(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.FunctionDef):
        node.body = [ast.Expr(ast.Constant(...))]
    return node


def formatted(text: str) -> str:
    for command in (("check", "--fix", "--quiet", "--select", "F401,I"), ("format", "--quiet")):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", PACKAGE / "x.pyi", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def stubs() -> dict[Path, str]:
    """Path of each stub → what it must hold."""
    sources = {name: PACKAGE / f"{name}.py" for name in STUBBED}
    return {path.with_suffix(".pyi"): stub(path.read_text()) for path in sources.values()}


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
