"""transformers models with random weights, on flashattn3 against transformers' own eager attention.

No network: every model is made from a config.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from flashattn3 import UnsupportedError, flash_attn_with_kvcache, use_backend
from flashattn3.integrations import masks, transformers_cache, transformers_fp8
from flashattn3.integrations import transformers as fa3
from flashattn3.integrations.segments import most_packed

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import small_models  # noqa: E402

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
NEW = RELEASE >= (5, 0)
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LAYERS = ["sliding_attention", "full_attention"]
MLA = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
MLA |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "n_group": 1}
MLA |= {"topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 4}
MLA |= {"moe_intermediate_size": 16}
WINDOW = {"sliding_window": 7}
QWEN2 = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
DECODERS = {
    "Llama": {},
    "Mistral": WINDOW,
    "Qwen2": QWEN2,
    # Its layers pass no sliding_window to their attention.
    "Qwen2Moe": {
        **QWEN2,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3": {"head_dim": 16},
    "Mixtral": EXPERTS,
    "Gemma2": {**WINDOW, "head_dim": 8},
    "Gemma3Text": {**WINDOW, "head_dim": 8, "layer_types": LAYERS},
    "GptOss": {**WINDOW, **EXPERTS, "head_dim": 8},
    "DeepseekV3": MLA,
    "Llama4Text": {
        **{"head_dim": 8, "attention_chunk_size": 8},
        **{"num_local_experts": 2, "intermediate_size_mlp": 48},
    },
    "GPT2": {"n_inner": 48, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
# Qwen2 (windows) or Llama has the same kinds of masks and layers as each of these.
ALIKE = ("Mistral", "Gemma3Text", "Qwen3", "Mixtral", "Qwen2Moe")


def decoders_with(*values):
    """(name, value) of each decoder, of those that are alike with the last value alone."""
    return [(name, x) for name in DECODERS for x in values if name not in ALIKE or x == values[-1]]


ROWS, NEW_TOKENS = 21, 8
REFUSED = UnsupportedError, RuntimeError  # the latter of an assertion in compiled code
CHUNKS_OF_SEQUENCES = (5, 23)  # the first release whose chunks begin with each packed sequence
OLD_ENCODERS = (
    "transformers 4.57 does not ask for its encoders' attention, or passes additive masks"
)


@pytest.fixture(autouse=True)
def registered():
    fa3.register()


if not NEW:
    del DECODERS["Qwen2Moe"]  # transformers 4.57 does not ask its attention interface there


def configured(name, **changes):
    return getattr(transformers, f"{name}Config")(**SIZES | DECODERS[name] | changes)


def pair(config, auto="AutoModelForCausalLM"):
    """The same model twice: with flashattn3 and with eager attention."""
    models = []
    for attention in ("fa3", "eager"):
        torch.manual_seed(0)
        make = getattr(transformers, auto).from_config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models.append(make(copy.deepcopy(config), attn_implementation=attention).eval())
        for name, weight in models[-1].named_parameters():
            if name.endswith("sinks"):  # which are nearly 0 in a new model
                torch.nn.init.normal_(weight)
    models[0].load_state_dict(models[1].state_dict())
    return models


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.fixture
def calls(monkeypatch):
    """How many dense and varlen calls the attention made."""
    found = {"dense": 0, "varlen": 0}
    function = fa3.flash_attn_bhsd_func

    def spy(q, k, v, *edges, **options):
        found["dense" if edges == (None, None) else "varlen"] += 1
        return function(q, k, v, *edges, **options)

    monkeypatch.setattr(fa3, "flash_attn_bhsd_func", spy)
    return found


def tokens(batch=2, rows=ROWS):
    torch.manual_seed(1)
    return torch.randint(2, 97, (batch, rows))


def padded(side, batch=2, rows=ROWS):
    """A 2-dimensional mask with six or seven tokens of padding in the first row; None: no mask."""
    if side is None:
        return None
    found = torch.ones(batch, rows, dtype=torch.long)
    if side == "left":
        found[0, :6] = 0
    elif side == "right":
        found[0, -6:] = 0
    elif side == "both":
        found[0, :3] = found[0, -4:] = 0
    return found


def assert_close(found, wanted, tolerance=1e-5):
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error <= tolerance, f"relative error {error:.1e}"


def assert_same_outputs(models, inputs):
    """Every tensor of the outputs, of tokens where it has a row for each token."""
    mask = inputs.get("attention_mask")
    with torch.no_grad():
        outputs = [small_models.outputs_of(model(**inputs)) for model in models]
    for found, wanted in zip(*outputs, strict=True):
        if mask is not None and found.shape[:2] == mask.shape:
            found, wanted = found[mask.bool()], wanted[mask.bool()]
        assert_close(found, wanted)


def assert_same_logits(models, mask):
    assert_same_outputs(models, {"input_ids": tokens(), "attention_mask": mask})


@pytest.mark.parametrize(("name", "side"), decoders_with(None, "all ones", "left", "right", "both"))
def test_logits(name, side, calls):
    assert_same_logits(pair(configured(name)), padded(side))
    assert sum(calls.values()) == 2


def packing_of(*lengths):
    """The arguments of sequences in one row by both ways of transformers: positions, offsets."""
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    offsets = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"position_ids": positions, "use_cache": False}, offsets


def logits_of_each(model, ids, lengths):
    """Compute each sequence by itself."""
    return torch.cat([model(x).logits for x in ids.split(lengths, 1)], 1)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", [name for name in DECODERS if name != "Llama4Text"])
@torch.no_grad()
def test_packed_sequences(name, by, calls):
    (model, eager), ids = pair(configured(name)), tokens(1)
    packing, offsets = packing_of(9, 12)
    if by == "cu_seq_lens":
        packing |= offsets | {"max_length_q": 12, "max_length_k": 12}
    found = model(ids, attention_mask=None, **packing).logits
    assert_close(found, logits_of_each(eager, ids, (9, 12)))
    assert calls["dense"] == 0


IN_CHUNKS = [((9, 12), False), ((9, 12), True), ((8, 13), False), ((16, 5), False)]
if RELEASE < CHUNKS_OF_SEQUENCES:
    IN_CHUNKS.append(((8, 13), True))  # else compiled as (9, 12)


@pytest.mark.parametrize(("lengths", "is_compiled"), IN_CHUNKS)
@torch.no_grad()
def test_packed_sequences_in_chunks(lengths, is_compiled, request):
    """Every sequence must begin with a chunk of 8. Older releases count chunks from the beginning
    of a row: for other lengths their own attention is wrong too."""
    (model, eager), ids = pair(configured("Llama4Text")), tokens(1)
    run = compiled(model) if is_compiled else model
    calls = {"dense": 0} if is_compiled else request.getfixturevalue("calls")
    packing, offsets = packing_of(*lengths)
    wanted = logits_of_each(eager, ids, lengths)
    new = RELEASE >= CHUNKS_OF_SEQUENCES
    if new or lengths[0] % 8 == 0:
        assert_close(run(ids, **packing).logits, wanted)
        if new or is_compiled:
            assert_close(run(ids, **packing, **offsets).logits, wanted)
        assert calls["dense"] == 0
    else:
        assert (eager(ids, **packing).logits - wanted).abs().max() > 0.1 * wanted.abs().max()
        with pytest.raises(REFUSED, match="must begin at multiples of attention_chunk_size"):
            run(ids, **packing)
    if lengths == (9, 12):  # chunks that are counted from the beginning of the row
        refused = [{"use_cache": False}]
        if not is_compiled:
            ones = {"attention_mask": torch.ones_like(ids)}
            refused = [packing | {"use_cache": True}, packing | ones]
        for given in refused:
            with pytest.raises(REFUSED, match="cu_seq_lens_q must be None where attention is in"):
                run(ids, **offsets, **given)


@torch.no_grad()
def test_half_of_a_packing_is_refused():
    (model, _), edges = pair(configured("Llama")), torch.tensor([0, 9, 21], dtype=torch.int32)
    for given, missing in ("qk", "kq"):
        with pytest.raises(ValueError, match=f"cu_seq_lens_{missing} must be a tensor"):
            model(tokens(1), **{f"cu_seq_lens_{given}": edges})


PACKED = torch.cat([torch.arange(9), torch.arange(12)])[None]


@torch.no_grad()
def test_positions_are_read_again_for_another_batch_and_another_model():
    first, second = (pair(configured("GptOss"))[0] for _ in range(2))
    ids, packed = tokens(3), PACKED.clone()
    wanted, alone = (
        second(x, position_ids=PACKED.clone(), use_cache=False).logits for x in (ids, ids[:1])
    )
    for batch, then in ((1, 3), (3, 1)):
        first(ids[:batch], position_ids=packed, use_cache=False)
        found = second(ids[:then], position_ids=packed, use_cache=False).logits
        assert torch.equal(found, wanted if then == 3 else alone)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_that_are_changed_in_place(mode):
    """Tensors of inference mode count no writes, so the first layer reads them in each forward, of
    this model and of another."""
    first, second = (pair(configured("GptOss"))[0] for _ in range(2))
    with mode():
        positions = torch.arange(ROWS)[None].clone()
        options = {"position_ids": positions, "use_cache": False}
        in_one_row = first(tokens(1), **options).logits
        positions.copy_(PACKED)
        for model in (second, first):
            found = model(tokens(1), **options).logits
            wanted = model(tokens(1), position_ids=PACKED.clone(), use_cache=False).logits
            assert torch.equal(found, wanted)
            positions.copy_(torch.arange(ROWS))
            assert torch.equal(model(tokens(1), **options).logits, in_one_row)
            positions.copy_(PACKED)
    assert (in_one_row - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("beside", ["a cache", "a mask of ones"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2", "Gemma2", "GptOss"])
@torch.no_grad()
def test_positions_pack_only_without_a_cache_or_a_mask(name, beside):
    """As with transformers' own attention."""
    options = {"position_ids": PACKED.expand(2, -1), "use_cache": beside == "a cache"}
    if beside == "a mask of ones":
        options["attention_mask"] = padded("all ones")
    assert_close(*(model(tokens(), **options).logits for model in pair(configured(name))))


@torch.no_grad()
def test_positions_that_begin_anywhere():
    """A sequence begins where a position is not the one before it plus 1."""
    packed = torch.cat([torch.arange(3, 12), torch.arange(5, 17)])[None]
    options = {"position_ids": packed, "use_cache": False}
    model, eager = pair(configured("Llama"))
    assert_close(model(tokens(1), **options).logits, eager(tokens(1), **options).logits)
    model = pair(configured("GptOss"))[0]
    found = model(tokens(1), **options).logits
    for part in (slice(9), slice(9, None)):
        alone = {"position_ids": packed[:, part], "use_cache": False}
        assert_close(found[:, part], model(tokens(1)[:, part], **alone).logits)


def generated(model, ids, **options):
    """With a prompt of ROWS tokens beyond every window and past the next chunk of 8."""
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


@pytest.fixture
def cached(monkeypatch):
    """The keywords of each cached call that a layer makes."""
    found = []

    def counted(*arguments, **named):
        found.append(named)
        return flash_attn_with_kvcache(*arguments, **named)

    monkeypatch.setattr(fa3, "flash_attn_with_kvcache", counted)
    return found


@pytest.fixture
def cached_calls(path, cached, monkeypatch):
    """Cached calls of next tokens, which float32 takes here as 16 bits do; None: it does not."""
    if path == "cached calls":
        monkeypatch.setattr(fa3, "SIXTEEN_BIT", (torch.float32,))
        return cached
    return None


PATHS = "all keys", "cached calls"  # of a next token
WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "eos_token_id": 96},  # 4.57 needs one here
}
# Each two of both caches, no padding or some, and both paths.
GENERATED = [
    ("dynamic", None, PATHS[0]),
    ("dynamic", "left", PATHS[1]),
    ("static", None, PATHS[1]),
    ("static", "left", PATHS[0]),
    ("beams", "left", PATHS[0]),
    ("prompt lookup", None, PATHS[0]),
]


@pytest.mark.parametrize(
    ("name", "way", "side", "path"),
    [(name, *x) for name in DECODERS for x in GENERATED if name not in ALIKE or x[2] != PATHS[0]],
)
def test_generate(name, way, side, cached_calls):
    is_static, looks_up = way == "static", way == "prompt lookup"
    if name in ("GPT2", "DeepseekV3") and is_static and not NEW:
        pytest.skip("transformers 4.57 has no static cache for it")
    ids, options = tokens(1 if looks_up else 2), dict(WAYS[way])
    if looks_up:
        ids[:, 10:] = ids[:, :11].clone()
    if side is not None:
        options["attention_mask"] = padded(side)
        ids = ids.masked_fill(options["attention_mask"] == 0, 0)
    models, error = pair(configured(name)), None
    local = DECODERS[name].keys() & {"sliding_window", "attention_chunk_size"}
    # Whatever the attention: transformers passes its own function an argument it does not have, or
    # shortens no cache of windows or chunks.
    if name == "Llama4Text" and is_static and (5, 9) <= RELEASE <= (5, 19):
        error = "unexpected keyword argument 'block_sequence_ids'"
    elif local and looks_up and RELEASE in ((5, 0), (5, 12), (5, 13)):
        error = "Cannot `crop` a `DynamicSlidingWindowLayer`"
    if error:
        for model in models:
            with pytest.raises((TypeError, ValueError), match=error):
                generated(model, ids, **options)
        return
    found, wanted = (generated(m, ids, **options) for m in models)
    assert torch.equal(found, wanted)
    assert looks_up or found.shape[1] == ROWS + NEW_TOKENS
    assert cached_calls is None or len(cached_calls) == (NEW_TOKENS - 1) * 2


@pytest.mark.skipif(RELEASE < (5, 4), reason="the positions of a static cache are not a tensor")
@pytest.mark.parametrize(
    ("name", "side", "path"),
    [
        ("Llama", None, PATHS[0]),
        ("Llama", "left", PATHS[1]),
        ("Gemma2", "left", PATHS[1]),
        ("GptOss", None, PATHS[0]),
        ("GptOss", "left", PATHS[1]),
    ],
)
@torch.no_grad()
def test_a_compiled_step_of_a_static_cache(name, side, cached_calls):
    """In 16 bits it has cached calls, where a layer's cache is not full of its window."""
    ids, logits = tokens(), []
    for model in pair(configured(name)):
        cache = transformers.StaticCache(config=model.config, max_cache_len=30)
        run, steps = model if logits else compiled(model), []
        for call, begin, end in ((model, 0, 19), (run, 19, 20), (run, 20, 21)):
            step = {"past_key_values": cache, "attention_mask": padded(side, rows=end)}
            steps.append(call(ids[:, begin:end], **step).logits)
        logits.append(torch.cat(steps[1:]))
    assert_close(*logits)
    assert cached_calls != []


OPTIONS = [{}, {"scaling": 0.3, "softcap": 2.0}, {"sliding_window": 5}, {"is_causal": False}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, {"is_causal": False, "sliding_window": 4}], ids=str)
def test_the_next_token_in_16_bits_is_a_cached_call(options, sinks, dtype, cached):
    """With the numbers of the other path, which gradients and float32 take."""
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=2, layer_idx=0, training=False)
    shapes = (2, 4, 1, 24), (2, 2, 23, 24), (2, 2, 23, 8)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    s_aux = torch.randn(4).to(dtype) if sinks else None
    exact, _ = fa3.attention(layer, *(x.float() for x in tensors), None, s_aux=s_aux, **options)
    with_gradients, _ = fa3.attention(layer, *tensors, None, s_aux=s_aux, **options)
    assert not cached
    with torch.no_grad():
        found, _ = fa3.attention(layer, *tensors, None, s_aux=s_aux, **options)
    assert len(cached) == 1 and found.dtype == dtype and found.shape == (2, 1, 4, 8)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert_close(found.float(), exact, tolerance)
    assert_close(with_gradients.float(), exact, tolerance)


@torch.no_grad()
def test_keys_that_no_cached_call_takes(monkeypatch):
    """A wider value, another dtype, a stride in the head dim: the other path."""
    monkeypatch.setattr(fa3, "flash_attn_with_kvcache", None)
    layer = SimpleNamespace(is_causal=True, layer_idx=0)
    query, key = torch.randn(2, 4, 1, 24).bfloat16(), torch.randn(2, 2, 23, 24).bfloat16()
    for value in (torch.randn(2, 2, 23, 32).bfloat16(), key.mT.contiguous().mT):
        out, _ = fa3.attention(layer, query, key, value, None)
        wide = fa3.attention(layer, *(x.float() for x in (query, key, value)), None)[0]
        assert_close(out.float(), wide, 2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = fa3.attention(layer, query, key.float(), key.float(), None)
    assert out.dtype == torch.bfloat16


class Rounded(transformers.cache_utils.QuantizedLayer):
    """transformers' own layer, of 4 bits for each token and head in place of a library's."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, qtensor):
        codes, scale = qtensor
        return codes * scale


@pytest.mark.parametrize(
    ("name", "side", "kind"), [("Llama", None, "fp8"), ("Llama", "left", ""), ("GptOss", None, "")]
)
def test_caches_that_transformers_quantizes(name, side, kind):
    if kind and RELEASE < (5, 24):
        pytest.skip("transformers has its own cache of 8 bits from 5.24 on")
    found = []
    for model in pair(configured(name)):
        layers = [Rounded(residual_length=3) for _ in range(2)]
        own = transformers.QuantizedCache("fp8", model.config) if kind else None
        cache = own or transformers.Cache(layers=layers)
        options = {"attention_mask": padded(side), "past_key_values": cache}
        found.append(generated(model, tokens(), **options))
    assert torch.equal(*found)


@pytest.fixture
def small_room(monkeypatch):
    """Buffers of a cache of 8 bits that are moved, on a backend that needs no interpreter."""
    monkeypatch.setattr(transformers_cache, "ROOM", 2)
    with use_backend("reference"):
        yield


@pytest.mark.parametrize(
    ("name", "dtype", "side"),
    [
        ("Llama", torch.int8, "left"),
        ("Qwen3", torch.float8_e4m3fn, None),
        ("Mistral", torch.float8_e4m3fn, "left"),
        ("GptOss", torch.float8_e4m3fn, None),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_cache_of_8_bits(name, dtype, side, small_room, cached, monkeypatch):
    """The first 13 tokens have the bits of a 16-bit cache; behind them 4 at once and 3 of one
    query, which reads the codes, are near."""
    model, ids, logits = pair(configured(name))[0].half(), tokens(), []
    mask = padded(side or "all ones")
    quantized = transformers_cache.quantized_cache(model.config, dtype)
    for cache in (transformers.DynamicCache(config=model.config), quantized):
        monkeypatch.setattr(fa3, "_fits_a_cached_call", lambda *_: bool(logits))
        steps, begin = [], 0
        for end in (13, 17, 18, 19, 20):
            options = {"past_key_values": cache, "attention_mask": mask[:, :end]}
            steps.append(model(ids[:, begin:end], **options).logits)
            begin = end
        logits.append(steps)
    kept = mask[:, :13].bool()
    assert torch.equal(*(steps[0][kept] for steps in logits))
    for wanted, found in zip(*(steps[1:] for steps in logits), strict=True):
        assert not torch.equal(found, wanted)
        assert_close(found, wanted, 0.03)
    assert [named["k_descale"].dtype for named in cached] == [torch.float32] * 6
    assert quantized.get_seq_length() == 20 and not quantized.is_compileable


@pytest.mark.parametrize("window", [None, 7])
@torch.no_grad()
def test_a_layer_of_8_bits_keeps_what_the_next_token_sees(window, small_room):
    config = configured("Mistral", sliding_window=window)
    layer = transformers_cache.quantized_cache(config).layers[0]
    states = [torch.randn(3, 2, 25, 16).half() for _ in range(2)]
    states[0][1] *= 100
    begin = 0
    for end in (12, 13, 14, 18, 25):
        sizes = layer.get_mask_sizes(end - begin if NEW else torch.arange(begin, end))
        new = [x[:, :, begin:end] for x in states]
        found = layer.update(*new)
        first = 0 if window is None else max(begin - window + 1, 0)
        assert sizes == (end - first, first) and layer.get_seq_length() == end
        if begin == 0:
            assert all(map(torch.equal, found, new))
        else:
            for x, of in zip(found, states, strict=True):
                wanted = of[:, :, first:end].float()
                scale = wanted.abs().amax(-1) / 448
                assert x.shape == wanted.shape and x.dtype == torch.float8_e4m3fn
                torch.testing.assert_close(x.descale, scale.transpose(1, 2))
                assert_close(x.widened(torch.float32), wanted, 2**-4)
        begin = end
    last = found[0].widened(torch.float16)
    query, token = torch.randn(3, 4, 1, 16).half(), [x[:, :, :1] for x in states]
    exact = [torch.cat((x.widened(torch.float32), y), 2) for x, y in zip(found, token, strict=True)]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    layer.batch_select_indices(torch.tensor([0, 1]))
    layer.batch_repeat_interleave(2)
    order = torch.tensor([2, 2, 0, 0])
    found = layer.update(*(x[order] for x in token))
    skipped = 0 if window is None else exact[0].shape[2] - window
    kept = last[order][:, :, skipped:]
    assert torch.equal(found[0].widened(torch.float16)[:, :, :-1], kept)
    module = SimpleNamespace(is_causal=True, layer_idx=0)
    out, _ = fa3.attention(module, query[order], *found, None)
    exact = [x[order][:, :, skipped:].float() for x in exact]
    wanted, _ = fa3.attention(module, query[order].float(), *exact, None)
    assert_close(out.float(), wanted, 0.05)  # of one token in 8 bits, and of 16
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.update(*states)[0] is states[0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_cache_of_8_bits_is_copied_and_pickled(copied, dtype):
    def states(batch, tokens):
        return [torch.randn(batch, 2, tokens, 16).half() for _ in range(2)]

    cache = transformers_cache.quantized_cache(configured("Mistral"), dtype)
    copied(cache).update(*states(1, 3), 0)
    cache.update(*states(2, 12), 0)
    other, token = copied(cache), states(2, 1)
    assert type(other.layers[0]) is type(cache.layers[0])
    for x, y in zip(cache.update(*token, 0), other.update(*token, 0), strict=True):
        assert torch.equal(x.widened(torch.half), y.widened(torch.half))
    assert not hasattr(transformers_cache, "another")


def test_rows_of_8_bits_are_selected_as_torch_2_10_can():
    layer = transformers_cache.quantized_cache(configured("Llama")).layers[0]
    layer.update(*(torch.randn(3, 2, 5, 16).half() for _ in range(2)))
    with torch.autograd.profiler.profile() as profile:
        layer.batch_select_indices(torch.tensor([2, 0]))
        layer.reorder_cache(torch.tensor([1, 0]))
    called = [event.name for event in profile.function_events]
    assert "aten::index_select" in called and "aten::index" not in called


def test_a_cache_of_8_bits_generates_the_tokens_of_16(small_room):
    model = pair(configured("Llama"))[0].bfloat16()
    cache = transformers_cache.quantized_cache(model.config)
    found = generated(model, tokens(), past_key_values=cache)
    assert torch.equal(found, generated(model, tokens()))


@torch.no_grad()
def test_a_cache_of_8_bits_refuses_by_name(monkeypatch):
    model, eager = (m.half() for m in pair(configured("Llama")))
    new = transformers_cache.quantized_cache
    cache = new(eager.config)
    eager(tokens(), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="attention must be flashattn3's with a cache of 8"):
        eager(tokens(rows=1), past_key_values=cache)
    for name, given in (("crop", (-1,)), ("offload", ()), ("prefetch", ())):
        with pytest.raises(UnsupportedError, match=f"transformers cache: {name} must not be asked"):
            getattr(cache.layers[0], name)(*given)
    with pytest.raises(ValueError, match=r"append_kvcache: k\.dtype must be one of"):
        model.float()(tokens(), past_key_values=new(model.config))
    with pytest.raises(ValueError, match="quantized_cache: dtype must be one of"):
        new(model.config, torch.float16)
    other = SimpleNamespace(layers=[0])
    monkeypatch.setattr(transformers.cache_utils, "DynamicCache", lambda config: other)
    with pytest.raises(UnsupportedError, match="got one with a int; use transformers' DynamicC"):
        new(model.config)


@pytest.mark.parametrize(("name", "side"), decoders_with(None, "left"))
@torch.no_grad()
def test_a_cache_continued_by_several_tokens(name, side):
    logits = []
    mask = None if side is None else padded(side)
    for model in pair(configured(name)):
        first = model(
            tokens()[:, :13], attention_mask=None if mask is None else mask[:, :13], use_cache=True
        )
        second = model(tokens()[:, 13:], attention_mask=mask, past_key_values=first.past_key_values)
        logits.append(second.logits)
    assert_close(*logits)


def assert_same_gradients(models, inputs, checkpointing):
    """One training step. inputs: with labels."""
    gradients = []
    for model in models:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train().zero_grad()
        model(**inputs).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    found, wanted = gradients
    assert found.keys() == wanted.keys() and len(found) > 10
    largest = max(x.abs().max() for x in wanted.values())
    for parameter, gradient in wanted.items():
        # Of keys' biases the exact gradient is 0, so its own size says nothing.
        error = (found[parameter] - gradient).abs().max()
        assert error <= 1e-5 * largest, (parameter, error / largest)


@pytest.mark.parametrize(("name", "checkpointing"), decoders_with(False, True))
def test_training_step(name, checkpointing):
    ids, mask = tokens(), padded("right")
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    inputs["labels"] = ids.masked_fill(mask == 0, -100)
    assert_same_gradients(pair(configured(name)), inputs, checkpointing)


COMPILED = [
    *(("padding", name) for name in DECODERS if name not in (*ALIKE, "Qwen2")),  # as Gemma2
    *(("nothing", name) for name in ("Llama", "GptOss")),
    ("packed", "Mistral"),
    ("packed", "Llama4Text"),
]


@pytest.mark.parametrize("name", ["Llama", "GptOss"])  # GptOss gives its mask no positions
@torch.no_grad()
def test_packed_sequences_of_a_compiled_model(name):
    """There may be ``most_packed`` in a row, on average over the batch; more are an assertion."""
    if name == "GptOss" and RELEASE < (5, 3):
        pytest.skip("transformers before 5.3 does not compile its experts")
    (model, eager), ids = pair(configured(name)), tokens()
    run = compiled(model)
    most = most_packed(ids.shape[1])
    for few, many in ((most, most), (1, 2 * most - 1), (most, most + 1)):
        lengths = [[1] * (n - 1) + [ids.shape[1] - n + 1] for n in (few, many)]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        options = {"position_ids": positions, "use_cache": False}
        if few + many > 2 * most:
            with pytest.raises(RuntimeError, match="compiled code takes 8 packed sequences in a"):
                run(ids, **options)
        else:
            found = run(ids, **options).logits
            for row, of_row, sizes in zip(ids, found, lengths, strict=True):
                assert_close(of_row[None], logits_of_each(eager, row[None], sizes))


@pytest.mark.parametrize(("given", "name"), COMPILED)
def test_compiled(name, given):
    experts = name in ("DeepseekV3", "GptOss")
    if experts and RELEASE < (5, 3):
        pytest.skip("transformers before 5.3 does not compile its experts")
    if (given, name) == ("packed", "Llama4Text") and RELEASE < CHUNKS_OF_SEQUENCES:
        pytest.skip("chunks are counted from the beginning of the row")
    model, eager = pair(configured(name))
    mask = padded("left") if given == "padding" else None
    positions = PACKED.expand(2, -1) if given == "packed" else None
    options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    trained = not experts or RELEASE >= (5, 23)  # before, the gradient of experts does not compile
    with torch.set_grad_enabled(trained):
        found, wanted = (m(tokens(), **options).logits for m in (compiled(model), eager))
    kept = slice(None) if mask is None else mask.bool()
    assert_close(found[kept], wanted[kept])
    if not trained:
        return
    weights = torch.randn_like(wanted[kept])
    gradients = []
    for m, logits in ((model, found), (eager, wanted)):
        (logits[kept] * weights).sum().backward()
        gradients.append(m.get_input_embeddings().weight.grad)
    assert_close(*gradients)


# Models of other kinds: the auto class, the config, the inputs and those of a training step.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_BOTH = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
SEQ2SEQ = {f"{part}_{x}": n for part in ("encoder", "decoder") for x, n in OF_BOTH.items()}
SEQ2SEQ |= {"d_model": 32, "max_position_embeddings": 128, "vocab_size": 97, "pad_token_id": 0}
SEQ2SEQ |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SEQ2SEQ |= {"forced_eos_token_id": None, "dropout": 0.0, "attention_dropout": 0.0}


def encoder(config, side):
    mask = padded(side)
    labels = tokens() if mask is None else tokens().masked_fill(mask == 0, -100)
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    return "AutoModelForMaskedLM", config, inputs, {"labels": labels}


def bert(side):
    return encoder(transformers.BertConfig(**SIZES, **NO_DROPOUT), side)


def modernbert(side):
    if RELEASE < (5, 1):
        pytest.skip("ModernBERT of transformers 5.0 looks its attention up in a table of its own")
    sizes = SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2}
    return encoder(transformers.ModernBertConfig(**sizes, cls_token_id=1, sep_token_id=1), side)


def bart(side):
    inputs = {"input_ids": tokens(), "attention_mask": padded(side)}
    inputs["decoder_input_ids"] = tokens(rows=11)
    training = {"labels": tokens(rows=11), "use_cache": False}
    return "AutoModelForSeq2SeqLM", transformers.BartConfig(**SEQ2SEQ), inputs, training


def whisper(side):
    sizes = {"max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8}
    config = transformers.WhisperConfig(**SEQ2SEQ, **sizes)
    config.suppress_tokens = config.begin_suppress_tokens = None
    inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens(rows=11)}
    training = {"labels": tokens(rows=11), "use_cache": False}
    return "AutoModelForSpeechSeq2Seq", config, inputs, training


def siglip(side):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4}
    config = transformers.SiglipConfig(
        text_config={**sizes, "vocab_size": 97, "max_position_embeddings": 32},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    inputs = {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 32, 32)}
    return "AutoModel", config, inputs, {"return_loss": True}


def qwen2_5_vl(side):
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=SIZES | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config=vision,
        **{"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93},
    )
    ids, mask = tokens(2, 40).clamp(max=90), padded(side or "all ones", rows=40)
    ids[:, 9] = 93
    ids[:, 10:26] = 95  # 8 x 8 patches, merged by 2 x 2
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs["pixel_values"] = torch.randn(128, 3 * 2 * 4 * 4)
    inputs["image_grid_thw"] = torch.tensor([[1, 8, 8]] * 2)
    if RELEASE >= (5, 3):
        inputs["mm_token_type_ids"] = (ids == 95).int()
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        labels[0, 6] = -100  # predicted by a row of padding
    return "AutoModelForImageTextToText", config, inputs, {"labels": labels}


# Model → its calls of flashattn3 in a forward, the sides of its padding, its WAYS to generate.
OTHER_MODELS = {
    bert: (2, (None, "left", "right", "both"), ()),
    modernbert: (2, (None, "left", "right", "both"), ()),
    bart: (6, (None, "right"), ("dynamic", "beams", "static")),
    whisper: (6, (None,), ("dynamic", "beams", "static")),
    siglip: (4, (None,), ()),
    qwen2_5_vl: (12, (None, "left", "right"), ("dynamic", "static")),
}


@pytest.mark.parametrize(
    ("model", "side"), [(model, side) for model in OTHER_MODELS for side in OTHER_MODELS[model][1]]
)
def test_other_models(model, side, calls):
    """Outputs, generated tokens, and gradients with and without checkpoints."""
    if model in (bert, modernbert, bart) and not NEW:
        pytest.skip(OLD_ENCODERS)
    torch.manual_seed(2)
    auto, config, inputs, training = model(side)
    models, (count, _, ways) = pair(config, auto), OTHER_MODELS[model]
    assert_same_outputs(models, inputs)
    assert sum(calls.values()) == count
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    for way in ways if model is not qwen2_5_vl or side != "right" else ():
        assert torch.equal(*(m.generate(**inputs, **options, **WAYS[way]) for m in models))
    for checkpointing in (False, True):
        assert_same_gradients(models, inputs | training, checkpointing)


# Errors.


@pytest.mark.parametrize("name", ["flash3", "me/kernel", "paged|fa3", "sdpa", ""])
def test_names_that_transformers_reads_otherwise(name):
    with pytest.raises(ValueError, match="register: name must be without 'flash'"):
        fa3.register(name)


def test_registering_twice_has_no_effect():
    assert fa3.register() == fa3.register() == "fa3"
    assert transformers.AttentionInterface()["fa3"] is fa3.attention


def test_library_missing_or_of_an_untested_version(monkeypatch):
    # transformers replaces its own module while it loads its parts.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0")
    with pytest.warns(UserWarning, match=r"transformers must be 4\.57 to 5\.\d+, got 5\.99\.0"):
        fa3.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"transformers is not installed; pip install"):
        fa3.register()


def test_what_a_model_asks_for_and_is_refused():
    model = pair(configured("Llama", attention_dropout=0.1))[0]
    model(tokens())
    with pytest.raises(UnsupportedError, match="output_attentions must be None, got True"):
        model(tokens(), output_attentions=True)
    with pytest.raises(UnsupportedError, match=r"dropout must be 0, got 0\.1: set attention_drop"):
        model.train()(tokens())


def test_masks_of_four_axes():
    """Floats are a bias. Bools show what they show, here packed sequences of a row that all see a
    prefix; eager attention adds a mask of floats."""
    models, causal = pair(configured("Llama")), torch.ones(ROWS, ROWS).tril().bool()
    bias = torch.randn(2, 1, ROWS, ROWS).masked_fill(~causal, -torch.inf)
    found, wanted = (model(tokens(), attention_mask=bias).logits for model in models)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    sequence = torch.arange(ROWS) // 7
    seen = (sequence[:, None] == sequence) | (torch.arange(ROWS) < 4)
    seen = (seen & causal).expand(2, 1, -1, -1)
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    given = zip(models, (seen, hidden), strict=True)
    assert_close(*(model(tokens(), attention_mask=mask).logits for model, mask in given))
    with pytest.raises(UnsupportedError, match="4-dimensional with bools or floats, got Tensor"):
        models[0](tokens(), attention_mask=seen.int())


@pytest.mark.skipif(NEW, reason="transformers 5 asks the mask function")
@pytest.mark.parametrize("side", [None, "right"])
def test_additive_masks_of_bart(side):
    models = pair(transformers.BartConfig(**SEQ2SEQ), "AutoModelForSeq2SeqLM")
    given = {"attention_mask": None if side is None else padded(side)}
    given["decoder_input_ids"] = tokens(rows=11)
    found, wanted = (model(tokens(), **given).logits for model in models)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_position_bias(side):
    """T5, with padding, and the gradient of its table of biases."""
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    if RELEASE < (5, 15):
        pytest.skip("T5 before transformers 5.15 has no attention interface")
    results = []
    for model in pair(config, "AutoModelForSeq2SeqLM"):
        mask = None if side is None else padded(side)
        given = {"attention_mask": mask, "decoder_input_ids": tokens(rows=11)}
        logits = model(tokens(), **given).logits
        logits.square().mean().backward()
        biases = [x.grad for name, x in model.named_parameters() if "relative" in name]
        results.append([logits, *biases])
    assert len(biases) == 2 and biases[0].any()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3], ids=["causal", "window"])
@pytest.mark.parametrize("shape", [(1, 4, 9, 1), (2, 1, 1, 9), (1, 4, 1, 1)], ids=str)
def test_a_position_bias_of_one_row_or_column(shape, window):
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    bias, layer = torch.randn(shape), torch.nn.Module()
    found, of_all = (
        fa3.attention(layer, q, k, v, None, position_bias=x, sliding_window=window)[0]
        for x in (bias, bias.expand(2, 4, 9, 9).contiguous())
    )
    torch.testing.assert_close(found, of_all)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(-8 if window is None else 1 - window)
    masked = bias.expand(2, 4, 9, 9).masked_fill(~seen, -math.inf)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=masked)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("name", ["output_attentions", "cache", "head_mask"])
def test_arguments_that_are_refused(name):
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match=f"transformers attention: {name} must be None"):
        fa3.attention(torch.nn.Module(), x, x, x, None, **{name: True})


def mask_arguments(embeds, mask=None):
    """Return the arguments of create_causal_mask but for the config."""
    found = {"attention_mask": mask, "past_key_values": None}
    found["inputs_embeds" if RELEASE >= (5, 2) else "input_embeds"] = embeds
    return found if RELEASE >= (5, 4) else found | {"cache_position": torch.arange(ROWS)}


@pytest.mark.parametrize("added", ["or_mask_function", "and_mask_function"])
def test_mask_functions_of_the_model(added):
    from transformers.masking_utils import create_causal_mask

    config = configured("Llama")
    config._attn_implementation = "fa3"
    embeds = torch.randn(2, ROWS, 32)
    arguments = mask_arguments(embeds)

    def prefix(batch, head, q, k):
        return k < 4

    found = create_causal_mask(config, **arguments, **{added: prefix})
    seen = torch.ones(ROWS, ROWS).tril().bool()
    first = torch.arange(ROWS) < 4
    wanted = seen | first if added == "or_mask_function" else seen & first
    assert torch.equal(found, wanted.expand(2, 1, ROWS, ROWS))


def test_gemma3_with_images():
    """Its mask shows the tokens of an image to each other."""
    from transformers import masking_utils

    if not hasattr(masking_utils, "blockwise_overlay"):
        pytest.skip("this transformers gives such masks as the model's own function")
    config = configured("Gemma3Text")
    config._attn_implementation = "fa3"
    images = torch.full((2, ROWS), -1)
    images[:, 4:8] = 0
    found = masking_utils.create_causal_mask(
        config, torch.randn(2, ROWS, 32), None, None, block_sequence_ids=images
    )
    wanted = torch.ones(ROWS, ROWS).tril().bool()
    wanted[4:8, 4:8] = True
    assert torch.equal(found, wanted.expand(2, 1, ROWS, ROWS))


def test_a_window_that_is_also_the_chunk():
    """transformers' own function says what it is."""
    causal = transformers.masking_utils.causal_mask_function
    config = transformers.LlamaConfig()
    new = {"q_length": 8, "device": "cpu"}
    given = new if RELEASE >= (5, 4) else {"cache_position": torch.arange(8)}
    mask = masks.mask(1, 8, causal, local_size=4, config=config, **given)
    assert torch.equal(mask, torch.ones(1, 1, 8, 8).tril().bool())


def test_the_benchmark_of_models(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    import json

    from flashattn3.cli import main
    from flashattn3_bench import models_suite

    monkeypatch.setattr(models_suite, "STEPS_PER_SAMPLE", 1)
    monkeypatch.setattr(models_suite, "NEW_TOKENS", 4)
    options = ("--suite", "models", "--quick", "--rounds", "2", "--device", "cpu")
    arguments = ["bench", *options, "--output", str(tmp_path)]
    assert main(arguments) == 0
    _, *records = map(json.loads, (tmp_path / "models.jsonl").read_text().splitlines())
    found = {(r["direction"], r["provider"]): r for r in records if r["status"] == "ok"}
    for work in ("train", "compiled", "compiled-no-graphs", "prefill", "decode"):
        for name in ("flashattn3", "sdpa"):
            assert found[work, name]["tokens_per_second"] > 0
    assert found["padding", "flashattn3"]["waits"] == 0
    assert "tokens/s: flashattn3 / sdpa" in capsys.readouterr().out
    monkeypatch.setattr(fa3, "attention", lambda *a, **k: (torch.zeros_like(a[1]).mT, None))
    monkeypatch.setattr(models_suite, "QUICK_CASES", models_suite.QUICK_CASES[:1])
    assert main(arguments) == 1  # the gate


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_in_8_bits(packed):
    """Loss and gradients of a training step near those in 16 bits; generation from a cache."""
    config = transformers.LlamaConfig(**SIZES, head_dim=16)
    torch.manual_seed(0)
    ids = torch.randint(1, 97, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    given = {} if packed else {"attention_mask": mask}
    if packed:
        positions = torch.cat((torch.arange(25), torch.arange(15))).expand(2, -1)
        given = {"position_ids": positions, "use_cache": False}
    found = {}
    for name in (fa3.register(), transformers_fp8.register()):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(
            copy.deepcopy(config), attn_implementation=name
        ).bfloat16()
        loss = model(ids, labels=ids, **given).loss
        loss.backward()
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad.float()
        texts = model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        found[name] = loss.float(), gradient, texts
    (loss, gradient, texts), (loss8, gradient8, texts8) = found.values()
    assert loss8 != loss and abs(loss8 - loss) < 0.01
    assert 0 < (gradient8 - gradient).norm() < 0.2 * gradient.norm()
    assert texts8.shape == texts.shape
    with pytest.raises((TypeError, ValueError), match=r"flash_attn.*fp8_func: q\.dtype must be"):
        model.float()(ids, **given)
