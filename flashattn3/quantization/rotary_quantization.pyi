from typing import overload

import torch
from torch import Tensor

from ..call.block_scaled import BlockScaled

@overload
def rotate_and_quantize(
    q: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    num_heads_q: None = None,
    rotary_interleaved: bool = False,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-06,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
) -> BlockScaled: ...
@overload
def rotate_and_quantize(
    q: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    num_heads_q: int,
    rotary_interleaved: bool = False,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-06,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
) -> tuple[BlockScaled, BlockScaled, BlockScaled]: ...
@overload
def rotate_and_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    num_heads_q: None = None,
    rotary_interleaved: bool = False,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-06,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
) -> tuple[BlockScaled, BlockScaled, BlockScaled]: ...
@overload
def rotate_and_quantize(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    num_heads_q: int | None = None,
    rotary_interleaved: bool = False,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-06,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    block: int = 128,
    hadamard: bool = True,
    qk_dtype: torch.dtype | None = None,
    smooth_k: bool = False,
) -> BlockScaled | tuple[BlockScaled, BlockScaled, BlockScaled]: ...
