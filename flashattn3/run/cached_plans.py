"""From the tensors of a cached call to its plan, and the run of the plan.

A call is checked once for its metadata; the plan under it is cached by the problem, which has no
size that grows from step to step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from ..backends.device import describe_device
from ..backends.registry import BACKENDS
from ..call import cached as problems
from ..call.cached import (
    AppendOptions,
    AppendTensors,
    CombineProblem,
    DecodeOptions,
    DecodeTensors,
    Lengths,
    lse_shape,
    query_sizes,
)
from ..call.cached_checks import check_append, check_combine, check_decode, check_tensors
from ..call.cached_value_checks import check_append_values, check_decode_values
from ..call.metadata import Metadata, key_of, metadata_of, metadata_under
from ..call.scheduler_metadata import hash_of_options
from ..call.value_checks import is_checked
from ..errors import expect
from ..modes import USUAL, unseen_by_modes
from .launches import cached_launch_cache
from .operator_rules import recorded, warn_of_reference
from .planner import Plan, choose


@lru_cache(maxsize=4096)
def plan_of(problem) -> Plan:
    """The backend of a problem and its tiles."""
    plan = choose(problem, describe_device(problem.device), BACKENDS)
    warn_of_reference(plan)
    return plan


class CheckedCall(NamedTuple):
    """A cached call whose metadata was checked: its plan, and shapes and dtype of its results.

    lse_shape: None where lse is neither asked for nor needed by the launch.
    copied: which tensors are copied first, those of COPIED whose last stride is not 1.
    """

    plan: Plan
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    lse_dtype: torch.dtype
    copied: tuple[str, ...]


COPIED = "q", "sinks", "alibi_slopes"


# The length as an int changes in every step: these caches know only whether there is one.
@lru_cache(maxsize=4096)
def _checked_decode(key: tuple, options: DecodeOptions, lengths: Lengths) -> CheckedCall:
    found = metadata_under(key)
    check_decode(found, options, lengths)
    problem = problems.describe_decode(found, options, lengths.max_seqlen_q)
    plan = plan_of(problem)
    tensors = DecodeTensors(*found)
    q, _, v_cache = tensors[:3]
    _, _, seqlen_q = query_sizes(tensors, lengths.max_seqlen_q)
    if plan.launch.keep is not None and not is_checked(q.device):
        options_hash = options_hash_of(problem, options)
        cached_launch_cache(options).keep(plan.launch.keep, seqlen_q, options_hash)
    of_out, of_lse = result_shapes(q, v_cache)
    wanted = options.return_lse or plan.launch.needs_lse
    of_lse = of_lse if wanted else None
    copied = _not_dense(tensors, COPIED)
    return CheckedCall(plan, of_out, of_lse, lse_dtype(q.dtype), copied)


def _not_dense(tensors: DecodeTensors | AppendTensors, names: tuple[str, ...]) -> tuple[str, ...]:
    given = ((name, getattr(tensors, name)) for name in names)
    return tuple(name for name, x in given if x is not None and not x.rows_are_dense)


def _with_copies(tensors: DecodeTensors | AppendTensors, copied: tuple[str, ...]):
    return tensors._replace(**{name: getattr(tensors, name).contiguous() for name in copied})


class CheckedAppend(NamedTuple):
    """An append whose metadata was checked: its plan, and which tensors are copied first: those of
    k, v and q whose last stride is not 1; both rotary tables if they have not one stride."""

    plan: Plan
    copied: tuple[str, ...]


@lru_cache(maxsize=4096)
def _checked_append(key: tuple, options: AppendOptions, lengths: Lengths) -> CheckedAppend:
    found = metadata_under(key)
    check_append(found, options, lengths)
    tensors = AppendTensors(*found)
    copied = _not_dense(tensors, ("k", "v", "q"))
    cos, sin = tensors.rotary_cos, tensors.rotary_sin
    if cos is not None and cos.stride != sin.stride:
        copied += ("rotary_cos", "rotary_sin")
    return CheckedAppend(plan_of(problems.describe_append(found, options)), copied)


def _constant(lengths: Lengths, function: str) -> Lengths:
    if lengths.seqlen is None:
        return lengths
    expect(lengths.seqlen >= 0, function, "cache_seqlens", ">= 0", lengths.seqlen)
    return lengths._replace(seqlen=0)


@lru_cache(maxsize=4096)
def options_hash_of(problem: problems.DecodeProblem, options: DecodeOptions) -> int:
    """What the scheduler metadata of a call must hold."""
    heads = problem.num_heads_q, problem.num_heads_kv
    sizes = (*heads, problem.head_dim, problem.head_dim_v, problem.page_size)
    return hash_of_options(sizes, problem.dtype, options)


def check_values_before_append(
    checked: CheckedCall,
    tensors: DecodeTensors,
    lengths: Lengths,
    options: DecodeOptions,
    appended: AppendTensors,
    how: AppendOptions,
) -> None:
    """Raise for wrong values of the attention where values are checked, after the append's own
    metadata."""
    if is_checked(tensors.q.device):
        with unseen_by_modes():
            _checked_append_call(appended, lengths, how)
            check_values(checked, tensors, lengths, options)


def checked_call(tensors: DecodeTensors, lengths: Lengths, options: DecodeOptions) -> CheckedCall:
    """The checks and the plan of a call that nothing watches."""
    key = checked_key_of(options.function, 3, tensors)
    return _checked_decode(key, options, _constant(lengths, options.function))


def checked_key_of(function: str, required: int, tensors: DecodeTensors | AppendTensors) -> tuple:
    """``key_of``; raises what ``check_tensors`` has to refuse, and asks it only then."""
    try:
        key = key_of(tensors)
        refused = tensors.v_cache is None or not USUAL.issuperset(map(type, tensors))
        refused = refused or (torch.is_grad_enabled() and _need_gradient(tensors))
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without strides
        refused = True
    if refused:
        check_tensors(function, required, **tensors._asdict())
        return key_of(tensors)
    return key


def _need_gradient(tensors: DecodeTensors | AppendTensors) -> bool:
    return bool([x for x in tensors if x is not None and x.requires_grad])


def result_shapes(
    q: Tensor | Metadata, v_cache: Tensor | Metadata
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse."""
    return (*q.shape[:-1], v_cache.shape[-1]), lse_shape(q)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def check_values(
    checked: CheckedCall, tensors: DecodeTensors, lengths: Lengths, options: DecodeOptions
) -> int:
    """Raise for wrong values where they are checked. Returns the hash that metadata must hold."""
    options_hash = 0
    if tensors.scheduler_metadata is not None:
        options_hash = options_hash_of(checked.plan.problem, options)
    if is_checked(tensors.q.device):
        check_decode_values(tensors, options, lengths, options_hash)
    return options_hash


def run_checked(
    checked: CheckedCall,
    out: Tensor | None,
    lse: Tensor | None,
    tensors: DecodeTensors,
    lengths: Lengths,
    options: DecodeOptions,
    prefix: tuple[Tensor, Tensor | None, int] | None = None,
) -> Tensor:
    """Run a call without the dispatcher and return out, new if None. checked: of ``checked_call``,
    which says whether lse may be None. prefix: of a launch that has ``after_prefix``, what that
    takes."""
    options_hash = check_values(checked, tensors, lengths, options)
    if checked.copied:
        tensors = _with_copies(tensors, checked.copied)
    launch = checked.plan.launch
    decode = launch.decode if prefix is None else launch.after_prefix(*prefix)
    if profiler._is_profiler_enabled:
        decode = recorded(checked.plan, decode)
    return decode(out, lse, tensors, lengths, options_hash)


def _checked_append_call(
    tensors: AppendTensors, lengths: Lengths, options: AppendOptions
) -> CheckedAppend:
    key = checked_key_of(options.function, 4, tensors)
    return _checked_append(key, options, _constant(lengths, options.function))


def append_of(tensors: AppendTensors, lengths: Lengths, options: AppendOptions) -> None:
    plan, copied = _checked_append_call(tensors, lengths, options)
    if is_checked(tensors.k.device):
        check_append_values(tensors, options.function, lengths)
    if copied:
        tensors = _with_copies(tensors, copied)
    append = plan.launch.append
    if profiler._is_profiler_enabled:
        append = recorded(plan, append, "" if options.function == "append_kvcache" else " append")
    append(tensors, lengths)


def combine_of(out, lse, out_partial, lse_partial, backend, function: str) -> None:
    parts = metadata_of(out_partial), metadata_of(lse_partial)
    check_combine(function, *parts, "out.dtype", out.dtype)
    dim, dtype = out_partial.shape[-1], out_partial.dtype
    problem = CombineProblem(
        function, dtype, out.dtype, out_partial.device, dim, dim, backend or None
    )
    plan = plan_of(problem)
    combine = plan.launch.combine
    if profiler._is_profiler_enabled:
        combine = recorded(plan, combine)
    combine(out, lse, out_partial, lse_partial)
