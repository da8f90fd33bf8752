"""transformers models with attention in 8 bits: ``attn_implementation="fa3_fp8"``.

    from flashattn3.integrations import transformers_fp8
    transformers_fp8.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa3_fp8")

A prompt and a training step quantize q, k and v of each layer (``flash_attn_fp8_func``) and have
gradients. The next token behind a cache, biases and bool masks of single scores are computed as
"fa3" computes them, in the model's dtype.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..api import flash_attn_fp8_func, flash_attn_varlen_fp8_func
from ..call.hadamard import is_rotatable
from . import transformers as of_16_bits


def register(name: str = "fa3_fp8") -> str:
    """Make ``attn_implementation=name`` run on flashattn3 in 8 bits; as ``transformers.register``,
    which documents arguments and errors."""
    return of_16_bits.register_as("integrations.transformers_fp8.register", name, attention)


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    edges: tuple[Tensor | None, Tensor | None],
    values: tuple,
    s_aux: Tensor | None,
    _compiling: bool,
) -> Tensor:
    """The attention of all queries, of 16 bits or under autocast. values: of OF_MODELS."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    options = of_16_bits.options_of(values, s_aux, qkv[0])
    options["hadamard"] = is_rotatable(q.shape[-1])
    if edges[0] is None:
        return flash_attn_fp8_func(q, k, v, **options)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    longest = {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    out = flash_attn_varlen_fp8_func(*rows, *edges, **longest, **options)
    return out.unflatten(0, q.shape[:2])


# As transformers' AttentionInterface calls it.
attention = partial(of_16_bits.attention, attend_whole=_attend)
