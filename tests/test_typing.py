"""What a type checker makes of a user's file."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import ROOT
from support.checkout import copy_tracked

sys.path.insert(0, str(ROOT))  # an installed package does not bring the build along

from build_support.type_stubs import PACKAGE, type_stubs

USER = """
import torch
from flashattn3 import (
    BlockScaled,
    explain,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize_block_fp8,
    rotate_and_quantize,
    use_backend,
)

q = torch.randn(1, 8, 2, 16)
cu = torch.tensor([0, 8], dtype=torch.int32)


def attend(verbose: bool) -> torch.Tensor:
    out: torch.Tensor = flash_attn_func(q, q, q, None, True, window_size=[1, 0])
    out, lse = flash_attn_func(q, q, q, causal=True, return_lse=True)
    out, lse = flash_attn_func(q, q, q, return_attn_probs=True)
    either = flash_attn_func(q, q, q, return_lse=verbose)
    if not isinstance(either, torch.Tensor):
        out, lse = either
    packed = flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 8, 8).sum()
    fused = flash_attn_qkvpacked_func(torch.stack((q, q, q), 2)).sum()
    eight: torch.Tensor = flash_attn_fp8_func(q, q, q)
    eight, lse = flash_attn_fp8_func(q, q, q, return_lse=True)
    cached: torch.Tensor = flash_attn_with_kvcache(q, q, q, cache_seqlens=3)
    cached, lse = flash_attn_with_kvcache(q, q, q, return_softmax_lse=True)
    cached, lse = flash_attn_with_kvcache(q, q, q, cache_seqlens=cu, return_lse=True)
    return out + lse.sum() + packed + fused + eight + cached.sum()


scaled: BlockScaled = quantize_block_fp8(q)
scaled = rotate_and_quantize(q, norm_eps=1e-5)
q8, k8, v8 = rotate_and_quantize(q, None, None, q, q, num_heads_q=4)
q8, k8, v8 = rotate_and_quantize(q, q, q)
block: int = q8.block
seqlen: int = scaled.shape[1]
with use_backend("reference"):
    name: str = explain(q, q, q, causal=True).backend
"""


def test_stubs_in_the_checkout_are_those_of_the_sources():
    """An editable install may be older than the sources."""
    for name, text in type_stubs().items():
        path = PACKAGE / name
        told = f"{path}: python -m build_support.type_stubs writes it anew"
        assert not path.is_file() or path.read_text() == text, told


@pytest.fixture(scope="module", params=["copied", "editable"])
def python(request, tmp_path_factory) -> Path:
    """One of an environment where the package is installed, beside the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    (Path(asked.stdout.strip()) / "beside.pth").write_text(sysconfig.get_path("purelib"))
    checkout = tmp_path_factory.mktemp("checkout") / "copy"
    copy_tracked(ROOT, checkout)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--no-build-isolation", "--no-deps", "--no-cache-dir"]
    options += ["--editable"] if request.param == "editable" else []
    variables = os.environ | {"FLASHATTN3_BUILD": "python"}
    command = [*pip, *options, str(checkout)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """What mypy knows of torch, read once."""
    return str(tmp_path_factory.mktemp("mypy"))


def complaints(python: Path, text: str, folder: Path, cache: str) -> list[str]:
    pytest.importorskip("mypy")
    user = folder / "user.py"
    user.write_text(text)
    options = ("--strict", "--no-error-summary", "--python-executable", str(python))
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", cache, user.name]
    variables = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_users_file_passes_mypy_strict(python, cache, tmp_path):
    assert complaints(python, USER, tmp_path, cache) == []
    wrong = USER + "flash_attn_func(q, q, q).shape\nexplain(q, q, q, cousal=True)\n"
    wrong += "lost, _ = flash_attn_func(q, q, q, causal='yes')\n"
    said = "\n".join(complaints(python, wrong, tmp_path, cache))
    assert 'Unexpected keyword argument "cousal" for "explain"' in said
    assert "No overload variant" in said
