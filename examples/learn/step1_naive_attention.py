"""Step 1: attention as the textbook writes it, forward and backward, and the bytes that it moves.

python examples/learn/step1_naive_attention.py
"""

import time

import numpy as np
import torch


def forward(q, k, v, scale):
    """O, and P, which the backward needs. q (sq, d), k (sk, d), v (sk, dv)."""
    scores = scale * (q @ k.T)  # (sq, sk): written to memory, read back
    scores -= scores.max(axis=1, keepdims=True)  # exp of a large score would overflow
    weights = np.exp(scores)
    probabilities = weights / weights.sum(axis=1, keepdims=True)  # written, read back
    return probabilities @ v, probabilities


def backward(q, k, v, scale, probabilities, dout):
    """dQ, dK and dV. Each line is one GEMM or one pass over a matrix of (sq, sk)."""
    dv = probabilities.T @ dout
    dp = dout @ v.T
    # The Jacobian of a softmax row is diag(p) - p pᵀ: dS = P * (dP - rowsum(P * dP)).
    ds = probabilities * (dp - (probabilities * dp).sum(axis=1, keepdims=True))
    return scale * (ds @ k), scale * (ds.T @ q), dv


def bytes_moved(seqlen: int, head_dim: int, element_bytes: int = 2) -> dict[str, int]:
    """Bytes between the GPU's memory and its cores, for one head with seqlen queries and keys.

    Each kernel of the textbook's form (QKᵀ, softmax, PV) reads its operands and writes its result.
    """
    matrix, scores = seqlen * head_dim * element_bytes, seqlen * seqlen * element_bytes
    return {
        "q, k, v, out": 4 * matrix,
        "scores and probabilities": 4 * scores,  # each is written once and read once
    }


def check_against_float64(seqlen_q: int = 96, seqlen_k: int = 130, head_dim: int = 32) -> float:
    """The largest error of float32 against torch's autograd in float64, which knows no formula of
    ours, relative to the largest number of each result."""
    rng = np.random.default_rng(0)
    shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim), (seqlen_q, head_dim)
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    scale = head_dim**-0.5
    out, probabilities = forward(q, k, v, scale)
    found = out, *backward(q, k, v, scale, probabilities, dout)

    leaves = [torch.from_numpy(x).double().requires_grad_() for x in (q, k, v)]
    reference = (scale * leaves[0] @ leaves[1].T).softmax(dim=1) @ leaves[2]
    gradients = torch.autograd.grad(reference, leaves, torch.from_numpy(dout).double())
    expected = [x.detach().numpy() for x in (reference, *gradients)]
    return max(
        float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(found, expected, strict=True)
    )


def main() -> None:
    error = check_against_float64()
    print(f"error of out, dQ, dK, dV against float64: {error:.1e}")
    assert error < 1e-5

    head_dim, rng = 64, np.random.default_rng(0)
    print(f"\none head of {head_dim}, 16 bits: bytes moved, FLOPs for each of them, time here")
    for seqlen in (256, 512, 1024, 2048):
        moved = bytes_moved(seqlen, head_dim)
        flops = 4 * seqlen * seqlen * head_dim
        q, k, v = rng.standard_normal((3, seqlen, head_dim), dtype=np.float32)
        start = time.perf_counter()
        forward(q, k, v, head_dim**-0.5)
        milliseconds = (time.perf_counter() - start) * 1e3
        share = moved["scores and probabilities"] / sum(moved.values())
        print(
            f"{seqlen:5} tokens: {sum(moved.values()) / 2**20:6.1f} MiB, {share:.0%} of it scores; "
            f"{flops / sum(moved.values()):3.0f} FLOP per byte; {milliseconds:6.1f} ms"
        )
    print("An H100 can do 295 FLOP (16 bits, data sheet) for each byte that it reads.")


if __name__ == "__main__":
    main()
