"""Prepares calls of the compiled kernels of cached calls, for these and for packed forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...call.cache_descales import OF_KEYS
from ...call.cached import DecodeTensors, new_out
from ...call.dtypes import EIGHT_BIT, NAMES, SIXTEEN_BIT
from ..base import CachedOperators, score_factor_reason
from .config_types import DECODE_TILE_ROWS, MAX_HEAD_DIM
from .kernel_configs import (
    CACHED_CONFIGS,
    DECODE_CONFIGS,
    DecodeConfig,
    ForwardConfig,
    KernelConfig,
    select_byte_decode_config,
    select_cached_forward_config,
    select_decode_config,
)
from .launch_record import decode_record_of

if TYPE_CHECKING:
    from ...call.cached import AppendProblem, DecodeProblem, Lengths
    from ..device import DeviceInfo
    from .library import Library

ALIGNED_BYTES = 16  # which a thread copies at once
ALIGNED = ALIGNED_BYTES // 2  # elements of 16 bits
# Packed rows up to which a cached call runs on a decode kernel, which reads K and V once for each
# DECODE_TILE_ROWS rows, of all heads of a KV head. Reading them takes longer than multiplying up to
# about 256 rows: 128 keys of dim 128 are 4850 cycles of an SM's share of an H100's memory bandwidth
# and 1024 of its tensor cores for each 64 rows.
DECODE_ROWS = 192
# Packed rows of all sequences up to which a prefix runs on a decode kernel, which reads it once for
# each DECODE_TILE_ROWS rows, from L2 but for the first time. A forward kernel multiplies faster, on
# few SMs where there are few rows, and none reads the sequences' own keys meanwhile. On an H200, 8k
# keys before 512, the time of two calls times 0.64 with 256 rows, 1.03 to 1.1 with 1024.
PREFIX_ROWS = 512
# Bytes that K and V of one KV head may take where a cache of 8 bits is widened for a forward
# kernel. The workspace has as many heads as fit into kWidenedBytes (csrc/launch/widen_cache.h), at
# least one.
MOST_WIDENED_BYTES = 1 << 31
_DESCALES = frozenset(("q_descale", "k_descale", "v_descale"))
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
                if q.ndim == 4 and q.stride(0) != q.shape[1] * q.stride(1):
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

        def keep(number: int, seqlen_q: int, options_hash: int) -> CachedOperators:
            library.keep_decode(number, self.kernel_launch.handle, index, seqlen_q, options_hash)
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
        return {
            "tile": f"up to {rows} packed rows x {keys} keys of a warp",
            "num_stages": 1,
            "warpgroups": "8 warps, each loads and multiplies",
            "parts": "by the keys of each sequence",
        }


def _stages_of(config: DecodeConfig, leaves_sms: bool) -> object:
    """The stages in use, which may depend on whether two CTAs share an SM in a call of its size."""
    alone, beside = config.num_stages, config.num_stages_beside
    if config.num_consumers != 1 or leaves_sms or alone == beside:
        return alone
    return f"{beside} where two CTAs share an SM, else {alone}"


def unfit_reason(problem: DecodeProblem) -> str | None:
    """Why no decode kernel takes the problem, or None."""
    if problem.dtype not in SIXTEEN_BIT:
        return f"computes in float16 and bfloat16, not in {problem.dtype}"
    if reads_bytes(problem):
        if problem.split_tokens:
            return "cuts caches of 8 bits into equal shares of all SMs, not into spans"
    else:
        if problem.cache_dtype != problem.dtype:
            return f"reads caches of q's dtype, {problem.dtype}, not {problem.cache_dtype}"
        if (reason := descale_reason(problem)) is not None:
            return reason
    aligned = ALIGNED_BYTES // problem.cache_dtype.itemsize
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size > MAX_HEAD_DIM or size % aligned:
            limits = f"multiples of {aligned} up to {MAX_HEAD_DIM}"
            return f"takes head dims that are {limits}, {name} is {size}"
    caches = sorted(problem.misaligned - {"q"})
    if caches and not problem.split_tokens:  # with it addresses change no bit: they are copied
        return f"copies 16 bytes at once: rows of {caches[0]} begin at other addresses"
    if "alibi_slopes" in problem.given:
        return "has no kernel of cached calls with alibi_slopes"
    if problem.tree_words and (reason := tree_reason(problem)) is not None:
        return reason
    if problem.num_splits > 1:
        parts = "cuts the batch into equal shares (num_splits=0) or no sequence (1)"
        return f"{parts}, num_splits is {problem.num_splits}"
    return score_factor_reason(problem, 100, torch.float32)


def tree_reason(problem: DecodeProblem) -> str | None:
    """Why no kernel reads the tree_mask of a problem that has one, or None."""
    if problem.split_tokens:
        return "has no kernel with spans of keys and a tree_mask"
    if reads_bytes(problem):
        return "has no kernel for caches of 8 bits with a tree_mask"
    if config_of(problem) is None:
        most = max(config.head_dim for config in DECODE_CONFIGS if config.tree)
        return f"takes a tree_mask up to head_dim {most}"
    return None


def prefix_config_of(problem: DecodeProblem, config: KernelConfig) -> DecodeConfig | None:
    """The decode kernel that reads a prefix in front of all sequences of a problem of the config.
    None: there is none, or the rows of a sequence are so many that a forward kernel takes them."""
    kind = _kind(problem)
    if config.kind == "forward" or reads_bytes(problem) or any(kind) or not problem.page_size:
        return None
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return select_decode_config(NAMES[problem.dtype], head_dim, prefix=True)


def reads_bytes(problem: DecodeProblem) -> bool:
    """Whether the cache has 8 bits."""
    return problem.cache_dtype in EIGHT_BIT


def descale_reason(problem: DecodeProblem | AppendProblem) -> str | None:
    """Why no kernel reads the descales of a problem's caches, or None."""
    for name in ("k_descale", "v_descale"):
        kind = getattr(problem, name)
        if kind in OF_KEYS:
            return f"takes a descale for each head of a sequence, {name} has those of {kind}"
    return None


def config_of(problem: DecodeProblem) -> DecodeConfig | None:
    """The decode kernel of a problem. None: the problem is unfit."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    if reads_bytes(problem):
        return select_byte_decode_config(NAMES[problem.dtype], head_dim)
    return select_decode_config(NAMES[problem.dtype], head_dim, *_kind(problem))


def _kind(problem: DecodeProblem) -> tuple[bool, bool]:
    """Whether the kernels of a problem have spans of keys, and whether they read a tree_mask."""
    return problem.split_tokens is not None, problem.tree_words > 0


def forward_config_of(problem: DecodeProblem) -> ForwardConfig | None:
    """The cached forward kernel of a problem that has neither unfit_reason nor forward_reason; with
    split_tokens it gives a row the bits of the decode kernel. None: there is none."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return select_cached_forward_config(NAMES[problem.dtype], head_dim, *_kind(problem))


def forward_reason(problem: DecodeProblem) -> str | None:
    """Why a problem that is not unfit runs on a decode kernel, not on a forward kernel; or None."""
    if problem.rows <= DECODE_ROWS:
        return f"up to {DECODE_ROWS} packed rows"
    if forward_config_of(problem) is None:
        return f"no forward kernel has spans of keys at head dim {problem.head_dim}"
    if reads_bytes(problem):
        return _widening_reason(problem)
    given = sorted(problem.given & _DESCALES)
    if given:
        return f"forward kernels take no {given[0]}"
    expanded = sorted(problem.expanded - {"q"})
    if expanded:
        return f"forward kernels need strides that are not 0: {expanded[0]} is expanded"
    return None


def _widening_reason(problem: DecodeProblem) -> str | None:
    """Why a cache of 8 bits is not widened to 16 for a forward kernel, or None."""
    if "q_descale" in problem.given:
        return "forward kernels take no q_descale"
    num_bytes = problem.cached_tokens * (problem.head_dim + problem.head_dim_v) * 2
    if num_bytes > MOST_WIDENED_BYTES:
        most = f"{MOST_WIDENED_BYTES >> 20} MiB"
        return (
            f"forward kernels read a cache of 8 bits widened to 16, K and V of a head in {most}: "
            f"those of {problem.cached_tokens} tokens take {num_bytes >> 20} MiB"
        )
    return None


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
    if out.data_ptr() % (2 * ALIGNED):
        return False
    return out.is_contiguous() or not any(step % ALIGNED for step in out.stride()[:-1])


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
