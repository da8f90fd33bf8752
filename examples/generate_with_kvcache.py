"""Generation with a static cache, equal token by token to computing everything anew.

A small transformer with rotary embedding: the prompt in one call, then a token at a time. Each call
writes the new keys and values into the cache and attends to it.

python examples/generate_with_kvcache.py
"""

import torch
from torch import Tensor, nn

from flashattn3 import flash_attn_with_kvcache

VOCABULARY, WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 97, 128, 2, 4, 2, 32
CAPACITY = 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM)
        self.project = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor], length: int, rotary) -> Tensor:
        """x: (batch, new tokens, width). length: tokens in the cache."""
        qkv = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split((HEADS, HEADS_KV, HEADS_KV), dim=-2)
        out = flash_attn_with_kvcache(
            q, *cache, k, v, None, *rotary, cache_seqlens=length, causal=True
        )
        return self.project(out.flatten(-2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, caches: list, length: int, rotary) -> Tensor:
        """Logits of the last token. tokens: (batch, new tokens)."""
        x = self.embed(tokens)
        for attention, mlp, cache in zip(self.attention, self.mlp, caches, strict=True):
            x = x + attention(nn.functional.layer_norm(x, (WIDTH,)), cache, length, rotary)
            x = x + mlp(nn.functional.layer_norm(x, (WIDTH,)))
        return self.head(x[:, -1])


def rotary_tables(device, dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (positions, head_dim / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.arange(CAPACITY, device=device).unsqueeze(1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make_caches(batch: int, device, dtype) -> list[tuple[Tensor, Tensor]]:
    shape = (batch, CAPACITY, HEADS_KV, HEAD_DIM)
    new = {"device": device, "dtype": dtype}
    return [(torch.empty(shape, **new), torch.empty(shape, **new)) for _ in range(LAYERS)]


@torch.no_grad()
def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    rotary = rotary_tables(device, torch.float32)
    prompt = torch.randint(VOCABULARY, (2, 9), device=device)

    caches, tokens, new = make_caches(2, device, dtype), prompt, prompt
    for step in range(12):
        length = tokens.shape[1] - new.shape[1]
        logits = model(new, caches, length, rotary)
        anew = model(tokens, make_caches(2, device, dtype), 0, rotary)
        difference = (logits - anew).abs().max().item()
        new = logits.argmax(-1, keepdim=True)
        assert difference < 0.02, f"step {step}: logits differ by {difference}"
        assert torch.equal(new, anew.argmax(-1, keepdim=True)), f"step {step}: another token"
        tokens = torch.cat([tokens, new], 1)
    print("generated:", tokens[0, prompt.shape[1] :].tolist())
    print("every step has the token that computing everything anew has")


if __name__ == "__main__":
    main()
