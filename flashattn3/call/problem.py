"""The problem of a call: its arguments, checked and normalised, without tensor data.

``check`` and ``describe`` raise every error that metadata shows. They read only metadata (shapes,
dtypes, strides, devices), so they never synchronize with a GPU; ``check`` also runs on fake tensors
with symbolic sizes. ``describe`` returns a ``Problem``, which is hashable and holds only plain
values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import UnsupportedError, expect, shown, type_error
from .arguments import expect_strided
from .descales import EIGHT_BIT, Descales, check_descales, descales_of, out_dtype, v_dtype

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
FULL_PRECISION = (torch.float32, torch.float64)
DTYPES = (*SIXTEEN_BIT, *FULL_PRECISION, *EIGHT_BIT)  # dtypes of q
CORE_KEYS = 16  # contiguous keys of permuted V (glossary: permuted V)
MAX_SPLITS = 256  # as in FlashAttention-3
# Address alignment that TMA and 16-byte vector loads need.
ALIGNMENT_BYTES = 16


class Tensors(NamedTuple):
    """The data of one call, as the backends receive it. The last stride of q, k and v is 1.

    Dense: q (batch, seqlen_q, num_heads_q, head_dim), k and v (batch, seqlen_k, num_heads_kv, ·).
    Varlen: q (total_q, num_heads_q, head_dim), k and v (total_k, num_heads_kv, ·) with cu_seqlens,
    int32 (batch + 1,); seqused, int32 (batch,), shortens each sequence and may be None.
    Descales of 8-bit inputs: float32 (batch, heads, num_blocks), see ``Descales``; None means 1.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def without_descales(self) -> tuple[torch.Tensor | None, ...]:
        return self[:NUM_UNSCALED]


class Options(NamedTuple):
    """The arguments of a call that are not tensors, with the defaults of the public functions.

    max_seqlen_q, max_seqlen_k: for varlen; None means "not known on the host", then the total
        number of tokens is the bound.
    q_block, k_block, v_block: tokens per descale; 0 without descales.
    function: the public function that was called, for errors.
    v_permuted: head dim of permuted v (batch, heads, keys / 16, columns, 16) or, for varlen,
        (heads, keys / 16, columns, 16); 0 if v is not permuted.
    """

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    num_splits: int = 1
    pack_gqa: bool | None = None
    deterministic: bool = False
    sm_margin: int = 0
    use_fast_accum: bool = False
    backend: str | None = None
    out_dtype: torch.dtype | None = None
    q_block: int = 0
    k_block: int = 0
    v_block: int = 0
    v_permuted: int = 0
    function: str = "flash_attn_func"


NUM_UNSCALED = Tensors._fields.index("q_descale")


class Metadata(NamedTuple):
    """The properties of a tensor that checks and planning read.

    aligned: whether its address is a multiple of 16 bytes.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True


def key_of(tensors: Tensors) -> tuple[tuple | None, ...]:
    """Read the metadata of the tensors as plain tuples: the key under which a plan is cached."""
    return tuple(
        [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT_BYTES == 0)
            for x in tensors
        ]
    )


def metadata_under(key: tuple[tuple | None, ...]) -> tuple[Metadata | None, ...]:
    return tuple(None if fields is None else Metadata(*fields) for fields in key)


def metadata_of(tensor: torch.Tensor | None) -> Metadata | None:
    return metadata_under(key_of((tensor,)))[0]


@dataclass(frozen=True)
class Problem:
    """One attention call, normalised. Lengths in tokens, strides in elements.

    seqlen_q, seqlen_k: for varlen the upper bounds, max_seqlen_q and max_seqlen_k.
    window_left, window_right: keys visible to the left and right of the bottom-right aligned
        diagonal, inclusive; -1 means open. ``causal`` becomes window_right = 0, and a window that
        reaches every key becomes open.
    copied: names of tensors whose last stride is not 1; they are copied before the launch.
    misaligned: names of the other tensors whose address is not a multiple of 16 bytes.
    q_stride, k_stride, v_stride: (batch, sequence, head), after that copy; the batch stride is 0
        for varlen.
    q_descales, k_descales, v_descales: for 8-bit inputs; None means descale 1.
    v_permuted: v is permuted and must be unpermuted unless the backend reads permuted V; v_stride
        is that of the unpermuted v.
    """

    function: str
    dtype: torch.dtype
    device: torch.device
    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    copied: tuple[str, ...]
    misaligned: tuple[str, ...]
    q_stride: tuple[int, int, int]
    k_stride: tuple[int, int, int]
    v_stride: tuple[int, int, int]
    varlen: bool
    has_seqused_q: bool
    has_seqused_k: bool
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    sm_margin: int
    use_fast_accum: bool
    backend: str | None
    out_dtype: torch.dtype
    q_descales: Descales | None
    k_descales: Descales | None
    v_descales: Descales | None
    v_permuted: bool

    @property
    def qhead_per_kvhead(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def masked(self) -> bool:
        return self.window_left >= 0 or self.window_right >= 0


def refuse(function: str, name: str, default: object, value: object) -> None:
    """Raise UnsupportedError for an argument that no backend supports."""
    raise UnsupportedError(
        f"{function}: {name} must be {default}, got {shown(value)}: "
        "it is not supported yet by any backend"
    )


def check_tensor_types(function: str, tensors: Tensors, varlen: bool) -> None:
    """Raise TypeError for a tensor argument that is not a tensor or has no strides."""
    required = 5 if varlen else 3
    for index, value in enumerate(tensors):
        if value is None and index >= required:
            continue
        if type(value) is not torch.Tensor:
            _check_class(function, Tensors._fields[index], value)
        if value.layout is not torch.strided or value.is_nested:
            expect_strided(function, Tensors._fields[index], value)


def _check_class(function: str, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise type_error(function, name, "a torch.Tensor", shown(value))
    if _is_distributed(value):
        wanted = "a local tensor (torch.distributed.tensor.experimental.local_map passes them)"
        raise type_error(function, name, wanted, shown(value))


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; the operators have no sharding rule for its placements."""
    return not torch.compiler.is_compiling() and hasattr(tensor, "device_mesh")


def check(tensors: Tensors | tuple[Metadata | None, ...], options: Options) -> None:
    """Raise for every invalid combination of shapes, dtypes, devices and options.

    tensors: the tensors themselves or their metadata, in the order of ``Tensors``.
    """
    tensors = Tensors(*tensors)
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tensors.without_descales
    varlen = cu_seqlens_q is not None
    function = options.function
    if options.v_permuted:
        v = v_as_rows(function, tensors, options.v_permuted)
    _check_qkv(function, q, k, v, varlen)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_index(function, name, cu_seqlens, q.device, required=varlen)
    if varlen:
        entries = cu_seqlens_q.shape[0]
        expect(entries >= 1, function, "cu_seqlens_q.shape[0]", "batch + 1 >= 1", entries)
        got = cu_seqlens_k.shape[0]
        expect(got == entries, function, "cu_seqlens_k.shape[0]", f"{entries} (batch + 1)", got)
    for name, seqused in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        _check_index(function, name, seqused, q.device, required=False)
        if seqused is not None:
            expect(varlen, function, name, "None without cu_seqlens", "a tensor")
            got = seqused.shape[0]
            expect(got == entries - 1, function, f"{name}.shape[0]", f"{entries - 1} (batch)", got)
    batch = entries - 1 if varlen else q.shape[0]
    check_descales(function, tensors, options, batch)
    _check_options(function, options)


def v_as_rows(function: str, tensors: Tensors, head_dim: int) -> Metadata:
    """Metadata of permuted v after it is unpermuted."""
    k, v, edges = tensors.k, tensors.v, tensors.cu_seqlens_k
    rank = len(k.shape) + 1
    axes = f"{'(batch, ' if rank == 5 else '('}heads, keys / {CORE_KEYS}, columns, {CORE_KEYS})"
    expect(len(v.shape) == rank, function, "v.shape", axes, tuple(v.shape))
    *lead, heads, groups, columns, width = v.shape
    expect(width == CORE_KEYS, function, "v.shape[-1]", CORE_KEYS, width)
    wanted = f"at least {head_dim} (v's head_dim)"
    expect(columns >= head_dim, function, "v.shape[-2]", wanted, columns)
    seqlen = k.shape[-3]
    # Each sequence takes whole groups of 32 permuted keys; with varlen, one more group each.
    varlen = edges is not None
    thirty_twos = seqlen // 32 + edges.shape[0] - 1 if varlen else -(-seqlen // 32)
    wanted = f"{2 * thirty_twos} (k's seqlen)"
    expect(groups == 2 * thirty_twos, function, "v.shape[-3]", wanted, groups)
    stride = (seqlen * heads * head_dim, heads * head_dim, head_dim, 1)
    return Metadata((*lead, seqlen, heads, head_dim), stride[-rank + 1 :], v.dtype, v.device)


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
        got, wanted = tensor.device, f"{q.device} as q's"
        expect(got == q.device, function, f"{name}.device", wanted, got)
        if not varlen:
            got = tensor.shape[0]
            expect(
                got == q.shape[0], function, f"{name}.shape[0]", f"{q.shape[0]} (q's batch)", got
            )
    for axis, what in ((-3, "seqlen"), (-2, "heads")):
        wanted, got = k.shape[axis], v.shape[axis]
        expect(got == wanted, function, f"v.shape[{axis}]", f"{wanted} (k's {what})", got)
    got = k.shape[-1]
    expect(got == q.shape[-1], function, "k.shape[-1]", f"{q.shape[-1]} (q's head_dim)", got)
    for name, tensor in (("q", q), ("v", v)):
        expect(tensor.shape[-1] >= 1, function, f"{name}.shape[-1]", "at least 1", tensor.shape[-1])
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    expect(heads_kv >= 1, function, "k.shape[-2]", "at least 1 head", heads_kv)
    expect(heads_q >= 1, function, "q.shape[-2]", "at least 1 head", heads_q)
    divisible = heads_q % heads_kv == 0
    expect(divisible, function, "q.shape[-2]", f"a multiple of k's {heads_kv} heads", heads_q)


def _check_index(function: str, name: str, index: Metadata | None, device, required: bool) -> None:
    if index is None:
        expect(not required, function, name, "an int32 tensor", None)
        return
    expect(len(index.shape) == 1, function, f"{name}.shape", "one-dimensional", tuple(index.shape))
    expect(index.dtype == torch.int32, function, f"{name}.dtype", torch.int32, index.dtype)
    expect(index.device == device, function, f"{name}.device", f"{device} as q's", index.device)


def _check_options(function: str, options: Options) -> None:
    scale = options.softmax_scale
    expect(scale is None or _finite(scale), function, "softmax_scale", "finite", scale)
    cap = options.softcap
    expect(_finite(cap) and cap >= 0, function, "softcap", "finite and >= 0", cap)
    splits = options.num_splits
    expect(splits <= MAX_SPLITS, function, "num_splits", f"at most {MAX_SPLITS}", splits)
    expect(options.sm_margin >= 0, function, "sm_margin", ">= 0", options.sm_margin)


def _finite(value: float) -> bool:
    return not isinstance(value, float) or abs(value) < math.inf


def describe(tensors: tuple[Metadata | None, ...], options: Options) -> Problem:
    """Check the metadata of one call's tensors (in the order of ``Tensors``) and normalise it."""
    check(tensors, options)
    tensors = Tensors(*tensors)
    q, k, v, cu_seqlens_q, _, seqused_q, seqused_k = tensors.without_descales
    varlen = cu_seqlens_q is not None
    function = options.function
    if options.v_permuted:
        expect(
            _is_dense(v), function, "v.stride", "that of a dense permuted tensor", tuple(v.stride)
        )
        v = v_as_rows(function, tensors, options.v_permuted)
    batch = cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0]
    total_q, total_k = q.shape[-3], k.shape[-3]
    seqlen_q = total_q if options.max_seqlen_q is None else min(options.max_seqlen_q, total_q)
    seqlen_k = total_k if options.max_seqlen_k is None else min(options.max_seqlen_k, total_k)
    right = 0 if options.causal else options.window_right
    scale = options.softmax_scale
    softmax_scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # Descales need no copy: kernels read them by stride, at any alignment.
    data = zip(Tensors._fields, tensors._replace(v=v).without_descales, strict=False)
    given = [(name, t) for name, t in data if t is not None]
    return Problem(
        function=function,
        dtype=q.dtype,
        device=q.device,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=total_q,
        total_k=total_k,
        num_heads_q=q.shape[-2],
        num_heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        copied=tuple(name for name, t in given if _has_sparse_rows(t)),
        misaligned=tuple(name for name, t in given if not (t.aligned or _has_sparse_rows(t))),
        q_stride=_strides(q, varlen),
        k_stride=_strides(k, varlen),
        v_stride=_strides(v, varlen),
        varlen=varlen,
        has_seqused_q=seqused_q is not None,
        has_seqused_k=seqused_k is not None,
        softmax_scale=softmax_scale,
        # A side that reaches past every key is open. For varlen only the totals bound the
        # sequence lengths.
        window_left=-1 if options.window_left >= total_k - 1 else options.window_left,
        window_right=-1 if right >= total_q - 1 else right,
        softcap=_effective_cap(float(options.softcap), softmax_scale),
        num_splits=options.num_splits,
        pack_gqa=options.pack_gqa,
        deterministic=options.deterministic,
        sm_margin=options.sm_margin,
        use_fast_accum=options.use_fast_accum,
        backend=options.backend or None,
        out_dtype=out_dtype(q.dtype, options.out_dtype),
        q_descales=descales_of(tensors.q_descale, options.q_block),
        k_descales=descales_of(tensors.k_descale, options.k_block),
        v_descales=descales_of(tensors.v_descale, options.v_block),
        v_permuted=options.v_permuted > 0,
    )


def _effective_cap(cap: float, scale: float) -> float:
    """Clamp softcap so that cap**2 and scale / cap stay in float32's range.

    A cap above the range changes no score with |q kᵀ| < 2**30, so it becomes 0: no cap. Below the
    lower bound, at most 2**-40, all probabilities of a row are equal, and raising the cap to the
    bound keeps them so. (A scale above 2**60 may still be too large.)
    """
    size = abs(scale)
    if cap == 0 or cap > 2.0**50 * min(1.0, size):
        return 0.0
    return max(cap, 2.0**-50 * max(1.0, min(size, 2.0**10)))


def _is_dense(tensor: Metadata) -> bool:
    if 0 in tensor.shape:
        return True
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return tensor.aligned


def _has_sparse_rows(tensor: Metadata | None) -> bool:
    return tensor.stride[-1] != 1 and tensor.shape[-1] > 1


def _strides(tensor: Metadata, varlen: bool) -> tuple[int, int, int]:
    """(batch, sequence, head) strides of the tensor, or of its contiguous copy if it is copied."""
    *_, rows, heads, head_dim = tensor.shape
    if _has_sparse_rows(tensor):
        strides = (rows * heads * head_dim, heads * head_dim, head_dim)
    else:
        strides = (0, *tensor.stride)[-4:-1]
    return (0, *strides[1:]) if varlen else strides
