"""torch's flash attention operators run on flashattn3: the provider of
``F.scaled_dot_product_attention``, ``torch.nn.attention.varlen.varlen_attn`` and of torch's ring
attention (``context_parallel``).

``register`` adds a name to torch's registry of providers; nothing changes until the user calls
``torch.nn.attention.activate_flash_attention_impl(name)``, and
``restore_flash_attention_impl()`` brings torch's kernels back. torch 2.10 has the first registry,
2.11 the first restore.

An operator keeps the meaning that it has in torch. The CUDA operators align causal masks to the
bottom right, as flashattn3 does (``F.scaled_dot_product_attention``, whose causal mask is aligned
to the top left, does not call them for unequal lengths); the CPU's align to the top left, and here
unequal lengths go to the former kernel. So do calls with dropout, the debug mask or ALiBi.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..call.batch_invariance import span_of_all_calls
from ..call.fields import Options
from ..call.operands import Tensors
from ..call.selection import backend_in_force, named_backend
from ..errors import UnsupportedError, expect
from ..modes import has_autocast
from ..run.operators import backward_of
from .libraries import release
from .paged import attend_to_pages

OLDEST = "2.10"  # the first release with a registry
NEWEST = "2.15"  # the last release that the tests ran with
_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION
_registered: dict[str, tuple[str, bool]] = {}


def register(name: str = "FLASHATTN3", *, prefer: bool = False, device: str = "cuda") -> str:
    """Add flashattn3 to torch's registry of flash attention providers.

    Args:
        name: what ``activate_flash_attention_impl`` takes. "FA3" replaces torch's own adapter of
            that name, so that code which activates "FA3" runs on flashattn3.
        prefer: while active, ``F.scaled_dot_product_attention`` tries flash attention before cuDNN;
            on Hopper torch tries cuDNN first. Deactivation restores the former order.
        device: "cuda", or "cpu" for tests: there torch's own kernels are faster.

    Returns: name. Registering the same name again with the same arguments has no effect.

    Raises:
        UnsupportedError: torch is older than 2.10; on activation: there is no GPU.
        ValueError: device is neither of the two.
    """
    function = "integrations.torch.register"
    expect(device in ("cuda", "cpu"), function, "device", "'cuda' or 'cpu'", repr(device))
    if release(torch.__version__) < release(OLDEST):
        raise UnsupportedError(
            f"{function}: torch must be {OLDEST} or newer, got {torch.__version__}: "
            "older releases have no registry of flash attention providers"
        )
    if release(torch.__version__) > release(NEWEST):
        warnings.warn(
            f"{function}: torch must be {OLDEST} to {NEWEST}, got {torch.__version__}: "
            "this version was not tested",
            stacklevel=2,
        )
    if _registered.get(name) == (device, prefer):
        return name
    from torch.nn.attention import register_flash_attention_impl

    _registered[name] = device, prefer
    if device == "cuda" and not prefer and _tries_cudnn_first():
        warnings.warn(
            f"{function}: on this GPU F.scaled_dot_product_attention tries cuDNN before flash "
            "attention; register(prefer=True) moves flash attention ahead",
            stacklevel=2,
        )
    register_flash_attention_impl(name, register_fn=lambda: Provider(device, prefer))
    return name


def _tries_cudnn_first() -> bool:
    """Whether torch may prefer cuDNN's attention: compute capability 9.0 or 10.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in ((9, 0), (10, 0))


class Provider:
    """The active overrides. torch keeps this object and calls ``remove`` to restore its kernels."""

    def __init__(self, device: str, prefer: bool):
        if device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(
                "activate_flash_attention_impl: flashattn3 was registered for a CUDA GPU, and none "
                "is visible"
            )
        key = device.upper()
        operators = _CPU_OPERATORS if device == "cpu" else {}
        # All former kernels are read first: afterwards a name means the override.
        former = {
            name: torch.library.get_kernel(f"aten::{name}", key)
            for name in (*_OPERATORS, *operators)
            if _exists(name)
            and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
        }
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # the first override in a process warns, for any operator
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, function in (_OPERATORS | operators).items():
                if _exists(name):
                    override = _Override(name, function, former.get(name))
                    self._library.impl(name, override, key, with_keyset=True)
        self._allowed_fp8 = _allow_fp8(True) if device == "cuda" else None
        self._order = _move_flash_ahead() if prefer else None

    def remove(self) -> None:
        self._library = None  # torch deregisters the kernels of a library that is gone
        if self._allowed_fp8 is not None:
            _allow_fp8(self._allowed_fp8)
        if self._order is not None:
            torch._C._set_sdp_priority_order(self._order)


def _exists(name: str) -> bool:
    operator, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, operator, None)
    return packet is not None and (overload or "default") in packet.overloads()


def _allow_fp8(allowed: bool) -> bool | None:
    """Set whether torch's choice of a kernel lets e4m3 reach flash attention; return the former
    setting, None where torch (2.10) has none."""
    if not hasattr(torch._C, "_set_sdp_use_fa3"):
        return None
    former = torch._C._get_fa3_sdp_enabled() if hasattr(torch._C, "_get_fa3_sdp_enabled") else False
    torch._C._set_sdp_use_fa3(allowed)
    return former


def _move_flash_ahead() -> list[int]:
    """Make flash attention the first choice of F.scaled_dot_product_attention; return the former
    order.

    torch puts cuDNN first when the first call chooses its kernel, so a call comes before.
    """
    if torch.cuda.is_available():
        x = torch.zeros(1, 1, 8, 64, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(x, x, x)
    order = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([_FLASH, *(choice for choice in order if choice != _FLASH)])
    return order


@dataclass(frozen=True)
class _Override:
    """One operator: flashattn3's function, or the former kernel where that returns NotImplemented,
    or where no backend takes the call and the caller names none.

    former: None where torch has no kernel for the dispatch key.
    """

    name: str
    function: Callable
    former: object

    def __call__(self, keyset, *arguments, **options):
        reason = "flashattn3 does not support these arguments"
        try:
            with torch.no_grad(), _without_autocast(arguments[0].device.type):
                result = self.function(*arguments, **options)
            if result is not NotImplemented:
                return result
        except UnsupportedError as error:
            if named_backend.get() is not None or span_of_all_calls.get() is not None:
                raise
            reason = str(error)
        if span_of_all_calls.get() is not None:
            raise UnsupportedError(f"aten::{self.name}: batch-invariant mode: {reason}")
        if self.former is None:
            raise UnsupportedError(
                f"aten::{self.name}: {reason}, and torch has no kernel of its own for them on this "
                "device"
            )
        return self.former.call_boxed(keyset, *arguments, **options)


def _without_autocast(device_type: str) -> AbstractContextManager:
    """Autocast's kernels are above the dispatch key, as autograd's are: what they cast, they cast
    before."""
    return torch.autocast(device_type, enabled=False) if has_autocast() else nullcontext()


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _flash_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """query (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cum_seq_q."""
    if dropout_p or return_debug_mask or alibi_slopes is not None:
        return NotImplemented
    if cum_seq_q is None and not (seqused_k is block_table is None):
        return NotImplemented
    options = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": _window(window_size_left, window_size_right),
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "num_splits": num_splits,
        "return_lse": True,
    }
    if block_table is not None:
        edges = block_table, cum_seq_q, max_q, cum_seq_k, seqused_k
        out, lse = attend_to_pages("varlen_attn", query, key, value, *edges, **options)
    elif cum_seq_q is None:
        out, lse = flash_attn_func(query, key, value, **options)
    else:
        lengths = cum_seq_q, cum_seq_k, max_q, max_k, None, seqused_k
        out, lse = flash_attn_varlen_func(query, key, value, *lengths, **options)
    return (_as_strided_like(out, query), lse, *_random_state(query), out.new_empty(0))


def _flash_forward_into(out, *arguments, **options):
    result = _flash_forward(*arguments, **options)
    if result is NotImplemented:
        return result
    out.copy_(result[0])
    return result[1]


def _flash_backward(grad_out, query, key, value, *arguments, **options):
    gradients = _gradients(grad_out, query, key, value, *arguments, **options)
    if gradients is NotImplemented:
        return gradients
    return tuple(map(_as_strided_like, gradients, (query, key, value)))


def _gradients(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    if dropout_p:
        return NotImplemented
    function = "aten::_flash_attention_backward"
    left, right = _window(window_size_left, window_size_right)
    options = Options(
        max_seqlen_q=None if cum_seq_q is None else max_q,
        max_seqlen_k=None if cum_seq_q is None else max_k,
        softmax_scale=scale,
        causal=is_causal,
        window_left=left,
        window_right=right,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        backend=backend_in_force(function, "backend", None),
        function=function,
    )
    tensors = Tensors(query, key, value, cum_seq_q, cum_seq_k)
    return backward_of(grad_out, None, out, logsumexp, tensors, options)


def _sdpa_forward(query, key, value, *arguments, **options):
    """query (batch, heads, seqlen, head_dim)."""
    return _dense_forward(query, key, value, (None, None, None), *arguments, **options)


def _sdpa_forward_quantized(
    query, key, value, q_descale, k_descale, v_descale, *arguments, **options
):
    descales = q_descale, k_descale, v_descale
    return _dense_forward(query, key, value, descales, *arguments, **options)


def _dense_forward(
    query,
    key,
    value,
    descales,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    lengths = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    flags = dropout_p, is_causal, return_debug_mask
    result = _flash_forward(q, k, v, None, None, *lengths, *flags, *descales, scale=scale)
    if result is NotImplemented:
        return result
    out, lse, *rest = result
    return (out.transpose(1, 2), lse, None, None, *lengths, *rest)


def _sdpa_backward(*arguments, scale=None):
    gradients = _dense_gradients(*arguments, scale=scale)
    if gradients is NotImplemented:
        return gradients
    return tuple(map(_as_strided_like, gradients, arguments[1:4]))


def _dense_gradients(grad_out, query, key, value, out, logsumexp, *arguments, scale):
    """As _gradients, with (batch, heads, seqlen, head_dim); cum_seq_q and cum_seq_k, which are
    undefined tensors here, are not read."""
    transposed = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _gradients(*transposed, logsumexp, None, None, *arguments[2:], scale=scale)
    if gradients is NotImplemented:
        return gradients
    return tuple(x.transpose(1, 2) for x in gradients)


def _cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if attn_mask is not None or (is_causal and query.shape[2] != key.shape[2]):
        return NotImplemented
    result = _sdpa_forward(query, key, value, dropout_p, is_causal, scale=scale)
    if result is NotImplemented:
        return result
    out, lse = result[:2]  # lse in the layout of (batch, seqlen, heads), as torch's kernel has it
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(grad_out, query, key, *arguments, attn_mask=None, scale=None):
    *saved, dropout_p, is_causal = arguments
    if attn_mask is not None or (is_causal and query.shape[2] != key.shape[2]):
        return NotImplemented
    rest = None, None, query.shape[2], key.shape[2], dropout_p, is_causal, None, None
    return _dense_gradients(grad_out, query, key, *saved, *rest, scale=scale)


def _as_strided_like(result: Tensor, source: Tensor) -> Tensor:
    """The result in the layout of ``torch.empty_like(source)``, which compiled code expects."""
    if result.stride() == source.stride() or result.shape != source.shape:
        return result
    wanted = torch.empty_like(source, device="meta").stride()
    if result.stride() == wanted:
        return result
    laid_out = torch.empty_strided(result.shape, wanted, dtype=result.dtype, device=result.device)
    return laid_out.copy_(result)


def _random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout, of the shapes that torch's own FlashAttention-3 provider has."""
    zeros = [torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())]
    return zeros[0], zeros[1]


_OPERATORS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward.quantized": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention.quantized": _sdpa_forward_quantized,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
# The two operators behind F.scaled_dot_product_attention on a CPU.
_CPU_OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
