"""A cache of 8 bits for transformers models that run on flashattn3.

    from flashattn3.integrations import transformers as fa3
    from flashattn3.integrations.transformers_cache import quantized_cache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=fa3.register())
    model.generate(**inputs, past_key_values=quantized_cache(model.config))

Keys and values are e4m3 or int8, with a descale for each token and head, which
``append_kvcache`` computes. The first tokens attend to themselves in 16 bits. The next token reads
the codes; several tokens behind a cache, and masks of single scores, read them widened to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..call.dtypes import EIGHT_BIT
from ..errors import UnsupportedError, value_error
from ..kvcache_api import append_kvcache
from .libraries import TRANSFORMERS, import_library

ROOM = 256  # tokens that a buffer has room for at least, beside those that it is made for


def quantized_cache(config, dtype: torch.dtype = torch.float8_e4m3fn):
    """Return an empty cache of 8 bits, for ``past_key_values`` of a model or of ``generate``.

    Args:
        config: of the model, whose layers have full or sliding attention.
        dtype: torch.float8_e4m3fn or torch.int8.

    Returns: a ``transformers.Cache``. Beams may be reordered. crop (prompt lookup, assistants) and
        offloading raise UnsupportedError, and so does any attention but flashattn3's.

    Raises:
        UnsupportedError: transformers is not installed, or a layer has another state.
        ValueError: dtype is another one.
    """
    function = "integrations.transformers_cache.quantized_cache"
    import_library(function, *TRANSFORMERS)
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )

    if dtype not in EIGHT_BIT:
        raise value_error(function, "dtype", f"one of {EIGHT_BIT}", dtype)
    layers = DynamicCache(config=config).layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(
                f"{function}: config must have layers of full or sliding attention alone, got one "
                f"with a {type(layer).__name__}; use transformers' DynamicCache"
            )
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return Cache(layers=[_layer_class()(dtype, window) for window in windows])


class QuantizedStates(Tensor):
    """Keys or values as a layer of the cache returns them, (batch, heads, tokens, head_dim). A
    model that computes with them gets an error: codes say nothing without their descales.

    codes: (batch, tokens, heads, head_dim). descale: (batch, tokens, heads).
    """

    codes: Tensor
    descale: Tensor

    @classmethod
    def of(cls, codes: Tensor, descale: Tensor) -> QuantizedStates:
        states = codes.transpose(1, 2).as_subclass(cls)
        states.codes, states.descale = codes, descale
        return states

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The values, rounded once."""
        return (self.codes.float() * self.descale[..., None]).to(dtype).transpose(1, 2)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if function.__name__ == "__get__":  # shape, dtype, device
            return super().__torch_function__(function, types, arguments, named)
        raise UnsupportedError(
            "transformers cache: attention must be flashattn3's with a cache of 8 bits, got "
            f"{function.__name__} of its codes; use attn_implementation='fa3', or another cache"
        )


@lru_cache(maxsize=1)
def _layer_class() -> type:
    """A layer of the cache with transformers' class as its base."""
    from transformers.cache_utils import CacheLayerMixin

    return type("QuantizedLayer", (_Layer, CacheLayerMixin), {"__module__": __name__})


def __getattr__(name: str) -> type:
    """pickle looks the class of a layer up in the module."""
    if name == "QuantizedLayer":
        return _layer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Layer:
    """The codes and descales of K and V in buffers that have room for further tokens. With a window
    a layer keeps the tokens that the next one sees, as transformers' layers do."""

    is_compileable = is_croppable = supports_early_init = False

    def __init__(self, dtype: torch.dtype, sliding_window: int | None):
        super().__init__()
        self.dtype, self.sliding_window = dtype, sliding_window
        self.is_sliding = sliding_window is not None
        self.reset()

    def reset(self) -> None:
        self.cumulative_length = self.end = 0  # end: of the tokens in the buffers
        self.buffers: list[Tensor] = []
        self.is_initialized = False

    def __getstate__(self) -> dict[str, object]:
        """Codes as bytes: torch 2.13 pickles tensors of e4m3 that it cannot read."""
        return vars(self) | {"buffers": self._viewed(torch.uint8)}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.buffers = self._viewed(self.dtype)

    def _viewed(self, dtype: torch.dtype) -> list[Tensor]:
        """The buffers, those of codes as tensors of dtype."""
        return [x.view(dtype) for x in self.buffers[:2]] + self.buffers[2:]

    def lazy_initialization(self, *_states: Tensor) -> None:
        """The first update makes the buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *_others, **_named):
        """Returns: what attention reads: the first tokens as they are, else all kept ones."""
        kept, is_first = self._kept(), self.cumulative_length == 0
        states = [x.transpose(1, 2) for x in (key_states, value_states)]
        new = states[0].shape[1]
        self.cumulative_length += new
        if is_first:
            states = [x[:, new - self._kept() :] for x in states]
        self._append(states, kept)
        if is_first:
            return key_states, value_states
        k, v, k_descale, v_descale = (x[:, self.end - kept - new : self.end] for x in self.buffers)
        return QuantizedStates.of(k, k_descale), QuantizedStates.of(v, v_descale)

    def _kept(self) -> int:
        """Number of tokens that a next one may see."""
        if self.sliding_window is None:
            return self.cumulative_length
        return min(self.cumulative_length, self.sliding_window - 1)

    def _append(self, states: list[Tensor], kept: int) -> None:
        """states: new keys and values. kept: number of tokens to keep of those in the buffers."""
        length = kept + states[0].shape[1]
        if not self.buffers or self.end - kept + length > self.buffers[0].shape[1]:
            sizes = [(len(x), length + max(ROOM, length // 8), *x.shape[2:]) for x in states]
            old, device = self.buffers, states[0].device
            self.buffers = [torch.empty(size, dtype=self.dtype, device=device) for size in sizes]
            self.buffers += [torch.empty(size[:3], device=device) for size in sizes]
            for buffer, tokens in zip(self.buffers, old, strict=False):
                buffer[:, :kept] = tokens[:, self.end - kept : self.end]
            self.end, self.is_initialized = kept, True
        k, v, k_descale, v_descale = self.buffers
        descales = {"k_descale": k_descale, "v_descale": v_descale}
        append_kvcache(*states, k, v, cache_seqlens=self.end, **descales)
        self.end += states[0].shape[1]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(number of keys, position of the first one). 4.57 passes the positions of queries."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        kept = self._kept()
        return kept + new, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    get_max_cache_shape = get_max_length  # its name before 5.24

    def _change(self, of: Callable[[Tensor], Tensor]) -> None:
        self.buffers = [of(x) for x in self.buffers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache  # torch 2.10 has no e4m3[indices] on a CPU

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, *_length: int) -> None:
        raise _refused("crop")

    def offload(self) -> None:
        raise _refused("offload")

    def prefetch(self) -> None:
        raise _refused("prefetch")


def _refused(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"transformers cache: {name} must not be asked of a cache of 8 bits; use transformers' "
        "DynamicCache"
    )
