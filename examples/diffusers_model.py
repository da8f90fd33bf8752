"""A diffusion transformer on flashattn3 by diffusers' dispatcher, and a UNet by the provider of
torch's attention. Random weights from configs; nothing is downloaded.

pip install 'flashattn3[diffusers]' && python examples/diffusers_model.py
"""

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from flashattn3.integrations import diffusers as dispatcher
from flashattn3.integrations import torch as provider


def flux(device: torch.device, dtype: torch.dtype) -> None:
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).to(device, dtype)
    inputs = {
        "hidden_states": torch.randn(1, 64, 4, device=device, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 8, 32, device=device, dtype=dtype),
        "pooled_projections": torch.randn(1, 32, device=device, dtype=dtype),
        "timestep": torch.tensor([1.0], device=device, dtype=dtype),
        "txt_ids": torch.zeros(8, 3, device=device),
        "img_ids": torch.zeros(64, 3, device=device),
    }
    wanted = model(**inputs).sample
    model.set_attention_backend(dispatcher.register())
    print("Flux, largest difference:", (model(**inputs).sample - wanted).abs().max().item())
    model.reset_attention_backend()


def unet(device: torch.device, dtype: torch.dtype) -> None:
    model = UNet2DConditionModel(
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    ).to(device, dtype)
    sample = torch.randn(1, 4, 16, 16, device=device, dtype=dtype)
    text = torch.randn(1, 7, 32, device=device, dtype=dtype)
    wanted = model(sample, 10, text).sample
    activate_flash_attention_impl(provider.register(prefer=True, device=device.type))
    print("UNet, largest difference:", (model(sample, 10, text).sample - wanted).abs().max().item())
    restore_flash_attention_impl()


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.no_grad():
        flux(device, dtype)
        unet(device, dtype)


if __name__ == "__main__":
    main()
