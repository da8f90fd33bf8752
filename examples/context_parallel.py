"""One long sequence over several GPUs: torch's context_parallel (ring attention) on flashattn3,
against one GPU with the whole sequence. A training step of causal attention.

torchrun --nproc-per-node 2 examples/context_parallel.py [--seqlen 65536]
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

from flashattn3.integrations import torch as provider

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
ROUNDS = 10


def step(q, k, v, dout):
    """out and the gradients of q, k and v, (1, heads, seqlen, head_dim)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def milliseconds(tensors) -> float:
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(*tensors)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seqlen", type=int, default=65536)
    seqlen = parser.parse_args().seqlen
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (size,))
    activate_flash_attention_impl(provider.register(prefer=True))

    torch.manual_seed(0)  # every process makes the same sequence
    shapes = [(1, heads, seqlen, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    whole = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    wanted, alone = step(*whole), milliseconds(whole)

    buffers = [x.clone() for x in whole]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        found, together = step(*buffers), milliseconds(buffers)
        found = context_parallel_unshard(mesh, list(found), [2] * 4)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = ((x.float() - y.float()).norm() / y.float().norm()).item()
        assert error < 1e-2, f"{name}: relative error {error:.2g}"
        if rank == 0:
            print(f"{name}: relative error {error:.2g}")
    if rank == 0:
        print(f"one GPU {alone:.1f} ms, {size} GPUs {together:.1f} ms: {alone / together:.2f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
