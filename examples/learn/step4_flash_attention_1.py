"""Step 4: FlashAttention-1 as a Triton kernel: keys in the outer loop, block-sparse masks.

python examples/learn/step4_flash_attention_1.py     (Triton's interpreter where there is no GPU)

Dao et al. 2022 (arXiv 2205.14135), algorithms 1, 4 and 5: one program for each head.
"""

import os

import torch
from masks import FAMILIES, density, largest_error, reference, run

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl


@triton.jit
def tile_of(head, block, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """A block's rows, their places in (heads, length), their elements' places, and a mask."""
    rows = block * BLOCK + tl.arange(0, BLOCK)
    places = head.to(tl.int64) * length + rows
    return rows, places, places[:, None] * D + tl.arange(0, D)[None, :], (rows < length)[:, None]


@triton.jit
def scores_of(q, k, rows, keys, sq, sk, scale, CAUSAL: tl.constexpr):
    """A tile of S; -inf past the ends and above the diagonal, which ends at the last key."""
    seen = (rows < sq)[:, None] & (keys < sk)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None] + sk - sq)
    return tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, max_ptr, sum_ptr, mask_ptr, sq, sk, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """O, row_max and row_sum, in float32, stay in memory."""
    head = tl.program_id(0)
    num_m_blocks, num_n_blocks = tl.cdiv(sq, BLOCK), tl.cdiv(sk, BLOCK)
    for n_block in range(num_n_blocks):
        keys, _, kv_tile, valid = tile_of(head, n_block, sk, D, BLOCK)
        k = tl.load(k_ptr + kv_tile, mask=valid, other=0.0)
        v = tl.load(v_ptr + kv_tile, mask=valid, other=0.0)
        for m_block in range(num_m_blocks):
            if tl.load(mask_ptr + m_block * num_n_blocks + n_block) != 0:
                rows, places, tile, inside = tile_of(head, m_block, sq, D, BLOCK)
                q = tl.load(q_ptr + tile, mask=inside, other=0.0)
                old = tl.load(out_ptr + tile, mask=inside, other=0.0)
                old_max = tl.load(max_ptr + places, mask=rows < sq, other=float("-inf"))
                old_sum = tl.load(sum_ptr + places, mask=rows < sq, other=0.0)
                tl.debug_barrier()  # every thread has read O before one writes it
                s = scores_of(q, k, rows, keys, sq, sk, scale, CAUSAL)
                new_max = tl.maximum(old_max, tl.max(s, 1))
                # A row that has seen no key has maximum -inf, and -inf - -inf is NaN.
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
                p, decayed = tl.exp(s - shift[:, None]), old_sum * tl.exp(old_max - shift)
                new_sum = decayed + tl.sum(p, 1)
                # O stays divided by row_sum: two multiplications more per element and block.
                divisor = tl.where(new_sum == 0.0, 1.0, new_sum)[:, None]
                new = (old * decayed[:, None] + tl.dot(p.to(v.dtype), v)) / divisor
                tl.store(out_ptr + tile, new, mask=inside)
                tl.store(max_ptr + places, new_max, mask=rows < sq)
                tl.store(sum_ptr + places, new_sum, mask=rows < sq)
                tl.debug_barrier()  # and has written it before the next block reads it


@triton.jit
def backward_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, mask_ptr, sq, sk,
    scale, D: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """P is recomputed as exp(S - lse). dK and dV of a key block stay; dQ, float32, passes by."""
    head = tl.program_id(0)
    num_m_blocks, num_n_blocks = tl.cdiv(sq, BLOCK), tl.cdiv(sk, BLOCK)
    for n_block in range(num_n_blocks):
        keys, _, kv_tile, valid = tile_of(head, n_block, sk, D, BLOCK)
        k = tl.load(k_ptr + kv_tile, mask=valid, other=0.0)
        v = tl.load(v_ptr + kv_tile, mask=valid, other=0.0)
        dk, dv = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK, D), tl.float32)
        for m_block in range(num_m_blocks):
            if tl.load(mask_ptr + m_block * num_n_blocks + n_block) != 0:
                rows, places, tile, inside = tile_of(head, m_block, sq, D, BLOCK)
                q = tl.load(q_ptr + tile, mask=inside, other=0.0)
                dout = tl.load(dout_ptr + tile, mask=inside, other=0.0)
                dq = tl.load(dq_ptr + tile, mask=inside, other=0.0)
                lse = tl.load(lse_ptr + places, mask=rows < sq, other=0.0)
                delta = tl.load(delta_ptr + places, mask=rows < sq, other=0.0)
                tl.debug_barrier()
                s = scores_of(q, k, rows, keys, sq, sk, scale, CAUSAL)
                p = tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
                dv += tl.dot(tl.trans(p.to(dout.dtype)), dout)
                ds = (p * (tl.dot(dout, tl.trans(v)) - delta[:, None])).to(q.dtype)
                dk += tl.dot(tl.trans(ds), q)
                tl.store(dq_ptr + tile, dq + tl.dot(ds, k) * scale, mask=inside)
                tl.debug_barrier()
        tl.store(dk_ptr + kv_tile, dk * scale, mask=valid)
        tl.store(dv_ptr + kv_tile, dv, mask=valid)


class FlashAttention1(torch.autograd.Function):
    """q (heads, sq, d), k and v (heads, sk, d): contiguous, 16 bits, d a power of two; mask: uint8
    (m_blocks, n_blocks), 1 where a block of ``block`` rows and keys is computed."""

    @staticmethod
    def forward(ctx, q, k, v, mask, block=64, causal=False):
        (heads, sq, d), sk = q.shape, k.shape[1]
        out, row_sum = q.new_zeros(q.shape).float(), q.new_zeros(heads, sq).float()
        row_max = torch.full_like(row_sum, float("-inf"))
        # num_stages=1: the compiler must not load O before the last block's O is stored.
        ctx.how = {"D": d, "BLOCK": block, "CAUSAL": causal, "num_stages": 1}
        ctx.how["num_warps"] = 4 if d <= 64 else 8
        sizes = sq, sk, d**-0.5
        forward_kernel[(heads,)](q, k, v, out, row_max, row_sum, mask, *sizes, **ctx.how)
        lse = row_max + row_sum.log()  # all that the backward needs of P; -inf of an empty row
        ctx.save_for_backward(q, k, v, out, lse, mask)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, mask = ctx.saved_tensors
        delta = (dout * out).sum(-1)  # rowsum(P * dP) without P
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        rest = dq, dk, dv, mask, q.shape[1], k.shape[1], q.shape[2] ** -0.5
        backward_kernel[(len(q),)](q, k, v, dout.contiguous(), lse, delta, *rest, **ctx.how)
        return dq.to(q.dtype), dk, dv, None, None, None


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, block, d, num_blocks = (1000, 64, 64, 16) if device == "cuda" else (120, 16, 32, 8)
    families = {"dense": lambda n: torch.ones(n, n, dtype=torch.uint8), **FAMILIES}
    for name, family in families.items():
        mask = family(num_blocks)
        for causal in (False, True):
            how = mask.to(device), block, causal
            given, found = run(FlashAttention1.apply, length, length, d, *how)
            error = largest_error(found, reference(*given, *how))
            what = f"{name}{', causal' if causal else ''}"
            print(f"{what:25} density {density(mask):.2f}  error {error:.1e}")
            assert error < 2e-3  # float16 rounds to 5e-4


if __name__ == "__main__":
    main()
