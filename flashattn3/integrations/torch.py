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
from dataclasses import dataclass

import torch

from ..call.batch_invariance import span_of_all_calls
from ..call.selection import named_backend
from ..errors import UnsupportedError, expect
from ..modes import without_autocast
from .libraries import release
from .torch_operators import CPU_OPERATORS, OPERATORS, NotTaken

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
        operators = CPU_OPERATORS if device == "cpu" else {}
        # All former kernels are read first: afterwards a name means the override.
        former = {
            name: torch.library.get_kernel(f"aten::{name}", key)
            for name in (*OPERATORS, *operators)
            if _exists(name)
            and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
        }
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # the first override in a process warns, for any operator
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, function in (OPERATORS | operators).items():
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
    """One operator: flashattn3's function, or the former kernel where that raises ``NotTaken``, or
    where no backend takes the call and the caller names none.

    former: None where torch has no kernel for the dispatch key.
    """

    name: str
    function: Callable
    former: object

    def __call__(self, keyset, *arguments, **options):
        reason = "flashattn3 does not support these arguments"
        try:
            # The kernels of autograd and of autocast are above the dispatch key.
            with torch.no_grad(), without_autocast(arguments[0].device.type):
                return self.function(*arguments, **options)
        except NotTaken:
            pass
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
