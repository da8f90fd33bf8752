"""``flashattn3 doctor``: an answer on every machine, and what to type where a part is missing."""

from __future__ import annotations

import sysconfig

import pytest
import torch
from helpers import A100, CPU, GPU, run_python

import flashattn3
from flashattn3 import doctor, triton_toolchain
from flashattn3.backends.hopper.kernel_configs import all_configs
from flashattn3.backends.hopper.library import KernelInfo, Library
from flashattn3.cli import main

FIRST_GPU = torch.device("cuda", 0)


def printed_by_doctor(capsys, *options: str, status: int = 0) -> str:
    assert main(["doctor", *options]) == status
    return capsys.readouterr().out


def test_versions_devices_and_backends_are_named_with_the_reason_of_each_that_declines(capsys):
    printed = printed_by_doctor(capsys)
    q = torch.empty(1, 128, 2, 128, dtype=torch.bfloat16)
    declined = flashattn3.explain(q, q, q, causal=True).declined
    names = (flashattn3.__version__, torch.__version__, "cpu:", "reference:", "triton")
    for wanted in (*names, *(f"  {name}: {reason}" for name, reason in declined.items())):
        assert wanted in printed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hopper", "FLASHATTN3_BACKEND hopper: calls that name no backend run there, or nowhere"),
        ("bogus", "FLASHATTN3_BACKEND 'bogus' is no backend: unset it, or set one of ('hopper',"),
    ],
)
def test_a_forced_backend_is_reported_and_forces_nothing_here(name, said):
    code = "from flashattn3.cli import main; raise SystemExit(main(['doctor']))"
    printed = run_python(code, FLASHATTN3_BACKEND=name, TRITON_INTERPRET=None)
    assert said in printed
    assert "  reference: runs a bfloat16 problem" in printed
    assert "  cached calls: reference (hopper: needs an NVIDIA GPU" in printed
    assert "  cached chunks: reference (hopper: needs an NVIDIA GPU" in printed
    assert f"  FLASHATTN3_BACKEND={name}: calls here fail unless they name a backend" in printed


def test_a_forced_backend_fails_only_where_it_declines(capsys, monkeypatch):
    monkeypatch.setenv("FLASHATTN3_BACKEND", "triton")
    monkeypatch.setattr(doctor, "_devices", lambda: [FIRST_GPU, torch.device("cpu")])
    monkeypatch.setattr(doctor, "describe_device", lambda of: CPU if of.type == "cpu" else A100)
    on_gpu, on_cpu = printed_by_doctor(capsys).split("\ncpu:")
    assert "  triton: runs a bfloat16 problem" in on_gpu
    assert "  cached calls: triton (hopper: " in on_gpu
    assert "  cached chunks: triton (hopper: " in on_gpu
    assert "calls here fail" not in on_gpu
    assert "calls here fail" in on_cpu


def test_a_part_that_fails_is_reported_in_its_place(capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error:\n  no kernel image")

    monkeypatch.setattr(doctor, "_devices", lambda: [FIRST_GPU, torch.device("cpu")])
    monkeypatch.setattr(doctor, "describe_device", broken)
    monkeypatch.setattr(doctor, "kernel_info", broken)
    monkeypatch.setattr(triton_toolchain, "find_errors", broken)
    printed = printed_by_doctor(capsys)
    assert "cuda:0: RuntimeError: CUDA error: no kernel image" in printed
    assert torch.__version__ in printed


def test_the_kernels_are_counted(capsys, monkeypatch):
    info = KernelInfo("forward_a", 512, 2048, -1, -1, -1, -1)  # -1: without a GPU
    monkeypatch.setattr(doctor, "find_library", lambda: Library(frozenset({"forward_a"})))
    monkeypatch.setattr(doctor, "kernel_info", lambda: [info])
    printed = printed_by_doctor(capsys)
    said = "  forward_a: 512 threads, 2 KiB of shared memory\n"
    assert f"Hopper kernels   1 of {len(all_configs())} kernel configs\n{said}" in printed
    assert "autograd node    in C++\nwith scores      in C++\n" in printed


@pytest.mark.skipif(GPU, reason="says what a machine without GPU sees")
def test_a_probe_without_a_gpu_says_so(capsys):
    assert "nothing to run: no CUDA device" in printed_by_doctor(capsys, "--probe")


@pytest.mark.gpu
def test_a_probe_runs_a_kernel(capsys):
    printed = printed_by_doctor(capsys, "--probe")
    assert "probe of cuda:0: right: Triton compiled and ran one kernel in" in printed


def test_a_probe_that_fails_is_one_line_and_status_1(capsys, monkeypatch):
    def broken(_):
        raise OSError("no\nptxas")

    monkeypatch.setattr(doctor, "_devices", lambda: [FIRST_GPU, torch.device("cpu")])
    monkeypatch.setattr(doctor, "_probe", broken)
    printed = printed_by_doctor(capsys, "--probe", status=1)
    assert printed.endswith("probe of cuda:0: OSError: no ptxas\n")


def program(folder, name: str, prints: str = ""):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return path


def ptxas(folder, release: str):
    return program(folder, "ptxas", f"Cuda compilation tools, release {release}, V{release}.20")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No program is found but those put into this folder."""
    which = triton_toolchain.shutil.which

    def found(name, path=None):
        return which(name, path=str(tmp_path))

    monkeypatch.setattr(triton_toolchain.shutil, "which", found)
    for name in ("CC", "TRITON_PTXAS_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_ptxas_too_new_for_the_driver_is_named_with_one_that_fits(bare, monkeypatch):
    new, fit = ptxas(bare / "new", "13.0"), ptxas(bare, "12.6")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(new))
    assert triton_toolchain.ptxas_error(driver=(12, 6)) == (
        f"ptxas of CUDA 13.0 at {new} is too new for the driver, which runs CUDA 12.6: "
        f"export TRITON_PTXAS_PATH={fit}"
    )
    for fitting in ((13, 0), (13, 2), None):
        assert triton_toolchain.ptxas_error(fitting) is None


def test_the_version_of_a_ptxas_is_read_from_what_it_prints(tmp_path):
    assert triton_toolchain.cuda_of(ptxas(tmp_path, "12.6")) == (12, 6)
    assert triton_toolchain.cuda_of(program(tmp_path, "other", "hello")) is None
    assert triton_toolchain.cuda_of(tmp_path / "absent") is None


def test_a_missing_ptxas_is_named_with_what_to_install(bare, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(bare / "absent"))
    said = triton_toolchain.ptxas_error(driver=(12, 6))
    assert said.startswith(f"no ptxas runs at {bare / 'absent'}: export TRITON_PTXAS_PATH=")
    assert said.endswith("(after installing the toolkit of CUDA 12.6)")


def test_a_missing_compiler_is_named(bare, monkeypatch):
    assert triton_toolchain.compiler_error() == "no C compiler (gcc or clang): apt install gcc"
    program(bare, "clang")
    assert triton_toolchain.compiler_error() is None
    monkeypatch.setenv("CC", "icx -O2")
    assert triton_toolchain.compiler_error() == "no C compiler (CC=icx -O2): apt install gcc"


def test_a_missing_python_header_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"no Python.h in {tmp_path}: apt install python3." in triton_toolchain.header_error()
    (tmp_path / "Python.h").touch()
    assert triton_toolchain.header_error() is None


@pytest.mark.parametrize(
    ("asked", "installed", "said"),
    [
        ("triton==3.8.0; platform_system == 'Linux'", "3.9.0", "pip install triton==3.8.0"),
        ("triton (==3.8.0) ; platform_system == 'Linux'", "3.8.0", None),
        ("filelock", "3.9.0", None),
        ("filelock", "3.4.0", "Triton 3.4.0 is older than 3.5"),
    ],
)
def test_a_triton_that_torch_did_not_ask_for_is_named(asked, installed, said, monkeypatch):
    monkeypatch.setattr(triton_toolchain.metadata, "requires", lambda name: ["sympy", asked])
    monkeypatch.setattr(triton_toolchain, "installed_version", lambda: installed)
    error = triton_toolchain.version_error()
    assert error is None if said is None else said in error


def test_a_missing_triton_is_named_with_the_one_for_this_torch(monkeypatch):
    monkeypatch.setattr(triton_toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_toolchain, "wanted_triton", lambda: "triton==3.8.0")
    assert triton_toolchain.find_errors() == [
        "Triton is not installed: pip install 'triton==3.8.0'"
    ]


def test_a_triton_that_does_not_import_is_named_with_its_error(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('no libtriton.so')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from flashattn3 import doctor\n"
    code += "print(doctor._versions(), doctor._triton())"
    printed = run_python(code, TRITON_INTERPRET=None)
    assert "triton           none" in printed
    assert "Triton does not import (no libtriton.so): pip install --force-reinstall" in printed
