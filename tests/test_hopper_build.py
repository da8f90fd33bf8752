"""The build of the Hopper kernels: what it writes, what it says, and what comes out of it.

Nothing here needs a GPU. The tests of a real build need nvcc, ninja and the CUTLASS headers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

if not (ROOT / "build_support").is_dir():
    pytest.skip("needs a source checkout", allow_module_level=True)

from support.checkout import checkout_to_build_in

from build_support import device_checks, ptxas, toolchain, units
from build_support.build import num_jobs
from build_support.ninja_file import ninja_text
from build_support.toolchain import BuildError, find_toolchain, kernels_are_wanted
from flashattn3.backends.device import SHARED_MEMORY_KIB
from flashattn3.backends.hopper.kernel_configs import (
    CACHED_FORWARD_CONFIGS,
    FORWARD_CONFIGS,
    all_configs,
    configs_hash,
)
from flashattn3.backends.hopper.library import find_library, kernel_info
from flashattn3.call import quantization_limits

ROW = "forward_bf16_d64_full_192x128x4"


@pytest.mark.parametrize(
    ("choice", "nvcc", "gpu", "wanted"),
    [
        (None, (13, 0), True, True),
        (None, (12, 3), True, False),
        (None, None, True, False),
        (None, (13, 0), False, False),
        ("", (13, 0), True, True),
        ("cuda", None, False, True),
        ("python", (13, 0), True, False),
    ],
)
def test_when_the_kernels_are_built(choice, nvcc, gpu, wanted, monkeypatch):
    monkeypatch.delenv("FLASHATTN3_BUILD", raising=False)
    if choice is not None:
        monkeypatch.setenv("FLASHATTN3_BUILD", choice)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc and Path("nvcc"))
    monkeypatch.setattr(toolchain, "nvcc_version", lambda path: nvcc)
    monkeypatch.setattr(toolchain, "hopper_is_visible", lambda: gpu)
    assert kernels_are_wanted() == wanted


def test_nvcc_is_looked_for_where_cuda_home_says_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.find_nvcc() is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.3, V12.3.1'\n")
    nvcc.chmod(0o755)
    assert toolchain.find_nvcc() == nvcc
    assert toolchain.nvcc_version(nvcc) == (12, 3)
    with pytest.raises(BuildError, match=r"nvcc 12.4 or newer: .* is 12\.3"):
        find_toolchain()
    for broken in ("#!/bin/sh\nexit 1\n", "#!/absent\n"):
        nvcc.write_text(broken)
        assert toolchain.nvcc_version(nvcc) == (0, 0)
        with pytest.raises(BuildError, match=r"nvcc 12.4 or newer: .* prints no version"):
            find_toolchain()


def test_max_jobs_is_the_number_of_compilers(monkeypatch):
    for asked, jobs in (("3", 3), ("0", 1)):
        monkeypatch.setenv("MAX_JOBS", asked)
        assert num_jobs() == jobs
    monkeypatch.setenv("MAX_JOBS", "all")
    with pytest.raises(BuildError, match="MAX_JOBS must be an integer, got 'all'"):
        num_jobs()


def test_units_name_every_field_of_their_row(tmp_path):
    paths = units.write_units(tmp_path, "*")
    names = [config.name for config in all_configs()]
    assert paths[-1].name == "registry.cpp"
    for config in all_configs():
        launch = "forward_cached" if config in CACHED_FORWARD_CONFIGS else config.kind
        dtypes = config.dtype + "_bytes" * ("_bytes_" in config.name)
        several = f"{launch}_{dtypes}_d{config.head_dim}"
        path = tmp_path / f"{config.name if config.kind == 'backward' else several}.cu"
        assert paths.count(path) == 1
        text = path.read_text()
        assert f'#include "launch/compiled_{launch}.cuh"' in text
        text, _ = text.split(f'compiled_{launch}<of_{config.name}::kConfig>("{config.name}");')
        _, text = text.split(f"namespace of_{config.name} {{")
        assert f"constexpr {config.kind}::Config kConfig = {{" in text
        assert f".head_dim = {config.head_dim}," in text
        if config.kind == "forward":
            assert f".masked = {str(config.masked).lower()}," in text
        assert units.DTYPES[config.dtype] in text
        assert "measured" not in text
    registry = paths[-1].read_text()
    assert f'kConfigsHash = "{configs_hash()}"' in registry
    listed = [line.split('"')[1] for line in registry.splitlines() if line.startswith('    {"')]
    assert listed == names
    assert f'const ForwardEntry kForwardEntries[] = {{\n    {{"{names[0]}"' in registry
    assert "nullptr" not in registry


def test_a_subset_keeps_the_places_and_untouched_files_their_time(tmp_path):
    units.write_units(tmp_path, "*")
    kept = tmp_path / "forward_bf16_d96.cu"
    before = kept.stat().st_mtime_ns
    paths = units.write_units(tmp_path, "forward_bf16_d96*")
    written = {kept.name, "registry.cpp", units.LIMITS_HEADER, units.TENSORS_HEADER}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert kept.stat().st_mtime_ns == before
    left_out = [config for config in all_configs() if "forward_bf16_d96" not in config.name]
    assert paths[-1].read_text().count("nullptr") == len(left_out)


def test_the_limits_of_quantization_stand_in_python_alone(tmp_path):
    units.write_units(tmp_path, FORWARD_CONFIGS[0].name)
    header = (tmp_path / units.LIMITS_HEADER).read_text()
    found = dict(re.findall(r"constexpr \w+ (\w+)(?:\[\])? = (.+);", header))
    largest = quantization_limits.LARGEST
    assert float(found["kLargestE4m3"].rstrip("f")) == largest["e4m3"] == 448
    assert float(found["kLargestInt8"].rstrip("f")) == largest["int8"] == 127
    smallest = float.fromhex(found["kSmallestScale"].rstrip("f"))
    assert smallest == quantization_limits.SMALLEST_DESCALE == 2.0**-126
    assert found["kBlocks"] == "{64, 128, 256}" and found["kBlocksText"] == '"64, 128 or 256"'
    csrc = ROOT / "csrc"
    sources = [*(csrc / "quantize").iterdir(), csrc / "launch" / "quantize.cu"]
    text = "".join(path.read_text() for path in sources)
    for name in found:
        assert re.search(rf"\b{name}\b", text), name
        assert not re.search(rf"\b(float|int|char) {name}\b", text), name


@pytest.mark.parametrize("check", device_checks.KINDS)
def test_the_device_checks_run_every_kernel_config(check, tmp_path):
    configs = device_checks.write_configs(tmp_path, check)
    kind, names = device_checks.KINDS[check], [config.name for config in configs]
    wanted = [config.name for config in all_configs() if config.kind == kind]
    assert names[: len(wanted)] == wanted and len(set(names)) == len(names)
    text = (tmp_path / f"{check}_configs.h").read_text()
    assert f"kNumCheckConfigs = {len(configs)};" in text
    assert text.count(".dtype = ") == len(configs)
    assert [line.strip(' ",') for line in text.splitlines() if line.startswith('    "')] == names


def test_ccache_knows_the_commands_of_another_checkout_again(tmp_path):
    """It makes the checkout's paths relative, but not in what nvcc passes on."""
    units_of = [tmp_path / "units" / "registry.cpp"]
    units_of[0].parent.mkdir()
    tools = toolchain.Toolchain(*map(Path, ("nvcc", "ninja", "ccache", "cutlass", "torch", "lib")))
    text = ninja_text(tools, units_of, tmp_path)
    passed_on = re.findall(r"-Xcompiler=\S+", text)
    assert any("-iquote," in words for words in passed_on)
    assert not any(re.search("[=,]/", words) for words in passed_on), passed_on


GOOD = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1k' for 'sm_90a'
    0 bytes stack frame, 8 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
WARNING = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions defining accumulator registers in function '_Z1k'\n"
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (GOOD, None),
        (GOOD.replace("8 bytes", "36 bytes"), "36 bytes of spills, allowed are 32"),
        (GOOD + WARNING, WARNING.strip()),
    ],
)
def test_what_ptxas_says_is_judged(text, error, tmp_path, capsys):
    (tmp_path / "row.cu").touch()
    (tmp_path / "row.cu.o.log").write_text(text)
    (report,) = ptxas.read_all(tmp_path)
    assert (report.name, report.registers, report.error) == ("row", 168, error)
    assert ptxas.main(tmp_path) == int(error is not None)
    assert ("WRONG: " in capsys.readouterr().out) == (error is not None)


def test_a_unit_may_spill_what_its_kernels_may():
    for config in all_configs():
        of_unit = ptxas.max_spill_bytes(units.unit_name(config))
        assert of_unit >= ptxas.max_spill_bytes(config.name), config.name


def test_no_log_is_no_pass(tmp_path):
    assert ptxas.main(tmp_path) == 1
    (tmp_path / "row.cu").touch()
    (tmp_path / "row.cu.o.log").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="says nothing of registers"):
        ptxas.main(tmp_path)


def run(source: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=source,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A copy of the checkout with one kernel config compiled in it."""
    copy = checkout_to_build_in(tmp_path_factory)
    done = run(copy, "-m", "build_support", FLASHATTN3_KERNELS=f"{ROW}_*")
    assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.mark.slow
def test_the_build_loads_under_any_torch_and_says_what_is_in_it(built):
    """Under torch's CPU build the operators are there to be looked at; none launches on a CPU."""
    names = ["quantize", "quantize_qkv", "sample_mean", "permute_v", "backward", "forward"]
    code = f"""import torch
from flashattn3.backends.hopper.library import find_library, kernel_info
found, (info,) = find_library(), kernel_info()
print(found.error, *found.configs, info.name, info.num_threads)
print(*(hasattr(torch.ops.flashattn3_hopper, name) for name in {names}))"""
    done = run(built, "-c", code)
    assert done.returncode == 0, done.stderr
    (config,) = (config for config in FORWARD_CONFIGS if config.name.startswith(ROW))
    threads = 128 * (config.num_mma_warpgroups + 1)
    wanted = ["None", config.name, config.name, str(threads), *["True"] * len(names)]
    assert done.stdout.split() == wanted
    assert ptxas.main(built / "build" / "hopper" / "units") == 0
    log = built / "build" / "hopper" / "launch" / "quantize.cu.o.log"
    assert ptxas.read(log).spill_bytes <= 16  # of norm and rotation at head dim 256


@pytest.mark.slow
def test_the_library_needs_no_python_and_no_cuda_library(built):
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    library = built / "flashattn3" / "_lib" / "libflashattn3_ops.so"
    read = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in read.splitlines() if "(NEEDED)" in line}
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not any(name.startswith(("libpython", "libcuda", "libc10")) for name in needed)
    read = subprocess.run(["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True)
    symbols = [line.split(maxsplit=7)[-1] for line in read.stdout.splitlines() if line.strip()]
    assert len(symbols) > 100
    assert not any(name.startswith("Py") for name in symbols)
    # torch's unstable interface
    assert not any("c10" in name or "N2at" in name for name in symbols)


@pytest.mark.slow
def test_an_unknown_row_is_refused_with_the_names(built):
    done = run(built, "-m", "build_support", FLASHATTN3_KERNELS="fast")
    assert done.returncode != 0
    sentence = "FLASHATTN3_KERNELS: no kernel config matches 'fast'; the kernel configs are"
    assert sentence in done.stderr


def test_the_library_of_this_installation_is_the_tables():
    library = find_library()
    if library.error is not None:
        pytest.skip(library.error)
    assert library.configs <= {config.name for config in all_configs()}
    infos = {info.name: info for info in kernel_info()}
    assert library.configs == infos.keys()
    for name, info in infos.items():
        assert 0 < info.shared_memory_bytes <= SHARED_MEMORY_KIB[90] * 1024
        assert info.local_bytes <= ptxas.max_spill_bytes(name)
