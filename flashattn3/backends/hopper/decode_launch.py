"""Prepares calls of the compiled kernels of cached calls, for these and for packed forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...call.cached import DecodeTensors, new_out
from ...call.dtypes import NAMES
from ..base import CachedOperators
from .config_types import DECODE_TILE_ROWS
from .decode_choice import (
    ALIGNED_BYTES,
    DECODE_ROWS,
    PREFIX_ROWS,
    config_of,
    reads_bytes,
)
from .kernel_configs import CACHED_CONFIGS, DecodeConfig, ForwardConfig
from .launch_record import decode_record_of

if TYPE_CHECKING:
    from ...call.cached import DecodeProblem, Lengths
    from ..device import DeviceInfo
    from .library import Library

_ALIGNED = ALIGNED_BYTES // 2  # elements of 16 bits
# Tensors on which no launch of up to DECODE_ROWS packed rows depends.
_NOT_KEPT = {"q_descale", "tree_mask", "alibi_slopes"}
_KEPT_WITH = frozenset(DecodeTensors._fields[3:]) - _NOT_KEPT


class KernelLaunch(NamedTuple):
    """The prepared launch of a kernel and its sizes. handle: as in ``Launch``."""

    handle: Tensor
    num_threads: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class DecodeLaunch:
    """The launch of one problem of cached calls on a decode kernel or a cached forward kernel.

    reason: why on this kind of kernel. leaves_sms: whether SMs are to stay free. short_queries: of
    sequences that run on a decode kernel beside a forward kernel; 0: none do. appends: whether the
    append kernel writes the new tokens of such calls. prefix_config, prefix_launch: of the kernel
    for such calls with a prefix, or None.
    """

    needs_lse = False

    problem: DecodeProblem
    kernel_config: DecodeConfig | ForwardConfig
    reason: str
    kernel_launch: KernelLaunch = field(compare=False, repr=False)
    library: Library = field(compare=False, repr=False)
    num_sms: int
    leaves_sms: bool
    short_queries: int
    appends: bool
    prefix_config: DecodeConfig | None
    prefix_launch: KernelLaunch | None = field(compare=False, repr=False)

    def describe(self) -> dict[str, object]:
        config = self.kernel_config
        if config.kind == "decode":
            rows, multiply = f"{DECODE_TILE_ROWS} packed rows", config.num_consumers
            stages = _stages_of(config, self.leaves_sms)
            whole = self.problem.num_splits == 1
        else:
            multiply = config.num_mma_warpgroups
            rows = f"{multiply} x 64 rows of a head"
            stages = config.num_stages
            whole = True
        beside = {}
        if self.short_queries:
            name = config_of(self.problem).name
            beside["short sequences"] = f"up to {self.short_queries} queries: {name}, at once"
        return {
            "kernel config": config.name,
            "kernel": f"{config.kind}: {self.reason}",
            **beside,
            "tile": f"{rows} x {config.block_n} keys",
            "num_stages": stages,
            "warpgroups": f"1 loads, {multiply} multiply",
            "parts": "none: whole tiles" if whole else f"equal shares on {self.num_sms} SMs",
            "shared_memory_bytes": self.kernel_launch.shared_memory_bytes,
            "tile measured": config.measured or "not yet",
            "copied first": ", ".join(self.copied) or "nothing",
            **self._describe_widening(),
        }

    def _describe_widening(self) -> dict[str, object]:
        if self.kernel_config.kind == "decode" or not reads_bytes(self.problem):
            return {}
        return {"widened first": f"the used keys, to {NAMES[self.problem.dtype]} in the workspace"}

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the tensors that are copied first. A forward kernel reads q by TMA, which has
        no stride of 0."""
        names = self.problem.misaligned
        if self.kernel_config.kind == "forward":
            names |= self.problem.expanded & {"q"}
        return tuple(sorted(names))

    @cached_property
    def decode(self) -> Callable[..., Tensor]:
        """See ``CachedLaunch``."""
        library, handle, problem = self.library, self.kernel_launch.handle, self.problem
        operator, into = library.decode, library.decode_into
        copied = self.copied
        converts = copied or "sinks" in problem.given
        names = DecodeTensors._fields
        num_passed = 1 + max(i for i, name in enumerate(names) if i < 3 or name in problem.given)

        def run(
            out: Tensor | None,
            lse: Tensor | None,
            tensors: DecodeTensors,
            lengths: Lengths,
            options_hash: int,
        ) -> Tensor:
            if converts:
                tensors = _converted(problem, tensors, copied)
            seqlen, seqlen_new, longest = lengths
            if seqlen is None:
                seqlen = -1
            if longest is None:
                longest = -1
            numbers = seqlen, seqlen_new, longest, options_hash
            if out is None:
                return operator(handle, lse, *numbers, *tensors[:num_passed])
            if _is_aligned(out):
                into(out, handle, lse, *numbers, *tensors[:num_passed])
                return out
            return out.copy_(operator(handle, lse, *numbers, *tensors[:num_passed]))

        return run

    @property
    def rows_after_prefix(self) -> int:
        """See ``CachedLaunch``."""
        return 0 if self.prefix_launch is None else PREFIX_ROWS

    @cached_property
    def after_prefix(self) -> Callable[[Tensor, Tensor | None, int], Callable]:
        """See ``CachedLaunch``."""
        operator, handle = self.library.decode_after_prefix, self.prefix_launch.handle
        problem, copied = self.problem, self.copied

        def of_prefix(page_table: Tensor, seqlen_of_prefix: Tensor | None, length: int) -> Callable:
            prefix = page_table, seqlen_of_prefix, length

            def run(
                out: Tensor | None,
                lse: Tensor | None,
                tensors: DecodeTensors,
                lengths: Lengths,
                options_hash: int,
            ) -> Tensor:
                tensors = _converted(problem, tensors, copied)
                q = tensors.q
                of_batch = q.ndim == 4 and q.shape[0] > 1
                if of_batch and q.stride(0) != q.shape[1] * q.stride(1):
                    tensors = tensors._replace(q=q.contiguous())
                seqlen, seqlen_new, longest = lengths
                seqlen = -1 if seqlen is None else seqlen
                longest = -1 if longest is None else longest
                into = new_out(tensors) if out is None or not _is_aligned(out) else out
                numbers = lse, seqlen, seqlen_new, longest, options_hash
                operator(into, *prefix, handle, *numbers, *tensors[:-1])  # no slopes
                return into if out is None or out is into else out.copy_(into)

            return run

        return of_prefix

    @cached_property
    def keep(self) -> Callable[[int, int, int], CachedOperators] | None:
        """See ``CachedLaunch``. None where a plan depends on more than CACHED_PLAN
        (call/tensor_fields.py) has, or a call on more than the operators take."""
        problem, library = self.problem, self.library
        alike = problem.given <= _KEPT_WITH and problem.rows <= DECODE_ROWS
        if library.keep_decode is None or not alike or problem.misaligned:
            return None
        index = -1 if problem.device.index is None else problem.device.index
        append = library.append_kept if self.appends else None
        operators = CachedOperators(library.decode_kept, library.decode_kept_with, append)
        handle, of_prefix = self.kernel_launch.handle, ()
        if self.prefix_launch is not None:
            of_prefix = self.prefix_launch.handle, PREFIX_ROWS

        def keep(number: int, seqlen_q: int, options_hash: int) -> CachedOperators:
            library.keep_decode(number, handle, index, seqlen_q, options_hash, *of_prefix)
            return operators

        return keep

    def describe_sizes(
        self, batch: int, total_q: int, seqlen_q: int, capacity: int, prefix_pages: int = -1
    ) -> dict[str, object]:
        """The grid and the workspace of a call of the problem, at any lengths of its cache, or with
        pages of a prefix of one that ``after_prefix`` runs."""
        rows = total_q if self.problem.varlen else -1
        launch, described = self.kernel_launch, {}
        if prefix_pages >= 0:
            launch, config = self.prefix_launch, self.prefix_config
            described = {"kernel config": config.name, "prefix": "in the same launch"}
        num_ctas, workspace_bytes, on_warps = self.library.decode_size(
            launch.handle, batch, seqlen_q, capacity, rows, prefix_pages
        )
        described |= {"grid": (num_ctas, 1, 1), "workspace_bytes": workspace_bytes}
        return described | self._describe_warps() if on_warps else described

    def _describe_warps(self) -> dict[str, object]:
        """Describe the warp kernel of the config, in place of its decode kernel."""
        rows, keys = self.kernel_config.warp_kernel_rows, self.kernel_config.warp_block_n
        of_many = ", or, of many work tiles, in equal shares"
        return {
            "tile": f"up to {rows} packed rows x {keys} keys of a warp",
            "num_stages": 1,
            "warpgroups": "warps, each of which loads and multiplies",
            "parts": "by the keys of each sequence" + of_many * reads_bytes(self.problem),
        }


def _stages_of(config: DecodeConfig, leaves_sms: bool) -> object:
    """The stages in use, which may depend on whether two CTAs share an SM in a call of its size."""
    alone, beside = config.num_stages, config.num_stages_beside
    if config.num_consumers != 1 or leaves_sms or alone == beside:
        return alone
    return f"{beside} where two CTAs share an SM, else {alone}"


def short_queries(
    problem: DecodeProblem, config: DecodeConfig | ForwardConfig, library: Library
) -> int:
    """Queries up to which a sequence of a varlen batch runs on a decode kernel beside the forward
    kernel: one tile of packed rows. 0: all run on the kernel of the config."""
    if not problem.varlen or config.kind != "forward":
        return 0
    if config_of(problem).name not in library.configs:
        return 0
    return DECODE_TILE_ROWS // problem.qhead_per_kvhead


def decode_launch(
    problem: DecodeProblem,
    device: DeviceInfo,
    library: Library,
    config: DecodeConfig | ForwardConfig,
    reason: str,
    appends: bool = False,
    prefix_config: DecodeConfig | None = None,
) -> DecodeLaunch:
    """Check the problem's numbers in the library, once. RuntimeError if the kernel refuses it."""
    short = short_queries(problem, config, library)
    short_config = CACHED_CONFIGS.index(config_of(problem)) if short else -1
    record = decode_record_of(problem, device, short_config, short)

    def prepared(config: DecodeConfig | ForwardConfig) -> KernelLaunch:
        return KernelLaunch(*library.prepare_decode(CACHED_CONFIGS.index(config), *record))

    with _disable_current_modes():  # the plan outlives the call
        kernel_launch = prepared(config)
        of_prefix = None if prefix_config is None else prepared(prefix_config)
    sms = record.num_sms, record.leaves_sms
    return DecodeLaunch(
        *(problem, config, reason, kernel_launch, library, *sms, short, appends),
        *(prefix_config, of_prefix),
    )


def _is_aligned(out: Tensor) -> bool:
    if out.data_ptr() % ALIGNED_BYTES:
        return False
    return out.is_contiguous() or not any(step % _ALIGNED for step in out.stride()[:-1])


def _converted(
    problem: DecodeProblem, tensors: DecodeTensors, copied: tuple[str, ...]
) -> DecodeTensors:
    """The tensors as the kernel reads them: aligned copies, sinks in float32."""
    changed = {
        name: getattr(tensors, name).clone(memory_format=torch.contiguous_format) for name in copied
    }
    if "sinks" in problem.given:
        changed["sinks"] = tensors.sinks.float()
    return tensors._replace(**changed)
