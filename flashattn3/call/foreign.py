"""Keywords of other attention functions, which our signatures lack.

FlashAttention-2's are taken at their neutral values, which code that was written for it passes in
every call. Those of torch's scaled_dot_product_attention get a sentence with our names.
"""

from __future__ import annotations

from ..errors import expect, shown, type_error, value_error
from .fields import CALL, Field, as_given, expect_default

_OTHER_NAMES = {"block_table": "page_table", "s_aux": "sinks"}
_OF_FLASH_ATTENTION_2 = {
    "dropout_p": CALL.fields["dropout_p"],
    "block_table": Field(
        "block_table", "", None, as_given, instead="flash_attn_with_kvcache reads keys in pages"
    ),
}
_PACKED = "masks.documents(lengths) packs documents into one dense row"
_DENSE = "flash_attn_func and the other dense forms"
_OF_OTHER_CALLS = {  # ours, but not of every function: the neutral value, and what to do
    "mask": (None, f"None: {_DENSE} take a mask; {_PACKED}"),
    "bias": (None, f"None: {_DENSE} take a bias"),
    "return_max_logit": (False, "False: flash_attn_func and the other forwards without a cache "
                                "return it"),
}  # fmt: skip
_OF_TORCH = {
    "scale": "given as softmax_scale",
    "is_causal": "given as causal, which is aligned to the bottom right",
    "attn_mask": "given as mask (flashattn3.masks), bias, causal or window_size",
    "enable_gqa": "left out: k and v may have fewer heads than q in every call",
}


def under_one_name(
    function: str, name: str, value: object, own: str, other: object
) -> object | None:
    """The value of an argument that has two names, of which at most one is given."""
    if value is not None and other is not None:
        wanted = f"None with {own}: both name one argument"
        raise value_error(function, name, wanted, "a second value")
    return other if value is None else value


def translated(
    function: str, given: dict[str, object], foreign: dict[str, object]
) -> dict[str, object]:
    """The arguments of a call, by the names in its signature.

    given: those that the signature has. foreign: keywords that it lacks.

    Raises: UnsupportedError for a value that no backend computes, TypeError for other keywords,
    ValueError for an argument under two names.
    """
    for name, value in foreign.items():
        own = _OTHER_NAMES.get(name)
        if own in given:
            given[own] = under_one_name(function, name, value, own, given[own])
        elif name in _OF_OTHER_CALLS:
            neutral, wanted = _OF_OTHER_CALLS[name]
            expect(value is neutral, function, name, wanted, shown(value))
        elif name in _OF_FLASH_ATTENTION_2:
            expect_default(function, _OF_FLASH_ATTENTION_2[name], value)
        elif name in _OF_TORCH:
            found = "the name in torch's scaled_dot_product_attention"
            raise type_error(function, name, _OF_TORCH[name], found)
        else:  # as Python says it
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return given
