"""build_support.same_machine_code finds a changed kernel and passes over a changed name."""

import subprocess
from functools import cache

import pytest

from build_support import same_machine_code
from build_support.toolchain import find_nvcc

KERNELS = """
namespace {space} {{
struct {struct} {{ int {field}; }};
template <int kValue>
__global__ void __launch_bounds__({threads}) {name}(float* out, {struct} arguments) {{
  __shared__ float staged[{threads}];
  staged[threadIdx.x] = out[threadIdx.x] + {number}.f * arguments.{field};
  __syncthreads();
  out[threadIdx.x] = staged[threadIdx.x ^ kValue];
}}
template __global__ void {name}<1>(float*, {struct});
template __global__ void {name}<2>(float*, {struct});
}}
"""
NAMES = {"space": "a", "struct": "Arguments", "field": "factor", "name": "kernel"}
OTHER_NAMES = {"space": "bcd", "struct": "Params", "field": "scale", "name": "a_longer_name"}
VALUES = {"number": 3, "threads": 64}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles KERNELS with the given names and values, each once, to an object in its folder."""
    nvcc = find_nvcc()
    if nvcc is None or same_machine_code.find_cuobjdump() is None:
        pytest.skip("nvcc and cuobjdump are not both installed")

    @cache
    def compile_(folder, **replacements):
        source = tmp_path_factory.mktemp(folder) / "kernels.cu"
        source.write_text(KERNELS.format(**replacements))
        command = [nvcc, "-arch=sm_90a", "-c", source, "-o", source.with_suffix(".o")]
        subprocess.run(command, check=True)
        return source.parent

    return compile_


def test_names_are_not_compared(compiled, capsys):
    before = compiled("before", **NAMES, **VALUES)
    after = compiled("after", **OTHER_NAMES, **VALUES)
    assert same_machine_code.main(before, after) == 0
    assert capsys.readouterr().out == "2 of 2 kernels are identical\n"
    assert same_machine_code.main(before / "kernels.o", after) == 0


@pytest.mark.parametrize("change", [{"number": 5}, {"threads": 96}], ids=["constant", "threads"])
def test_a_changed_kernel_is_found(compiled, capsys, change):
    before = compiled("before", **NAMES, **VALUES)
    after = compiled("after", **OTHER_NAMES, **{**VALUES, **change})
    assert same_machine_code.main(before, after) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 2 kernels are identical"
    assert sum(line.startswith(f"only in {before}: ") for line in lines) == 2
    assert sum(line.startswith(f"only in {after}: ") for line in lines) == 2


def test_a_missing_kernel_is_found(compiled):
    before = compiled("before", **NAMES, **VALUES)
    kernels = same_machine_code.kernels_of(before)
    assert same_machine_code.differences(kernels, kernels[:1]) == ([kernels[1]], [])
    assert same_machine_code.differences(kernels[1:], kernels) == ([], [kernels[0]])


def test_nothing_to_compare_is_a_failure(compiled, tmp_path):
    (tmp_path / "empty").mkdir()
    assert same_machine_code.main(tmp_path / "empty", compiled("before", **NAMES, **VALUES)) == 1
