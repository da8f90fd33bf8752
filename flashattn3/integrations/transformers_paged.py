"""transformers' continuous batching on flashattn3: the attention ``paged|fa3`` of releases before
5.23, whose paged cache writes new keys and hands out those of each sequence.

Where a step passes a block table instead, the cached call writes the new keys, and reads the pages
where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import flash_attn_varlen_func
from ..errors import UnsupportedError, complaint, shown
from ..kvcache_api import flash_attn_with_kvcache

FUNCTION = "transformers paged attention"


def no_mask(*arguments: object, **named: object) -> None:
    """The mask of such an attention, which knows the sequences by their lengths."""


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | dict[str, Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int | dict[str, int],
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention of one layer in a step of continuous batching.

    Args:
        query, key, value: (1, heads, total, head_dim), the new tokens of all sequences.
        cache: transformers' PagedAttentionCache; read_index, write_index: for its ``update``.
        cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k: of the sequences; those of keys
            may be dictionaries with an entry for each kind of layer.
        block_table: int32 (groups of layers, batch, blocks), or None.

    Returns: out (1, total_q, heads, head_dim_v), and None.

    Raises: UnsupportedError: dropout or an attention mask.
    """
    for name, given, neutral in (
        ("dropout", dropout, 0.0),
        ("attention_mask", attention_mask, None),
    ):
        if given is not None and given != neutral:
            raise UnsupportedError(complaint(FUNCTION, name, neutral, shown(given)))
    window = getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    options = {
        "softmax_scale": scaling,
        "causal": True,
        "window_size": (window - 1 if window else -1, 0),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    q = query.transpose(1, 2)[0]
    if block_table is not None:
        return _decoded(module, q, key, value, cache, cu_seq_lens_k, block_table, options), None
    k, v = cache.update(key, value, module.layer_idx, read_index, write_index)
    edges = [edges.to(torch.int32) for edges in (cu_seq_lens_q, cu_seq_lens_k)]
    lengths = max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *edges, *lengths, **options)[None], None


def _decoded(
    module: torch.nn.Module,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    cache,
    cu_seq_lens_k: Tensor,
    block_table: Tensor,
    options: dict[str, object],
) -> Tensor:
    """One new token of each sequence, written to its page by the cached call."""
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    caches = (
        x[layer].view(-1, cache.block_size, *x[layer].shape[-2:])
        for x in (cache.key_cache, cache.value_cache)
    )
    batch = q.shape[0]
    cached = cu_seq_lens_k[: batch + 1].diff().to(torch.int32) - 1
    new = (x.transpose(1, 2)[0].unsqueeze(1) for x in (key, value))
    table = block_table[group][:batch]
    out = flash_attn_with_kvcache(
        q.unsqueeze(1), *caches, *new, cache_seqlens=cached, page_table=table, **options
    )
    return out.transpose(0, 1)
