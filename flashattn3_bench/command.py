"""``flashattn3 bench``: the options, and the loop over the cells."""

from __future__ import annotations

import argparse
import importlib.util
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch

from flashattn3.backends.registry import BACKENDS
from flashattn3.call.selection import use_backend
from flashattn3.command_line import DTYPES, choose_device, integer

from .accuracy_suite import SUITE as ACCURACY
from .accuracy_suite import accuracy_cases, findings, run_accuracy
from .cached_cells import SUITES as CACHED
from .cached_cells import cached_cells
from .cached_suite import HOST_WORK, run_cached, run_cached_host
from .distributions_suite import SUITE as DISTRIBUTIONS
from .distributions_suite import distribution_cases, run_distribution
from .environment import header
from .few_queries_suite import OWN as OF_FEW_QUERIES
from .few_queries_suite import SUITE as FEW_QUERIES
from .few_queries_suite import run_few_queries
from .figure import draw
from .host_suite import (
    ROTARY_WORK,
    SINKS_WORK,
    WORK,
    run_host,
    run_rotary_host,
    run_sinks_host,
)
from .ladder_figure import draw_ladder
from .ladder_suite import RUNGS, SPARSE, run_rung, run_sparse, sparse_work
from .ladder_suite import SUITE as LADDER
from .mask_build_suite import SUITE as MASKS_BUILD
from .mask_build_suite import build_work, run_build
from .masks_suite import SUITE as MASKS
from .masks_suite import mask_cells, run_masks
from .memory_suite import QUICK_SEQLENS, SEQLENS, run_length
from .models_suite import CASES as MODELS
from .models_suite import QUICK_CASES as QUICK_MODELS
from .models_suite import WORKS, run_model
from .output import folder, make_folder, require_extras
from .providers import CAPTURED, DETERMINISTIC, EIGHT_BIT, MHA, OURS, SELECTABLE
from .quantize_suite import SUITE as QUANTIZE
from .quantize_suite import quantize_work, run_quantize
from .report import Results, summary
from .robot_suite import SUITE as ROBOT
from .robot_suite import TIMES, run_robot
from .rotary_suite import SUITE as ROTARY
from .rotary_suite import run_rotary
from .runner import Record, Settings, run_cell
from .scores_suite import SUITE as SCORES
from .scores_suite import run_scores
from .suites import CASES, DIRECTIONS, cells
from .varlen_suite import run_varlen

SUITES = (*CASES, SPARSE, MASKS, MASKS_BUILD, ACCURACY, DISTRIBUTIONS, QUANTIZE, *CACHED)
SUITES += ("varlen", "memory", "host", "models")
ALL = SUITES[:-1]  # the last needs transformers
# Directions of a suite.
ONLY = {"deterministic": ("bwd",), **dict.fromkeys(("fp8", ROBOT, FEW_QUERIES), ("fwd",))}
# Providers of ours; elsewhere one.
OWN = {
    "fp8": (*EIGHT_BIT, OURS),
    "gqa": (OURS, MHA),
    FEW_QUERIES: OF_FEW_QUERIES,
    "deterministic": (DETERMINISTIC, OURS),
    "captured": (CAPTURED, OURS),
}
# On a CPU too, and there in which dtype: Triton's interpreter multiplies no bfloat16.
OF_16_BIT = {
    **dict.fromkeys(("fp8", ACCURACY, DISTRIBUTIONS, QUANTIZE), "bfloat16"),
    **dict.fromkeys((LADDER, SPARSE, ROTARY), "float16"),
}
INAPPLICABLE = {
    "fp8": ("direction",),
    ROBOT: ("direction",),
    FEW_QUERIES: ("direction",),
    "deterministic": ("direction", "baselines"),
    "captured": ("baselines",),
    ACCURACY: ("direction", "head_dim", "seqlen", "dtype", "baselines"),
    DISTRIBUTIONS: ("direction", "dtype", "baselines"),
    QUANTIZE: ("direction", "seqlen", "baselines", "backend"),
    **dict.fromkeys((SCORES, MASKS, ROTARY), ("baselines",)),
    MASKS_BUILD: ("direction", "head_dim", "dtype", "baselines", "backend"),
    "varlen": ("head_dim", "seqlen", "baselines"),
    LADDER: ("baselines",),
    SPARSE: ("head_dim", "seqlen", "baselines", "backend"),
    "memory": ("direction", "head_dim"),
    "host": ("direction", "head_dim", "seqlen"),
    **dict.fromkeys(CACHED, ("direction", "head_dim", "seqlen")),
    "models": ("direction", "head_dim", "seqlen"),
}
FIGURES = dict.fromkeys((LADDER, SPARSE), draw_ladder)
ROUND_MS = 15.0
ENDINGS = ("jsonl", "png")  # of the files of a suite


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="check, then time flashattn3 against torch's attention",
        description="Checks every result on the inputs it is timed on, then times flashattn3 and "
        "the baselines in turn. Writes PATH/SUITE.jsonl and PATH/SUITE.png and prints a table. "
        "Exit status 1 if a result of flashattn3 is wrong.",
    )
    parser.add_argument(
        "--suite",
        choices=(*SUITES, "all"),
        default="grid",
        help="default: grid; all: without models",
    )
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), help="default: both")
    parser.add_argument("--head-dim", type=_integers, help="only these, as in 64,128")
    parser.add_argument("--seqlen", type=_integers, help="only these, as in 512,4096")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: bfloat16 on a GPU and where it is quantized, else float32",
    )
    parser.add_argument("--rounds", type=integer(2), default=5, help="default: 5")
    parser.add_argument(
        "--baselines",
        type=_baselines,
        help=f"some of {','.join(SELECTABLE)}; default: fa2,cudnn,naive (on a CPU math,naive), "
        "without naive in the fp8 and gqa suites",
    )
    parser.add_argument(
        "--backend",
        choices=tuple(backend.name for backend in BACKENDS),
        help="of flashattn3; default: the one it picks itself",
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; default: a GPU if there is one")
    parser.add_argument(
        "--output",
        type=folder,
        default=Path("out/bench"),
        metavar="PATH",
        help="folder of the results; default: out/bench",
    )
    parser.add_argument("--work", choices=WORKS, help="models: only this; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it works")
    parser.set_defaults(run=run, parser=parser)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"integers separated by commas, got {text!r}") from None


def _baselines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SELECTABLE]
    if unknown:
        raise argparse.ArgumentTypeError(f"some of {','.join(SELECTABLE)}, got {text!r}")
    return names


def run(args: argparse.Namespace) -> int:
    error = args.parser.error
    require_extras(error)
    device = choose_device(args.device, error)
    suites = _suites(args, device)
    work = {suite: _work(suite, args, _settings(suite, args, device)) for suite in suites}
    for suite, steps in work.items():
        if not steps:
            error(f"--suite {suite}: no case has the asked head dims and lengths")
    make_folder(args.output, (f"{suite}.{end}" for suite in suites for end in ENDINGS), error)
    about = header(device)
    with use_backend(args.backend) if args.backend else nullcontext():
        passed = [_run_suite(suite, steps, args.output, about) for suite, steps in work.items()]
    return 0 if all(passed) else 1


def _suites(args: argparse.Namespace, device: torch.device) -> tuple[str, ...]:
    """The suites that were asked for; no option is silently ignored."""
    error = args.parser.error
    suites = ALL if args.suite == "all" else (args.suite,)
    for suite in suites:
        for option in INAPPLICABLE.get(suite, ()):
            if getattr(args, option) is not None:
                error(f"--{option.replace('_', '-')} says nothing to the {suite} suite")
        if args.work is not None and suite != "models":
            error(f"--work says nothing to the {suite} suite")
        if suite in OF_16_BIT and args.dtype == "float32":
            error(f"--dtype must have 16 bits for the {suite} suite, got float32")
    if "models" in suites and importlib.util.find_spec("transformers") is None:
        error("the models suite needs transformers: pip install 'flashattn3[transformers]'")
    if device.type == "cuda":
        return suites
    if not args.quick and args.suite != "host":
        error("the suites need a GPU; on a CPU only --quick, and the host suite")
    return suites


def _settings(suite: str, args: argparse.Namespace, device: torch.device) -> Settings:
    on_gpu = device.type == "cuda"
    baselines = ("fa2", "cudnn") if on_gpu else ("fa2",) if suite == "host" else ("math",)
    if suite in ("deterministic", "captured", SCORES, MASKS, MASKS_BUILD, ROTARY):
        baselines = ()
    elif suite == LADDER:
        baselines = RUNGS
    elif suite not in ("fp8", "gqa", FEW_QUERIES):
        baselines += ("naive",)
    dtype = "bfloat16" if on_gpu else OF_16_BIT.get(suite, "float32")
    return Settings(
        device=device,
        dtype=DTYPES[args.dtype or dtype],
        baselines=args.baselines or baselines,
        rounds=args.rounds,
        round_ms=1.0 if args.quick else ROUND_MS,
        own=OWN.get(suite, (OURS,)),
    )


def _run_suite(suite: str, work: list, output: Path, about: Record) -> bool:
    from tqdm import tqdm

    results = Results(output / f"{suite}.jsonl", about)
    for step in tqdm(work, desc=suite, unit="cell"):
        results.add(list(step()))
    figure = output / f"{suite}.png"
    FIGURES.get(suite, draw)(results.records, about, figure)
    print(summary(results.records))
    if suite == ACCURACY:
        print("\n" + "\n".join(findings(results.records)))
    for record in results.failures:
        where = " ".join(str(record[key]) for key in ("direction", "case", "provider"))
        print(f"\n{record['status']} {where}: {record['reason']}")
    print(f"\nwritten: {output / suite}.jsonl and {figure}\n")
    return results.passed


def _work(suite: str, args: argparse.Namespace, settings: Settings) -> list:
    """The steps of a suite; each is a function that gives the records of one cell."""
    if suite == "host":
        steps = [lambda work=work: run_host(work, settings) for work in WORK]
        if settings.device.type == "cuda":  # 8 bits of the CPU's few tokens are not compared
            steps += [lambda work=work: run_sinks_host(work, settings) for work in SINKS_WORK]
            steps += [lambda work=work: run_rotary_host(work, settings) for work in ROTARY_WORK]
        return steps + [lambda work=work: run_cached_host(work, settings) for work in HOST_WORK]
    if suite in CACHED:
        chosen = cached_cells(suite, args.quick)
        return [lambda cell=cell: run_cached(cell, settings) for cell in chosen]
    if suite == "models":
        models = [
            case
            for case in (QUICK_MODELS if args.quick else MODELS)
            if args.work in (None, case.work)
        ]
        return [lambda case=case: run_model(case, settings) for case in models]
    if suite == "memory":
        lengths = QUICK_SEQLENS if args.quick else SEQLENS
        given_up: set[str] = set()
        chosen = [n for n in lengths if args.seqlen is None or n in args.seqlen]
        return [lambda n=n: run_length(n, settings, given_up) for n in chosen]
    directions = (args.direction,) if args.direction in DIRECTIONS else DIRECTIONS
    directions = ONLY.get(suite, directions)
    if suite == "varlen":
        varlen = product(directions, (64, 128, 256), (False, True), (1, 8))
        return [lambda of=of: run_varlen(*of, settings, args.quick) for of in varlen]
    if suite == ACCURACY:
        cases = accuracy_cases(args.quick)
        return [lambda case=case: run_accuracy(*case, settings) for case in cases]
    if suite == DISTRIBUTIONS:
        cases = distribution_cases(args.quick, args.head_dim, args.seqlen)
        return [lambda case=case: run_distribution(case, settings) for case in cases]
    if suite == QUANTIZE:
        chosen = quantize_work(args.head_dim)
        return [lambda work=work: run_quantize(work, settings, args.quick) for work in chosen]
    if suite == MASKS:
        of_masks = mask_cells(directions, args.head_dim, args.seqlen, args.quick)
        return [lambda cell=cell: run_masks(cell, settings) for cell in of_masks]
    if suite == MASKS_BUILD:
        builds = build_work(args.seqlen, args.quick)
        return [lambda of=of: run_build(*of, settings) for of in builds]
    if suite == SPARSE:
        masks = sparse_work(directions, args.quick)
        return [lambda of=of: run_sparse(*of, settings, args.quick) for of in masks]
    chosen = cells(suite, directions, args.head_dim, args.seqlen, args.quick)
    if suite == LADDER:
        return [lambda cell=cell: run_rung(cell, settings) for cell in chosen]
    if suite == SCORES:
        return [lambda cell=cell: run_scores(cell, settings) for cell in chosen]
    if suite == ROTARY:
        return [lambda cell=cell: run_rotary(cell, settings) for cell in chosen]
    if suite == ROBOT:
        return [lambda of=of: run_robot(*of, settings) for of in product(chosen, TIMES)]
    if suite == FEW_QUERIES:
        return [lambda of=of: run_few_queries(*of, settings) for of in product(chosen, TIMES)]
    return [lambda cell=cell: run_cell(cell, settings) for cell in chosen]
