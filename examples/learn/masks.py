"""Families of block-sparse masks, and the float64 reference that the kernels are held to.

A mask is uint8 (m_blocks, n_blocks): 1 where a block of queries sees a block of keys.
"""

import torch


def butterfly(num_blocks: int) -> torch.Tensor:
    """Block i sees block j where i and j are equal or differ in one binary digit.

    The flat block butterfly of Dao et al. (Pixelated Butterfly, arXiv 2112.00029), which the
    FlashAttention paper uses: any two blocks are connected by at most log2(num_blocks) layers.
    """
    i = torch.arange(num_blocks)
    differing = i[:, None] ^ i[None, :]
    return ((differing & (differing - 1)) == 0).to(torch.uint8)


def sliding_window(num_blocks: int, reach: int = 1) -> torch.Tensor:
    """Block i sees the blocks from i - reach to i + reach."""
    i = torch.arange(num_blocks)
    return ((i[:, None] - i[None, :]).abs() <= reach).to(torch.uint8)


def local_and_global(num_blocks: int, reach: int = 1, num_global: int = 1) -> torch.Tensor:
    """A sliding window, and global blocks that see all and are seen by all (Longformer, arXiv
    2004.05150)."""
    mask = sliding_window(num_blocks, reach)
    mask[:num_global], mask[:, :num_global] = 1, 1
    return mask


FAMILIES = {
    "butterfly": butterfly,
    "sliding window": sliding_window,
    "local and global": local_and_global,
}


def density(mask: torch.Tensor) -> float:
    return mask.float().mean().item()


def reference(q, k, v, dout, mask, block, causal):
    """out, dq, dk and dv in float64, by torch's autograd on the whole score matrix."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    sq, sk = q.shape[1], k.shape[1]
    seen = mask.bool().repeat_interleave(block, 0)[:sq].repeat_interleave(block, 1)[:, :sk]
    if causal:
        seen = seen & torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    # A row that sees no key has out 0; softmax alone would give NaN.
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    out = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def largest_error(found, expected) -> float:
    """The largest root mean square error of the results, each relative to its own size."""
    return max(
        ((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt()).item()
        for x, y in zip(found, expected, strict=True)
    )


def run(attention, sq, sk, head_dim, *arguments, num_heads=2, seed=0):
    """q, k, v, dout of normal numbers, and out, dq, dk, dv of attention(q, k, v, *arguments)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    shapes = [(num_heads, n, head_dim) for n in (sq, sk, sk, sq)]
    q, k, v, dout = (torch.randn(shape, device=device).half() for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, *arguments)
    return (q, k, v, dout), (out, *torch.autograd.grad(out, leaves, dout))
