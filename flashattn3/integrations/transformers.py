"""transformers models run on flashattn3: ``attn_implementation="fa3"`` after ``register()``.

    from flashattn3.integrations import transformers as fa3
    fa3.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa3")

A model asks two functions. The mask function runs once per forward and kind of mask; it describes
the mask as *segments* (``masks.py``, ``segments.py``). The attention function runs in every layer
and passes the segments on as cu_seqlens, for the next token behind a cache as cache_seqlens and
cache_leftpad: no gather, no graph break, and one wait for the GPU in the first layer, which checks
all masks.

What a model asks and this integration does not have raises UnsupportedError: nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call.cached import DECODE, MAX_HEAD_DIM
from ..call.dtypes import SIXTEEN_BIT
from ..call.public import public, reader
from ..errors import UnsupportedError, shown, value_error
from ..flex import attend_masked_bhsd
from ..kvcache_api import flash_attn_with_kvcache
from ..masks import Mask
from ..modes import is_watched
from ..run.bhsd import attend_like_before, call_operator, is_compiled
from ..run.launches import Further, attend_kept
from .dense_masks import fits, mask_of
from .libraries import TRANSFORMERS, import_library
from .masks import mask
from .packed_positions import edges_of_positions
from .refused_models import _awaited, attention_was_called, attention_was_compiled, refuse_models
from .segments import INSTEAD, Segments, is_plain
from .transformers_cache import QuantizedStates
from .transformers_paged import no_mask, paged_attention

TAKEN = ("eager", "sdpa", "flex_attention")


def register(name: str = "fa3") -> str:
    """Make ``attn_implementation=name`` run on flashattn3.

    Args:
        name: must not contain "flash", "/" or "|": transformers loads such names from its hub.

    Returns: name. Registering twice has no effect.

    Raises:
        UnsupportedError: transformers is not installed.
        ValueError: transformers gives the name another meaning.
    """
    function = "integrations.transformers.register"
    return register_as(function, name, attention)


def register_as(function: str, name: str, attend: Callable) -> str:
    """``register`` of an attention function. function: that a user called."""
    import_library(function, *TRANSFORMERS)
    from transformers import AttentionInterface, AttentionMaskInterface

    reserved = any(part in name.lower() for part in ("flash", "/", "|"))
    if reserved or not name or name in TAKEN:
        wanted = f"without 'flash', '/' and '|', and none of {TAKEN}"
        raise value_error(function, "name", wanted, repr(name))
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(f"paged|{name}", paged_attention)  # continuous batching
    AttentionMaskInterface.register(f"paged|{name}", no_mask)
    refuse_models(name)
    return name


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    attend_whole: Callable | None = None,
    **others,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers' AttentionInterface calls it.

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, heads_kv, seqlen_k, ·); value's head_dim may differ. QuantizedStates of
            a cache of 8 bits.
        attention_mask: from ``mask``, or None: then attention is causal where is_causal says so, as
            in transformers' sdpa and flash attention; eager attention shows all keys there. A model
            that asks for its mask never differs in this. A floating one (batch or 1, heads or 1,
            seqlen_q, seqlen_k), of a user or of Swin, is added to the scores and hides by -inf; a
            bool one, of a user or from ``mask``, is True where a query sees a key.
        sliding_window: w: a query sees the w - 1 keys before it, and after it where the mask is not
            causal. Where ``mask`` describes a window, that one counts.
        scaling: factor of the scores; None: head_dim ** -0.5.
        dropout: must be 0.
        is_causal: None: that of module.
        softcap: None or 0: no cap.
        position_ids: packed sequences are found by them where there is no attention_mask and no
            cache, in models that do not give them to the mask function (``WITHOUT_POSITIONS``).
        s_aux: (heads,), attention sinks: one more key per head with this score and no value.
        position_bias: (batch or 1, heads or 1, seqlen_q, seqlen_k), added to the scores (T5).
        cu_seq_lens_q, cu_seq_lens_k: sequences packed into one row of the batch.
        attend_whole: computes what ``_attend`` does, of calls without a bias and a bool mask; None:
            ``_attend``. Not an argument of transformers.
        others: arguments that change no number, and those that are refused.

    Returns: out (batch, seqlen_q, heads, head_dim_v) and None in place of the probabilities.

    Raises:
        UnsupportedError: dropout, or another argument that flashattn3 does not support; a mask of
            other lengths; no mask for a causal layer with other numbers of queries and keys.
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        attention_was_compiled()
    elif _awaited:
        attention_was_called()
    if compiling or dropout or not _REFUSED.keys().isdisjoint(others):
        _refuse(dropout, others)
    batch, _, length, _ = query.shape
    lengths = length, key.shape[2]
    if attention_mask is not None and attention_mask.dtype.is_floating_point:
        bias = attention_mask[..., : lengths[1]]  # as in transformers' eager attention
        bias = bias if position_bias is None else bias + position_bias
        return _attend_with_bias(query, key, value, bias, scaling, softcap, s_aux), None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        segments = Segments(causal, -1 if sliding_window is None else sliding_window - 1)
    elif attention_mask.dtype == torch.bool and attention_mask.ndim == 4:
        segments = Segments(False, dense=attention_mask)
    else:
        segments = Segments.of_mask(attention_mask, batch, lengths, module)
    is_packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if segments.dense is not None:
        if is_packed:
            raise UnsupportedError(
                "transformers attention: cu_seq_lens_q must be None where attention_mask has a "
                "bool for each score: let it show the tokens of a sequence alone"
            )
        options = scaling, softcap, s_aux
        return _attend_with_mask(query, key, value, segments.dense, position_bias, *options), None
    if attention_mask is None and segments.causal and 1 < length != lengths[1] and not is_packed:
        raise _not_asked(lengths, module)
    if length == 1 and not is_packed and position_bias is None:
        out = _attend_to_cache(query, key, value, segments, scaling, softcap or 0.0, s_aux)
        if out is not None:
            return out, None
    is_whole = attention_mask is None or is_plain(attention_mask)
    if attention_mask is not None:
        segments = segments.packed(lengths)
    if is_packed:
        segments = segments.cut_at(cu_seq_lens_q, cu_seq_lens_k, lengths)
    elif is_whole and _is_packed(module, position_ids, segments, lengths, others):
        edges = edges_of_positions(position_ids, batch, length, module)
        if edges is not None:
            segments = segments._replace(cu_seqlens_q=edges, cu_seqlens_k=edges)
    if position_bias is not None:
        bias = _of_all_scores(position_bias.to(query.dtype), query, key)
        bias = segments.hidden_in(bias, batch)
        return _attend_with_bias(query, key, value, bias, scaling, softcap, s_aux), None
    if type(key) is QuantizedStates:
        key, value = _widened(key, value, query.dtype)
    causal, left = segments.causal, segments.left
    edges = segments.cu_seqlens_q, segments.cu_seqlens_k  # torch 2.8 traces no slice
    values = scaling, causal, left, 0 if causal else left, softcap or 0.0
    attend = attend_whole or _attend
    return attend((query, key, value), edges, values, s_aux, compiling), None


def _not_asked(lengths: tuple[int, int], module: torch.nn.Module) -> UnsupportedError:
    """``mask`` returns no None for such lengths, so the model did not ask for its mask. Attention
    functions of transformers differ here: eager shows all keys, sdpa the first ones."""
    return UnsupportedError(
        "transformers attention: attention_mask must not be None where the numbers of queries and "
        f"keys differ, got {lengths}: {type(module).__name__} is causal and its model asked for no "
        f"mask; pass attention_mask, or {INSTEAD}"
    )


# Models whose mask function gets no position_ids. Those of other models find packed sequences
# themselves, where there is no cache: a layer then has a mask.
WITHOUT_POSITIONS = "gpt_oss", "afmoe", "granitemoehybrid"


def _is_packed(
    module: torch.nn.Module,
    position_ids: Tensor | None,
    segments: Segments,
    lengths: tuple[int, int],
    others: dict,
) -> bool:
    """Return whether the positions must be read: a layer says by use_cache that there is no
    cache."""
    if position_ids is None or others.get("use_cache") is not False:
        return False
    if not segments.causal or not 1 < lengths[0] == lengths[1]:
        return False
    config = getattr(module, "config", None)
    return getattr(config, "model_type", None) in WITHOUT_POSITIONS


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    edges: tuple[Tensor | None, Tensor | None],
    values: tuple,
    s_aux: Tensor | None,
    compiling: bool,
) -> Tensor:
    """The attention of all queries. edges: cu_seqlens of queries and keys. values: of OF_MODELS."""
    if s_aux is None and edges[0] is None and not compiling:
        out = attend_like_before(*qkv, *values)
        if out is not None:
            return out
    if s_aux is None and compiling and is_compiled(*qkv):
        return call_operator(*qkv, *edges, values, False)
    return flash_attn_bhsd_func(*qkv, *edges, **options_of(values, s_aux, qkv[0]))


def options_of(values: tuple, s_aux: Tensor | None, query: Tensor) -> dict[str, object]:
    """The arguments of attention functions. values: of OF_MODELS."""
    scaling, causal, left, right, softcap = values
    options = {"causal": causal, "window_size": (left, right), "softcap": softcap}
    return options | {"softmax_scale": scaling, "sinks": _sinks(s_aux, query)}


def _attend_with_bias(query, key, value, bias, *options) -> Tensor:
    """The attention of all queries to all keys that the bias does not hide."""
    bias = _of_all_scores(bias.to(query.dtype), query, key)
    return _attend_densely(query, key, value, *options, bias=bias)


def _of_all_scores(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A bias with a row for each query and a column for each key, where it has one for all."""
    sizes = query.shape[2], key.shape[2]
    sizes = [n if found == 1 else -1 for n, found in zip(sizes, bias.shape[2:], strict=True)]
    return bias.expand(-1, -1, *sizes)


def _attend_with_mask(query, key, value, seen, position_bias, *options) -> Tensor:
    """The attention of all queries to the keys that a bool mask shows."""
    keys = key.shape[2]  # a mask may have more, as transformers' eager attention has it
    if not fits(seen[..., :keys], *query.shape[:3], keys):
        raise UnsupportedError(
            "transformers attention: attention_mask must be for the lengths of the call, (batch or "
            f"1, heads or 1, {query.shape[2]}, {keys}), got {shown(seen)}; {INSTEAD}"
        )
    if position_bias is not None:
        hidden = ~seen[..., :keys]
        bias = position_bias.to(query.dtype).masked_fill(hidden, -torch.inf)
        return _attend_with_bias(query, key, value, bias, *options)
    return _attend_densely(query, key, value, *options, mask=mask_of(seen, keys))


def _attend_densely(query, key, value, scaling, softcap, s_aux, **mask_or_bias) -> Tensor:
    if type(key) is QuantizedStates:
        key, value = _widened(key, value, query.dtype)
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": _sinks(s_aux, query)}
    return flash_attn_bhsd_func(query, key, value, **mask_or_bias, **options)


def _widened(
    key: QuantizedStates, value: QuantizedStates, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache of 8 bits in the dtype of queries."""
    return key.widened(dtype), value.widened(dtype)


def _sinks(s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    """Sinks in float32 or query's dtype."""
    if s_aux is None or s_aux.dtype == query.dtype:
        return s_aux
    return s_aux.float()


def _attend_to_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    softcap: float,
    s_aux: Tensor | None,
) -> Tensor | None:
    """The attention of the next token behind a cache, by a cached call, whose plan does not depend
    on the length of the cache. None if no cached call takes it. A query is the last position of its
    sequence, so a mask that is not causal shows it no other keys."""
    if torch.is_grad_enabled() or segments.cu_seqlens_q is not None:
        return None
    end, begin = segments.cache_seqlens, segments.cache_leftpad
    q, window = query.transpose(1, 2), (segments.left, 0)
    k_descale = v_descale = None
    if type(key) is QuantizedStates:
        k, v, k_descale, v_descale = key.codes, value.codes, key.descale, value.descale
    else:
        k, v = key.transpose(1, 2), value.transpose(1, 2)
    if s_aux is None and not is_watched(q, k):
        options = _options_of_one_query(window, scaling, True, softcap, None)
        further = None
        if begin is not None or k_descale is not None:
            further = Further(cache_leftpad=begin, k_descale=k_descale, v_descale=v_descale)
        out = attend_kept(options, q, k, v, end, None, None, further, None)
        if out is not None:
            return out
    if not _fits_a_cached_call(q, k, v, k_descale, end):
        return None
    sinks = None if s_aux is None else s_aux.float()
    named = {"cache_seqlens": end, "cache_leftpad": begin, "sinks": sinks}
    named |= {"softmax_scale": scaling, "window_size": window, "softcap": softcap}
    named |= {"k_descale": k_descale, "v_descale": v_descale}
    return flash_attn_with_kvcache(q, k, v, causal=True, **named)


_OPTIONS = "window_size", "softmax_scale", "causal", "softcap", "backend"
_options_of_one_query = reader(DECODE, "flash_attn_with_kvcache", _OPTIONS)


def _fits_a_cached_call(
    q: Tensor, k: Tensor, v: Tensor, k_descale: Tensor | None, end: Tensor | None
) -> bool:
    """end: where the keys end in a cache that does not grow. One that does gives compiled code
    another shape in each step, and a call that is not cached has a plan for all of them."""
    if end is None and torch.compiler.is_compiling():
        return False
    stored = q.dtype if k_descale is None else k.dtype
    if q.dtype not in SIXTEEN_BIT or not stored == k.dtype == v.dtype:
        return False
    return v.shape[3] <= q.shape[3] <= MAX_HEAD_DIM and k.stride(3) == v.stride(3) == 1


@public(attend_masked_bhsd)
def flash_attn_bhsd_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    return_max_logit: bool = False,
    mask: Mask | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_attn_func`` of tensors whose heads come before their tokens, as models have them.

    Args:
        q: (batch, num_heads_q, seqlen_q, head_dim), any strides.
        k, v: (batch, num_heads_kv, seqlen_k, head_dim) and (batch, num_heads_kv, seqlen_k,
            head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), as in ``flash_attn_varlen_func``: of
            sequences packed into the flattened batch, none longer than seqlen_q and seqlen_k.
        All other arguments are those of ``flash_attn_func``.

    Returns: as ``flash_attn_func``: out (batch, seqlen_q, num_heads_q, head_dim_v), lse, max_logit.

    Raises: as ``flash_attn_func``.
    """


# Arguments of some models that the attention here does not have → what to use instead.
_REFUSED = {
    "head_mask": "use attn_implementation='eager'",
    "output_attentions": "use attn_implementation='eager' to read the probabilities",
    "cache": "it is the paged cache of continuous batching: use attn_implementation='paged|fa3'",
}


def _refuse(dropout: float, others: dict) -> None:
    if dropout:
        raise UnsupportedError(
            f"transformers attention: dropout must be 0, got {dropout}: set attention_dropout=0.0 "
            "in the model's config, or use attn_implementation='sdpa'"
        )
    for name, instead in _REFUSED.items():
        value = others.get(name)
        if value is not None and value is not False:
            raise UnsupportedError(
                f"transformers attention: {name} must be None, got {shown(value)}: {instead}"
            )
