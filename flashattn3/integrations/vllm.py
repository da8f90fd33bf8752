"""vLLM's attention layers on flashattn3.

    from flashattn3.integrations import vllm as fa3

    fa3.register()  # before the engine is made, in every process: in a plugin of vLLM
    # then --attention-backend CUSTOM, or AttentionConfig(backend="CUSTOM")

Written against vLLM 0.33. The classes below have no base: ``register`` and vLLM's registry get them
with vLLM's abstract classes as bases, so that this module imports without vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..call.batch_invariance import DEFAULT_SPAN
from ..call.cached import MAX_HEAD_DIM
from ..errors import UnsupportedError, complaint, shown
from ..kvcache_api import flash_attn_with_kvcache
from .libraries import import_library

TESTED = "vllm", "0.33", "0.33", "vllm==0.33.*"
NAME = "FlashAttn3Backend"


def register() -> None:
    """Make flashattn3 the backend that vLLM calls CUSTOM, in this process. Calling again has no
    effect.

    Raises: UnsupportedError: vLLM is not installed.
    """
    import_library("register", *TESTED)
    from vllm.v1.attention.backends import registry

    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, f"{__name__}.{NAME}")


def __getattr__(name: str) -> type:
    """vLLM's registry finds the backend by its name in this module."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_class()


@lru_cache(maxsize=1)
def backend_class() -> type:
    """The backend with vLLM's classes as bases."""
    import_library(NAME, *TESTED)
    from vllm.v1.attention import backend

    implementation = type("FlashAttn3Impl", (_Impl, backend.AttentionImpl), {})
    builder = type("FlashAttn3MetadataBuilder", (_Builder, backend.AttentionMetadataBuilder), {})
    of_backend = {
        "get_impl_cls": staticmethod(lambda: implementation),
        "get_builder_cls": staticmethod(lambda: builder),
        "__module__": __name__,
    }
    return type(NAME, (_Backend, backend.AttentionBackend), of_backend)


class _Backend:
    """What vLLM's selector asks. Caches of 16 bits; forward writes new keys and values."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class Metadata:
    """One batch, for all layers. Lengths and edges are int32 on the GPU.

    cached: tokens of each sequence before this step.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    cached: Tensor
    block_table: Tensor
    causal: bool


class _Builder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False):
        """Each step makes a new tensor, so no graph may hold it: CUDA graphs are vLLM's piecewise
        ones, which leave attention out."""
        of = common_attn_metadata
        if not isinstance(of.causal, bool):
            wanted = "a bool for all sequences"
            raise UnsupportedError(complaint("build", "causal", wanted, shown(of.causal)))
        cached = of.seq_lens - of.query_start_loc.diff()
        return Metadata(
            of.num_actual_tokens, of.max_query_len, of.query_start_loc, of.seq_lens, cached,
            of.block_table_tensor, of.causal,
        )  # fmt: skip


class _Impl:
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != "decoder":
            _refuse("attn_type", "'decoder'", attn_type)
        if alibi_slopes is not None:
            _refuse("alibi_slopes", None, alibi_slopes)
        if kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            _refuse("kv_cache_dtype", "one of auto, float16 and bfloat16", kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.writes = kv_sharing_target_layer_name is None
        left = -1 if sliding_window is None else sliding_window - 1
        self.options = {
            "softmax_scale": self.scale,
            "window_size": (left, -1),
            "softcap": logits_soft_cap or 0.0,
            "split_tokens": DEFAULT_SPAN if _asks_for_invariance() else None,
        }

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """kv_cache: (blocks, num_kv_heads, block_size, 2 * head_size), any strides."""
        for name, scale in (
            ("output_scale", output_scale),
            ("output_block_scale", output_block_scale),
        ):
            if scale is not None:
                _refuse(name, None, scale)
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        rows = slice(attn_metadata.num_actual_tokens)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, -1)
        lengths, new = attn_metadata.seq_lens, {}
        if self.writes and key is not None:
            lengths = attn_metadata.cached
            new = {"k": key[rows], "v": value[rows]}
            new["cu_seqlens_k_new"] = attn_metadata.query_start_loc
        with torch.no_grad():
            flash_attn_with_kvcache(
                query[rows],
                k_cache,
                v_cache,
                **new,
                cache_seqlens=lengths,
                page_table=attn_metadata.block_table,
                cu_seqlens_q=attn_metadata.query_start_loc,
                max_seqlen_q=attn_metadata.max_query_len,
                causal=attn_metadata.causal,
                sinks=self.sinks,
                out=output[rows].view(-1, self.num_heads, self.head_size),
                **self.options,
            )
        return output


def _asks_for_invariance() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _refuse(name: str, wanted: object, found: object) -> None:
    raise UnsupportedError(complaint("flashattn3 in vLLM", name, wanted, shown(found)))
