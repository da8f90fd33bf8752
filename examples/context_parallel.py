"""One long sequence over several GPUs: torch's context_parallel (ring attention) on flashattn3,
against one GPU with the whole sequence. A training step of causal attention.

torchrun --nproc-per-node 2 examples/context_parallel.py [--seqlen 16384 65536] [--results FILE]
"""

import argparse
import json
import os
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


def compare(seqlen: int, mesh) -> dict:
    """Times in ms of a step on one GPU and on all, and the relative errors of the latter."""
    torch.manual_seed(0)  # every process makes the same sequence
    shapes = [(1, heads, seqlen, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    whole = [torch.randn(shape, device=mesh.device_type, dtype=torch.bfloat16) for shape in shapes]
    wanted, alone = step(*whole), milliseconds(whole)

    buffers = [x.clone() for x in whole]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        found, together = step(*buffers), milliseconds(buffers)
        found = context_parallel_unshard(mesh, list(found), [2] * 4)
    errors = {}
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        errors[name] = ((x.float() - y.float()).norm() / y.float().norm()).item()
        assert errors[name] < 1e-2, f"{name}: relative error {errors[name]:.2g}"
    return {"seqlen": seqlen, "one_gpu_ms": alone, "all_gpus_ms": together, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seqlen", type=int, nargs="+", default=[65536])
    parser.add_argument("--results", help="append a JSON line for each length to this file")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(__doc__)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (size,))
    activate_flash_attention_impl(provider.register(prefer=True))
    for seqlen in args.seqlen:
        found = compare(seqlen, mesh)
        if rank != 0:
            continue
        alone, together = found["one_gpu_ms"], found["all_gpus_ms"]
        errors = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
        print(f"{seqlen} tokens: one GPU {alone:.1f} ms, {size} GPUs {together:.1f} ms, ", end="")
        print(f"{alone / together:.2f}x; relative errors: {errors}", flush=True)
        if args.results:
            about = {"gpu": torch.cuda.get_device_name(), "gpus": size, "torch": torch.__version__}
            with open(args.results, "a") as file:
                file.write(json.dumps(about | found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
