"""The command line, ``flashattn3`` or ``python -m flashattn3``: doctor, explain, bench, demo."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence

import torch

import flashattn3

from .backends.hopper_library import find_library, kernel_facts
from .bench import command as bench
from .bench.command import DTYPES, choose_device
from .bench.environment import triton_version
from .demo import command as demo
from .device import describe_device
from .kernel_table import all_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. Bad options exit with 2 and a sentence."""
    args = build_parser().parse_args(argv)
    return args.run(args)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashattn3", description="Exact attention on every machine."
    )
    parser.add_argument("--version", action="version", version=flashattn3.__version__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    _add_doctor(subparsers)
    _add_explain(subparsers)
    bench.add_parser(subparsers)
    demo.add_parser(subparsers)
    return parser


def _add_doctor(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor", help="what this machine has, and which backend runs there"
    )
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> int:
    versions = {
        "flashattn3": flashattn3.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda (of torch)": torch.version.cuda or "none: a CPU build",
        "triton": triton_version() or "not installed",
    }
    print("\n".join(f"{name:<16} {found}" for name, found in versions.items()))
    print(_hopper_kernels())
    for device in _devices():
        print(f"\n{device}: {_properties(device)}")
        print(_backends(device))
    if not torch.cuda.is_available():
        print("\nNo CUDA device is visible to torch.")
    return 0


def _hopper_kernels() -> str:
    """The compiled kernel rows with the resources they take, or why there are none."""
    library = find_library()
    if library.fault is not None:
        return f"{'Hopper kernels':<16} none: {library.fault}"
    summary = f"{'Hopper kernels':<16} {len(library.rows)} of the table's {len(all_rows())} rows"
    return "\n".join([summary, *map(_resources, kernel_facts())])


def _resources(facts: dict[str, object]) -> str:
    """registers, spills and occupancy are those that the current GPU reports."""
    known = (
        f"{facts['num_threads']} threads",
        f"{facts['shared_memory_bytes'] / 1024:g} KiB of shared memory",
    )
    reported = (
        f"{facts['num_registers']} registers",
        f"{facts['local_bytes']} bytes of spills",
        f"{facts['blocks_per_sm']} on an SM",
    )
    shown = known if facts["num_registers"] < 0 else known + reported
    return f"  {facts['name']}: {', '.join(shown)}"


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


def _backends(device: torch.device) -> str:
    """Who takes an ordinary bfloat16 problem on the device, and why the others do not."""
    q = torch.empty(1, 128, 2, 128, dtype=torch.bfloat16, device=device)
    explained = flashattn3.explain(q, q, q, causal=True)
    declined = [f"  {name}: {reason}" for name, reason in explained.declined.items()]
    return "\n".join([f"  {explained.backend}: runs a bfloat16 problem", *declined])


def _add_explain(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="how a problem would run, without running it",
    )
    parser.add_argument("--batch", type=int, default=1, help="default: 1")
    parser.add_argument("--seqlen-q", type=int, default=1024, help="default: 1024")
    parser.add_argument("--seqlen-k", type=int, help="default: as --seqlen-q")
    parser.add_argument("--heads", type=int, default=16, help="default: 16")
    parser.add_argument("--kv-heads", type=int, help="default: as --heads")
    parser.add_argument("--head-dim", type=int, default=128, help="default: 128")
    parser.add_argument("--head-dim-v", type=int, help="default: as --head-dim")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--window",
        type=int,
        nargs=2,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="-1 is open; default: -1 -1",
    )
    parser.add_argument("--softcap", type=float, default=0.0, help="default: 0, none")
    parser.add_argument("--backend", help="only this one; default: chosen by the device")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; default: a GPU if there is one")
    parser.set_defaults(run=explain, parser=parser)


def explain(args: argparse.Namespace) -> int:
    device = choose_device(args.device, args.parser.error)
    seqlen_k = args.seqlen_q if args.seqlen_k is None else args.seqlen_k
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    shapes = (
        (args.batch, args.seqlen_q, args.heads, args.head_dim),
        (args.batch, seqlen_k, kv_heads, args.head_dim),
        (args.batch, seqlen_k, kv_heads, head_dim_v),
    )
    try:
        explained = flashattn3.explain(
            *(torch.empty(shape, dtype=DTYPES[args.dtype], device=device) for shape in shapes),
            causal=args.causal,
            window_size=tuple(args.window),
            softcap=args.softcap,
            backend=args.backend,
        )
    except (TypeError, ValueError, RuntimeError) as error:  # ours, or torch's on a negative size
        args.parser.error(str(error))
    print(explained)
    return 0
