"""diffusers' attention dispatcher runs on flashattn3:

    from flashattn3.integrations import diffusers as fa3
    fa3.register()
    pipeline.transformer.set_attention_backend("flashattn3")

Processors that call ``F.scaled_dot_product_attention`` themselves (UNets, Stable Diffusion 3,
PixArt) do not ask the dispatcher: ``flashattn3.integrations.torch`` serves them. diffusers takes
the backend for such models too, so ``set_attention_backend`` then warns.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..call.arguments import window
from ..errors import UnsupportedError, complaint, shown, value_error
from .dense_masks import fits, mask_of
from .libraries import import_library

OLDEST, NEWEST = "0.35", "0.42"  # releases of diffusers that the tests cover
NAME = "flashattn3"
_FUNCTION = "diffusers attention"


def register() -> str:
    """Add the backend "flashattn3" to diffusers' attention dispatcher.

    Returns: its name. Registering twice has no effect.

    Raises:
        UnsupportedError: diffusers is not installed, or this release has another dispatcher.
    """
    function = "integrations.diffusers.register"
    import_library(function, "diffusers", OLDEST, NEWEST)
    # diffusers has no public way to add a backend: these private names are used here alone.
    try:
        from diffusers.models import attention_dispatch

        names = attention_dispatch.AttentionBackendName
        registry = attention_dispatch._AttentionBackendRegistry
        if NAME in names._value2member_map_:
            return NAME
        add = registry.register
        members = names._member_map_, names._value2member_map_, names._member_names_
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"{function}: diffusers must be {OLDEST} to {NEWEST}, got one without "
            f"AttentionBackendName and _AttentionBackendRegistry ({error})"
        ) from None
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    by_name, by_value, order = members
    by_name[member._name_] = by_value[NAME] = member
    order.append(member._name_)
    add(member)(attention)
    _warn_of_others()
    return NAME


def _warn_of_others() -> None:
    """From now on setting the backend of a model whose layers do not ask for it gives a warning."""
    from diffusers.models.modeling_utils import ModelMixin

    set_backend = ModelMixin.set_attention_backend

    @functools.wraps(set_backend)
    def set_and_warn(model, backend, *arguments, **options):
        result = set_backend(model, backend, *arguments, **options)
        if str(backend).lower() == NAME:
            _warn_unless_asked(model)
        return result

    ModelMixin.set_attention_backend = set_and_warn


def _warn_unless_asked(model: torch.nn.Module) -> None:
    """A processor that asks the dispatcher has an attribute for the backend."""
    found = (getattr(module, "processor", None) for module in model.modules())
    processors = [x for x in found if x is not None]
    others = [x for x in processors if not hasattr(x, "_attention_backend")]
    if processors and not others:
        return
    names = ", ".join(sorted({type(x).__name__ for x in others})) or "no processor that asks"
    warnings.warn(
        f"{_FUNCTION}: {len(others) or 'all'} of {len(processors)} attention layers of "
        f"{type(model).__name__} do not ask for the backend {NAME!r} ({names}) and keep torch's "
        "attention; for these, activate flashattn3.integrations.torch.register(prefer=True), "
        "which serves F.scaled_dot_product_attention of the whole process",
        stacklevel=3,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One attention, as diffusers' dispatcher calls it. (The dispatcher drops arguments that are
    not in this signature.)

    Args:
        query: (batch, seqlen_q, heads, head_dim); key and value likewise.
        attn_mask: None; bool (batch or 1, 1, 1, seqlen_k): which keys count, in any order; or bool
            (batch or 1, heads or 1, seqlen_q, seqlen_k): which keys each query sees.
        dropout_p: must be 0.
        is_causal: only where seqlen_q is seqlen_k.
        scale: factor of the scores; None: head_dim ** -0.5.
        enable_gqa: required where key and value have fewer heads than query.
        window_size: (-1, -1) with an attn_mask; else as in ``flash_attn_func``, and so is softcap.

    Returns: out; with return_lse also lse (batch, seqlen_q, heads).

    Raises:
        UnsupportedError: dropout, context parallelism, or another kind of mask.
    """
    if dropout_p:
        raise _unsupported("dropout_p", 0, dropout_p)
    if _parallel_config is not None:
        raise _unsupported("parallel_config", "None; use torch's context_parallel", "a config")
    if not enable_gqa and key.shape[2] != query.shape[2]:
        wanted = f"{query.shape[2]} (query's heads) without enable_gqa"
        raise value_error(_FUNCTION, "key.shape[2]", wanted, key.shape[2])
    if is_causal and (query.shape[1] != key.shape[1] or attn_mask is not None):
        wanted = "False where the lengths differ or there is an attn_mask"
        raise _unsupported("is_causal", wanted, True)
    options = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": return_lse or return_attn_probs,
    }
    if attn_mask is not None:
        _check_mask(attn_mask, query, key, window_size)
    if attn_mask is None or attn_mask.shape[2] > 1 or attn_mask.shape[1] > 1:
        mask = None if attn_mask is None else mask_of(attn_mask, key.shape[1])
        result = flash_attn_func(query, key, value, mask=mask, **options)
        if not options["return_lse"]:
            return result
        return result[0], result[1].transpose(1, 2)
    return _with_key_mask(query, key, value, attn_mask[:, 0, 0], options)


def _check_mask(mask: Tensor, query: Tensor, key: Tensor, window_size: tuple[int, int]) -> None:
    batch, rows, heads, keys = *query.shape[:3], key.shape[1]
    fit = mask.dtype == torch.bool and mask.ndim == 4
    fit = fit and any(fits(mask, batch, *of, keys) for of in ((1, 1), (heads, rows)))
    if not fit:
        wanted = (
            f"bool ({batch} or 1, 1, 1, {keys}) or ({batch} or 1, {heads} or 1, {rows}, {keys})"
        )
        raise _unsupported("attn_mask", wanted, f"{shown(mask)}; use the backend 'native'")
    if window(_FUNCTION, "window_size", window_size) != (-1, -1):
        raise _unsupported("window_size", "(-1, -1) with an attn_mask", tuple(window_size))


def _with_key_mask(
    query: Tensor, key: Tensor, value: Tensor, counts: Tensor, options: dict
) -> Tensor | tuple[Tensor, Tensor]:
    """Without causality the order of keys does not matter: those that count come first, and
    flash_attn_varlen_func gets their number. Nothing waits for the device.

    counts: (batch or 1, seqlen_k) bool.
    """
    batch, rows = query.shape[:2]
    counts = counts.expand(batch, -1)
    order = counts.int().argsort(dim=-1, descending=True, stable=True)[:, :, None, None]
    key, value = (x.take_along_dim(order, 1) for x in (key, value))
    edges = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * rows
    used = counts.sum(-1, dtype=torch.int32)
    lengths = edges, None, rows, key.shape[1], None, used
    result = flash_attn_varlen_func(query.flatten(0, 1), key, value, *lengths, **options)
    if not options["return_lse"]:
        return result.unflatten(0, (batch, rows))
    out, lse = result
    return out.unflatten(0, (batch, rows)), lse.transpose(0, 1).unflatten(0, (batch, rows))


def _unsupported(name: str, wanted: object, got: object) -> UnsupportedError:
    return UnsupportedError(complaint(_FUNCTION, name, wanted, got))
