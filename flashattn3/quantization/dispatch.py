"""Selects the implementation that quantizes a tensor: the Hopper library, Triton or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..backends.device import describe_device
from ..backends.hopper.backend import BACKEND as HOPPER
from ..backends.hopper.config_types import MAX_HEAD_DIM as HOPPER_MAX_HEAD_DIM
from ..backends.triton.backend import BACKEND as TRITON
from ..backends.triton.tile_configs import MAX_HEAD_DIM as TRITON_MAX_HEAD_DIM
from ..call import permuted_v
from ..call.dtypes import FP8, INT8, SIXTEEN_BIT
from ..call.hadamard import signs
from ..modes import is_batched, is_traced
from . import smoothing, torch_operations
from .torch_operations import Stored


def on_hopper(x: Tensor) -> bool:
    """Whether the operators of the Hopper library support x's device and head dim."""
    return x.shape[-1] <= HOPPER_MAX_HEAD_DIM and runs_on("hopper", x.device.type, x.device.index)


def layout_of_v(v: Tensor) -> str:
    """The layout in which the attention kernels on v's device read v."""
    return "permuted" if on_hopper(v) else "rows"


def scaled_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    qk_dtype: torch.dtype,
    smooth_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Quantize q, k and v; return data and descale of each, and k's mean, as plain tensors. The
    Hopper library takes one launch, with smooth_k two.
    """
    mean = sample_mean(k, cu_seqlens_k, max_seqlen_k) if smooth_k else None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *quantize_qkv(q, k, v, block, hadamard, *lengths, qk_dtype, mean), mean


def is_opaque(x: Tensor) -> bool:
    """Whether torch must not trace into kernel launches, or x has no data to launch on."""
    return x.is_meta or is_traced()


def _sample_mean(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Return float32 (batch, heads, head_dim)."""
    x, cu_seqlens = _rows_dense(x), _dense(cu_seqlens)
    if on_hopper(x) and x.dtype in SIXTEEN_BIT:
        return torch.ops.flashattn3_hopper.sample_mean.default(x, cu_seqlens, max_seqlen or 0)
    implementation = _triton_launch() if on_triton(x, x.shape[-1]) else smoothing
    return implementation.sample_mean(x, cu_seqlens, max_seqlen)


def _quantize(
    x: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    layout: str,
    dtype: torch.dtype,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return data, in the given layout, and descale."""
    hopper = on_hopper(x)
    x, cu_seqlens = _rows_dense(x), _dense(cu_seqlens)
    if hopper and x.dtype in SIXTEEN_BIT:
        return torch.ops.flashattn3_hopper.quantize.default(
            x,
            mean,
            signs(x.shape[-1], x.device) if hadamard else None,
            cu_seqlens,
            block,
            max_seqlen or 0,
            layout == "permuted",
            dtype == INT8,
        )
    implementation = _triton_launch() if on_triton(x, x.shape[-1]) else torch_operations
    data, descale = implementation.quantize(x, block, hadamard, cu_seqlens, max_seqlen, dtype, mean)
    if layout == "permuted" and hopper:
        permute_v = torch.ops.flashattn3_hopper.permute_v.default
        return permute_v(data, cu_seqlens, max_seqlen or 0), descale
    return permuted_v.permute_v(data, cu_seqlens) if layout == "permuted" else data, descale


def _quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    qk_dtype: torch.dtype,
    k_mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return data and descale of q, k and v, v in layout_of_v."""
    if on_hopper(q if q.shape[-1] > v.shape[-1] else v):
        return torch.ops.flashattn3_hopper.quantize_qkv.default(
            _rows_dense(q),
            _rows_dense(k),
            _rows_dense(v),
            k_mean,
            signs(q.shape[-1], q.device) if hadamard else None,
            _dense(cu_seqlens_q),
            _dense(cu_seqlens_k),
            block,
            max_seqlen_q or 0,
            max_seqlen_k or 0,
            qk_dtype == INT8,
        )
    return (
        *_quantize(q, block, hadamard, cu_seqlens_q, max_seqlen_q, "rows", qk_dtype, None),
        *_quantize(k, block, hadamard, cu_seqlens_k, max_seqlen_k, "rows", qk_dtype, k_mean),
        *_quantize(v, block, False, cu_seqlens_k, max_seqlen_k, layout_of_v(v), FP8, None),
    )


def _dequantize(
    q: Tensor,
    q_descale: Tensor | None,
    q_block: int | None,
    cu_seqlens_q: Tensor | None,
    k: Tensor,
    k_descale: Tensor | None,
    k_block: int | None,
    v: Tensor,
    v_descale: Tensor | None,
    v_block: int | None,
    cu_seqlens_k: Tensor | None,
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of q, k and v of 8 bits, rotated as they are and without the mean: 0 in
    rows of no sequence, and without descales, where there are no tokens."""
    stored = (
        Stored(q, q_descale, q_block, cu_seqlens_q, q.shape),
        Stored(k, k_descale, k_block, cu_seqlens_k, k.shape),
        Stored(v, v_descale, v_block, cu_seqlens_k, torch.Size(v_shape)),
    )
    on_chip = on_triton(q, max(q.shape[-1], v_shape[-1]))
    return (_triton_launch() if on_chip else torch_operations).dequantize(stored, dtype)


def _take_exact_rows(
    out: Tensor,
    exact: Tensor,
    dout: Tensor,
    lse: Tensor,
    exact_lse: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return lse and dlse, of the first rows those of exact; see torch_operations."""
    on_chip = on_triton(out, out.shape[-1]) and not is_batched(dout, dlse)
    implementation = _triton_launch() if on_chip else torch_operations
    return implementation.take_exact_rows(out, exact, dout, lse, exact_lse, dlse)


@cache
def _triton_launch() -> ModuleType:
    from . import triton_launch  # imports Triton

    return triton_launch


def on_triton(x: Tensor, head_dim: int) -> bool:
    return head_dim <= TRITON_MAX_HEAD_DIM and runs_on("triton", x.device.type, x.device.index)


def _rows_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.contiguous()


@torch.compiler.assume_constant_result  # it needs plain arguments
def runs_on(name: str, device_type: str, device_index: int | None) -> bool:
    """Whether a backend runs on a device."""
    return _backend_runs_on(name, torch.device(device_type, device_index))


@cache
def _backend_runs_on(name: str, device: torch.device) -> bool:
    backend = {HOPPER.name: HOPPER, TRITON.name: TRITON}[name]
    return backend.unavailable_reason(describe_device(device)) is None


def in_own_memory(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    """The function of a custom op, whose results torch allows no memory of each other: descales of
    tensors that are quantized together share an allocation."""

    def run(*arguments: object) -> Sequence[Tensor]:
        results, memory = function(*arguments), set()
        found = []
        for x in results:
            begin = x.untyped_storage().data_ptr()
            found.append(x.clone() if begin in memory else x)
            memory.add(begin)
        return type(results)(found)

    return run


def opaque(
    name: str, run: Callable, schema: str, fake: Callable, convert: Callable = lambda run: run
) -> Callable:
    """``run``; a custom operator where ``is_opaque`` says so, of ``convert(run)``."""
    operator = torch.library.custom_op(
        f"flashattn3::{name}", convert(run), mutates_args=(), schema=schema
    )
    operator.register_fake(fake)
    return lambda *arguments: (operator if is_opaque(arguments[0]) else run)(*arguments)


def _sample_mean_fake(x, cu_seqlens, max_seqlen):
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((batch, *x.shape[-2:]), dtype=torch.float32)


def _quantize_fake(x, block, hadamard, cu_seqlens, max_seqlen, layout, dtype, mean=None):
    varlen = cu_seqlens is not None
    batch, seqlen = (cu_seqlens.shape[0] - 1, max_seqlen) if varlen else x.shape[:2]
    shape = permuted_v.shape_of(x.shape, cu_seqlens) if layout == "permuted" else x.shape
    descale = x.new_empty((batch, x.shape[-2], -(-seqlen // block)), dtype=torch.float32)
    return x.new_empty(shape, dtype=dtype), descale


def _quantize_qkv_fake(q, k, v, block, hadamard, edges_q, edges_k, longest_q, longest_k, dtype, _):
    return (
        *_quantize_fake(q, block, hadamard, edges_q, longest_q, "rows", dtype),
        *_quantize_fake(k, block, hadamard, edges_k, longest_k, "rows", dtype),
        *_quantize_fake(v, block, False, edges_k, longest_k, layout_of_v(v), FP8),
    )


def _dequantize_fake(q, *others):
    _, _, _, k, _, _, v, _, _, _, v_shape, dtype = others
    shapes = (q, q.shape), (k, k.shape), (v, v_shape)
    return tuple(x.new_empty(shape, dtype=dtype) for x, shape in shapes)


def _take_exact_rows_fake(out, exact, dout, lse, exact_lse, dlse):
    return lse.new_empty(lse.shape), lse.new_empty(lse.shape)


sample_mean = opaque(
    "sample_mean",
    _sample_mean,
    "(Tensor x, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor",
    _sample_mean_fake,
)
quantize = opaque(
    "quantize",
    _quantize,
    "(Tensor x, int block, bool hadamard, Tensor? cu_seqlens, SymInt? max_seqlen, str layout, "
    "ScalarType dtype, Tensor? mean) -> (Tensor data, Tensor descale)",
    _quantize_fake,
)
quantize_qkv = opaque(
    "quantize_qkv",
    _quantize_qkv,
    "(Tensor q, Tensor k, Tensor v, int block, bool hadamard, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, ScalarType qk_dtype, "
    "Tensor? k_mean) -> "
    "(Tensor q, Tensor q_descale, Tensor k, Tensor k_descale, Tensor v, Tensor v_descale)",
    _quantize_qkv_fake,
    in_own_memory,
)
dequantize = opaque(
    "dequantize",
    _dequantize,
    "(Tensor q, Tensor? q_descale, SymInt? q_block, Tensor? cu_seqlens_q, Tensor k, "
    "Tensor? k_descale, SymInt? k_block, Tensor v, Tensor? v_descale, SymInt? v_block, "
    "Tensor? cu_seqlens_k, SymInt[] v_shape, ScalarType dtype) -> (Tensor q, Tensor k, Tensor v)",
    _dequantize_fake,
)
take_exact_rows = opaque(
    "take_exact_rows",
    _take_exact_rows,
    "(Tensor out, Tensor exact, Tensor dout, Tensor lse, Tensor exact_lse, Tensor? dlse) -> "
    "(Tensor lse, Tensor dlse)",
    _take_exact_rows_fake,
)
