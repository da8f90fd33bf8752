"""transformers' continuous batching on flashattn3: ``paged|fa3``."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashattn3 import UnsupportedError, flash_attn_func
from flashattn3.integrations import transformers as fa3
from flashattn3.integrations.transformers_paged import paged_attention

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 16, 8
CACHED, NEW = (11, 0, 20), (1, 5, 3)


class Cache:
    """What the attention uses of transformers' PagedAttentionCache: one group of one layer."""

    block_size = PAGE

    def __init__(self, slots: int, generator: torch.Generator):
        shape = slots, HEADS_KV, DIM
        self.key_cache, self.value_cache = (
            [torch.randn(shape, generator=generator)] for _ in range(2)
        )
        self.layer_index_to_group_indices = {3: (0, 0)}

    def update(self, key, value, layer_idx, read_index, write_index):
        assert layer_idx == 3
        for cache, x in ((self.key_cache[0], key), (self.value_cache[0], value)):
            cache[write_index[0]] = x.transpose(1, 2)[0]
        return self.key_cache[0][read_index[0]], self.value_cache[0][read_index[0]]


def batch_of(new: tuple[int, ...]) -> SimpleNamespace:
    """The new tokens of each sequence in pages, and the result of each by itself."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(12, generator=generator).view(3, 4)
    cache = Cache(12 * PAGE, generator)
    slots = [
        (row.repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(4))[: before + own]
        for row, before, own in zip(pages, CACHED, new, strict=True)
    ]
    q, k, v = (
        torch.randn(1, heads, sum(new), DIM, generator=generator)
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    )
    return SimpleNamespace(
        cache=cache, q=q, k=k, v=v, slots=slots, pages=pages, new=new,
        written=torch.cat([x[len(x) - own :] for x, own in zip(slots, new, strict=True)]),
        edges_q=torch.tensor([0, *new]).cumsum(0),
        edges_k=torch.tensor([0, *map(len, slots)]).cumsum(0),
    )  # fmt: skip


def wanted_of(of: SimpleNamespace, window: int | None) -> Tensor:
    """After the call, whose keys are in the cache."""
    caches = of.cache.key_cache[0], of.cache.value_cache[0]
    for cache, x in zip(caches, (of.k, of.v), strict=True):
        assert torch.equal(cache[of.written], x.transpose(1, 2)[0])
    sides = -1 if window is None else window - 1, 0
    out = [
        flash_attn_func(q[None], *(x[slots][None] for x in caches), causal=True, window_size=sides)
        for q, slots in zip(of.q.transpose(1, 2)[0].split(of.new), of.slots, strict=True)
    ]
    return torch.cat(out, 1)


@pytest.mark.parametrize("by_layer", [False, True], ids=["one-length", "by-kind"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("decodes", [False, True], ids=["mixed", "block-table"])
def test_a_step_is_attention_of_each_sequence(decodes, window, by_layer):
    of = batch_of((1, 1, 1) if decodes else NEW)
    module = SimpleNamespace(layer_idx=3, sliding_window=window)
    edges_k, longest = of.edges_k, max(map(len, of.slots))
    if by_layer:
        kind = "sliding_attention" if window else "full_attention"
        edges_k, longest = {kind: edges_k}, {kind: longest}
    indices = {"read_index": [torch.cat(of.slots)], "write_index": [of.written]}
    if decodes:
        indices |= {"block_table": of.pages.int()[None]}
    found, probabilities = paged_attention(
        module, of.q, of.k, of.v, None, of.cache, of.edges_q, edges_k, max(of.new), longest,
        scaling=DIM**-0.5, use_cache=False, **indices,
    )  # fmt: skip
    assert probabilities is None
    torch.testing.assert_close(found, wanted_of(of, window))


def test_dropout_is_refused_by_name():
    of = batch_of(NEW)
    module = SimpleNamespace(layer_idx=3, sliding_window=None)
    edges = of.edges_q, of.edges_k, 5, 31
    with pytest.raises(UnsupportedError, match="paged attention: dropout must be"):
        paged_attention(module, of.q, of.k, of.v, None, of.cache, *edges, dropout=0.1)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_a_model_generates_what_it_generates_alone():
    import transformers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if not (5, 0) <= release < (5, 23):
        pytest.skip("4.57 asks a GPU for its memory, 5.23 takes names with flash alone")
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}

    def model(attention: str) -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention)).eval()

    prompts = [list(range(1, 8)), list(range(3, 40)), [5, 6]]
    how = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    alone = model("sdpa")
    wanted = [
        alone.generate(torch.tensor([prompt]), generation_config=how)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    found = model(fa3.register()).generate_batch(
        inputs=prompts,
        generation_config=how,
        progress_bar=False,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=32, block_size=32, max_batch_tokens=64
        ),
    )
    assert [found[name].generated_tokens for name in sorted(found)] == wanted
