"""Masks of transformers as segments: when they are read, and that a reading serves one mask."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from flashattn3 import UnsupportedError
from flashattn3.integrations import dense_masks, masks, segments
from flashattn3.integrations import transformers as fa3

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_integrations_transformers import (  # noqa: E402
    NEW,
    OLD_ENCODERS,
    RELEASE,
    ROWS,
    SIZES,
    assert_close,
    assert_same_logits,
    compiled,
    configured,
    mask_arguments,
    padded,
    pair,
    tokens,
)


@pytest.fixture(autouse=True)
def registered():
    fa3.register()
    segments._readings.clear()  # errors of other tests may keep masks alive


class Waits:
    """Counts reads of a tensor's values on the host by this package, which wait for a GPU."""

    READS = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__")

    def __enter__(self):
        self.count = 0
        self.patches = [self._counted(name) for name in self.READS]
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()

    def _counted(self, name):
        function = getattr(torch.Tensor, name)

        def read(tensor, *arguments):
            self.count += 1
            return function(tensor, *arguments)

        patch = mock.patch.object(torch.Tensor, name, read)
        patch.start()
        return patch


def without_reading(q, k, v, *edges, return_lse=False, **options):
    out = torch.zeros_like(q.transpose(1, 2))
    return (out, out[..., 0].mT.float()) if return_lse else out


@pytest.fixture
def waits(monkeypatch):
    """Waits in each call of the mask function and of a layer, in their order."""
    found = []

    def counted(function):
        def count(*arguments, **options):
            with Waits() as here:
                result = function(*arguments, **options)
            found.append(here.count)
            return result

        return count

    # The reference backend reads cu_seqlens.
    monkeypatch.setattr(fa3, "flash_attn_bhsd_func", without_reading)
    name = "counted"
    transformers.AttentionMaskInterface.register(name, counted(fa3.mask))
    transformers.AttentionInterface.register(name, counted(fa3.attention))
    return found


def model_of(name, attention, **changes):
    """A model and the number of masks that its layers ask for."""
    factory, config = transformers.AutoModelForCausalLM, configured(name, **changes)
    model = factory.from_config(config, attn_implementation=attention)
    return model, 1 if name == "Llama" else 2


@pytest.mark.parametrize("side", [None, "all ones", "left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3Text", "GptOss", "Llama4Text"])
def test_one_wait_in_a_forward(name, side, waits):
    """In the first layer, for all masks: those of windows, of chunks and of all tokens. Without
    padding those of all tokens need none."""
    model, masks = model_of(name, "counted", num_hidden_layers=4, layer_types=None)
    for _ in range(2):
        waits.clear()
        model(tokens(), attention_mask=padded(side))
        assert len(waits) == masks + 4
        assert waits[:masks] == [0] * masks
        chosen = (1,) if side is not None else (0,) if name == "Llama" else (0, 1)
        assert waits[masks] in chosen
        assert not any(waits[masks + 1 :])


STEPS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize("cache", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_one_wait_in_a_step_of_generate(name, cache, waits):
    model, masks = model_of(name, "counted")
    model.generate(tokens(), attention_mask=padded("left"), **STEPS, **cache)
    size = masks + 2
    steps = [sum(waits[i : i + size]) for i in range(0, len(waits), size)]
    assert len(steps) == 6
    # generate copies the masks of a static cache, so each kind of layer reads its own. Before 5.18
    # each mask function looks first whether there is padding.
    looks = masks * (RELEASE < (5, 18))
    assert max(steps) <= (masks if cache else 1) + looks


@pytest.mark.skipif(RELEASE < (5, 18), reason="generate before 5.18 passes a mask of ones")
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_no_wait_for_a_static_cache_without_padding(name, waits):
    model, masks = model_of(name, "counted")
    model.generate(tokens(), **STEPS, **STATIC)
    assert len(waits) == 6 * (2 + masks) and not any(waits)


def keep_masks():
    """Register attention "kept", whose masks are appended to the list."""
    found = []

    def kept(*arguments, **options):
        found.append(fa3.mask(*arguments, **options))
        return found[-1]

    transformers.AttentionMaskInterface.register("kept", kept)
    transformers.AttentionInterface.register("kept", fa3.attention)
    return found


@pytest.mark.skipif(RELEASE < (5, 4), reason="positions are a tensor: the cache may be longer")
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@torch.no_grad()
def test_a_mask_of_ones_is_none_in_generate(name):
    """So a step describes no mask. 5.18 and newer pass none."""
    found = keep_masks()
    model, masks = model_of(name, "kept", **({"sliding_window": 64} if name == "Gemma2" else {}))
    model.generate(tokens(), attention_mask=padded("all ones"), **STEPS)
    assert found[masks:] == [None] * 5 * masks


@pytest.mark.skipif(RELEASE < (5, 4), reason="the positions of a static cache are not a tensor")
@pytest.mark.parametrize("ones", [False, True])
@torch.no_grad()
def test_the_mask_of_a_step_with_a_static_cache_is_a_length(ones):
    """A layer reads nothing of it, and passes it on as cache_seqlens."""
    found = keep_masks()
    model, _ = model_of("Llama", "kept")
    cache = transformers.StaticCache(config=model.config, max_cache_len=30)
    for begin, end in ((0, 19), (19, 20), (20, 21)):
        mask = padded("all ones", rows=end) if ones and RELEASE < (5, 18) else None
        model(tokens()[:, begin:end], past_key_values=cache, attention_mask=mask)
    for mask, length in zip(found[1:], (20, 21), strict=True):
        step = segments.Segments.of_mask(mask, 2, (1, 30), None)
        assert mask.shape[0] == 1 and step.cache_seqlens.tolist() == [length] * 2
        assert step.cache_leftpad is step.cu_seqlens_k is None


@pytest.mark.parametrize("offset", [20, torch.tensor(20)], ids=["int", "tensor"])
def test_a_mask_of_ones_that_ends_before_the_query(offset):
    """It shows no key past its end."""
    from transformers.masking_utils import causal_mask_function

    shown = torch.ones(2, 18, dtype=torch.bool)
    options = {"q_length": 1, "q_offset": offset, "attention_mask": shown, "device": "cpu"}
    mask = fa3.mask(2, 21, causal_mask_function, **options)
    assert segments.Segments.of_mask(mask, 2, (1, 21), None).cache_seqlens.tolist() == [18, 18]


@pytest.mark.skipif(not NEW, reason=OLD_ENCODERS)
def test_one_wait_in_an_encoder(waits):
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="counted")
    model(tokens(), attention_mask=padded("right"))
    assert waits == [0, 1, 0]


def test_a_mask_that_is_changed_in_place():
    models = pair(configured("Gemma2"))
    mask = padded("left").bool()  # bool, so that transformers passes the tensor itself
    for start in (6, 0, 9):
        mask[0] = torch.arange(ROWS) >= start
        assert_same_logits(models, mask)


def test_masks_that_follow_each_other_at_one_address():
    models = pair(configured("Gemma2"))
    for side in ("left", "all ones", "right", "both", "left"):
        assert_same_logits(models, padded(side).bool())


def test_threads_read_their_masks_side_by_side(monkeypatch):
    """Masks of other threads come and go while one is read, and none is read by another thread."""
    own = OwnMasks(segments._numbers_of)
    monkeypatch.setattr(segments, "_numbers_of", own)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(own.read_some, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert found == [[1 + i % 3 for i in range(200)]] * 8


class OwnMasks:
    """Counts the sequences of masks, each in the thread that made it."""

    def __init__(self, numbers_of):
        self.numbers_of, self.made = numbers_of, threading.local()

    def __call__(self, mask):
        assert any(mask is own for own in self.made.masks)
        return self.numbers_of(mask)

    def read_some(self, _):
        counts = []
        for i in range(200):
            lengths = [2] * (1 + i % 3) + [0] * (2 - i % 3)
            edges = torch.tensor([0, *lengths]).cumsum(0).int()
            made = segments.Segments(True, cu_seqlens_q=edges, cu_seqlens_k=edges, lengths=(6, 6))
            self.made.masks = [made.as_mask(edges.device, {}) for _ in range(2)]
            read = [segments._checked(mask, batch=5) for mask in self.made.masks]
            counts.append(read[0].cu_seqlens_q.diff().count_nonzero().item())
        return counts


@torch.no_grad()
def test_no_mask_outlives_its_forward():
    model = pair(configured("Gemma2"))[0]
    model(tokens(), attention_mask=padded("left"))
    gc.collect()
    assert len(segments._readings) == 0
    model.generate(tokens(), attention_mask=padded("left"), cache_implementation="static")
    gc.collect()
    assert len(segments._readings) == 0


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_mask_with_a_hole(name, monkeypatch):
    """A Mask is made once for each kind of layer."""
    made = []
    from_bool = dense_masks.from_bool
    monkeypatch.setattr(dense_masks, "from_bool", lambda x: made.append(x) or from_bool(x))
    models = pair(configured(name, num_hidden_layers=4, layer_types=None))
    mask = padded("left")
    mask[0, 10:12] = 0
    assert_same_logits(models, mask)
    assert len(made) == (1 if name == "Llama" else 2)
    assert_same_logits(models, padded("left"))
    gc.collect()
    assert len(dense_masks._made) == 0


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@torch.no_grad()
def test_a_hole_before_the_next_token(name):
    models, found = pair(configured(name)), []
    for model in models:
        mask = padded("right", rows=ROWS - 1)
        first = model(tokens()[:, :-1], attention_mask=mask, use_cache=True)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = {"position_ids": mask.sum(-1, keepdim=True) - 1}
        cache = {"past_key_values": first.past_key_values}
        found.append(model(tokens()[:, -1:], attention_mask=mask, **cache, **positions).logits)
    assert_close(*found)


def test_a_step_takes_no_packed_sequences():
    """A mask that describes one query in each row is not ignored."""
    end = torch.tensor([9], dtype=torch.int32)
    mask = segments.Segments(True, cache_seqlens=end, lengths=(1, 12)).as_mask("cpu")
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 12, 8)
    edges = {f"cu_seq_lens_{x}": torch.tensor([0, n]).int() for x, n in (("q", 1), ("k", 12))}
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q must be None where attention_mask"):
        fa3.attention(torch.nn.Module(), q, k, k, mask, **edges)


def test_mask_with_a_hole_in_a_compiled_model():
    model = compiled(pair(configured("Llama"))[0])
    mask = padded("all ones")
    mask[0, 4] = 0
    with pytest.raises(RuntimeError, match="tokens of a row must follow each other"):
        model(tokens(), attention_mask=mask)


@pytest.mark.parametrize("module", [masks, segments])
def test_no_imports_in_compiled_functions(module):
    """The compiler of torch 2.11 cannot import from transformers."""
    inside = [
        node
        for function in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert not inside


def test_the_compiler_needs_the_name_of_a_mask_function_alone(monkeypatch):
    """That of torch 2.11 cannot split __qualname__."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    arguments = False, None, None
    assert masks._of_another_kind(SimpleNamespace(__name__="and_mask"), *arguments) is None
    found = masks._of_another_kind(SimpleNamespace(__name__="or_mask"), *arguments)
    assert "got or_mask; use attn_implementation" in found


@pytest.mark.skipif(not NEW, reason=OLD_ENCODERS)
def test_mask_with_a_hole_in_an_encoder():
    mask = padded("all ones")
    mask[0, 4] = 0
    assert_same_logits(pair(transformers.BertConfig(**SIZES), "AutoModelForMaskedLM"), mask)


def test_a_bool_mask_of_other_sizes_and_beside_packed_sequences():
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 12, 8)
    module = torch.nn.Module()
    for shape in ((2, 1, 4, 12), (2, 1, 5, 11), (3, 1, 5, 12), (2, 3, 5, 12)):
        with pytest.raises(UnsupportedError, match="attention_mask must be for the lengths of the"):
            fa3.attention(module, q, k, k, torch.ones(shape).bool())
    edges = {"cu_seq_lens_q": torch.tensor([0, 5]).int()}
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q must be None where attention_mask"):
        fa3.attention(module, q, k, k, torch.ones(2, 1, 5, 12).bool(), **edges)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_bool_mask_that_is_written_to(mode):
    """In inference mode too, where a tensor has no version."""
    with mode():
        q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 12, 8)
        seen = torch.ones(1, 1, 5, 12).bool()
        for first in (0, 3, 7):
            seen[..., :first] = False
            found, _ = fa3.attention(torch.nn.Module(), q, k, k, seen)
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=seen)
            torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-5, atol=1e-6)


def layer_and_mask(hole=False):
    """A layer's arguments and the mask that an eager mask function made for it."""
    mask = padded("left")
    if hole:
        mask[0, 10] = 0
    config = configured("Llama")
    config._attn_implementation = "fa3"
    from transformers.masking_utils import create_causal_mask

    arguments = mask_arguments(torch.randn(2, ROWS, 32), mask)
    torch.manual_seed(0)
    q = torch.randn(2, 4, ROWS, 8)
    return torch.nn.Module(), (q, q, q), create_causal_mask(config, **arguments)


@pytest.mark.parametrize("elsewhere", ["a copy", "a compiled layer"])
def test_a_mask_that_its_layer_does_not_read(elsewhere):
    """Empty segments at its end change nothing, and a fault is an assertion on the device."""
    module, qkv, mask = layer_and_mask()
    wanted, _ = fa3.attention(module, *qkv, mask)
    run = compiled(fa3.attention) if elsewhere == "a compiled layer" else fa3.attention
    copy = mask.clone()  # beside the mask that was read, as layers on other devices get it
    torch.testing.assert_close(run(module, *qkv, copy)[0], wanted)
    copy[2] = 1
    with pytest.raises(RuntimeError, match="tokens of a row must follow each other"):
        run(module, *qkv, copy)


def test_a_copy_alone_is_read():
    module, qkv, mask = layer_and_mask()
    wanted, _ = fa3.attention(module, *qkv, mask)
    mask = mask.clone()  # as generate makes it of the masks of a static cache
    gc.collect()
    with Waits() as waits:
        found = [segments.Segments.of_mask(mask, 2, (ROWS, ROWS), None) for _ in range(2)]
    assert found[0] is found[1]
    assert waits.count == 1
    torch.testing.assert_close(fa3.attention(module, *qkv, mask)[0], wanted)
    del mask, found
    gc.collect()
    mask = layer_and_mask(hole=True)[2].clone()
    with pytest.raises(UnsupportedError, match="tokens of a row must follow each other"):
        fa3.attention(module, *qkv, mask)


@pytest.mark.parametrize("window", [1, 2])
def test_the_narrowest_windows(window):
    """With a window of 1 every token is a segment of its own."""
    assert_same_logits(pair(configured("Mistral", sliding_window=window)), padded("both"))
