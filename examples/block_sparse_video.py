"""Block-sparse attention over video: block-causal frames, and the blocks that matter most.

Each frame sees itself and the frames before it (a world model that generates frame by frame). Of
the past a frame then reads a few blocks alone, those whose mean key is nearest to the mean query of
its own blocks (VSA, MoBA and NSA select blocks in such ways). Both are a mask of blocks; out and
gradients of the sparse one are compared with torch's attention and its bool tensor.

python examples/block_sparse_video.py
"""

import torch
import torch.nn.functional as F

from flashattn3 import flash_attn_func, masks

FRAMES, HEIGHT, WIDTH = 6, 8, 16  # tokens of a frame: a block of 128
HEADS, HEAD_DIM = 4, 64
BLOCK = HEIGHT * WIDTH
KEPT = 3  # blocks that a block of queries reads, its own frame's among them


def block_causal(frames: int, device: torch.device) -> torch.Tensor:
    """bool (1, 1, frames, frames): a frame sees itself and the frames before it."""
    return torch.ones(1, 1, frames, frames, device=device, dtype=torch.bool).tril()


def nearest_blocks(q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """bool (batch, heads, blocks, blocks): the KEPT allowed blocks with the highest score between
    the means of their queries and keys, the diagonal always. Nothing waits for the device."""
    means = (x.unflatten(1, (-1, BLOCK)).mean(2).transpose(1, 2) for x in (q, k))
    mean_q, mean_k = means
    scores = (mean_q @ mean_k.mT).masked_fill(~allowed, -torch.inf)
    scores.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    best = scores.topk(KEPT, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & allowed


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = 1, FRAMES * BLOCK, HEADS, HEAD_DIM
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    frames = block_causal(FRAMES, device)
    with torch.no_grad():
        selected = nearest_blocks(q, k, frames)
    whole = masks.blocks(frames, BLOCK, BLOCK)
    sparse = masks.blocks(selected, BLOCK, BLOCK)
    print(whole)
    print(sparse)  # its first head

    out = flash_attn_func(q, k, v, mask=sparse)
    heads_first = (x.transpose(1, 2) for x in leaves)
    wanted = F.scaled_dot_product_attention(*heads_first, attn_mask=sparse.to_bool())
    wanted = wanted.transpose(1, 2)
    dout = torch.randn_like(out)
    gradients = (torch.autograd.grad(x, leaves, dout) for x in (out, wanted))
    pairs = [(out, wanted), *zip(*gradients, strict=True)]
    difference = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
    assert difference < (0.02 if device.type == "cuda" else 1e-5), difference
    share = float(sparse.density / whole.density)
    print(f"{share:.0%} of the block-causal scores: largest difference to torch {difference:.1e}")


if __name__ == "__main__":
    main()
