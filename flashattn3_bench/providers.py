"""What is compared: flashattn3 and the attention that every PyTorch user already has.

An attention here is a function (q, k, v, causal) -> out of (batch, seqlen, heads, head_dim); "fp8
int8" and "fp8 e4m3" take q, k and v already quantized, q and k rotated to the type they name, with
"fast accum" behind the name with use_fast_accum=True; "quantize+int8" and "quantize+e4m3" quantize
them so, "quantize+int8+smooth_k" after k's mean was subtracted; "mha" takes the heads of k and v
once for each query head; "cached" is the cached call of k and v, "one part" our call with
``num_splits=1``; "on 16 SMs" is our call with that ``sm_margin``; "triton" is our call on
that backend, "captured" our call as the replay of a CUDA graph, "ladder fa1" and "ladder fa2" are
kernels of examples/learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn3

from . import ladder

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def with_options(**options: Any) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return flashattn3.flash_attn_func(q, k, v, causal=causal, **options)

    return attend


ours = with_options()


def cached(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flashattn3.flash_attn_with_kvcache(q, k, v, causal=causal)


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_few_sms(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flashattn3.flash_attn_func(q, k, v, causal=causal, sm_margin=num_sms(q.device) - FEW)


def _quantize_and_attend(qk_dtype: torch.dtype, smooth_k: bool = False) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        how = {"qk_dtype": qk_dtype, "smooth_k": smooth_k}
        return flashattn3.flash_attn_fp8_func(q, k, v, causal=causal, **how)

    return attend


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax(q kᵀ) v as in the textbook: stores scores (batch, heads, seqlen_q, seqlen_k)."""
    qhead_per_kvhead = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if qhead_per_kvhead > 1:
        k, v = (x.repeat_interleave(qhead_per_kvhead, dim=1) for x in (k, v))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    if causal:
        sq, sk = scores.shape[-2:]
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu_(sk - sq + 1)
        scores = scores.masked_fill_(hidden, -math.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's own attention on the same storage, with whichever of its backends is selected.

    Its is_causal is aligned to the top left, so a causal problem must have as many queries as keys.
    """
    if causal and q.shape[1] != k.shape[1]:
        said = "torch's is_causal is aligned to the top left: needs seqlen_q = seqlen_k"
        raise RuntimeError(said)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


SDPA_BACKENDS = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def _with_backend(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, causal)

    return attend


OURS, DETERMINISTIC, CAPTURED = "flashattn3", "deterministic", "captured"
MHA, TRITON = "mha", "triton"
CACHED, ONE_PART = "cached", "one part"
FEW = 16  # SMs of a Jetson Orin
ON_FEW_SMS = f"on {FEW} SMs"
NAIVE, LADDER_FA1, LADDER_FA2 = "naive", "ladder fa1", "ladder fa2"
FP8_INT8, FP8_E4M3 = "fp8 int8", "fp8 e4m3"
FAST_INT8, FAST_E4M3 = f"{FP8_INT8} fast accum", f"{FP8_E4M3} fast accum"
WHOLE_INT8, WHOLE_E4M3 = "quantize+int8", "quantize+e4m3"
WHOLE_SMOOTH = f"{WHOLE_INT8}+smooth_k"
# The dtype of q and k, rotated: converted before they are timed, or while.
FAST = {FAST_INT8: torch.int8, FAST_E4M3: torch.float8_e4m3fn}
IN_8_BITS = "8 bits"  # of the rotary suite, rotated and quantized in one pass
QUANTIZED = {FP8_INT8: torch.int8, FP8_E4M3: torch.float8_e4m3fn, **FAST}
WHOLE = {WHOLE_INT8: torch.int8, WHOLE_E4M3: torch.float8_e4m3fn, WHOLE_SMOOTH: torch.int8}
EIGHT_BIT = {**QUANTIZED, **WHOLE}
PROVIDERS: dict[str, Attention] = {
    **dict.fromkeys(QUANTIZED, ours),
    **dict.fromkeys(FAST, with_options(use_fast_accum=True)),
    **{name: _quantize_and_attend(to, name == WHOLE_SMOOTH) for name, to in WHOLE.items()},
    DETERMINISTIC: with_options(deterministic=True),
    CAPTURED: ours,
    OURS: ours,
    MHA: ours,
    CACHED: cached,
    ONE_PART: with_options(num_splits=1),
    ON_FEW_SMS: on_few_sms,
    **{name: _with_backend(backend) for name, backend in SDPA_BACKENDS.items()},
    NAIVE: naive,
    TRITON: with_options(backend="triton"),
    LADDER_FA1: ladder.fa1,
    LADDER_FA2: ladder.fa2,
}
FLEX = "flex"  # FlexAttention, of the suites of masks
SELECTABLE = (*SDPA_BACKENDS, NAIVE, TRITON, LADDER_FA1, LADDER_FA2)
BASELINES = (*SELECTABLE, FLEX)
