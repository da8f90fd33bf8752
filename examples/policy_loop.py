"""A robot's policy: 51 action tokens attend to a prefix of 800 tokens, in every step anew.

The prefix is written into the cache once; each step writes its own keys behind it, over those of
the step before. 8 query heads share one KV head of dim 256.

python examples/policy_loop.py
"""

import time

import torch

from flashattn3 import append_kvcache, flash_attn_func, flash_attn_with_kvcache

PREFIX, ACTIONS, STEPS = 800, 51, 3
HEADS, HEAD_DIM = 8, 256


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def normal(tokens: int, heads: int = 1) -> torch.Tensor:
        return torch.randn(1, tokens, heads, HEAD_DIM, device=device, dtype=dtype)

    caches = [torch.empty_like(normal(PREFIX + ACTIONS)) for _ in range(2)]
    prefix = normal(PREFIX), normal(PREFIX)
    append_kvcache(*prefix, *caches, cache_seqlens=0)
    largest, start = 0.0, time.perf_counter()
    for _ in range(STEPS):
        q, k, v = normal(ACTIONS, HEADS), normal(ACTIONS), normal(ACTIONS)
        # Without causal all actions see the prefix and each other.
        out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=PREFIX)
        whole = (torch.cat([old, new], 1) for old, new in zip(prefix, (k, v), strict=True))
        largest = max(largest, (out - flash_attn_func(q, *whole)).abs().max().item())
    took = (time.perf_counter() - start) / STEPS
    assert largest < 2e-2, f"largest difference {largest}"
    print(f"{STEPS} steps of {ACTIONS} queries over {PREFIX} + {ACTIONS} keys: {took * 1e3:.1f} ms")
    print(f"largest difference to attention without a cache: {largest:.1e}")


if __name__ == "__main__":
    main()
