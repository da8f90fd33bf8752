"""What the source may lean on: the oldest Python, torch alone without Triton, and no part of Triton
that goes."""

from __future__ import annotations

import ast
import re

from helpers import ROOT, run_python

PACKAGES = ("flashattn3", "flashattn3_bench")
SOURCES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
# Block pointers are gone from Triton main.
GONE_FROM_TRITON = {"make_block_ptr", "advance"}


def attributes(source: str) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def test_sources_are_python_3_10_and_use_nothing_that_newer_tritons_lack():
    for path in SOURCES:
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))
        assert not attributes(path.read_text()) & GONE_FROM_TRITON, path


def test_what_is_gone_would_be_found():
    assert attributes("tl.advance(tl.make_block_ptr(x), (0,))") == GONE_FROM_TRITON


def test_the_project_asks_for_what_the_tests_hold_it_to():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in project
    assert 'dependencies = ["torch>=2.8"]' in project
    assert re.search(r'^triton = \["triton>=3\.5;.*Linux', project, re.MULTILINE)


def test_the_pinned_check_has_a_triton_whose_spills_are_bounded():
    pinned = re.search(r"triton==(\d+\.\d+)", (ROOT / ".ci" / "run").read_text())
    bounds = (ROOT / "tests" / "test_ahead_of_time.py").read_text()
    assert f'"{pinned[1]}"' in re.search(r"^MEASURED_TRITONS = (.*)", bounds, re.MULTILINE)[1]


def test_everything_but_triton_works_without_triton():
    code = """
import sys, torch
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
import flashattn3
q = torch.randn(1, 8, 2, 16, dtype=torch.float16, requires_grad=True)
flashattn3.flash_attn_func(q, q, q, causal=True).sum().backward()
print(flashattn3.available_backends("cpu"))
print(flashattn3.explain(q, q, q).declined["triton"])
try:
    flashattn3.flash_attn_func(q, q, q, backend="triton")
except flashattn3.UnsupportedError as error:
    print(error)"""
    names, reason, error = run_python(code, TRITON_INTERPRET=None).splitlines()
    assert names == "['reference']"
    assert reason == "Triton is not installed"
    assert "backend must be one that takes this problem, got 'triton' (" in error
    assert "; triton: Triton is not installed; " in error
