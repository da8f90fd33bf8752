"""``flashattn3 doctor``: versions and devices, the backend that runs on each, and missing parts.

If a part of the report raises, its error replaces it, so the report always ends with status 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import torch

import flashattn3

from . import triton_toolchain
from .backends.device import DeviceInfo, describe_device
from .backends.hopper.kernel_configs import all_configs
from .backends.hopper.library import KernelInfo, find_library, kernel_info
from .backends.registry import BACKENDS
from .call.cached import DecodeOptions, DecodeTensors, describe_decode
from .call.fields import Options
from .call.metadata import Metadata, metadata_of
from .call.problem import Problem, describe
from .run import aten_node
from .run.planner import choose, decline_reason

SHAPE = (1, 128, 2, 128)  # of q, k and v in _ordinary_problem and _probe
CACHED_CALLS = {"cached calls": 1, "cached chunks": 2048}  # queries of a sequence
FORCED_BY = "FLASHATTN3_BACKEND"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor", help="what this machine has, and which backend runs there"
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also compile and run one kernel on every GPU; exit status 1 if one fails",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(_answer(_versions))
    print(_answer(_hopper_kernels))
    print(_answer(_triton))
    forced = os.environ.get(FORCED_BY)
    if forced:
        print(_forced(forced))
    for device in _devices():
        print(f"\n{device}: {_answer(_properties, device)}")
        print(_answer(_backends, device, forced))
    if not torch.cuda.is_available():
        print("\nNo CUDA device is visible to torch.")
    return _probe_all() if args.probe else 0


def _answer(part: Callable[..., str], *arguments: object) -> str:
    try:
        return part(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _versions() -> str:
    versions = {
        "flashattn3": flashattn3.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda (of torch)": torch.version.cuda or "none: a CPU build",
        "triton": triton_toolchain.installed_version() or "none",
    }
    return "\n".join(_line(name, found) for name, found in versions.items())


def _line(name: str, found: object) -> str:
    return f"{name:<16} {found}"


def _hopper_kernels() -> str:
    """The compiled kernel configs and their resources, or the reason why there are none."""
    library = find_library()
    if library.error is not None:
        return _line("Hopper kernels", f"none: {library.error}")
    summary = f"{len(library.configs)} of {len(all_configs())} kernel configs"
    resources = [_resources(info) for info in kernel_info()]
    names = "autograd node", "with scores"  # the latter of calls with one tensor that changes them
    lines = [_line(*of_node) for of_node in zip(names, map(_node, aten_node.NODES), strict=True)]
    lines.append(_line("Hopper kernels", summary))
    return "\n".join([*lines, *resources])


def _node(node: aten_node.AtenNode) -> str:
    reason = aten_node.unusable_reason(node)
    return "in C++" if reason is None else f"in Python, more host time: {reason}"


def _resources(info: KernelInfo) -> str:
    """The current GPU reports registers, spills and occupancy; without a GPU they are omitted."""
    known = (
        f"{info.num_threads} threads",
        f"{info.shared_memory_bytes / 1024:g} KiB of shared memory",
    )
    reported = (
        f"{info.num_registers} registers",
        f"{info.local_bytes} bytes of spills",
        f"{info.blocks_per_sm} on an SM",
    )
    shown = known if info.num_registers < 0 else known + reported
    return f"  {info.name}: {', '.join(shown)}"


def _triton() -> str:
    errors = triton_toolchain.find_errors() or ["has all that it needs"]
    return "\n".join(_line("triton compiles", error) for error in errors)


def _forced(name: str) -> str:
    names = tuple(backend.name for backend in BACKENDS)
    if name not in names:
        return _line(FORCED_BY, f"{name!r} is no backend: unset it, or set one of {names}")
    return _line(FORCED_BY, f"{name}: calls that name no backend run there, or nowhere")


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [*gpus, torch.device("cpu")]


def _properties(device: torch.device) -> str:
    info = describe_device(device)
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    return (
        f"{info.name}, compute capability {_dotted(info.capability)}, "
        f"Triton compiles for {_dotted(info.lowering)}, {info.num_sms} SMs, "
        f"{info.shared_memory_bytes / 1024:g} KiB of shared memory per block"
    )


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _backends(device: torch.device, forced: str | None) -> str:
    """The backend that runs an ordinary bfloat16 problem on the device; why the others do not."""
    problem, info = _ordinary_problem(device), describe_device(device)
    reasons = {backend.name: decline_reason(backend, problem, info) for backend in BACKENDS}
    first = next(name for name, reason in reasons.items() if reason is None)
    lines = [f"  {first}: runs a bfloat16 problem"]
    lines += [
        f"  {name}: {reason or f'{first} comes first'}"
        for name, reason in reasons.items()
        if name != first
    ]
    lines += [f"  {calls}: {_cached(device, info, n)}" for calls, n in CACHED_CALLS.items()]
    if forced and reasons.get(forced, "unknown") is not None:
        lines.append(f"  {FORCED_BY}={forced}: calls here fail unless they name a backend")
    return "\n".join(lines)


def _cached(device: torch.device, info: DeviceInfo, seqlen_q: int) -> str:
    """The backend that runs an ordinary bfloat16 call of seqlen_q queries with a KV cache, which of
    its kernels, and why not the first backend."""
    like = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
    x = metadata_of(like)._replace(device=device)
    q = x._replace(shape=(SHAPE[0], seqlen_q, *SHAPE[2:]))
    tensors = (q, x, x, *[None] * (len(DecodeTensors._fields) - 3))
    plan = choose(describe_decode(tensors, DecodeOptions(), None), info, BACKENDS)
    notes = [f"{name}: {reason}" for name, reason in plan.declined]
    if plan.backend.name == "hopper":
        notes.append(str(plan.launch.describe()["kernel"]))
    return f"{plan.backend.name} ({'; '.join(notes)})" if notes else plan.backend.name


def _ordinary_problem(device: torch.device) -> Problem:
    """A problem without a forced backend, described without allocating memory."""
    like = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
    q = Metadata(like.shape, like.stride(), like.dtype, device)
    return describe((q, q, q), Options(causal=True))


def _probe_all() -> int:
    gpus = _devices()[:-1]
    if not gpus:
        print("\nprobe: nothing to run: no CUDA device is visible to torch")
    said = [_answer(_probe, device) for device in gpus]
    for device, sentence in zip(gpus, said, strict=True):
        print(f"\nprobe of {device}: {sentence}")
    return 0 if all(sentence.startswith("right") for sentence in said) else 1


def _probe(device: torch.device) -> str:
    """Compile and run Triton's forward kernel and compare it with the reference backend."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator).half().to(device) for _ in range(3))
    start = time.perf_counter()
    found = flashattn3.flash_attn_func(q, k, v, causal=True, backend="triton")
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    wanted = flashattn3.flash_attn_func(q, k, v, causal=True, backend="reference")
    error = (found.float() - wanted.float()).abs().max().item()
    verdict = "right" if error <= 0.01 else "WRONG"
    return f"{verdict}: Triton compiled and ran one kernel in {seconds:.1f} s, error {error:.1e}"
