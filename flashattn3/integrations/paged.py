"""Calls with a block table, of torch and of FlashAttention's functions, as cached calls."""

from __future__ import annotations

from torch import Tensor

from ..errors import expect
from ..kvcache_api import flash_attn_with_kvcache


def attend_to_pages(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from sequences in rows to keys in pages.

    Args:
        function: the function that was called, for messages.
        q: (total_q, num_heads_q, head_dim). k, v: (num_pages, page_size, num_heads_kv, ·).
        block_table: int32 (batch, max_pages), the pages of each sequence in order.
        cu_seqlens_k, seqused_k: the length of each sequence follows from the first, unless the
            second has it.
        options: of ``flash_attn_with_kvcache``.
    """
    if seqused_k is None:
        wanted = "given with a block table, or seqused_k"
        expect(cu_seqlens_k is not None, function, "cu_seqlens_k", wanted, None)
        seqused_k = cu_seqlens_k.diff()
    return flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=seqused_k,
        page_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        **options,
    )
