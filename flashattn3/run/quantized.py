"""Calls that quantize 16-bit tensors to 8 bits and attend."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.device import describe_device
from ..backends.registry import BACKENDS
from ..call.arguments import boolean, expect_local, integer
from ..call.descales import BLOCKS, check_out_dtype
from ..call.dtypes import EIGHT_BIT, SIXTEEN_BIT, best_qk_dtype, v_dtype
from ..call.fields import Options, expect_shared_shift
from ..call.hadamard import is_rotatable
from ..call.operands import (
    Scaled,
    Tensors,
    changes_scores,
    check_tensor_types,
    checked_key_of,
    lengths_of_k,
    lengths_of_q,
    metadata_under,
    scores_of,
    tensors_by_name,
    with_sides,
)
from ..call.problem import check, describe
from ..call.scores import refuse_gradient_of_slopes
from ..call.value_checks import check_values, is_checked
from ..errors import expect, shown, type_error, value_error
from ..modes import (
    has_autocast,
    has_dual_level,
    is_plain,
    is_traced,
    is_transformed,
    needs_gradient,
    refuse_gradients,
)
from ..quantization import comes_permuted
from .doors import attend
from .operator_rules import under_autocast
from .planner import choose
from .quantized_gradient import attend_differentiably

QK_DTYPES = (None, *EIGHT_BIT)


class Scheme(NamedTuple):
    """How to quantize: the arguments of flash_attn_fp8_func with these names."""

    block: int
    hadamard: bool
    qk_dtype: torch.dtype | None
    smooth_k: bool


class _Checked(NamedTuple):
    """What a check finds: the scheme with a dtype, options of the 8-bit call, head dim of v if it
    comes permuted, else None, and whether q, and k and v, have tokens and so descales."""

    scheme: Scheme
    options: Options
    permuted_head_dim: int | None
    scales_q: bool
    scales_k: bool


def attend_quantized(
    options: Options, tensors: Tensors, scheme: Scheme, varlen: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """tensors: q, k and v of 16 bits. All that is refused is refused before the first launch."""
    function = options.function
    if has_autocast():
        tensors = under_autocast(tensors)
    q, k, v = tensors.q, tensors.k, tensors.v
    plain = type(q) is type(k) is type(v) is Tensor and is_plain()
    unusual = not plain or changes_scores(tensors)
    if varlen or unusual:
        check_tensor_types(function, tensors, varlen)
    if not plain:
        for name, x in zip("qkv", (q, k, v), strict=True):
            expect_local(function, name, x)
    differentiably = q.requires_grad or k.requires_grad or v.requires_grad
    if unusual or differentiably:
        differentiably = needs_gradient((q, k, v, *scores_of(tensors)))
        scheme = _converted(function, *scheme)
        refuse_gradient_of_slopes(function, tensors.alibi_slopes)
        if not torch.compiler.is_compiling() and (is_transformed() or has_dual_level()):
            refuse_gradients(function, **tensors_by_name(tensors))
    if not plain and is_traced():
        checked = _checked(tensors, options, scheme)
    else:
        key = checked_key_of(function, tensors)
        try:
            checked = _checked_once(key, options, *scheme)
        except TypeError:  # the scheme is not plain, or wrong
            checked = _checked_once(key, options, *_converted(function, *scheme))
        if varlen and is_checked(q.device):
            lengths = lengths_of_q(tensors), lengths_of_k(tensors)
            check_values(*lengths, options, q.shape[0], k.shape[0])
    if differentiably:
        return attend_differentiably(tensors, checked.options, partial(_quantized, checked))
    return attend(with_sides(tensors, *_quantized(checked, tensors)), checked.options)


def _quantized(checked: _Checked, tensors: Tensors) -> tuple[Scaled, Scaled, Scaled]:
    """q, k and v of 8 bits."""
    scheme, options, head_dim, scales_q, scales_k = checked
    block, hadamard, qk_dtype, smooth_k = scheme
    edges = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    longest = options.max_seqlen_q, options.max_seqlen_k
    from ..quantization.dispatch import scaled_qkv  # its custom operators import Triton

    q, of_q, k, of_k, v, of_v, mean = scaled_qkv(
        *(tensors.q, tensors.k, tensors.v),
        *(block, hadamard, *edges, *longest, qk_dtype, smooth_k),
    )
    of_q, of_k, of_v = of_q if scales_q else None, *((of_k, of_v) if scales_k else (None, None))
    layout = "rows" if head_dim is None else "permuted"
    of_keys = block if scales_k else None
    return (
        Scaled(q, of_q, block if scales_q else None, hadamard),
        Scaled(k, of_k, of_keys, hadamard, "rows", None, mean),
        Scaled(v, of_v, of_keys, False, layout, head_dim),
    )


def _converted(function: str, block, hadamard, qk_dtype, smooth_k) -> Scheme:
    block = integer(function, "block", block)
    hadamard = boolean(function, "hadamard", hadamard)
    smooth_k = boolean(function, "smooth_k", smooth_k)
    if not (qk_dtype is None or isinstance(qk_dtype, torch.dtype)):
        raise type_error(function, "qk_dtype", f"one of {QK_DTYPES}", shown(qk_dtype))
    if qk_dtype not in QK_DTYPES:
        raise value_error(function, "qk_dtype", f"one of {QK_DTYPES}", qk_dtype)
    return Scheme(block, hadamard, qk_dtype, smooth_k)


@lru_cache(maxsize=4096, typed=True)
def _checked_once(key: tuple, options: Options, *scheme: object) -> _Checked:
    """Run _checked and the planner on metadata. The result is cached: a call is checked once.

    TypeError for a scheme that is not plain values: equal ones of other types are other calls.
    """
    if not all(value is None or type(value) in _PLAIN for value in scheme):
        raise TypeError
    tensors = Tensors(*metadata_under(key))
    checked = _checked(tensors, options, _converted(options.function, *scheme))
    dtype = checked.scheme.qk_dtype
    eight_bit = {
        name: getattr(tensors, name)._replace(dtype=to)
        for name, to in (("q", dtype), ("k", dtype), ("v", v_dtype(dtype)))
    }
    problem = describe(tensors._replace(**eight_bit), options)
    choose(problem, describe_device(problem.device), BACKENDS)
    return checked


_PLAIN = (int, bool, torch.dtype)


def _checked(tensors: Tensors, options: Options, scheme: Scheme) -> _Checked:
    """Check the 16-bit tensors, or their metadata."""
    q, k, v, edges = tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q
    if scheme.qk_dtype is None and q.shape:
        scheme = scheme._replace(qk_dtype=best_qk_dtype(q.shape[-1], scheme.hadamard))
    _check(tensors, options, scheme)
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if edges is not None:
        batch = edges.shape[0] - 1
        seqlen_q = _longest(q, options.max_seqlen_q)
        seqlen_k = _longest(k, options.max_seqlen_k)
    of_8_bits = options._replace(
        max_seqlen_q=None if edges is None else seqlen_q,
        max_seqlen_k=None if edges is None else seqlen_k,
        out_dtype=options.out_dtype or q.dtype,
    )
    head_dim = v.shape[-1] if comes_permuted(v) else None
    return _Checked(scheme, of_8_bits, head_dim, bool(batch and seqlen_q), bool(batch and seqlen_k))


def _longest(rows: Tensor, max_seqlen: int | None) -> int:
    """No sequence is longer than all rows."""
    return rows.shape[0] if max_seqlen is None else min(max_seqlen, rows.shape[0])


def _check(tensors: Tensors, options: Options, scheme: Scheme) -> None:
    """Raise if the tensors cannot be quantized."""
    function, q = options.function, tensors.q
    expect(q.dtype in SIXTEEN_BIT, function, "q.dtype", f"one of {SIXTEEN_BIT}", q.dtype)
    check(tensors, options._replace(out_dtype=None))
    check_out_dtype(function, scheme.qk_dtype, options.out_dtype)
    expect(scheme.block in BLOCKS, function, "block", f"one of {BLOCKS}", scheme.block)
    fits = not scheme.hadamard or is_rotatable(q.shape[-1])
    expect(fits, function, "q.shape[-1]", "a power of two with hadamard=True", q.shape[-1])
    if scheme.smooth_k:
        expect_shared_shift(options, tensors.sinks, "with smooth_k=True")
