"""Models of transformers under attn_implementation="fa3" are right or refused, never wrong.

The sweep tries every model_type; ``.ci/models.py`` writes its results to docs.
"""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import pytest
import torch

from flashattn3 import UnsupportedError
from flashattn3.integrations import masks, refused_models
from flashattn3.integrations import transformers as fa3

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import small_inputs  # noqa: E402
import small_models  # noqa: E402

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
RIGHT = ("llama", "paligemma", "deepseek_v3", "jamba", "opt", "siglip", "t5gemma", "whisper", "vit")
# Named by their class when they are made, in all releases.
REFUSED = (
    *("xglm", "gpt_neox_japanese", "trocr", "mvp", "led", "blip", "groupvit"),
    *("falcon", "gpt_neo", "bloom", "mpt", "sam_vision_model", "data2vec-vision"),
    *("roformer", "big_bird", "rembert", "megatron-bert", "mpnet", "longformer", "luke", "doge"),
    *("deepseek_v32", "deepseek_v4", "bigbird_pegasus", "siglip2_vision_model"),
)
# Refused until the release that gave them transformers' AttentionInterface.
REFUSED_BEFORE = {"gptj": (5, 24), "codegen": (5, 24), "bert": (5, 0), "moshi": (5, 17)}
# Without a mask eager attention of these shows every key, until the release that asks for it.
AS_SDPA_BEFORE = {"moshi": (5, 24)}
KINDS = (*RIGHT, *REFUSED, *REFUSED_BEFORE)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    fa3.register()
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models are slower with more
    monkeypatch.setattr(refused_models, "_awaited", set())
    monkeypatch.setattr(fa3, "_awaited", refused_models._awaited)
    yield
    torch.set_num_threads(threads)


def outcome(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="transformers: a .* model asked for the mask")
        return small_models.outcome(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_each_sort(kind):
    if kind not in small_models.model_classes():
        pytest.skip(f"this transformers has no {kind}")
    refused = kind in REFUSED or REFUSED_BEFORE.get(kind, (0, 0)) > RELEASE
    found = outcome(kind)
    if refused:
        assert found.startswith("refused: it")
    elif AS_SDPA_BEFORE.get(kind, (0, 0)) > RELEASE:
        assert small_models.AS_SDPA in found
    elif RELEASE >= (5, 0):
        assert found == "right"
    else:  # 4.57 makes no small model of some, and passes additive masks to others
        assert "WRONG" not in found and "ERROR" not in found


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", small_models.model_classes())
def test_every_model(kind):
    found = outcome(kind)
    assert "WRONG" not in found and "ERROR" not in found


def test_the_error_names_model_argument_and_alternative():
    with pytest.raises(UnsupportedError) as error:
        small_models.build("XGLMForCausalLM", small_models.small_config("xglm"), "fa3")
    for part in ("XGLMForCausalLM", "attn_implementation='fa3'", "use attn_implementation="):
        assert part in str(error.value)


def test_a_mask_for_other_lengths():
    """The mask of MiniMax has the length of its first layer, which keeps no keys."""
    config = small_models.small_config("minimax")
    eager = small_models.build("MiniMaxForCausalLM", config, "eager")
    inputs = next(small_inputs.inputs_of(eager)) | {"attention_mask": small_inputs.mask_of("left")}
    eager.generate(**inputs, max_new_tokens=4)
    model = small_models.build("MiniMaxForCausalLM", config, "fa3")
    with pytest.raises(
        UnsupportedError, match=r"lengths of the call, \(1, 13\) .* for \(1, 1\): M"
    ):
        model.generate(**inputs, max_new_tokens=4)


CAUSAL = transformers.masking_utils.causal_mask_function


@pytest.mark.parametrize("made_in", ["the compiled function", "eager code", "a copy"])
@pytest.mark.parametrize(
    ("lengths", "others"),
    [((8, 8), (6, 6)), ((1, 8), (1, 6)), ((8, 8), (1, 8)), ((4, 8), (8, 8)), ((1, 8), (8, 8))],
)
@torch.no_grad()
def test_a_mask_for_other_lengths_in_compiled_code(lengths, others, made_in):
    """One for the lengths of its call is right. generate copies masks of static caches."""
    torch._dynamo.reset()
    layer, (q, k) = torch.nn.Module(), (torch.randn(2, 2, n, 8) for n in lengths)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :3] = False

    def attend(queries, keys, run=fa3.attention, copied=False):
        mask = masks.mask(2, keys, CAUSAL, q_length=queries, attention_mask=valid[:, :keys])
        return run(layer, q, k, k, mask.clone() if copied else mask)[0]

    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    call = {
        "the compiled function": lambda: compiled(attend),
        "eager code": lambda: partial(attend, run=compiled(fa3.attention)),
        "a copy": lambda: partial(attend, copied=True),
    }[made_in]()
    torch.testing.assert_close(call(*lengths), attend(*lengths))
    with pytest.raises(Exception, match="attention_mask must be for the lengths of the call"):
        call(*others)


def test_a_mask_of_a_user_is_not_read_as_segments():
    """Whatever its shape; transformers passes masks with four axes on as they are. One of floats
    is a bias, and one of bools that fits the scores a mask."""
    layer, q, k = torch.nn.Module(), torch.randn(3, 8, 4, 8), torch.randn(3, 8, 6, 8)
    for dtype in (torch.int32, torch.int64, torch.bool, torch.uint32):
        for sizes in itertools.product((1, 3, 4), (1, 8), (1, 4), (1, 6)):
            mask = torch.ones(sizes, dtype=torch.int32).to(dtype)
            if dtype == torch.bool and sizes[0] != 4 and sizes[2:] == (4, 6):
                continue
            with pytest.raises(UnsupportedError, match=r"attention_mask must be (None, or 2-|for)"):
                fa3.attention(layer, q, k, k, mask)


def test_no_mask_of_a_model_fits_the_scores_of_its_call():
    """So a mask of a user, which does, is never taken for one."""
    for queries, keys, left, causal in itertools.product(range(1, 9), range(1, 9), (0, -1), (0, 1)):
        for valid in (None, torch.ones(2, keys, dtype=torch.bool)):
            if keys < queries:
                continue
            config = transformers.LlamaConfig(sliding_window=1)
            options = {"q_length": queries, "q_offset": keys - queries, "attention_mask": valid}
            options |= {"config": config} | ({"local_size": 1} if left == 0 else {})
            if not causal:
                options["allow_is_bidirectional_skip"] = True
            mask = masks.mask(2, keys, CAUSAL, **options)
            refused_models._awaited.clear()
            if mask is not None:
                *_, rows, columns = mask.shape
                assert not (rows in (1, queries) and columns in (1, keys))


def test_a_causal_layer_of_a_model_that_asked_for_no_mask():
    """Attention functions of transformers differ where queries are not as many as keys."""
    layer, q, k = torch.nn.Module(), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8)
    layer.is_causal = True
    with pytest.raises(UnsupportedError, match=r"must not be None .* \(4, 6\): Module is causal"):
        fa3.attention(layer, q, k, k, None)
    mask = masks.mask(2, 6, CAUSAL, q_length=4, q_offset=2)  # as a model does that asks
    fa3.attention(layer, q, k, k, mask)
    fa3.attention(layer, q, k, k, None, is_causal=False)
    fa3.attention(layer, q[:, :, :1], k, k, None)


def test_a_mask_that_no_attention_follows():
    config = transformers.LlamaConfig()
    arguments = {"q_length": 8, "config": config}
    made = (2, 8, transformers.masking_utils.causal_mask_function)
    q = torch.randn(2, 2, 8, 8)
    for _ in range(3):
        masks.mask(*made, **arguments)
        fa3.attention(torch.nn.Module(), q, q, q, None)
    other = transformers.GPT2Config()
    masks.mask(*made, **arguments | {"config": other})
    with pytest.warns(UserWarning, match="'gpt2' model asked for the mask of flashattn3 twice"):
        masks.mask(*made, **arguments | {"config": other})
    masks.mask(*made, **arguments | {"config": other})  # once


def test_a_compiled_layer_follows_its_mask():
    """Although its compiled code reports no call."""
    torch._dynamo.reset()
    made = (2, 8, transformers.masking_utils.causal_mask_function)
    q, config = torch.randn(2, 2, 8, 8), transformers.LlamaConfig()
    layer = torch.compile(fa3.attention, fullgraph=True, backend="eager")
    for _ in range(3):
        masks.mask(*made, q_length=8, config=config)
        layer(torch.nn.Module(), q, q, q, None)
