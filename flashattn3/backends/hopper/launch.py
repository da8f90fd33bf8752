"""Prepares a plan's calls of the compiled operators: aligned copies, permuted V, the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from ...call.dtypes import EIGHT_BIT, SIXTEEN_BIT
from ...call.metadata import ALIGNMENT_BYTES
from ...call.operands import NUM_TENSORS, Tensors, as_scaled, tensors_of_mask
from ...call.problem import Problem
from ...call.tensor_fields import FOUND
from ...masks.block_lists import BlockLists, turns_of
from .. import packed
from ..base import PassOperators, ScaledOperators
from ..conversions import with_dense_rows
from .kernel_configs import BACKWARD_CONFIGS, FORWARD_CONFIGS, BackwardConfig, ForwardConfig
from .launch_record import record_of

if TYPE_CHECKING:
    from ..device import DeviceInfo
    from .backend import HopperLaunch
    from .library import Library

OUT_ALIGNMENT = ALIGNMENT_BYTES // 2  # in 16-bit elements: output rows are 16-byte aligned


class Launch(NamedTuple):
    """What prepare_forward or prepare_backward returns.

    handle: the prepared launch; the operators take it with the tensors of a call.
    num_ctas, num_threads, shared_memory_bytes: of the main kernel.
    workspace_bytes: device memory that each launch allocates besides its results.
    """

    handle: Tensor
    num_ctas: int
    num_threads: int
    shared_memory_bytes: int
    workspace_bytes: int


def forward_launch(
    problem: Problem, device: DeviceInfo, config: ForwardConfig, library: Library
) -> Launch:
    """Check the problem's numbers in the library, once. RuntimeError if the kernel refuses it."""
    index = FORWARD_CONFIGS.index(config)
    return _prepared(library.prepare_forward, index, problem, device)


def backward_launch(
    problem: Problem, device: DeviceInfo, config: BackwardConfig, library: Library
) -> Launch:
    """The same for the gradient."""
    index = BACKWARD_CONFIGS.index(config)
    return _prepared(library.prepare_backward, index, problem, device)


def _prepared(operator: Callable, index: int, problem: Problem, device: DeviceInfo) -> Launch:
    """The plan outlives the call, so the handle is a plain tensor even under FakeTensorMode."""
    with _disable_current_modes():
        return Launch(*operator(index, *record_of(problem, device)))


def fits_tma(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA supports these strides, of all axes but the last.

    It does not support a stride of 0 (an expanded tensor): its descriptors need distinct rows.
    """
    aligned = ALIGNMENT_BYTES // itemsize
    return all(
        size <= 1 or (step and step % aligned == 0)
        for size, step in zip(sizes, strides, strict=True)
    )


def prepare_forward(
    launch: HopperLaunch, library: Library
) -> Callable[[Tensors], tuple[Tensor, ...]]:
    """Build a function of the tensors that returns (out, lse), or (out, lse, max_logit)."""
    problem = launch.problem
    run = (_with_8_bits if problem.dtype in EIGHT_BIT else _with_16_bits)(launch, library)
    if problem.head_dim_v % OUT_ALIGNMENT == 0:
        return run

    def trimmed(tensors: Tensors) -> tuple[Tensor, ...]:
        out, *others = run(tensors)
        return out[..., : problem.head_dim_v].contiguous(), *others

    return trimmed


def prepare_packed(launch: HopperLaunch) -> Callable[[Tensors], tuple[Tensor, ...]]:
    """The same on a kernel of cached calls."""
    copied = launch.config.copied
    run = packed.prepare_packed(launch.problem, launch.config.packed.decode)
    if not copied:
        return run
    return lambda tensors: run(Tensors(*_copied(copied, *tensors[:3]), *tensors[3:]))


def _with_16_bits(launch: HopperLaunch, library: Library) -> Callable[[Tensors], tuple]:
    handle, copied = launch.config.launch.handle, launch.config.copied
    if launch.problem.score_options:
        operator = _with_scores(launch.problem, library, handle)
        return lambda tensors: operator(tensors, *_copied(copied, *tensors[:3]), None, None, None)
    operator = library.forward
    if not copied:
        return lambda tensors: operator(handle, *tensors[:NUM_TENSORS], None, None, None)
    return lambda tensors: operator(
        handle, *_copied(copied, *tensors[:3]), *tensors[3:NUM_TENSORS], None, None, None
    )


def _with_scores(problem: Problem, library: Library, handle: Tensor) -> Callable[..., tuple]:
    """A function of the tensors, and of q, k, v and their descales as the kernel reads them, for a
    call with a mask, or one that changes scores or asks for the largest one."""
    operator, largest = library.forward_scores, problem.return_max_logit
    masked = problem.mask is not None

    def run(tensors: Tensors, q, k, v, *descales) -> tuple[Tensor, ...]:
        of_call = q, k, v, *tensors[3:NUM_TENSORS], *descales, *_scores_of(tensors)
        if masked:
            return operator(handle, *of_call, None, *_dense(tensors_of_mask(tensors)[:3]))
        if not largest:
            return operator(handle, *of_call)
        max_logit = _no_logit(q, problem.num_heads_q)
        return *operator(handle, *of_call, max_logit), max_logit

    return run


def _no_logit(q: Tensor, num_heads: int) -> Tensor:
    """Return max_logit before a kernel has seen a score: -inf for each head."""
    return q.new_full((num_heads,), -inf, dtype=torch.float32)


def _scores_of(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """The tensors that change scores, as kernels read them."""
    bias = tensors.bias
    return tensors.sinks, tensors.alibi_slopes, None if bias is None else _in_whole_rows(bias)


def _dense(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)


def prepare_keep(launch: HopperLaunch, library: Library) -> Callable[..., PassOperators] | None:
    """See ``Launch.keep``. None where a pass needs a copy first, as decode kernels do of 16-bit
    sinks, or another backend, where no kernel runs or the sequences have a used length, of varlen
    calls with split_tokens, which have a page table, and of deterministic calls with a mask, whose
    turns follow the values of the lists."""
    problem, config = launch.problem, launch.config
    aligned = problem.head_dim % OUT_ALIGNMENT == problem.head_dim_v % OUT_ALIGNMENT == 0
    shortened = problem.q.has_seqused or problem.k.has_seqused
    paged = problem.varlen and problem.split_tokens
    if not aligned or problem.copied or config.copied or shortened or paged:
        return None
    if _has_no_scores(problem):
        return None
    if problem.dtype in EIGHT_BIT:
        return _keep_scaled(launch, library)
    if config.gradient_config is None:
        return None
    copies_sinks = config.packed is not None and problem.sinks_dtype in SIXTEEN_BIT
    if library.keep_passes is None or copies_sinks:
        return None
    if problem.mask is not None and problem.deterministic:
        return None
    backward = backward_launch(problem, launch.device, config.gradient_config, library)
    decode = config.packed and config.packed.kernel_launch.handle
    handles = config.launch.handle, backward.handle, decode

    def keep(number: int, bhsd: bool, *tensors: Tensor | None) -> PassOperators:
        # A copy would not follow what is written to a mask, so none is kept.
        if all(x is None or x.is_contiguous() for x in tensors[len(FOUND) :]):
            library.keep_passes(number, bhsd, *handles, *tensors)
        forwards = library.forward_kept, library.forward_kept_scores
        if problem.return_max_logit:
            forwards = (_with_max_logit(forwards[1], heads=1 if bhsd else 2),) * 2
        backwards = library.backward_kept, library.backward_kept_scores
        return PassOperators(library.namespace, *forwards, *backwards, library.forget_passes)

    return keep


def _keep_scaled(launch: HopperLaunch, library: Library) -> Callable[..., ScaledOperators] | None:
    """The same of 8 bits: of dense calls without a mean of k, whose v is permuted as the kernel
    reads it."""
    problem, config = launch.problem, launch.config
    converted = not problem.v.permuted or problem.k.has_mean
    if library.keep_scaled is None or converted or problem.varlen or problem.score_options:
        return None
    operators = ScaledOperators(library.scaled_kept)

    def keep(number: int, returns_lse: bool, *tensors: Tensor | None) -> ScaledOperators:
        is_padded = tensors[2].shape[-2] < config.kernel_config.head_dim
        if not is_padded and all(x is not None for x in tensors):
            library.keep_scaled(number, returns_lse, config.launch.handle, *tensors)
        return operators

    return keep


def _with_max_logit(operator: Callable, heads: int) -> Callable[..., tuple]:
    """The operator that finds a forward's launch, of calls that ask for the largest score. heads:
    their axis in q."""

    def run(
        number: int, returns_lse: bool, q: Tensor, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        max_logit = _no_logit(q, q.shape[heads])
        return *operator(number, returns_lse, q, *others, max_logit=max_logit), max_logit

    return run


def _with_8_bits(launch: HopperLaunch, library: Library) -> Callable[[Tensors], tuple]:
    operator, handle, copied = library.forward, launch.config.launch.handle, launch.config.copied
    with_layout, changes = _v_for_kernel(launch, library), bool(launch.problem.score_options)
    with_scores = _with_scores(launch.problem, library, handle)

    def forward(tensors: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v = map(as_scaled, tensors[:3])
        data = q.data, k.data, with_layout(v.data, tensors.cu_seqlens_k)
        if copied:
            data = _copied(copied, *data)
        descales = q.descale, k.descale, v.descale
        if changes:
            return with_scores(tensors, *data, *descales)
        return operator(handle, *data, *tensors[3:NUM_TENSORS], *descales)

    return forward


def prepare_backward(
    launch: HopperLaunch, library: Library
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Build a function of dout, dlse, out, lse and the tensors that returns (dq, dk, dv), and of
    calls that change scores dsinks and dbias too."""
    problem, copied = launch.problem, launch.config.copied
    changes, masked = bool(problem.score_options), problem.mask is not None
    operator = library.backward_scores if changes else library.backward
    sparse = bool(problem.copied)
    gradient_config = launch.config.gradient_config
    handle = backward_launch(problem, launch.device, gradient_config, library).handle
    whole_rows = problem.head_dim % OUT_ALIGNMENT == problem.head_dim_v % OUT_ALIGNMENT == 0
    columns = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    no_scores = _has_no_scores(problem)

    def run(dout, dlse, out, lse, tensors, *with_dbias):
        if sparse:
            tensors = with_dense_rows(problem, tensors)
        scores = (*_scores_of(tensors), any(with_dbias)) if changes else ()
        if masked:
            scores += _lists_of_keys(problem, tensors)
        if copied:
            tensors = (*_copied(copied, *tensors[:3]), *tensors[3:])
        dout, out, lse = _in_whole_rows(dout), _in_whole_rows(out), lse.contiguous()
        of_call = handle, dout, dlse, out, lse, *tensors[:NUM_TENSORS]
        dq, dk, dv, *others = operator(*of_call, *scores)
        results, (dsinks, dbias) = (dq, dk, dv), others or (None, None)
        if dsinks is not None and no_scores:
            dsinks = _gradient_without_scores(dsinks, dlse, lse)
        if dbias is not None:
            dbias = dbias.zero_() if no_scores else dbias
            dbias = dbias[..., : problem.seqlen_k].contiguous()
        if not whole_rows:
            of = zip(results, columns, strict=True)
            results = tuple(x[..., :d].contiguous() for x, d in of)
        return (*results, dsinks, dbias) if with_dbias else results

    return run


def _lists_of_keys(problem: Problem, tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Those of the mask, and the order of additions to a block of queries if it is that of each
    run."""
    lists = _dense(tensors_of_mask(tensors)[3:])
    return *lists, turns_of(BlockLists(*lists)) if problem.deterministic else None


def _has_no_scores(problem: Problem) -> bool:
    """Whether a problem has no queries or no keys, so that no kernel runs."""
    sizes = problem.batch, problem.seqlen_q, problem.total_q, problem.seqlen_k, problem.total_k
    return 0 in sizes


def _gradient_without_scores(dsinks: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """That of sinks which are the lse of all rows, if there are rows."""
    if dlse is None:
        return dsinks.zero_()
    of_rows = dlse.where(lse.isfinite(), 0).transpose(-2, 0).flatten(1)
    return of_rows.sum(-1).to(dsinks.dtype)


def _v_for_kernel(
    launch: HopperLaunch, library: Library
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A function of (v, cu_seqlens_k) that gives 8-bit V its layout."""
    problem, permute_v = launch.problem, library.permute_v
    permuted, seqlen_k = problem.v.permuted, problem.seqlen_k
    columns = launch.config.kernel_config.head_dim

    def with_layout(v: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
        if not permuted:
            v = permute_v(v, cu_seqlens_k, seqlen_k)
        if v.shape[-2] < columns:  # pad to the kernel's head dim
            missing = columns - v.shape[-2]
            v = pad(v.view(torch.uint8), (0, 0, 0, missing)).view(v.dtype)
        return v

    return with_layout


def _copied(names: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    named = (("q", q), ("k", k), ("v", v))
    return tuple(_aligned_copy(tensor) if name in names else tensor for name, tensor in named)


def _in_whole_rows(tensor: Tensor) -> Tensor:
    """dout, out or bias (16 bits) itself if the kernels can read it, else an aligned copy."""
    fits = tensor.is_contiguous() and tensor.shape[-1] % OUT_ALIGNMENT == 0
    if not fits:
        *strides, last = tensor.stride()
        fits = last == 1 and fits_tma(tensor.shape[:-1], strides, tensor.element_size())
    return tensor if fits and tensor.data_ptr() % ALIGNMENT_BYTES == 0 else _aligned_copy(tensor)


def _aligned_copy(tensor: Tensor) -> Tensor:
    """Copy to a tensor whose rows begin at multiples of 16 bytes."""
    head_dim, aligned = tensor.shape[-1], ALIGNMENT_BYTES // tensor.element_size()
    rows = tensor.new_empty((*tensor.shape[:-1], ceil(head_dim / aligned) * aligned))
    return rows[..., :head_dim].copy_(tensor)
