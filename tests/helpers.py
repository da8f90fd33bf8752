"""Shared by the test files: where to run, and how to run something in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import forked
import pytest
import torch
from support.cases import FORWARD_CASES, call
from support.rounding import gradient_rounding, out_rounding
from support.tolerance import check_lse, score_floor

from flashattn3.backends.device import DeviceInfo, default_lowering, describe_device
from flashattn3.backends.hopper.kernel_configs import all_configs
from flashattn3.backends.hopper.launch_record import DecodeRecord, LaunchRecord
from flashattn3.backends.hopper.library import Library
from flashattn3.backends.registry import BACKENDS, HOPPER
from flashattn3.call.dtypes import FULL_PRECISION, v_dtype
from flashattn3.call.fields import Options
from flashattn3.call.operands import Tensors, metadata_of
from flashattn3.call.problem import describe
from flashattn3.run import cached_plans
from flashattn3.run.launches import cached_launch_cache
from flashattn3_bench.checking import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    attention,
    check,
    gradients,
    max_logit,
    score_rounding,
)

GPU = torch.cuda.is_available()
# What dispatch asks on a machine without the compiled Hopper kernels, apart from their reason.
WITHOUT_HOPPER = tuple(backend for backend in BACKENDS if backend is not HOPPER)
ROOT = Path(__file__).resolve().parents[1]
ALL_CONFIGS = frozenset(config.name for config in all_configs())


def fake_gpu(name: str, capability: int, shared_memory_kib: int, num_sms: int) -> DeviceInfo:
    """A GPU as the planner sees it, on a machine that has none."""
    return DeviceInfo(
        kind="cuda",
        name=name,
        capability=capability,
        lowering=default_lowering(capability),
        shared_memory_bytes=shared_memory_kib * 1024,
        num_sms=num_sms,
    )


H100 = fake_gpu("H100", 90, 227, 132)
A100 = fake_gpu("A100", 80, 163, 108)
RTX3090 = fake_gpu("RTX 3090", 86, 99, 82)
ORIN = fake_gpu("Orin", 87, 163, 16)
L4 = fake_gpu("L4", 89, 99, 58)
B200 = fake_gpu("B200", 100, 227, 148)
RTX5090 = fake_gpu("RTX 5090", 120, 99, 170)
T4 = fake_gpu("T4", 75, 64, 40)
GPUS = (H100, A100, RTX3090, ORIN, L4, B200, RTX5090)
CPU = DeviceInfo("cpu", "cpu")
LOWERED_H100 = H100._replace(lowering=80, shared_memory_bytes=163 * 1024)


class Prepared(NamedTuple):
    """Stands in for the handle of a prepared launch of the Hopper library."""

    config: int
    record: LaunchRecord | DecodeRecord


def _prepare(config: int, *record: object) -> tuple:
    """Stands in for prepare_forward and prepare_backward."""
    return Prepared(config, LaunchRecord(*record)), 11, 384, 2048, 16


def _prepare_decode(config: int, *record: object) -> tuple:
    return Prepared(config, DecodeRecord(*record)), 384, 2048


def library_double(configs=ALL_CONFIGS, error: str | None = None, **operators) -> Library:
    """A Hopper library whose launches are prepared without it."""
    prepared = {
        "prepare_forward": _prepare,
        "prepare_backward": _prepare,
        "prepare_decode": _prepare_decode,
        "decode_size": lambda handle, *sizes: (11, 16, False),
    }
    return Library(configs, error, **prepared, **operators)


def run_program(program: Callable, *arguments, folder: Path = ROOT, **environment) -> str:
    """Standard output of ``program(*arguments)`` in a process of its own; a variable given as None
    is not set there."""
    variables = {**os.environ, **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    with TemporaryDirectory() as log:
        how = {"folder": folder, "variables": variables, "log": Path(log) / "standard"}
        status = forked.run(program, *arguments, **how, timeout=300)
        out, err = ((Path(log) / f"standard.{end}").read_text() for end in ("out", "err"))
    assert status == 0, f"exit status {status}\n{out}\n{err}"
    return out


def run_python(code: str, **environment: str | None) -> str:
    """Standard output of ``python -c code``, with torch imported."""
    return run_program(forked.run_code, code, **environment)


def _hopper_is_missing() -> str | None:
    """Why the Hopper backend runs nothing here, or None."""
    device = torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
    return HOPPER.unavailable_reason(describe_device(device))


HOPPER_IS_MISSING = _hopper_is_missing()
needs_hopper = pytest.mark.skipif(
    HOPPER_IS_MISSING is not None, reason=f"hopper: {HOPPER_IS_MISSING}"
)


def on_hopper_gpu(test):
    """Marks a test that runs on a Hopper GPU alone."""
    return pytest.mark.gpu(needs_hopper(test))


CACHE_BACKENDS = ("reference", "triton", pytest.param("hopper", marks=needs_hopper))
EVERY_BACKEND = (pytest.param("hopper", marks=needs_hopper), "triton", "reference")

# One case of FORWARD_CASES for each feature; the others are its sizes, heads and head dims.
FEATURE_CASES = (
    *("one-token", "one-key", "over-tile", "odd", "causal-empty-rows", "causal-one-query"),
    *("window-both", "window-empty-rows", "softcap-causal", "softcap-tiny", "softcap-highest"),
    *("gqa-2", "mqa-one-query", "dim-8", "dim-96", "dim-72-40", "scale-negative", "scale-zero"),
    *("layout-bhsd", "layout-packed", "layout-padded", "layout-unaligned", "large-scores"),
    *("monotone-scores", "outliers", "zero-scores", "huge-values", "varlen-causal-cross"),
    *("varlen-empty-sequences", "varlen-no-keys", "varlen-no-queries", "varlen-no-sequence"),
    *("varlen-seqused", "varlen-tail-rows", "varlen-splits", "no-keys", "no-queries", "no-batch"),
    *("dim-v-wider", "dim-192-128", "dim-256", "splits"),
)


def quick_case(case, backend: str, dtype: torch.dtype) -> bool:
    """Whether the quick tier runs a case without a GPU: every feature on every backend and in every
    dtype, and all cases once."""
    return case.name in FEATURE_CASES or (backend, dtype) == ("reference", torch.float32)


def swept_case(case, backend: str, dtype: torch.dtype) -> bool:
    """Whether a similar case runs: the reference backend computes 16 bits in float32, and
    test_reference.py has all cases in float64, with smaller tiles."""
    return case.name not in FEATURE_CASES and backend == "reference" and dtype != torch.float32


SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def is_twin(backend: str, dtype: torch.dtype | None = None, **_) -> bool:
    """Whether the same is computed in float16: the reference backend computes both in float32."""
    return (backend, dtype) == ("reference", torch.bfloat16)


# Triton's interpreter multiplies bfloat16 matrices as if their bits were integers.
TRITON_DTYPES = SIXTEEN_BIT if GPU else (torch.float16,)
BACKEND_DTYPES = [
    pytest.param(
        backend,
        dtype,
        id=f"{backend}-{str(dtype).removeprefix('torch.')}",
        marks=needs_hopper if backend == "hopper" else (),
    )
    for backend, dtypes in (
        ("hopper", SIXTEEN_BIT),
        ("triton", TRITON_DTYPES),
        ("reference", (*SIXTEEN_BIT, torch.float32, torch.float64)),
    )
    for dtype in dtypes
]


def forward_holds(case, tensors, backend: str, **options) -> tuple[torch.Tensor, ...]:
    """Run a case, hold out, lse and max_logit, if it is asked for, to the tolerance rule against
    float64, and return out and lse."""
    out, lse, *largest = call(case, tensors, return_lse=True, backend=backend, **options)
    reference, reference_lse = attention(tensors, **case.reference_options())
    baseline, _ = attention(tensors, **case.reference_options(), dtype=tensors.q.dtype)
    assert out.dtype == tensors.q.dtype
    # Inputs of 16 bits round far more coarsely than the scores.
    floor = score_floor(lse) if tensors.q.dtype in FULL_PRECISION else None

    def rounding():
        return out_rounding(tensors, out.dtype, **case.reference_options())

    check("out", out, reference, baseline, FORWARD_FACTOR, case, backend, floor, rounding)
    moved = score_rounding(tensors, unit=torch.finfo(lse.dtype).eps, **case.reference_options())
    check_lse(lse, reference_lse, case, backend, moved=moved)
    for found in largest:
        axes = (0, 2) if moved.ndim == 3 else (1,)
        moved = moved.nan_to_num().amax(axes) if moved.numel() else torch.zeros_like(found)
        wanted = max_logit(tensors, **case.reference_options())
        check_lse(found, wanted, f"max_logit of {case}", backend, moved=moved)
    return out, lse


def gradients_hold(case, tensors, got, dout, dlse, backend: str) -> None:
    """Hold the gradients of q, k, v, sinks and bias to the tolerance rule against float64."""
    reference = gradients(tensors, dout, dlse, **case.reference_options())
    baseline = gradients(tensors, dout, dlse, **case.reference_options(), dtype=tensors.q.dtype)
    dtype = tensors.q.dtype

    def roundings():
        return gradient_rounding(tensors, dout, dlse, dtype, **case.reference_options())

    names = ("q", "k", "v", "sinks", "bias")[: len(reference)]
    places = [i for i, name in enumerate(names) if getattr(tensors, name) is not None]
    for i, found in zip(places, got, strict=True):
        of, name = getattr(tensors, names[i]), f"d{names[i]}"
        assert (found.dtype, found.shape) == (of.dtype, of.shape)
        values = found, reference[i], baseline[i]
        check(name, *values, GRADIENT_FACTOR, case, backend, rounding=lambda i=i: roundings()[i])


def described(tensors, **options):
    """The problem of a call with these tensors and options."""
    return describe(tuple(map(metadata_of, tensors)), Options(**options))


def meta_qkv(
    batch=2, seqlen_q=1024, seqlen_k=1024, heads=(8, 8), d=64, dv=None, dtype=torch.bfloat16
) -> Tensors:
    """q, k and v without memory."""
    shapes = (seqlen_q, heads[0], d), (seqlen_k, heads[1], d), (seqlen_k, heads[1], dv or d)
    made = zip(shapes, (dtype, dtype, v_dtype(dtype)), strict=True)
    return Tensors(*(torch.empty(batch, *x, device="meta", dtype=of) for x, of in made))


def case_named(name: str):
    return next(case for case in FORWARD_CASES if case.name == name)


def ints(*values: int, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    of = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [x.contiguous().view(of[x.element_size()]) for x in (found, wanted)]
    return torch.equal(*bits)


def forget_cached_calls() -> None:
    """The plans and checks of cached calls and appends are found anew."""
    of_ops = cached_plans.plan_of, cached_plans._checked_decode, cached_plans._checked_append
    for cache in (*of_ops, cached_launch_cache):
        cache.cache_clear()


@contextmanager
def cached_calls_of_an_h100(patch, *backends, modules=(cached_plans,)):
    """Cached calls on CPU tensors are planned for an H100; no values are checked."""
    for module in modules:
        patch.setattr(module, "BACKENDS", backends)
        patch.setattr(module, "describe_device", lambda device: H100)
    patch.setattr(cached_plans, "is_checked", lambda device: False)
    forget_cached_calls()
    yield
    forget_cached_calls()


def built(config, library: Library):
    """The kernel config, if the library has it; else the test is skipped."""
    if library.error is not None:
        pytest.skip(library.error)
    if config.name not in library.configs:
        pytest.skip(f"{config.name} is not in this build")
    return config
