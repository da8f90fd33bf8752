"""The options of this test suite: a clear error where they cannot be honoured."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import ptx
import pytest
import torch
from helpers import GPU, ROOT

from flashattn3.backends.device import describe_device

AMPERE = ".version 8.4\n.target sm_80\nmma.sync.aligned.m16n8k16; cp.async.cg.shared.global;"
HOPPER = ".version 8.4\n.target sm_90a\nwgmma.mma_async.sync.aligned; cp.async.cg.shared.global;"
AN_H100 = SimpleNamespace(
    major=9,
    minor=0,
    name="H100",
    shared_memory_per_block_optin=227 * 1024,
    multi_processor_count=132,
)


def pytest_says(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_options.py"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    return done.stderr


@pytest.mark.skipif(GPU, reason="says what happens without a CUDA device; one is visible")
@pytest.mark.parametrize("option", [("--lowering", "sm80"), ("--shared-memory-kib", "99")])
def test_options_for_a_gpu_need_one(option):
    sentence = "--lowering and --shared-memory-kib need a CUDA device; none is visible"
    assert sentence in pytest_says(*option)


def test_options_that_cannot_be_honoured():
    assert "must be written like sm80, got 'ampere'" in pytest_says("--lowering", "ampere")
    assert "must be positive, got -1" in pytest_says("--shared-memory-kib", "-1")
    said = pytest_says("--lowering", "sm80", "-p", "no:cacheprovider")
    assert "keeps its kernels in pytest's cache: leave -p no:cacheprovider out" in said


def test_overrides_reach_the_device_description(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: AN_H100)
    names = ("TRITON_OVERRIDE_ARCH", "FLASHATTN3_SHARED_MEMORY_KIB")
    for overrides, wanted in (
        ({}, (90, 90, 227, 132)),
        ({"TRITON_OVERRIDE_ARCH": "sm80"}, (90, 80, 163, 132)),
        ({"TRITON_OVERRIDE_ARCH": "sm86"}, (90, 86, 99, 132)),
        ({"TRITON_OVERRIDE_ARCH": "sm90a"}, (90, 90, 227, 132)),
        ({"FLASHATTN3_SHARED_MEMORY_KIB": "163"}, (90, 90, 163, 132)),
        ({"FLASHATTN3_SHARED_MEMORY_KIB": "1000"}, (90, 90, 227, 132)),
        ({"TRITON_OVERRIDE_ARCH": "sm80", "FLASHATTN3_SHARED_MEMORY_KIB": "99"}, (90, 80, 99, 132)),
    ):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in overrides.items():
            monkeypatch.setenv(name, value)
        info = describe_device.__wrapped__(torch.device("cuda", 0))
        found = (info.capability, info.lowering, info.shared_memory_bytes // 1024, info.num_sms)
        assert found == wanted


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("TRITON_OVERRIDE_ARCH", "ampere", "written like sm80"),
        ("FLASHATTN3_SHARED_MEMORY_KIB", "-1", "a number of KiB"),
    ],
)
def test_overrides_that_say_nothing_are_refused(name, value, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: AN_H100)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be {wanted}, got '{value}'"):
        describe_device.__wrapped__(torch.device("cuda", 0))


def test_ptx_is_read_right():
    assert ptx.target_of(AMPERE) == "sm_80"
    assert ptx.target_of(HOPPER) == "sm_90a"
    ptx.assert_ampere(AMPERE, "kernel")
    with pytest.raises(AssertionError, match=r"no mma\.sync"):
        ptx.assert_ampere(HOPPER, "kernel")
    with pytest.raises(AssertionError, match=r"\['wgmma'\] in code for"):
        ptx.assert_ampere(AMPERE + HOPPER, "kernel")
    with pytest.raises(AssertionError, match=r"no cp\.async"):
        ptx.assert_ampere("mma.sync.aligned", "kernel")
    ptx.assert_ampere("mma.sync.aligned", "kernel", pipelined=False)


def test_the_cache_is_searched_for_foreign_kernels(tmp_path, monkeypatch):
    def write(name, chip, code):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.ttgir").write_text(f'module {{ttg.target = "cuda:{chip}"}}')
        (tmp_path / name / "kernel.ptx").write_text(code)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(AssertionError, match="no kernel with tensor-core"):
        ptx.assert_cache_is_lowered_to("sm80")
    write("ampere", 80, AMPERE)
    ptx.assert_cache_is_lowered_to("sm80")
    with pytest.raises(AssertionError, match="is not for sm86"):
        ptx.assert_cache_is_lowered_to("sm86")
    write("mixed", 80, HOPPER)
    with pytest.raises(AssertionError, match=r"mixed.*\['wgmma'\] in code for"):
        ptx.assert_cache_is_lowered_to("sm80")
