"""``flashattn3 bench``: the options, and the loop over the cells."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import torch

from flashattn3.backends.registry import BACKENDS
from flashattn3.call.selection import use_backend
from flashattn3.command_line import DTYPES, choose_device, integer

from . import (
    accuracy_suite,
    cached_cells,
    cached_suite,
    distributions_suite,
    few_queries_suite,
    host_suite,
    ladder_figure,
    ladder_suite,
    mask_build_suite,
    masks_suite,
    memory_suite,
    models_suite,
    output,
    quantize_suite,
    robot_suite,
    rotary_suite,
    scores_suite,
)
from .environment import header
from .figure import draw
from .providers import CAPTURED, DETERMINISTIC, EIGHT_BIT, FLEX, MHA, OURS, SELECTABLE
from .report import Results, summary
from .runner import Record, Settings, run_cell
from .suites import CASES, DIRECTIONS, cells
from .varlen_suite import run_varlen

ACCURACY, DISTRIBUTIONS = accuracy_suite.SUITE, distributions_suite.SUITE
ROBOT, FEW_QUERIES = robot_suite.SUITE, few_queries_suite.SUITE
LADDER, SPARSE = ladder_suite.SUITE, ladder_suite.SPARSE
MASKS, MASKS_BUILD = masks_suite.SUITE, mask_build_suite.SUITE
SCORES, ROTARY, QUANTIZE = scores_suite.SUITE, rotary_suite.SUITE, quantize_suite.SUITE
CACHED = cached_cells.SUITES
SUITES = (*CASES, SPARSE, MASKS, MASKS_BUILD, ACCURACY, DISTRIBUTIONS, QUANTIZE, *CACHED)
SUITES += ("varlen", "memory", "host", "models")
ALL = SUITES[:-1]  # the last needs transformers
# Directions of a suite.
ONLY = {"deterministic": ("bwd",), **dict.fromkeys(("fp8", ROBOT, FEW_QUERIES), ("fwd",))}
# Providers of ours; elsewhere one.
OWN = {
    "fp8": (*EIGHT_BIT, OURS),
    "gqa": (OURS, MHA),
    FEW_QUERIES: few_queries_suite.OWN,
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
    ACCURACY: ("direction", "head_dim", "seqlen", "dtype", "baselines", "only"),
    DISTRIBUTIONS: ("direction", "dtype", "baselines", "only"),
    QUANTIZE: ("direction", "seqlen", "baselines", "backend", "only"),
    **dict.fromkeys((SCORES, ROTARY), ("baselines",)),
    MASKS_BUILD: ("direction", "head_dim", "dtype", "baselines", "backend"),
    "varlen": ("head_dim", "seqlen", "baselines", "only"),
    LADDER: ("baselines",),
    SPARSE: ("head_dim", "seqlen", "baselines", "backend", "only"),
    "memory": ("direction", "head_dim", "only"),
    "host": ("direction", "head_dim", "seqlen"),
    **dict.fromkeys(CACHED, ("direction", "head_dim", "seqlen")),
    "models": ("direction", "head_dim", "seqlen", "only"),
}
FIGURES = dict.fromkeys((LADDER, SPARSE), ladder_figure.draw_ladder)
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
        "--only",
        type=_pattern,
        metavar="REGEX",
        help="only cells whose row and column in the table, as in 'fwd d128 causal 4096', match",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: bfloat16 on a GPU and where it is quantized, else float32",
    )
    parser.add_argument("--rounds", type=integer(2), default=5, help="default: 5")
    parser.add_argument(
        "--baselines",
        type=_baselines,
        help=f"some of {','.join(SELECTABLE)}, or none; default: fa2,cudnn,naive (on a CPU "
        "math,naive), without naive in the fp8 and gqa suites, flex in the masks suite",
    )
    parser.add_argument(
        "--backend",
        choices=tuple(backend.name for backend in BACKENDS),
        help="of flashattn3; default: the one it picks itself",
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; default: a GPU if there is one")
    parser.add_argument(
        "--output",
        type=output.folder,
        default=Path("out/bench"),
        metavar="PATH",
        help="folder of the results; default: out/bench",
    )
    parser.add_argument(
        "--work", choices=models_suite.WORKS, help="models: only this; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it works")
    parser.set_defaults(run=run, parser=parser)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"integers separated by commas, got {text!r}") from None


def _pattern(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"a regular expression, got {text!r}: {error}") from None


def _baselines(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SELECTABLE]
    if unknown:
        raise argparse.ArgumentTypeError(f"some of {','.join(SELECTABLE)}, or none, got {text!r}")
    return names


def run(args: argparse.Namespace) -> int:
    error = args.parser.error
    output.require_extras(error)
    device = choose_device(args.device, error)
    suites = _suites(args, device)
    work = {suite: _work(suite, args, _settings(suite, args, device)) for suite in suites}
    for suite, steps in work.items():
        if not steps:
            error(f"--suite {suite}: no case has the asked head dims, lengths and rows")
    output.make_folder(
        args.output, (f"{suite}.{end}" for suite in suites for end in ENDINGS), error
    )
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
        if suite == MASKS and args.baselines:
            error("--baselines of the masks suite can be none alone, in place of flex")
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
    if suite in ("deterministic", "captured", SCORES, MASKS_BUILD, ROTARY):
        baselines = ()
    elif suite == MASKS:
        baselines = (FLEX,)
    elif suite == LADDER:
        baselines = ladder_suite.RUNGS
    elif suite not in ("fp8", "gqa", FEW_QUERIES):
        baselines += ("naive",)
    dtype = "bfloat16" if on_gpu else OF_16_BIT.get(suite, "float32")
    return Settings(
        device=device,
        dtype=DTYPES[args.dtype or dtype],
        baselines=baselines if args.baselines is None else args.baselines,
        rounds=args.rounds,
        round_ms=1.0 if args.quick else ROUND_MS,
        own=OWN.get(suite, (OURS,)),
    )


def _run_suite(suite: str, work: list, target: Path, about: Record) -> bool:
    from tqdm import tqdm

    results = Results(target / f"{suite}.jsonl", about)
    for step in tqdm(work, desc=suite, unit="cell"):
        results.add(list(step()))
    figure = target / f"{suite}.png"
    FIGURES.get(suite, draw)(results.records, about, figure)
    print(summary(results.records))
    if suite == ACCURACY:
        print("\n" + "\n".join(accuracy_suite.findings(results.records)))
    for record in results.failures:
        where = " ".join(str(record[key]) for key in ("direction", "case", "provider"))
        print(f"\n{record['status']} {where}: {record['reason']}")
    print(f"\nwritten: {target / suite}.jsonl and {figure}\n")
    return results.passed


def _name(first: tuple) -> str:
    """Row and column of a step in the tables; first: its first arguments, a cell or names."""
    row, column = (getattr(first[0], name, None) for name in ("row", "column"))
    named = [str(x) for x in first] if row is None else [row, column, *map(str, first[1:])]
    return " ".join(x for x in named if x)


def _work(suite: str, args: argparse.Namespace, settings: Settings) -> list:
    """The steps of a suite; each is a function that gives the records of one cell."""
    quick, head_dims, seqlens = args.quick, args.head_dim, args.seqlen
    directions = (args.direction,) if args.direction in DIRECTIONS else DIRECTIONS
    directions = ONLY.get(suite, directions)

    def steps(run: Callable[..., object], work: Iterable[object], *more: object) -> list:
        """work: the first argument of each step, or a tuple of its first arguments."""
        first = (of if isinstance(of, tuple) else (of,) for of in work)
        chosen = (of for of in first if args.only is None or args.only.search(_name(of)))
        return [partial(run, *of, settings, *more) for of in chosen]

    if suite == "host":
        found = steps(host_suite.run_host, host_suite.WORK)
        if settings.device.type == "cuda":  # 8 bits of the CPU's few tokens are not compared
            found += steps(host_suite.run_option_host, host_suite.OPTION_WORK)
            found += steps(host_suite.run_rotary_host, host_suite.ROTARY_WORK)
        return found + steps(cached_suite.run_cached_host, cached_suite.HOST_WORK)
    if suite in CACHED:
        return steps(cached_suite.run_cached, cached_cells.cached_cells(suite, quick))
    if suite == "models":
        models = models_suite.QUICK_CASES if quick else models_suite.CASES
        chosen = [case for case in models if args.work in (None, case.work)]
        return steps(models_suite.run_model, chosen)
    if suite == "memory":
        lengths = memory_suite.QUICK_SEQLENS if quick else memory_suite.SEQLENS
        chosen = [n for n in lengths if seqlens is None or n in seqlens]
        given_up: set[str] = set()
        return steps(memory_suite.run_length, chosen, given_up)
    if suite == "varlen":
        varlen = product(directions, (64, 128, 256), (False, True), (1, 8))
        return steps(run_varlen, varlen, quick)
    if suite == ACCURACY:
        return steps(accuracy_suite.run_accuracy, accuracy_suite.accuracy_cases(quick))
    if suite == DISTRIBUTIONS:
        cases = distributions_suite.distribution_cases(quick, head_dims, seqlens)
        return steps(distributions_suite.run_distribution, cases)
    if suite == QUANTIZE:
        of_suite = quantize_suite.quantize_work(head_dims)
        return steps(quantize_suite.run_quantize, of_suite, quick)
    if suite == MASKS:
        of_masks = masks_suite.mask_cells(directions, head_dims, seqlens, quick)
        return steps(masks_suite.run_masks, of_masks)
    if suite == MASKS_BUILD:
        return steps(mask_build_suite.run_build, mask_build_suite.build_work(seqlens, quick))
    if suite == SPARSE:
        return steps(ladder_suite.run_sparse, ladder_suite.sparse_work(directions, quick), quick)
    chosen = cells(suite, directions, head_dims, seqlens, quick)
    if suite == ROBOT:
        return steps(robot_suite.run_robot, product(chosen, robot_suite.TIMES))
    if suite == FEW_QUERIES:
        return steps(few_queries_suite.run_few_queries, product(chosen, robot_suite.TIMES))
    run_of = {LADDER: ladder_suite.run_rung, SCORES: scores_suite.run_scores}
    run_of[ROTARY] = rotary_suite.run_rotary
    return steps(run_of.get(suite, run_cell), chosen)
