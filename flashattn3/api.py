"""The public functions. Names, order and defaults follow the FlashAttention-3 interface."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from . import ops
from .autograd import attention
from .backends import BACKENDS
from .call.arguments import boolean, expect_strided, integer, length, real, window
from .call.inputs import resolved, with_mean_of_keys
from .call.problem import Options, Tensors, refuse
from .dispatch.device import describe_device
from .dispatch.planner import decline_reason
from .errors import expect, shown, type_error, value_error
from .quantization import BlockScaled


def flash_attn_func(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(softmax_scale * q @ k.T) @ v, without ever storing the scores.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16, bfloat16, float8_e4m3fn or int8;
            float32 and float64 run on the reference backend. Any strides; if the last one is not 1
            the tensor is copied. q, k and v may instead all be ``BlockScaled``, from
            ``quantize_block_fp8``: q and k rotated alike, v not. k may have a mean, but not with
            softcap.
        k: (batch, seqlen_k, num_heads_kv, head_dim). num_heads_q must be a multiple of
            num_heads_kv: query head i reads key-value head i // (num_heads_q // num_heads_kv).
            In q's dtype.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v); head_dim_v may differ from head_dim. In q's
            dtype, where that is int8 in float8_e4m3fn.
        softmax_scale: 0, or of a magnitude between 2**-100 and 2**100 (2**900 in float64); None
            stands for head_dim ** -0.5.
        causal: query i sees the keys up to i + seqlen_k - seqlen_q (aligned to the bottom right).
        q_descale, k_descale, v_descale: of 8 bits, float32: a stored value times its descale is the
            real value; None stands for 1. (batch, num_heads_kv) as FlashAttention-3 has it, q's as
            well; or (batch, num_heads_kv, ceil(seqlen / block)) for blocks of 64, 128 or 256
            tokens. q's may also have num_heads_q heads.
        window_size: (left, right) keys visible on each side of that diagonal, inclusive; a
            negative number or None is open. With causal the right side is 0.
        softcap: if positive, scores become softcap * tanh(score / softcap) before the mask.
        num_splits: number of KV splits, at most 256; the partial results are combined exactly. 1:
            no split; <= 0: chosen automatically. A hint.
        pack_gqa: True asks for the packed layout of grouped queries. A hint.
        deterministic: gradients are bitwise the same in every run.
        sm_margin: number of streaming multiprocessors to leave free. A hint.
        return_attn_probs: FlashAttention-3's name for return_lse.
        return_lse: also return the log-sum-exp of every row.
        backend: name of the only backend that may run this call; None dispatches by the device.
        out_dtype: of an 8-bit call bfloat16 (None), float16 or, on the reference backend, float32;
            of others None or q's.
        use_fast_accum: of 8 bits on the Hopper backend. False: out leaves the tensor cores'
            accumulators for float32 every 768 keys. True: out stays in them, which is up to 10 %
            faster beyond 768 keys and drops low bits: where V's values share one sign, out loses
            n * 2**-16 of itself over n keys (V = 1: about 8 % from 4096 keys on), and light keys
            vanish beside a heavy one. Other backends and 16-bit inputs accumulate in float32
            either way. A hint.
        qv, attention_chunk: not supported yet, an error if given.

        Numbers and bools may be Python's, numpy's or 0-d tensors; one on a GPU is read, which waits
        for the device. A hint, but for use_fast_accum, changes no result: a backend that has no use
        for it runs without it, and ``explain`` says so.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v) in q's dtype, of 8 bits in out_dtype; with
        return_lse also lse (batch, num_heads_q, seqlen_q), natural logarithm, float32, of float64
        inputs float64. A row that sees no key has out 0, lse -inf and gradient 0. Both are
        differentiable with respect to q, k and v, unless these have 8 bits: in reverse mode and
        once, with torch.func's grad, vjp, jacrev and vmap too.

    Raises:
        TypeError, ValueError: an argument is illegal.
        UnsupportedError: the call is legal, but no backend (or not the named one) takes it; or it
            is of 8 bits and would need a gradient.

    Source: Dao et al., FlashAttention-2 (arXiv 2307.08691); Shah et al., FlashAttention-3 (arXiv
        2407.08608).
    """
    options = options_of(
        "flash_attn_func",
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    tensors = Tensors(q, k, v, None, None, None, None, q_descale, k_descale, v_descale)
    return attended(tensors, options, False, return_lse, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over sequences of different lengths, packed one after another.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k, v: (total_k, num_heads_kv, head_dim) and (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,) on q's device, from 0, non-decreasing:
            sequence i holds the rows cu_seqlens[i] up to cu_seqlens[i + 1]. cu_seqlens_k may be
            None: k and v then have the axes (batch, seqlen_k, ·, ·), of which seqused_k counts.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, an int or a 0-d integer tensor.
            One that lies on a GPU is not read, which would wait for the device: the number of rows
            stands in, at the price of a larger grid.
        seqused_q, seqused_k: int32 (batch,), rows of each sequence that count, from its beginning.
        q_descale, k_descale, v_descale: (batch, num_heads_kv), or one for each block of each
            sequence, (batch, num_heads_kv, ceil(max_seqlen / block)). BlockScaled q, k and v hold
            the cu_seqlens of the call.
        All other arguments are those of ``flash_attn_func``.

    Returns:
        out (total_q, num_heads_q, head_dim_v); with return_lse also lse (num_heads_q, total_q),
        float32, of float64 inputs float64. Rows outside the sequences have out 0, lse -inf and
        gradient 0.

    Raises:
        TypeError, ValueError, UnsupportedError: as ``flash_attn_func``. The values of cu_seqlens
            and seqused are checked on a CPU, elsewhere only in a process started with
            FLASHATTN3_CHECK=1, because that reads them on the host; without it wrong values give
            wrong numbers but are never used to read or write outside the tensors.
    """
    options = options_of(
        "flash_attn_varlen_func",
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    indices = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    tensors = Tensors(q, k, v, *indices, q_descale, k_descale, v_descale)
    return attended(tensors, options, True, return_lse, return_attn_probs)


def attended(
    tensors: Tensors, options: Options, varlen: bool, return_lse: bool, return_attn_probs: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """What a call returns. tensors: as the caller gave them."""
    with_lse = boolean(options.function, "return_lse", return_lse)
    with_lse |= boolean(options.function, "return_attn_probs", return_attn_probs)
    out, lse = attention(*resolved(tensors, options, varlen))
    if not with_lse:
        return out
    return out, with_mean_of_keys(lse, tensors.q, tensors.k, options.softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_func`` for queries, keys and values in one tensor, viewed and never copied.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_kv,
            head_dim) with num_heads_q given: query heads first, then keys, then values.
        num_heads_q: query heads of the four-dimensional form; None for the five-dimensional one.
        All other arguments, the result and the errors are those of ``flash_attn_func``.
    """
    options = options_of(
        "flash_attn_qkvpacked_func",
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    q, k, v = _unpacked(options.function, qkv, num_heads_q)
    descales = q_descale, k_descale, v_descale
    tensors = Tensors(q, k, v, None, None, None, None, *descales)
    return attended(tensors, options, False, return_lse, return_attn_probs)


def _unpacked(function: str, qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(qkv, Tensor):
        raise type_error(function, "qkv", "a torch.Tensor", shown(qkv))
    expect_strided(function, "qkv", qkv)
    if num_heads_q is None:
        if qkv.ndim != 5 or qkv.shape[2] != 3:
            wanted = "(batch, seqlen, 3, heads, head_dim) without num_heads_q"
            raise value_error(function, "qkv.shape", wanted, tuple(qkv.shape))
        return qkv.unbind(dim=2)
    num_heads_q = integer(function, "num_heads_q", num_heads_q)
    if qkv.ndim == 5:
        raise value_error(function, "num_heads_q", "None where qkv has five axes", num_heads_q)
    if qkv.ndim != 4:
        wanted = "(batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with num_heads_q"
        raise value_error(function, "qkv.shape", wanted, tuple(qkv.shape))
    rest = qkv.shape[2] - num_heads_q
    if num_heads_q < 1 or rest < 2 or rest % 2:
        wanted = f"at least 1 and leave an even number of qkv's {qkv.shape[2]} heads for k and v"
        raise value_error(function, "num_heads_q", wanted, num_heads_q)
    return qkv.split((num_heads_q, rest // 2, rest // 2), dim=2)


def options_of(
    function: str,
    *,
    softmax_scale=None,
    causal=False,
    qv=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    use_fast_accum=False,
    backend=None,
    out_dtype=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
) -> Options:
    """The arguments that are not tensors as plain Python values, refused by name where they are of
    the wrong kind or nothing supports them yet."""
    if qv is not None:
        _refuse_qv(function, qv)
    if integer(function, "attention_chunk", attention_chunk) != 0:
        refuse(function, "attention_chunk", 0, attention_chunk)
    if not (out_dtype is None or isinstance(out_dtype, torch.dtype)):
        raise type_error(function, "out_dtype", "a torch.dtype or None", shown(out_dtype))
    if softmax_scale is not None:
        softmax_scale = real(function, "softmax_scale", softmax_scale)
        if softmax_scale == 0 and not torch.compiler.is_compiling():
            _warn_of_zero_scale(function)
    if causal is None:
        raise type_error(function, "causal", "a bool", f"None{FA2_ORDER}")
    left, right = window(function, "window_size", window_size)
    return Options(
        max_seqlen_q=length(function, "max_seqlen_q", max_seqlen_q),
        max_seqlen_k=length(function, "max_seqlen_k", max_seqlen_k),
        softmax_scale=softmax_scale,
        causal=boolean(function, "causal", causal),
        window_left=left,
        window_right=right,
        softcap=real(function, "softcap", softcap),
        num_splits=integer(function, "num_splits", num_splits),
        pack_gqa=None if pack_gqa is None else boolean(function, "pack_gqa", pack_gqa),
        deterministic=boolean(function, "deterministic", deterministic),
        sm_margin=integer(function, "sm_margin", sm_margin),
        use_fast_accum=boolean(function, "use_fast_accum", use_fast_accum),
        backend=ops.backend_in_force(function, backend),
        out_dtype=out_dtype,
        function=function,
    )


FA2_ORDER = (
    "; after q, k and v FlashAttention-2 has dropout_p, softmax_scale and causal, FlashAttention-3 "
    "and this function softmax_scale, causal and qv: pass them by name"
)


def _refuse_qv(function: str, qv: object) -> None:
    if isinstance(qv, Tensor):
        refuse(function, "qv", None, qv)
    raise type_error(function, "qv", None, f"{shown(qv)}{FA2_ORDER}")


@cache
def _warn_of_zero_scale(function: str) -> None:
    """Once for each function."""
    warnings.warn(
        f"{function}: softmax_scale is 0, so all keys weigh the same{FA2_ORDER}", stacklevel=4
    )


@dataclass(frozen=True)
class Explanation:
    """How a call would run. str() gives it as text.

    declined: every other backend's name and why it does not run the call.
    unused_hints: name of each hint given that the backend runs without, and why.
    """

    backend: str
    device: str
    config: dict[str, object]
    grid: tuple[int, ...] | None
    shared_memory_bytes: int | None
    declined: dict[str, str]
    unused_hints: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"backend: {self.backend} on {self.device}"]
        lines += [f"  {name}: {value}" for name, value in self.config.items()]
        for name, reason in self.unused_hints.items():
            lines.append(f"  {name} has no effect: {self.backend} {reason}")
        lines += [f"not {name}: {reason}" for name, reason in self.declined.items()]
        return "\n".join(lines)


def explain(
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    device: torch.device | str | None = None,
) -> Explanation:
    """Say how a call with these arguments would run. Nothing is launched.

    Args: those of ``flash_attn_func``; with cu_seqlens_q those of ``flash_attn_varlen_func``. The
        tensors may lie on the meta device, where they take no memory.
        device: where the call of meta tensors would run; None stands for the current GPU, or the
            CPU where there is none.

    Raises: what the call would raise.
    """
    function, varlen = "explain", cu_seqlens_q is not None
    if not varlen:
        given = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q}
        for name, value in (given | {"max_seqlen_k": max_seqlen_k}).items():
            expect(value is None, function, name, "None without cu_seqlens_q", shown(value))
    for name, flag in (("return_lse", return_lse), ("return_attn_probs", return_attn_probs)):
        boolean(function, name, flag)
    options = options_of(
        function,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
        out_dtype=out_dtype,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        use_fast_accum=use_fast_accum,
    )
    indices = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    tensors = Tensors(q, k, v, *indices, q_descale, k_descale, v_descale)
    tensors, options = resolved(tensors, options, varlen)
    plan = ops.plan_on(_place(function, tensors.q, device), tensors, options)
    described = plan.config.describe()
    declined = dict(plan.declined)
    for backend in BACKENDS:
        if backend.name != plan.backend.name and backend.name not in declined:
            reason = decline_reason(backend, plan.problem, plan.device)
            declined[backend.name] = reason or f"{plan.backend.name} comes first"
    return Explanation(
        backend=plan.backend.name,
        device=plan.device.name,
        config=described,
        grid=described.get("grid"),
        shared_memory_bytes=described.get("shared_memory_bytes"),
        declined=declined,
        unused_hints=plan.unused_hints,
    )


def _place(function: str, q: Tensor, device: object) -> torch.device:
    """The device of a call; of meta tensors the one that is named, or this machine's first."""
    if not q.is_meta:
        expect(device is None, function, "device", "None unless q is on meta", shown(device))
        return q.device
    return _device(function, _here() if device is None else device)


def _here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def available_backends(device: torch.device | str | None = None) -> list[str]:
    """Names of the backends that can run on a device, in the order in which dispatch asks them.

    device: None stands for the current GPU, or the CPU where there is none.
    """
    if device is None:
        device = _here()
    info = describe_device(_device("available_backends", device))
    return [backend.name for backend in BACKENDS if backend.unavailable_reason(info) is None]


def _device(function: str, device: object) -> torch.device:
    """A device of this machine; of GPUs the current one where no index is given."""
    wanted = "a torch.device or its name"
    if not isinstance(device, (str, torch.device)):
        raise type_error(function, "device", wanted, shown(device))
    try:
        found = torch.device(device)
    except RuntimeError:
        raise value_error(function, "device", wanted, shown(device)) from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = 0 <= (found.index or 0) < count  # torch reads "cuda:1000" as index -24
    expect(here, function, "device", f"one of this machine's {count} GPUs or a CPU", shown(device))
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, every call in this thread (or task) that names no backend runs on this one.

    It never falls back: a call that the backend does not take raises UnsupportedError. For a
    compiled function the block around its run counts, not the one around its compilation; a block
    inside it counts for the calls there. A gradient runs on the backend of its forward.
    """
    ops.known_backend("use_backend", "name", name)
    if torch.compiler.is_compiling():
        ops.traced_backends.append(name)
        try:
            yield
        finally:
            ops.traced_backends.pop()
        return
    token = ops.named_backend.set(name)
    try:
        yield
    finally:
        ops.named_backend.reset(token)
