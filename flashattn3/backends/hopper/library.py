"""Loads the compiled operator library of the Hopper backend and checks its kernel configs.

One build makes ``flashattn3._kernel_configs`` and ``_lib/libflashattn3_ops.so``; importing the
module loads the library, which registers ``torch.ops.flashattn3_hopper``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from ...dispatch.kernel_configs import configs_hash

PROJECT = Path(__file__).resolve().parents[3]  # repository root, or site-packages if installed


@dataclass(frozen=True)
class Library:
    """The compiled library. configs: names of the compiled kernel configs.

    error: why the library cannot be used; None if it can.
    forward, forward_fp8, permute_v, backward: operators of torch.ops.flashattn3_hopper.
    """

    configs: frozenset[str] = frozenset()
    error: str | None = None
    forward: Callable | None = None
    forward_fp8: Callable | None = None
    permute_v: Callable | None = None
    backward: Callable | None = None


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
    try:
        from ..._kernel_configs import compiled_configs, driver_error
        from ..._kernel_configs import configs_hash as hash_of_build
    except ModuleNotFoundError:
        return Library(error="the Hopper kernels were not built")
    except ImportError as error:
        return Library(error=f"the Hopper kernels do not load ({error})")
    if hash_of_build() != configs_hash():
        return Library(error="the Hopper kernels were built from other kernel configs")
    if driver_error():
        return Library(error=f"the Hopper kernels were {driver_error()}")
    operators = torch.ops.flashattn3_hopper
    return Library(
        configs=frozenset(compiled_configs()),
        forward=operators.forward.default,
        forward_fp8=operators.forward_fp8.default,
        permute_v=operators.permute_v.default,
        backward=operators.backward.default,
    )


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


def kernel_info() -> list[dict[str, object]]:
    """Name, num_threads and shared_memory_bytes of each compiled kernel of a usable library.

    num_registers, local_bytes (spills), max_threads and blocks_per_sm are what the current GPU
    reports; -1 if no GPU runs the kernel.
    """
    from ..._kernel_configs import kernel_info as ask

    return ask()
