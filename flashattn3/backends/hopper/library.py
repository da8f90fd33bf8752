"""Loads the compiled operator library of the Hopper backend and checks its kernel configs.

Loading ``_lib/libflashattn3_ops.so`` registers ``torch.ops.flashattn3_hopper``. The library holds
nothing of Python, and of torch it needs the stable interface alone.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from .kernel_configs import configs_hash
from .launch_record import (
    BACKWARD_ARGUMENTS,
    DECODE_ARGUMENTS,
    FOUND_ARGUMENTS,
    KEEP_ARGUMENTS,
    PREFIX_ARGUMENTS,
    DecodeRecord,
    LaunchRecord,
)

PACKAGE = Path(__file__).resolve().parents[2]
PROJECT = PACKAGE.parent  # repository root, or site-packages if installed
OPS_LIBRARY = Path("_lib", "libflashattn3_ops.so")


class Library(NamedTuple):
    """The compiled library. configs: names of the compiled kernel configs.

    error: why the library cannot be used; None if it can.
    cuda_version: of the CUDA runtime inside it, such as "13.0".
    namespace: torch.ops.flashattn3_hopper, whose other operators the autograd node needs.
    The others: operators of torch.ops.flashattn3_hopper, as the builtins that their calls call.
        ``_scores``: the overload for calls with a tensor that changes scores, or that return the
        largest one, of an operator that takes plain calls in less time.
    """

    configs: frozenset[str] = frozenset()
    error: str | None = None
    cuda_version: str = ""
    namespace: torch._ops._OpNamespace | None = None
    prepare_forward: Callable | None = None
    forward: Callable | None = None
    forward_scores: Callable | None = None
    permute_v: Callable | None = None
    prepare_backward: Callable | None = None
    backward: Callable | None = None
    backward_scores: Callable | None = None
    prepare_decode: Callable | None = None
    decode_size: Callable | None = None
    decode: Callable | None = None
    decode_into: Callable | None = None
    decode_after_prefix: Callable | None = None
    keep_passes: Callable | None = None
    forget_passes: Callable | None = None
    forward_kept: Callable | None = None
    forward_kept_scores: Callable | None = None
    backward_kept: Callable | None = None
    backward_kept_scores: Callable | None = None
    keep_scaled: Callable | None = None
    scaled_kept: Callable | None = None
    keep_decode: Callable | None = None
    decode_kept: Callable | None = None
    decode_kept_with: Callable | None = None
    append_kept: Callable | None = None
    append: Callable | None = None


@cache
def mended_by() -> str:
    """The command that builds the kernels, from a checkout or from pip's install source."""
    if (PROJECT / "build_support").is_dir():
        return f"in {PROJECT}: FLASHATTN3_BUILD=cuda pip install --no-build-isolation ."
    try:
        source = metadata.distribution("flashattn3").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        source = None
    # pip may reuse a cached wheel without the kernels, even if FLASHATTN3_BUILD is set now.
    fresh = "pip install --no-cache-dir --force-reinstall --no-deps"
    return f"FLASHATTN3_BUILD=cuda {fresh} {json.loads(source)['url'] if source else 'flashattn3'}"


@cache
def find_library() -> Library:
    """Load the library if it was built from these kernel configs. Uses no GPU."""
    path = PACKAGE / OPS_LIBRARY
    if not path.is_file():
        return Library(error="the Hopper kernels were not built")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(error=f"the Hopper kernels do not load ({error})")
    if _text(loaded, "configs_hash") != configs_hash():
        return Library(error="the Hopper kernels were built from other kernel configs")
    driver_error = _text(loaded, "driver_error")
    if driver_error:
        return Library(error=f"the Hopper kernels were {driver_error}")
    operators = torch.ops.flashattn3_hopper
    arguments = {
        "prepare_forward": LaunchRecord._fields,
        "prepare_backward": LaunchRecord._fields,
        "prepare_decode": DecodeRecord._fields,
        "decode": DECODE_ARGUMENTS,
        "decode_after_prefix": (*PREFIX_ARGUMENTS, "launch", *DECODE_ARGUMENTS),
        "keep_decode": KEEP_ARGUMENTS,
        "forward_kept_scores": FOUND_ARGUMENTS,
        "backward_scores": BACKWARD_ARGUMENTS,
    }
    found = {name: _operator(operators, name) for name in _OPERATORS}
    of_nodes = (_operator(operators, f"register_{kind}_node") for kind in ("autograd", "score"))
    older = None in (*found.values(), *of_nodes)
    if older or any(_arguments_of(found[name]) != wanted for name, wanted in arguments.items()):
        return Library(error="the Hopper kernels were built from other sources")
    return Library(
        configs=frozenset(_text(loaded, "compiled_configs").split()),
        cuda_version=_text(loaded, "cuda_version"),
        namespace=operators,
        **{name: operator._op for name, operator in found.items()},
    )


_OPERATORS = Library._fields[Library._fields.index("namespace") + 1 :]
_OVERLOAD = "_scores"


def _operator(operators: torch._ops._OpNamespace, name: str) -> torch._ops.OpOverload | None:
    """The operator, or the overload of one, under its name in ``Library``."""
    overload = "scores" if name.endswith(_OVERLOAD) else "default"
    return getattr(getattr(operators, name.removesuffix(_OVERLOAD), None), overload, None)


def _arguments_of(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the operator's arguments after the kernel config, or the launch, that is first."""
    return tuple(argument.name for argument in operator._schema.arguments[1:])


def _text(loaded: ctypes.CDLL, name: str) -> str:
    """What a function of csrc/launch/exports.cpp returns; empty if an older build lacks it."""
    function = getattr(loaded, f"flashattn3_{name}", None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return function().decode()


@cache
def library_for_gpu() -> Library:
    """Load the library for a Hopper GPU; warn once if it cannot be used."""
    library = find_library()
    if library.error is not None:
        warnings.warn(
            f"flashattn3: {library.error}, so this Hopper GPU runs Triton's slower ones. "
            f"To build them, {mended_by()}",
            RuntimeWarning,
            stacklevel=2,
        )
    return library


class KernelInfo(NamedTuple):
    """The resources of one compiled kernel.

    num_registers, local_bytes (spills), max_threads and blocks_per_sm are what the current GPU
    reports; -1 if no GPU runs the kernel.
    """

    name: str
    num_threads: int
    shared_memory_bytes: int
    num_registers: int
    local_bytes: int
    max_threads: int
    blocks_per_sm: int


def kernel_info() -> list[KernelInfo]:
    """The compiled kernels of a usable library."""
    names = _text(ctypes.CDLL(str(PACKAGE / OPS_LIBRARY)), "compiled_configs").split()
    numbers = torch.ops.flashattn3_hopper.kernel_info().tolist()
    return [KernelInfo(name, *fields) for name, fields in zip(names, numbers, strict=True)]
