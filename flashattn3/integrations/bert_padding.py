"""Between padded batches and sequences in rows, under the names of FlashAttention-2's
bert_padding, in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]: (rows, ...) → (len(indices), ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(len(indices), ...) → (first_axis_dim, ...): values at distinct indices, 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Keep the tokens that a mask marks, one sequence after the other. Waits for the device.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int, 1 for a token.
        unused_mask: the same, 1 for a place that is kept and holds no token.

    Returns:
        the kept rows (total, ...); their indices in batch * seqlen; cu_seqlens, int32 (batch + 1,);
        the longest sequence; the number of tokens of each sequence, int32 (batch,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    tokens = attention_mask.sum(-1, dtype=torch.int32)
    return (*_selected(hidden_states, kept, lengths), tokens)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for rows of the batch that hold several sequences one after the other.

    attention_mask_in_length: (batch, seqlen), int: the lengths of each row's sequences, then 0.
    Returns the first four of ``unpad_input``, for the sequences.
    """
    lengths = attention_mask_in_length
    steps = torch.arange(lengths.shape[1], device=lengths.device)
    kept = steps < lengths.sum(-1, keepdim=True)
    return _selected(hidden_states, kept, lengths[lengths > 0].to(torch.int32))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of ``unpad_input``: (total, ...) → (batch, seqlen, ...), 0 at padding."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _selected(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple:
    """The kept rows, their indices, cu_seqlens and the longest sequence."""
    indices = kept.flatten().nonzero().flatten()
    edges = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, edges, int(lengths.max())


NAMES = {
    function.__name__: function
    for function in (
        index_first_axis,
        index_put_first_axis,
        unpad_input,
        unpad_input_for_concatenated_sequences,
        pad_input,
    )
}
