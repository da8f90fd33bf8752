"""Models of transformers that cannot run on flashattn3 are refused when they are made.

transformers accepts any registered name for any model. It asks a class before "sdpa" and
"flex_attention" alone, so a model with an attention of its own would take "fa3", receive no mask
for plain causal attention and see the future, or fail in its tensors' sizes. So ``refuse_models``
asks the same in the method in which transformers asks: ``get_correct_attn_implementation``, which
every model calls when it is made, and when its attention is changed.
"""

from __future__ import annotations

import functools
import sys
import warnings

import torch

from ..errors import UnsupportedError

FLAGS = "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"
# Modules of models whose layers compute with the mask before they pass it on, although they ask
# for their attention by name.
COMPUTE_WITH_MASKS = (
    *("doge", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4"),
    "t5gemma2",
)
# Modules whose vision models pool with torch.nn.MultiheadAttention and the mask, unless the config
# says vision_use_head=False.
POOL_WITH_MASKS = ("siglip2",)

_names: set[str] = set()


def refuse_models(name: str) -> None:
    """From now on a model that cannot run on the attention of this name raises UnsupportedError."""
    from transformers import PreTrainedModel

    if not _names:
        ask = PreTrainedModel.get_correct_attn_implementation

        @functools.wraps(ask)
        def ask_first(model, requested, *arguments, **options):
            if requested in _names:
                reason = reason_against(type(model), requested, model.config)
                if reason is not None:
                    raise UnsupportedError(_sentence(type(model), requested, reason))
            return ask(model, requested, *arguments, **options)

        PreTrainedModel.get_correct_attn_implementation = ask_first
    _names.add(name)


def reason_against(model: type, name: str, config=None) -> str | None:
    """Why a class of models cannot run on the attention of this name; None if it can. Models
    without attention can, and models that consist of others, which are asked themselves."""
    module = sys.modules.get(model.__module__)
    contents = {} if module is None else vars(module)
    own = any(
        isinstance(x, type) and issubclass(x, torch.nn.Module) and "Attention" in x.__name__
        for x in contents.values()
        if getattr(x, "__module__", None) == model.__module__
    )
    if not own:
        return None
    for table, classes in contents.items():
        if isinstance(classes, dict) and "eager" in classes and name not in classes:
            return f"it takes its attention from {table}, a table of its own"
    folder = model.__module__.split(".")[-2]
    if folder in COMPUTE_WITH_MASKS:
        return "its layers compute with the mask themselves"
    has_head = folder in POOL_WITH_MASKS and "Vision" in model.__name__
    if has_head and getattr(config, "vision_use_head", True):
        return "its pooling head computes with the mask itself"
    if not any(getattr(model, flag, False) for flag in FLAGS):
        return "it computes attention itself: transformers does not offer it sdpa either"
    asks = "ALL_ATTENTION_FUNCTIONS" in contents
    if not asks and not getattr(model, "_supports_attention_backend", False):
        return "it computes attention itself and does not ask transformers' AttentionInterface"
    return None


def _sentence(model: type, name: str, reason: str) -> str:
    other = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    return (
        f"transformers: {model.__name__} does not support attn_implementation={name!r}, because "
        f"{reason}; use attn_implementation={other!r} for it. Where it is a part of a model, a "
        f"dict with the names of the config's parts sets theirs: {{'text_config': {name!r}, ...}}"
    )


# Masks of eager forwards whose layers have not called the attention yet: (id of config, thread,
# kind of mask). Configs whose layers have called it. An id that another object gets later means
# no warning.
_awaited: set[tuple] = set()
_asked: set[int] = set()


def expect_attention(config, kind: tuple) -> None:
    """Note that a model was given a mask. If its last mask of this kind was given in vain, warn."""
    if id(config) in _asked:
        return
    if kind in _awaited:
        _asked.add(id(config))
        _awaited.discard(kind)
        warnings.warn(
            f"transformers: a {getattr(config, 'model_type', None)!r} model asked for the mask of "
            "flashattn3 twice and did not call its attention in between. Its results are wrong "
            "if it relies on that mask; use attn_implementation='sdpa' or 'eager'. (A forward "
            "that raised an error before its first layer has this effect too.)",
            stacklevel=4,
        )
        return
    _awaited.add(kind)


def attention_was_called() -> None:
    """The masks that were given were given to models that call the attention."""
    _asked.update(kind[0] for kind in _awaited)
    _awaited.clear()


@torch.compiler.assume_constant_result
def attention_was_compiled() -> int:
    """The same when a layer is compiled: its compiled code does not report its calls."""
    attention_was_called()
    return 0
