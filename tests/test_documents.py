"""What README and docs show is true: code blocks run, commands parse, links lead somewhere, pages
that are generated are up to date."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import forked
import pytest
import torch
from helpers import GPU, ROOT, run_program, run_python

from flashattn3.cli import build_parser
from flashattn3_bench.command import SUITES

if not (ROOT / "README.md").is_file():
    pytest.skip("needs a source checkout", allow_module_level=True)

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What an example needs besides: a library, which .ci/run has in an environment of its own, or GPUs.
NEEDED = {"transformers_model.py": "transformers", "diffusers_model.py": "diffusers"}
TWO_GPUS = "context_parallel.py"
TWO_PROCESSES = (TWO_GPUS, "sharded_training.py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(path.read_text()) if found == language]


def script(name: str) -> ModuleType:
    """A program of .ci."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WITH_PYTHON = [path for path in PAGES if blocks(path, "python")]
# Its programs need a GPU and a library each: tests/test_integrations_*.py make these calls.
COMPILED = ROOT / "docs" / "integrations.md"


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name_of)
def test_the_code_blocks_of_a_page_are_one_program_that_runs(path):
    sybil = pytest.importorskip("sybil")
    from sybil.parsers.markdown import PythonCodeBlockParser

    torch.manual_seed(0)
    document = sybil.Sybil([PythonCodeBlockParser()], encoding="utf-8").parse(path)
    examples = list(document.examples())
    assert len(examples) == len(blocks(path, "python"))  # none is skipped
    for example in examples:
        if path == COMPILED:
            compile(example.parsed, name_of(path), "exec")
        else:
            example.evaluate()


def test_every_suite_of_the_benchmarks_is_described():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for suite in SUITES:
        assert f"\n| `{suite}` |" in page and f"\n- `{suite}`:" in page, suite


def test_the_pages_that_show_calls_are_run():
    assert {"README.md", "docs/quickstart.md", "docs/fp8.md", "docs/training.md"} <= {
        name_of(path) for path in WITH_PYTHON
    }


ALONE = [path for path in EXAMPLES if path.name not in TWO_PROCESSES]


@pytest.mark.parametrize("path", ALONE, ids=name_of)
def test_an_example_runs(path, tmp_path):
    if path.name in NEEDED:
        pytest.importorskip(NEEDED[path.name])
    # Triton does not interpret: they are programs of their own.
    assert run_program(forked.run_file, str(path), folder=tmp_path, TRITON_INTERPRET=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_an_example_of_two_processes_runs(name, tmp_path):
    alone = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=300)
    assert f"\n\ntorchrun --nproc-per-node 2 examples/{name}" in done.stderr
    if name == TWO_GPUS and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [alone[0], *launcher, alone[1]]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


COMMAND = re.compile(
    r"^(?:[A-Z0-9_]+=\S+ )*(?:python3? -m )?(flashattn3(?: [^#\n]*)?)", re.MULTILINE
)


def commands(path: Path) -> list[str]:
    return [found for code in blocks(path, "") for found in COMMAND.findall(code)]


def test_the_commands_of_the_pages_have_these_options():
    found = {command.strip(): name_of(path) for path in PAGES for command in commands(path)}
    assert len(found) > 8
    parser = build_parser()
    for command, page in found.items():
        try:
            parser.parse_args(shlex.split(command)[1:])
        except SystemExit:
            pytest.fail(f"{page}: {command}")


needs_results = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results").is_dir(), reason="a source archive has no results"
)


@needs_results
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_to_files(path):
    text = FENCE.sub("", path.read_text())
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


@needs_results
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    import flashattn3

    assert all(f'id="flashattn3.{name}"' in api for name in flashattn3.__all__)
    assert "All other arguments" in api  # sentences of Args that name no argument


@pytest.mark.skipif(GPU, reason="the page has the messages of a machine without a GPU")
def test_the_troubleshooting_page_has_todays_messages():
    """Outside of Triton's interpreter, in which the other tests run."""
    code = """
import runpy
written = runpy.run_path(".ci/troubleshooting.py")
assert written["PAGE"].read_text() == written["page"](), "run python .ci/troubleshooting.py"
"""
    run_python(code, TRITON_INTERPRET=None)


def test_the_schedules_are_drawn_from_their_description():
    schedules = script("schedules")
    for name, figure in schedules.FIGURES.items():
        drawn = (schedules.ASSETS / f"schedule-{name}.svg").read_text()
        assert drawn == schedules.svg(figure), "run python .ci/schedules.py"


def test_prose_is_under_100_columns():
    """A table's row may be longer, in README up to 120."""
    too_long = [
        f"{name_of(path)}: {line}"
        for path in PAGES
        for line in FENCE.sub("", path.read_text()).splitlines()
        if len(line) > 100 and not line.startswith(("|", "!["))
    ]
    assert not too_long
    assert max(map(len, (ROOT / "README.md").read_text().splitlines())) < 120


def test_an_issue_asks_for_the_doctor():
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "flashattn3 doctor" in template and "required: true" in template


def test_the_citation_has_the_version():
    import flashattn3

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {flashattn3.__version__}\n" in citation
