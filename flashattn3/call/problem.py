"""The problem of a call: its arguments, checked and normalised, without tensor data.

``check`` and ``describe`` raise every error that metadata shows. They read only metadata (shapes,
dtypes, strides, devices), so they never synchronize with a GPU; ``check`` also runs on fake tensors
with symbolic sizes. ``describe`` returns a ``Problem``, which is hashable and holds only plain
values.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..errors import expect
from ..modes import refuse_jit_trace
from . import permuted_v
from .descales import Descales, block_of, check_scaled, descales_of
from .dtypes import DTYPES, EIGHT_BIT, out_dtype, v_dtype
from .fields import CALL, Description, Options, ScoreScale, expect_shared_shift, score_scale_of
from .mask_tensors import BlockMask, check_alone, check_mask, mask_of
from .metadata import Metadata
from .operands import (
    SIDES,
    Scaled,
    Tensors,
    as_scaled,
    changes_scores,
    data_of,
    lengths_of_k,
    lengths_of_q,
    scores_of,
    tensors_of_mask,
)
from .scores import Bias, bias_of, check_scores
from .tensor_checks import check_device, check_int32


class Operand(NamedTuple):
    """q, k or v of a problem.

    stride: (batch, sequence, head) in elements, as a kernel that reads rows receives it; the batch
        stride is 0 for varlen.
    descales: of 8 bits; None means descale 1.
    permuted: v is permuted, and has ``stride`` once it is in rows.
    has_mean: k lacks a mean, which lse does not have then.
    has_seqused: whether only some rows of each sequence count.
    """

    stride: tuple[int, int, int]
    descales: Descales | None = None
    permuted: bool = False
    has_mean: bool = False
    has_seqused: bool = False


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CallProblem:
    """The fields that the problems of all kinds of calls share: dense and varlen calls
    (``Problem``), cached calls, appends and combinations (cached.py). backend: None: any.

    Bases have no methods of their own, because writing those takes 0.5 ms of the import; so records
    that neither inherit nor cache are NamedTuples.
    """

    function: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    head_dim: int
    head_dim_v: int
    backend: str | None


@dataclass(frozen=True, init=False, repr=False, eq=False)
class AttentionProblem(CallProblem):
    """The same of calls that compute scores, with a cache or without."""

    num_heads_q: int
    num_heads_kv: int
    score_scale: ScoreScale

    @cached_property
    def qhead_per_kvhead(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv


# The options that backends read, by their names in ``Options``.
_Asked = make_dataclass("_Asked", CALL.to_backend, frozen=True, init=False, repr=False, eq=False)


@dataclass(frozen=True)
class Problem(_Asked, AttentionProblem):
    """One attention call, normalised, with the options that a field of call/fields.py passes on to
    the backends. Lengths in tokens, strides in elements.

    seqlen_q, seqlen_k: for varlen the upper bounds, max_seqlen_q and max_seqlen_k.
    window_left, window_right: keys visible to the left and right of the bottom-right aligned
        diagonal, inclusive; -1 means open. ``causal`` becomes window_right = 0, and a window that
        reaches every key becomes open.
    copied: names of tensors whose last stride is not 1; they are copied before the launch.
    misaligned: names of the other tensors whose address is not a multiple of 16 bytes.
    sinks_dtype: None without sinks.
    slopes: "heads" where every head has a slope, "batch" where each sequence has its own; None
        without ALiBi.
    bias: None without one.
    mask: None without a ``masks.Mask``.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    copied: tuple[str, ...]
    misaligned: tuple[str, ...]
    q: Operand
    k: Operand
    v: Operand
    varlen: bool
    sinks_dtype: torch.dtype | None = None
    slopes: str | None = None
    bias: Bias | None = None
    mask: BlockMask | None = None

    @property
    def masked(self) -> bool:
        return self.window_left >= 0 or self.window_right >= 0 or self.mask is not None

    @property
    def score_options(self) -> tuple[str, ...]:
        """Names of the call's arguments of which a score, or what is known of scores, depends
        besides scale and cap."""
        given = {
            "sinks": self.sinks_dtype,
            "alibi_slopes": self.slopes,
            "bias": self.bias,
            "mask": self.mask,
            "return_max_logit": self.return_max_logit or None,
        }
        return tuple(name for name, value in given.items() if value is not None)


def check(tensors: Tensors | tuple[Metadata | Scaled | None, ...], options: Options) -> None:
    """Raise for every invalid combination of shapes, dtypes, devices and options.

    tensors: the tensors themselves or their metadata, in the order of ``Tensors``.
    """
    tensors, function = Tensors(*tensors), options.function
    refuse_jit_trace(function)
    q, k, v = in_rows(function, tensors)
    varlen = tensors.cu_seqlens_q is not None
    _check_qkv(function, q, k, v, varlen)
    lengths = {"q": lengths_of_q(tensors), "k": lengths_of_k(tensors)}
    for side, (cu_seqlens, _) in lengths.items():
        _check_index(function, f"cu_seqlens_{side}", cu_seqlens, q.device, required=varlen)
    if varlen:
        entries = tensors.cu_seqlens_q.shape[0]
        expect(entries >= 1, function, "cu_seqlens_q.shape[0]", "batch + 1 >= 1", entries)
        got = tensors.cu_seqlens_k.shape[0]
        expect(got == entries, function, "cu_seqlens_k.shape[0]", "{} (batch + 1)", got, entries)
    batch = entries - 1 if varlen else q.shape[0]
    for side, (_, seqused) in lengths.items():
        name = f"seqused_{side}"
        _check_index(function, name, seqused, q.device, required=False)
        if seqused is not None:
            expect(varlen, function, name, "None without cu_seqlens", "a tensor")
            got = seqused.shape[0]
            expect(got == batch, function, f"{name}.shape[0]", "{} (batch)", got, batch)
    sides = {name: as_scaled(getattr(tensors, name)) for name in SIDES}
    if sides["k"].mean is not None:
        expect_shared_shift(options, tensors.sinks, "where k has a mean")
    check_scaled(function, sides, options, batch, varlen)
    if changes_scores(tensors):
        check_scores(function, q, k.shape[-3], batch, *scores_of(tensors), varlen)
        if tensors.mask_entries_q is not None:
            check_alone(function, options, tensors.bias, varlen)
            check_mask(function, q, k.shape[-3], batch, tensors_of_mask(tensors))
    CALL.check(options)


def in_rows(function: str, tensors: Tensors) -> tuple[Metadata, Metadata, Metadata]:
    """q, k and v, or their metadata; of a permuted v the metadata that it has in rows."""
    q, k, v, _, cu_seqlens_k = tensors[:5]
    if type(v) is Scaled and v.layout == "permuted" and v.data.dtype in EIGHT_BIT:
        return data_of(q), data_of(k), _unpermuted(function, data_of(k), v, cu_seqlens_k)
    return data_of(q), data_of(k), data_of(v)


def _unpermuted(function: str, k: Metadata, v: Scaled, edges: Metadata | None) -> Metadata:
    """Metadata of permuted v after it is unpermuted."""
    shape, head_dim, rank = v.data.shape, v.head_dim, len(k.shape) + 1
    run = permuted_v.CORE_ROW_KEYS
    axes = f"{'(batch, ' if rank == 5 else '('}heads, keys / {run}, columns, {run})"
    expect(len(shape) == rank, function, "v.shape", axes, tuple(shape))
    *lead, heads, groups, columns, width = shape
    expect(width == run, function, "v.shape[-1]", run, width)
    wanted = f"at least {head_dim} (v's head_dim)"
    expect(columns >= head_dim, function, "v.shape[-2]", wanted, columns)
    seqlen = k.shape[-3]
    expected = permuted_v.num_permuted_keys(seqlen, edges) // run
    expect(groups == expected, function, "v.shape[-3]", f"{expected} (k's seqlen)", groups)
    stride = (seqlen * heads * head_dim, heads * head_dim, head_dim, 1)
    of = v.data
    return Metadata((*lead, seqlen, heads, head_dim), stride[-rank + 1 :], of.dtype, of.device)


def _check_qkv(function: str, q: Metadata, k: Metadata, v: Metadata, varlen: bool) -> None:
    layout = "(total, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect(
            len(tensor.shape) == 3 + (not varlen),
            function,
            f"{name}.shape",
            layout,
            tuple(tensor.shape),
        )
    expect(q.dtype in DTYPES, function, "q.dtype", f"one of {DTYPES}", q.dtype)
    for name, tensor, dtype in (("k", k, q.dtype), ("v", v, v_dtype(q.dtype))):
        wanted = f"{dtype} as q's" if dtype == q.dtype else f"{dtype} where q is {q.dtype}"
        expect(tensor.dtype == dtype, function, f"{name}.dtype", wanted, tensor.dtype)
        check_device(function, name, tensor, q.device, "q")
        if not varlen:
            got, batch = tensor.shape[0], q.shape[0]
            expect(got == batch, function, f"{name}.shape[0]", "{} (q's batch)", got, batch)
    for axis, what in ((-3, "seqlen"), (-2, "heads")):
        wanted, got = k.shape[axis], v.shape[axis]
        expect(got == wanted, function, f"v.shape[{axis}]", "{} (k's {})", got, wanted, what)
    wanted, got = q.shape[-1], k.shape[-1]
    expect(got == wanted, function, "k.shape[-1]", "{} (q's head_dim)", got, wanted)
    for name, tensor in (("q", q), ("v", v)):
        expect(tensor.shape[-1] >= 1, function, f"{name}.shape[-1]", "at least 1", tensor.shape[-1])
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    expect(heads_kv >= 1, function, "k.shape[-2]", "at least 1 head", heads_kv)
    expect(heads_q >= 1, function, "q.shape[-2]", "at least 1 head", heads_q)
    divisible = heads_q % heads_kv == 0
    expect(divisible, function, "q.shape[-2]", "a multiple of k's {} heads", heads_q, heads_kv)


def _check_index(function: str, name: str, index: Metadata | None, device, required: bool) -> None:
    if index is None:
        expect(not required, function, name, "an int32 tensor", None)
    else:
        check_int32(function, name, index, 1, device, "q")


def describe(tensors: tuple[Metadata | Scaled | None, ...], options: Options) -> Problem:
    """Check the metadata of one call's tensors (in the order of ``Tensors``) and normalise it."""
    check(tensors, options)
    tensors, function = Tensors(*tensors), options.function
    q, k, v = in_rows(function, tensors)
    cu_seqlens_q, varlen = tensors.cu_seqlens_q, tensors.cu_seqlens_q is not None
    lengths = lengths_of_q(tensors), lengths_of_k(tensors), lengths_of_k(tensors)
    sides = {name: as_scaled(getattr(tensors, name)) for name in SIDES}
    if sides["v"].layout == "permuted":
        stored = sides["v"].data
        wanted = "that of a dense permuted tensor"
        expect(_is_dense(stored), function, "v.stride", wanted, tuple(stored.stride))
    total_q, total_k = q.shape[-3], k.shape[-3]
    operands = {
        name: Operand(
            _strides(rows, varlen),
            descales_of(x.descale, block_of(function, name, sides, options, varlen)),
            x.layout == "permuted",
            x.mean is not None,
            seqused is not None,
        )
        for (name, x), rows, (_, seqused) in zip(sides.items(), (q, k, v), lengths, strict=True)
    }
    # Descales need no copy: kernels read them by stride, at any alignment.
    data = zip(Tensors._fields, (q, k, v, *tensors[3:]), strict=True)
    given = [(name, t) for name, t in data if t is not None]
    alike, slopes = attention_fields(CALL, options, q, k, v), tensors.alibi_slopes
    # A side that reaches past every key is open. For varlen only the totals bound the sequence
    # lengths.
    for side, total in (("window_left", total_k), ("window_right", total_q)):
        if alike[side] >= total - 1 and options.split_tokens is None:
            alike[side] = -1
    return Problem(
        **alike,
        batch=cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0],
        seqlen_q=total_q if options.max_seqlen_q is None else min(options.max_seqlen_q, total_q),
        seqlen_k=total_k if options.max_seqlen_k is None else min(options.max_seqlen_k, total_k),
        total_q=total_q,
        total_k=total_k,
        copied=tuple(name for name, t in given if not t.rows_are_dense),
        misaligned=tuple(name for name, t in given if t.rows_are_dense and not t.aligned),
        varlen=varlen,
        sinks_dtype=None if tensors.sinks is None else tensors.sinks.dtype,
        slopes=None if slopes is None else ("heads", "batch")[len(slopes.shape) - 1],
        bias=bias_of(tensors.bias),
        mask=mask_of(tensors.mask_entries_q),
        **operands,
    )


def attention_fields(
    kind: Description, options: tuple, q: Metadata, k: Metadata, v: Metadata
) -> dict[str, object]:
    """The fields of an ``AttentionProblem`` and the options of the kind of call that backends read,
    normalised: causal is window_right = 0."""
    asked = {name: getattr(options, name) for name in kind.to_backend}
    return asked | {
        "function": options.function,
        "dtype": q.dtype,
        "out_dtype": out_dtype(q.dtype, options.out_dtype),
        "device": q.device,
        "num_heads_q": q.shape[-2],
        "num_heads_kv": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "score_scale": score_scale_of(options, q.shape[-1]),
        "window_right": 0 if options.causal else options.window_right,
        "num_splits": max(0, options.num_splits),
        "backend": options.backend or None,
    }


def _is_dense(tensor: Metadata) -> bool:
    if 0 in tensor.shape:
        return True
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return tensor.aligned


def _strides(tensor: Metadata, varlen: bool) -> tuple[int, int, int]:
    """(batch, sequence, head) strides of the tensor, or of its contiguous copy if it is copied."""
    *_, rows, heads, head_dim = tensor.shape
    if not tensor.rows_are_dense:
        strides = (rows * heads * head_dim, heads * head_dim, head_dim)
    else:
        strides = (0, *tensor.stride)[-4:-1]
    return (0, *strides[1:]) if varlen else strides
