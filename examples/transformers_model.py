"""A transformers model on flashattn3: a training step and generation with padding, against eager
attention. Random weights from a config; nothing is downloaded.

pip install 'flashattn3[transformers]' && python examples/transformers_model.py
"""

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flashattn3.integrations import transformers as fa3

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def made(attention: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIG)  # a model writes its attention's name into its config
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {"fa3": made(fa3.register(), device), "eager": made("eager", device)}
    ids = torch.randint(1, 1000, (2, 24), device=device)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0  # the first text is shorter: padding on the left
    for name, model in models.items():
        # On a GPU autocast gives the kernels 16-bit inputs.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        text = model.eval().generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        print(f"{name:5}  loss {loss:.5f}  gradient {norm:.5f}  {text[0, 24:].tolist()}")


if __name__ == "__main__":
    main()
