"""Prepares calls of the compiled decode kernels, for cached calls and for packed forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...call.dtypes import NAMES, SIXTEEN_BIT
from ...dispatch.backend import score_factor_reason
from ...dispatch.kernel_configs import (
    DECODE_CONFIGS,
    DECODE_TILE_ROWS,
    MAX_HEAD_DIM,
    DecodeConfig,
    select_decode_config,
)
from .launch_record import decode_record_of

if TYPE_CHECKING:
    from ...dispatch.device import DeviceInfo
    from ...kvcache.problem import DecodeProblem, DecodeTensors, Lengths
    from .library import Library

ALIGNED = 8  # elements of 16 bits in 16 bytes, which a thread copies at once
# Packed rows up to which dispatch takes a decode kernel: every DECODE_TILE_ROWS rows read the keys
# again.
MAX_ROWS = 256
_NAMES_TO_CONVERT = frozenset(("q_descale", "k_descale", "v_descale", "sinks"))


class Prepared(NamedTuple):
    """What prepare_decode returns. handle: the prepared launch, as in ``Launch``."""

    handle: Tensor
    num_threads: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class DecodeLaunch:
    """The launch of one problem of cached calls on a decode kernel."""

    problem: DecodeProblem
    kernel_config: DecodeConfig
    prepared: Prepared = field(compare=False, repr=False)
    library: Library = field(compare=False, repr=False)
    num_sms: int

    def describe(self) -> dict[str, object]:
        config = self.kernel_config
        whole = self.problem.num_splits == 1
        return {
            "kernel config": config.name,
            "tile": f"{DECODE_TILE_ROWS} packed rows x {config.block_n} keys",
            "num_stages": config.num_stages,
            "warpgroups": "1 loads, 2 multiply",
            "parts": "none: whole tiles" if whole else f"an equal share for each of {self.num_sms}",
            "shared_memory_bytes": self.prepared.shared_memory_bytes,
            "tile measured": config.measured or "not yet",
            "copied first": "q" if "q" in self.problem.misaligned else "nothing",
        }

    def describe_sizes(
        self, batch: int, total_q: int, seqlen_q: int, capacity: int
    ) -> dict[str, object]:
        """What a call of the problem launches and allocates, at any lengths of its cache."""
        sizes = self.library.decode_size(self.prepared.handle, batch, seqlen_q, capacity)
        return {"grid": (sizes[0], 1, 1), "workspace_bytes": sizes[1]}


def unfit_reason(problem: DecodeProblem) -> str | None:
    """Why no decode kernel takes the problem, or None."""
    if problem.dtype not in SIXTEEN_BIT:
        return f"computes in float16 and bfloat16, not in {problem.dtype}"
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size > MAX_HEAD_DIM or size % ALIGNED:
            limits = f"multiples of {ALIGNED} up to {MAX_HEAD_DIM}"
            return f"takes head dims that are {limits}, {name} is {size}"
    caches = sorted(problem.misaligned - {"q"})
    if caches:
        return f"copies 16 bytes at once: rows of {caches[0]} begin at other addresses"
    if problem.num_splits > 1:
        parts = "cuts the batch into equal shares (num_splits=0) or no sequence (1)"
        return f"{parts}, num_splits is {problem.num_splits}"
    return score_factor_reason(problem, 100, torch.float32)


def config_of(problem: DecodeProblem) -> DecodeConfig:
    """The kernel config of a problem that is not unfit."""
    return select_decode_config(NAMES[problem.dtype], max(problem.head_dim, problem.head_dim_v))


def decode_launch(problem: DecodeProblem, device: DeviceInfo, library: Library) -> DecodeLaunch:
    """Check the problem's numbers in the library, once. RuntimeError if the kernel refuses it."""
    config = config_of(problem)
    record = decode_record_of(problem, device)
    with _disable_current_modes():  # the plan outlives the call
        prepared = Prepared(*library.prepare_decode(DECODE_CONFIGS.index(config), *record))
    return DecodeLaunch(problem, config, prepared, library, record.num_sms)


def prepare_decode(launch: DecodeLaunch) -> Callable:
    """Build a function of (out, lse, tensors, lengths, options_hash)."""
    operator, handle, problem = launch.library.decode, launch.prepared.handle, launch.problem
    converts = "q" in problem.misaligned or not problem.given.isdisjoint(_NAMES_TO_CONVERT)

    def run(
        out: Tensor, lse: Tensor, tensors: DecodeTensors, lengths: Lengths, options_hash: int
    ) -> None:
        if not _is_aligned(out):
            aligned = out.new_empty(out.shape)
            run(aligned, lse, tensors, lengths, options_hash)
            out.copy_(aligned)
            return
        if converts:
            tensors = _converted(problem, tensors)
        seqlen, seqlen_new, longest = lengths
        if seqlen is None:
            seqlen = -1
        if longest is None:
            longest = -1
        operator(handle, out, lse, *tensors, seqlen, seqlen_new, longest, options_hash)

    return run


def _is_aligned(out: Tensor) -> bool:
    if out.data_ptr() % (2 * ALIGNED):
        return False
    return out.is_contiguous() or not any(step % ALIGNED for step in out.stride()[:-1])


def _converted(problem: DecodeProblem, tensors: DecodeTensors) -> DecodeTensors:
    """The tensors as the kernel reads them: aligned q, dense descales, sinks in float32."""
    changed = {}
    if "q" in problem.misaligned:
        changed["q"] = tensors.q.clone(memory_format=torch.contiguous_format)
    for name in _NAMES_TO_CONVERT & problem.given:
        changed[name] = getattr(tensors, name).float().contiguous()
    return tensors._replace(**changed)
