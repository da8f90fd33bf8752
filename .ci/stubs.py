"""Writes the types of the public functions whose arguments decide what they return, the .pyi files
of flashattn3, from their sources.

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
STUBBED = ("api", "kvcache_api", "quantization/rotary_quantization")
POSITIONAL_FLAGS = ("return_attn_probs", "return_softmax_lse")
FLAGS = (*POSITIONAL_FLAGS, "return_lse", "return_max_logit")
PLAIN, WITH_LSE, WITH_MORE = "Tensor", "tuple[Tensor, Tensor]", "tuple[Tensor, ...]"
TRUE, FALSE = "Literal[True]", "Literal[False]"
DEFAULTS = (FALSE, "None")  # an argument of another type must be given
# The types of arguments, and what then is returned; the last takes bools known at run time.
OF_FLAGS = (
    (dict.fromkeys(FLAGS, FALSE), PLAIN),
    *(
        ({flag: TRUE, "return_max_logit": FALSE}, WITH_LSE)
        for flag in ("return_lse", *POSITIONAL_FLAGS)
    ),
    ({"return_max_logit": TRUE}, WITH_MORE),
    ({}, None),
)
ONE, THREE = "BlockScaled", "tuple[BlockScaled, BlockScaled, BlockScaled]"
OF_TENSORS = (  # of rotate_and_quantize
    ({"k": "None", "v": "None", "num_heads_q": "None"}, ONE),
    ({"k": "None", "v": "None", "num_heads_q": "int"}, THREE),
    ({"k": "Tensor", "v": "Tensor", "num_heads_q": "None"}, THREE),
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
    table = OF_FLAGS
    if function.name == "rotate_and_quantize":
        table = OF_TENSORS
    elif not function.name.startswith("flash_attn_") or "return_lse" not in names:
        function.decorator_list = []
        yield bodiless(function)
        return
    for types, returned in table:
        required = {name for name, type in types.items() if type not in DEFAULTS}
        if required <= names:
            returned = returned or ast.unparse(function.returns)
            yield overload(copy.deepcopy(function), types, required, returned)


def overload(function: ast.FunctionDef, types: dict[str, str], required: set[str], returned: str):
    """With arguments of these types; a required one has no default, so a flag is keyword-only."""
    function.decorator_list = [ast.Name("overload")]
    function.returns = ast.parse(returned).body[0].value
    given = function.args
    for flag in required.intersection(POSITIONAL_FLAGS):
        position = [argument.arg for argument in given.args].index(flag)
        given.kwonlyargs.insert(0, given.args.pop(position))
        given.defaults.pop()
        given.kw_defaults.insert(0, None)
    for argument in (*given.args, *given.kwonlyargs):
        if argument.arg in types:
            argument.annotation = ast.parse(types[argument.arg]).body[0].value
    given.defaults = given.defaults[sum(argument.arg in required for argument in given.args) :]
    for index, argument in enumerate(given.kwonlyargs):
        if argument.arg in required:
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
