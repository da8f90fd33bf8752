"""A byte-level GPT in which attention is an argument; everything else is plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
NUM_BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The model's width is num_heads * head_dim; seqlen is the length of its input in bytes."""

    num_layers: int
    num_heads: int
    head_dim: int
    seqlen: int

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class Block(nn.Module):
    """Pre-norm transformer block. ``attention`` works on (batch, seqlen, heads, head_dim)."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        width = shape.width
        self.attention = attention
        self.heads = (3, shape.num_heads, shape.head_dim)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = _linear(width, 3 * width), _linear(width, width)
        self.mlp = nn.Sequential(_linear(width, 4 * width), nn.GELU(), _linear(4 * width, width))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, self.heads).unbind(dim=2)
        q, k = rotate(q, rotation), rotate(k, rotation)
        x = x + self.project(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, shape.width)
        nn.init.normal_(self.byte.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.register_buffer("rotation", rotary_angles(shape.seqlen, shape.head_dim))

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; text and target are int64 (batch, seqlen)."""
        x = self.byte(text)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = F.linear(self.norm(x), self.byte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def _linear(num_in: int, num_out: int) -> nn.Linear:
    # Unit gain: with torch's default, a third of it, so short a training hardly reaches attention.
    linear = nn.Linear(num_in, num_out)
    nn.init.normal_(linear.weight, std=num_in**-0.5)
    return linear


def rotary_angles(seqlen: int, head_dim: int) -> Tensor:
    """cos and sin of the rotary position embedding, (2, seqlen, 1, head_dim / 2)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(seqlen)[:, None, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of (batch, seqlen, heads, head_dim); arXiv 2104.09864."""
    cos, sin = rotation.to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)
