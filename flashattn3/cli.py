"""The command line, ``flashattn3`` or ``python -m flashattn3``: doctor, explain, bench, demo."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

import flashattn3

from . import doctor
from .call.fields import CALL
from .command_line import DTYPES, Parser, choose_device, integer

# The options of a call that are flags or numbers, by the fields that describe them.
_OPTIONS = [x for x in CALL.fields.values() if x.type and isinstance(x.default, (int, float))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. Bad options exit with 2 and a sentence."""
    try:
        try:
            args = build_parser().parse_args(argv)
            return args.run(args)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # the reader has ended, as in ``flashattn3 doctor | head -1``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="flashattn3", description="Exact attention on every machine.")
    parser.add_argument("--version", action="version", version=flashattn3.__version__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    doctor.add_parser(subparsers)
    _add_explain(subparsers)
    _add_benchmarks(subparsers)
    return parser


def _add_benchmarks(subparsers: argparse._SubParsersAction) -> None:
    """bench and demo. They are a package beside this one, which a copy of flashattn3 may lack."""
    if importlib.util.find_spec("flashattn3_bench"):
        from flashattn3_bench import command as bench
        from flashattn3_bench.demo import command as demo

        bench.add_parser(subparsers)
        demo.add_parser(subparsers)
        return
    for name in ("bench", "demo"):
        absent = subparsers.add_parser(
            name, help="not installed", add_help=False, prefix_chars="\0"
        )
        absent.add_argument("options", nargs="*")  # with this prefix, every word
        absent.set_defaults(run=_refuse_benchmarks, parser=absent)


def _refuse_benchmarks(args: argparse.Namespace) -> NoReturn:
    needed = "the package flashattn3_bench, which every wheel and checkout of flashattn3 has"
    args.parser.exit(2, f"{args.parser.prog}: error: needs {needed}\n")


def _add_explain(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="how a problem would run, without running it",
    )
    parser.add_argument("--batch", type=integer(0), default=1, help="default: 1")
    parser.add_argument("--seqlen-q", type=integer(0), default=1024, help="default: 1024")
    parser.add_argument("--seqlen-k", type=integer(0), help="default: as --seqlen-q")
    parser.add_argument("--heads", type=integer(1), default=16, help="default: 16")
    parser.add_argument("--kv-heads", type=integer(1), help="default: as --heads")
    parser.add_argument("--head-dim", type=integer(1), default=128, help="default: 128")
    parser.add_argument("--head-dim-v", type=integer(1), help="default: as --head-dim")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--window",
        type=int,
        nargs=2,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="-1 is open; default: -1 -1",
    )
    for field in _OPTIONS:
        option, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(
                option, type=type(default), default=default, help=f"default: {default}"
            )
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
            *(torch.empty(shape, dtype=DTYPES[args.dtype], device="meta") for shape in shapes),
            device=device,
            window_size=tuple(args.window),
            **{field.name: getattr(args, field.name) for field in _OPTIONS},
            backend=args.backend,
        )
    except (TypeError, ValueError) as error:
        args.parser.error(str(error))
    except RuntimeError:  # torch's, with the place in its source
        args.parser.error(f"tensors of {' and '.join(map(str, shapes[:2]))} have no address")
    print(explained)
    return 0
