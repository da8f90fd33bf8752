"""Step 5: FlashAttention-2 as Triton kernels, beside step 4 in one run.

python examples/learn/step5_flash_attention_2.py     (Triton's interpreter where there is no GPU)

Dao 2023 (arXiv 2307.08691), algorithms 1 and 2. Against step 4: queries in the outer loop, which is
the grid; O is divided once, at the end; only blocks on the diagonal or past the end are masked.
"""

import os

import torch
from masks import largest_error, reference, run

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl
from step4_flash_attention_1 import FlashAttention1, scores_of, tile_of


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sq, sk, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A program holds one m_block of one head; O, row_max and row_sum never leave its registers."""
    m_block, head = tl.program_id(0), tl.program_id(1)
    rows, places, tile, inside = tile_of(head, m_block, sq, D, BLOCK_M)
    q = tl.load(q_ptr + tile, mask=inside, other=0.0)
    out = tl.zeros((BLOCK_M, D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    end, full_end = tl.cdiv(sk, BLOCK_N), sk // BLOCK_N  # of the n_blocks
    if CAUSAL:
        first, last = m_block * BLOCK_M, tl.minimum((m_block + 1) * BLOCK_M, sq) - 1
        end = tl.cdiv(tl.maximum(tl.minimum(sk, last + sk - sq + 1), 0), BLOCK_N)
        full_end = tl.maximum(tl.minimum(sk, first + sk - sq + 1), 0) // BLOCK_N
    for masked in tl.static_range(2):  # first the full blocks, then the partial ones
        for n_block in range(full_end if masked else 0, end if masked else full_end):
            keys, _, kv_tile, valid = tile_of(head, n_block, sk, D, BLOCK_N)
            if masked:
                k = tl.load(k_ptr + kv_tile, mask=valid, other=0.0)
                v = tl.load(v_ptr + kv_tile, mask=valid, other=0.0)
                s = scores_of(q, k, rows, keys, sq, sk, scale, CAUSAL)
            else:
                k, v = tl.load(k_ptr + kv_tile), tl.load(v_ptr + kv_tile)
                s = tl.dot(q, tl.trans(k)) * scale
            new_max = tl.maximum(row_max, tl.max(s, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp(s - shift[:, None])
            decay = tl.exp(row_max - shift)
            row_sum = row_sum * decay + tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, out * decay[:, None])
            row_max = new_max
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key: O 0, lse -inf
    tl.store(out_ptr + tile, out / divisor[:, None], mask=inside)  # the only division
    lse = row_max + tl.log(divisor)
    tl.store(lse_ptr + places, lse, mask=rows < sq)


@triton.jit
def backward_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, sq, sk, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A program holds one n_block: dK and dV stay, and it adds to dQ, which others add to too."""
    n_block, head = tl.program_id(0), tl.program_id(1)
    keys, _, kv_tile, valid = tile_of(head, n_block, sk, D, BLOCK_N)
    k = tl.load(k_ptr + kv_tile, mask=valid, other=0.0)
    v = tl.load(v_ptr + kv_tile, mask=valid, other=0.0)
    dk, dv = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    # Under the causal mask no row before key + sq - sk sees a key.
    start = tl.maximum(n_block * BLOCK_N + sq - sk, 0) // BLOCK_M if CAUSAL else 0
    for m_block in range(start, tl.cdiv(sq, BLOCK_M)):
        rows, places, tile, inside = tile_of(head, m_block, sq, D, BLOCK_M)
        q = tl.load(q_ptr + tile, mask=inside, other=0.0)
        dout = tl.load(dout_ptr + tile, mask=inside, other=0.0)
        lse = tl.load(lse_ptr + places, mask=rows < sq, other=0.0)
        delta = tl.load(delta_ptr + places, mask=rows < sq, other=0.0)
        s = scores_of(q, k, rows, keys, sq, sk, scale, CAUSAL)
        p = tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
        dv += tl.dot(tl.trans(p.to(dout.dtype)), dout)
        ds = (p * (tl.dot(dout, tl.trans(v)) - delta[:, None])).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        tl.atomic_add(dq_ptr + tile, tl.dot(ds, k) * scale, mask=inside, sem="relaxed")
    tl.store(dk_ptr + kv_tile, dk * scale, mask=valid)
    tl.store(dv_ptr + kv_tile, dv, mask=valid)


class FlashAttention2(torch.autograd.Function):
    """q (heads, sq, d), k and v (heads, sk, d): contiguous, 16 bits, d a power of two."""

    @staticmethod
    def forward(ctx, q, k, v, block=64, causal=False):
        (heads, sq, d), sk = q.shape, k.shape[1]
        out, lse = torch.empty_like(q), torch.empty(heads, sq, device=q.device)
        ctx.how = {"D": d, "BLOCK_M": block, "BLOCK_N": block, "CAUSAL": causal}
        m_block = 2 * block  # O of 128 rows: K and V are read half as often
        how = ctx.how | {"BLOCK_M": m_block, "num_warps": 8, "num_stages": 2}
        grid = triton.cdiv(sq, m_block), heads
        forward_kernel[grid](q, k, v, out, lse, sq, sk, d**-0.5, **how)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        delta = (dout.float() * out).sum(-1)
        dq = torch.zeros_like(q, dtype=torch.float32)  # programs add to it in any order
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        grid = triton.cdiv(k.shape[1], ctx.how["BLOCK_N"]), len(q)
        how = ctx.how | {"num_warps": 8, "num_stages": 1}
        rest = dk, dv, q.shape[1], k.shape[1], q.shape[2] ** -0.5
        backward_kernel[grid](q, k, v, dout.contiguous(), lse, delta, dq, *rest, **how)
        return dq.to(q.dtype), dk, dv, None, None


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (1000, 1000), (300, 1000), (1000, 300)
    block, head_dim = 64, 64
    if device == "cpu":
        sizes, block, head_dim = [(n // 10, m // 10) for n, m in sizes], 16, 32
    for sq, sk in sizes:
        for causal in (False, True):
            given, found = run(FlashAttention2.apply, sq, sk, head_dim, block, causal)
            shape = -(-sq // block), -(-sk // block)
            dense = torch.ones(shape, dtype=torch.uint8, device=device)
            error = largest_error(found, reference(*given, dense, block, causal))
            first, other = run(FlashAttention1.apply, sq, sk, head_dim, dense, block, causal)
            step4 = largest_error(other, reference(*first, dense, block, causal))
            print(f"{sq} queries, {sk} keys, causal: {causal}: {error:.1e} (step 4: {step4:.1e})")
            assert max(error, step4) < 2e-3  # float16 rounds to 5e-4
    if device == "cuda":
        q, k, v = torch.randn(3, 64, 4096, 64, device=device, dtype=torch.float16)
        dense = torch.ones(64, 64, dtype=torch.uint8, device=device)
        first = triton.testing.do_bench(lambda: FlashAttention1.apply(q, k, v, dense))
        second = triton.testing.do_bench(lambda: FlashAttention2.apply(q, k, v))
        print(f"64 heads of 64, 4096 tokens: step 4 {first:.2f} ms, step 5 {second:.2f} ms")


if __name__ == "__main__":
    main()
