"""diffusers models with random weights, on flashattn3 against torch's own attention.

No network: every model is made from a config.
"""

from __future__ import annotations

import inspect
import sys
import warnings

import pytest
import torch
import torch.nn.attention

from flashattn3 import UnsupportedError
from flashattn3.integrations import diffusers as fa3
from flashattn3.integrations import torch as provider
from flashattn3.integrations import torch_operators

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
OLD = diffusers.__version__.startswith("0.35.")


@pytest.fixture
def calls(monkeypatch):
    """How many calls reached flashattn3, and by which function."""
    found = {"flash_attn_func": 0, "flash_attn_varlen_func": 0}

    def spied(module, name):
        function = getattr(module, name)

        def spy(*arguments, **options):
            found[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, spy)

    for module in (fa3, torch_operators):
        for name in found:
            spied(module, name)
    fa3.register()
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend("native"):  # newer releases choose the backend for all models at once
        yield found


def assert_close(found, wanted):
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error <= 1e-5, f"relative error {error:.1e}"


def compared(model, inputs, activate=None):
    """The model's output with torch's attention and with flashattn3, its own or of the provider."""
    model.eval()
    with torch.no_grad():
        wanted = model(**inputs, return_dict=False)[0]
        if activate is None:
            model.set_attention_backend(fa3.NAME)
        else:
            activate()
        assert_close(model(**inputs, return_dict=False)[0], wanted)


def made(name, **config):
    cls = getattr(diffusers, name, None)
    if cls is None:
        pytest.skip(f"this diffusers has no {name}")
    torch.manual_seed(0)
    return cls(**config)


def flux():
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    return made("FluxTransformer2DModel", patch_size=1, axes_dims_rope=[4, 4, 8], **sizes)


def wan():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "num_layers": 2}
    sizes |= {"out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32}
    sizes |= {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
    return made("WanTransformer3DModel", patch_size=(1, 2, 2), **sizes)


def qwen_image():
    """Text comes before the image, so its padding is a hole between keys that count."""
    sizes = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2}
    sizes |= {"attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 16}
    return made("QwenImageTransformer2DModel", axes_dims_rope=(8, 4, 4), **sizes)


def hunyuan_video():
    if OLD:
        pytest.skip("HunyuanVideo of diffusers 0.35 calls torch's SDPA itself")
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "patch_size": 1}
    sizes |= {"attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1, "patch_size_t": 1}
    sizes |= {"num_refiner_layers": 1, "text_embed_dim": 16, "pooled_projection_dim": 8}
    return made("HunyuanVideoTransformer3DModel", rope_axes_dim=(2, 4, 4), **sizes)


def unet():
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    blocks |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "layers_per_block": 1}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 16}
    sizes |= {"in_channels": 4, "out_channels": 4, "attention_head_dim": 2}
    return made("UNet2DConditionModel", cross_attention_dim=16, **blocks, **sizes)


def stable_diffusion_3():
    sizes = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2}
    sizes |= {"attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 32}
    sizes |= {"caption_projection_dim": 32, "pooled_projection_dim": 32, "out_channels": 4}
    return made("SD3Transformer2DModel", **sizes)


def text_mask(rows, first):
    """(2, rows): padding behind the first tokens of the first text."""
    return torch.arange(rows) < torch.tensor([[first], [rows]])


# Model → whether it asks for its backend (else it calls torch's SDPA itself), its dense and varlen
# calls of flashattn3, and its inputs: values, or shapes of random tensors.
MODELS = {
    flux: (True, (2, 0), {
        "hidden_states": (2, 16, 4), "encoder_hidden_states": (2, 8, 32),
        "pooled_projections": (2, 32), "txt_ids": torch.zeros(8, 3), "img_ids": (16, 3),
        "timestep": torch.tensor([1.0, 1.0]),
    }),
    wan: (True, (4, 0), {
        "hidden_states": (1, 4, 2, 16, 16), "encoder_hidden_states": (1, 12, 16),
        "timestep": torch.tensor([5]),
    }),
    qwen_image: (True, (2, 0) if OLD else (0, 2), {  # 0.35 ignores the mask
        "hidden_states": (2, 16, 16), "encoder_hidden_states": (2, 7, 16),
        "encoder_hidden_states_mask": text_mask(7, 4), "timestep": torch.tensor([1.0, 1.0]),
        "img_shapes": [[(1, 4, 4)]] * 2, "txt_seq_lens": [7, 7],
    }),
    hunyuan_video: (True, (0, 2), {
        "hidden_states": (2, 4, 1, 8, 8), "encoder_hidden_states": (2, 12, 16),
        "encoder_attention_mask": text_mask(12, 8).float(), "pooled_projections": (2, 8),
        "timestep": torch.tensor([5, 5]), "guidance": torch.tensor([1000.0, 1000.0]),
    }),
    unet: (False, (8, 0), {
        "sample": (1, 4, 16, 16), "encoder_hidden_states": (1, 7, 16), "timestep": 10,
    }),
    stable_diffusion_3: (False, (2, 0), {
        "hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 7, 32),
        "pooled_projections": (2, 32), "timestep": torch.tensor([5, 5]),
    }),
}  # fmt: skip


@pytest.fixture
def sdpa_provider(calls):
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.11 has the first registry of providers that restores")
    provider.register(device="cpu")
    yield lambda: torch.nn.attention.activate_flash_attention_impl("FLASHATTN3")
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("model", MODELS)
def test_models(model, calls, request):
    asks, counts, inputs = MODELS[model]
    activate = None if asks else request.getfixturevalue("sdpa_provider")
    model = model()
    taken = inspect.signature(model.forward).parameters
    given = {name: x for name, x in inputs.items() if name in taken}
    given = {name: torch.randn(x) if type(x) is tuple else x for name, x in given.items()}
    compared(model, given, activate)
    assert calls == dict(zip(("flash_attn_func", "flash_attn_varlen_func"), counts, strict=True))


def vae():
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    return made("AutoencoderKL", **blocks, block_out_channels=(4,), norm_num_groups=2)


@pytest.mark.parametrize("model", [stable_diffusion_3, vae, flux])
def test_a_model_that_does_not_ask_for_its_backend(model, calls):
    model = model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.set_attention_backend(fa3.NAME)
    texts = [str(w.message) for w in found if "diffusers attention" in str(w.message)]
    assert len(texts) == (type(model).__name__ != "FluxTransformer2DModel")
    for text in texts:
        assert type(model).__name__ in text and "flashattn3.integrations.torch.register" in text


# The function itself.


def qkv(rows=5, keys=9, heads_kv=4):
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 16) for n, h in ((rows, 4), (keys, heads_kv), (keys, heads_kv))]


def exact(q, k, v, mask=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": k.shape[1] != q.shape[1]}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_keys_that_do_not_count(batch):
    mask = torch.rand(batch, 1, 1, 9) > 0.4
    mask[..., 3] = True
    q, k, v = qkv()
    found, lse = fa3.attention(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(found, exact(q, k, v, mask))
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT / 4).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(1, 2))


@pytest.mark.parametrize("shape", [(1, 1, 5, 9), (2, 4, 5, 9)])
def test_keys_that_each_query_sees(shape):
    mask = torch.rand(shape) > 0.4
    mask[..., 3] = True
    q, k, v = qkv(heads_kv=2)
    for _ in range(2):
        torch.testing.assert_close(
            fa3.attention(q, k, v, mask, enable_gqa=True), exact(q, k, v, mask)
        )
        mask[..., 0] = False  # a Mask serves one version of the tensor


def test_other_arguments():
    q, k, v = qkv(9, heads_kv=2)
    wanted = exact(q, k, v, causal=True)
    torch.testing.assert_close(fa3.attention(q, k, v, is_causal=True, enable_gqa=True), wanted)
    out, lse = fa3.attention(q, k, v, enable_gqa=True, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 9, 4, 16), (2, 9, 4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("attn_mask", {"attn_mask": torch.zeros(2, 1, 1, 9)}),
        ("attn_mask", {"attn_mask": torch.ones(5, 9, dtype=torch.bool)}),
        ("attn_mask", {"attn_mask": torch.ones(2, 1, 4, 9, dtype=torch.bool)}),
        ("attn_mask", {"attn_mask": torch.ones(2, 4, 1, 9, dtype=torch.bool)}),
        ("is_causal", {"is_causal": True}),
        ("parallel_config", {"_parallel_config": object()}),
        (
            "window_size",
            {"window_size": (3, 3), "attn_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)},
        ),
    ],
)
def test_refused(name, options):
    with pytest.raises(UnsupportedError, match=f"diffusers attention: {name} must be"):
        fa3.attention(*qkv(), **options)


def test_register(monkeypatch):
    from diffusers.models import attention_dispatch

    assert fa3.register() == fa3.register() == "flashattn3"
    names = attention_dispatch.AttentionBackendName
    assert names("flashattn3") is names["FLASHATTN3"] and list(names).count("flashattn3") == 1
    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(UnsupportedError, match="without AttentionBackendName and _AttentionBack"):
        fa3.register()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UnsupportedError, match="diffusers is not installed; pip install"):
        fa3.register()
