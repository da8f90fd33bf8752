"""Sequences of different lengths without padding: packed, each seeing only itself.

python examples/varlen_packing.py
"""

import torch

from flashattn3 import flash_attn_func, flash_attn_varlen_func


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    lengths = [37, 256, 5, 120]
    num_heads_q, num_heads_kv, head_dim = 8, 2, 64

    # Row i of cu_seqlens is where sequence i begins; the last one is the number of rows.
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    total = sum(lengths)
    q = torch.randn(total, num_heads_q, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, total, num_heads_kv, head_dim, device=device, dtype=dtype)

    longest = max(lengths)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    print(f"{total} rows in one call instead of {len(lengths) * longest} padded ones: {out.shape}")

    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = flash_attn_func(q[None, rows], k[None, rows], v[None, rows], causal=True)[0]
        difference = (out[rows] - alone).abs().max().item()
        print(f"sequence of {length:3}: largest difference to a call of its own {difference:.1e}")
        start += length


if __name__ == "__main__":
    main()
