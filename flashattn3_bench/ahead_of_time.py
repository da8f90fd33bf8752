"""Compiles a launch for any GPU architecture without that GPU and reads the kernel's resources."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flashattn3.backends.triton.backward_launch import backward_launches
from flashattn3.backends.triton.config import TritonConfig
from flashattn3.backends.triton.kernels.launch import Launch
from flashattn3.backends.triton.launch import combine_launch, forward_launch
from flashattn3.call.dtypes import EIGHT_BIT
from flashattn3.call.problem import Problem


@dataclass(frozen=True)
class Resources:
    """registers and stack_bytes (local memory, where spilled registers go) are per thread."""

    registers: int
    stack_bytes: int
    shared_memory_bytes: int


def compile_kernel(launch: Launch, capability: int, aligned: bool = True) -> CompiledKernel:
    """Compile a launch for a compute capability (90: 9.0). aligned: tensors are, to 16 bytes."""
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(_source(launch, aligned), target=target, options=launch.options)


def resources(kernel: CompiledKernel) -> Resources:
    """Resources of a compiled kernel, read from its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    return Resources(int(usage[1]), int(usage[2]), kernel.metadata.shared)


def _source(launch: Launch, aligned: bool) -> ASTSource:
    """The kernel specialized as Triton's own launch would: on 1, on multiples of 16 and on None."""
    signature, constants, attributes = {}, {}, {}
    params = launch.kernel.params
    tensors_end = len(launch.tensor_types)
    for param, kind in zip(params, launch.tensor_types, strict=False):
        signature[param.name] = "constexpr" if kind is None else f"*{kind}"
        if kind is None:
            constants[param.name] = None
        elif aligned:
            attributes[(param.num,)] = [["tt.divisibility", 16]]
    for param, value in zip(params[tensors_end:], launch.scalars, strict=False):
        if value is None:
            signature[param.name], constants[param.name] = "constexpr", None
            continue
        specialize = isinstance(value, int) and not param.do_not_specialize
        if specialize and value == 1:
            signature[param.name], constants[param.name] = "constexpr", 1
            continue
        signature[param.name] = (
            "fp32" if isinstance(value, float) else ("i32" if abs(value) < 2**31 else "i64")
        )
        if specialize and value % 16 == 0:
            attributes[(param.num,)] = [["tt.divisibility", 16]]
    for name, value in launch.constants_of(aligned).items():
        signature[name], constants[name] = "constexpr", value
    names = [param.name for param in params]
    if list(signature) != names:
        raise ValueError(
            f"{launch.kernel.__name__}: arguments {list(signature)} do not match {names}"
        )
    return ASTSource(launch.kernel, signature, constants, attributes)


def all_launches(problem: Problem, config: TritonConfig) -> dict[str, Launch]:
    """Every kernel that a call and its gradient may launch, by name, for tests and tuning."""
    of_forward = {
        "forward": forward_launch(problem, config),
        "combine": combine_launch(problem, config),
    }
    if problem.dtype in EIGHT_BIT:
        return of_forward
    dout_stride = (problem.total_q * problem.num_heads_q * problem.head_dim_v,) * (
        not problem.varlen
    )
    dout_stride += (problem.num_heads_q * problem.head_dim_v, problem.head_dim_v, 1)
    launches = of_forward | backward_launches(problem, config, dout_stride, None)
    if problem.bias is None:
        return launches
    return launches | backward_launches(problem, config, dout_stride, None, True)
