"""flashattn3 in place of torch's attention, in a transformer block that trains.

python examples/transformer_block.py
"""

import torch
from torch import Tensor, nn

from flashattn3 import flash_attn_qkvpacked_func


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seqlen, width)."""
        # With torch this would be three transposes and F.scaled_dot_product_attention.
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        attended = flash_attn_qkvpacked_func(qkv, causal=True)
        x = x + self.project(attended.flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    block = Block(width=256, num_heads=4).to(device, dtype)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    x = torch.randn(2, 512, 256, device=device, dtype=dtype)
    # The token before: a block can learn it only if attention and its gradients are right.
    target = x.roll(1, dims=1)
    for step in range(20):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1:2}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
