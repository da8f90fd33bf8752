"""Types of the public functions whose arguments decide what they return, as .pyi files that a build
writes beside their sources: ``python -m build_support.type_stubs`` writes them into the checkout.

A function that returns the log-sum-exp on request has an overload for each answer, which would
stand four times in the source.
"""

from __future__ import annotations

import ast
import copy
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
    """The text of a .pyi: classes and public functions without their bodies, and what they name."""
    imports, lines = [ast.parse("from typing import Literal, overload").body[0]], []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            lines += map(ast.unparse, overloads(node))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            node.body = [bodiless(item) for item in node.body if not isinstance(item, ast.Expr)]
            lines.append(ast.unparse(node))
    nodes = ast.walk(ast.parse("\n".join(lines)))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in imports:
        node.names = [name for name in node.names if (name.asname or name.name) in named]
    head = [ast.unparse(node) for node in imports if node.names]
    return "\n".join((*head, *lines, ""))


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


def type_stubs() -> dict[str, str]:
    """Name of each file in the package → its text."""
    return {f"{name}.pyi": stub((PACKAGE / f"{name}.py").read_text()) for name in STUBBED}


def write_type_stubs(package: Path = PACKAGE) -> None:
    """Write them into the package, or into a copy of it."""
    for name, text in type_stubs().items():
        (package / name).write_text(text)


if __name__ == "__main__":
    write_type_stubs()
