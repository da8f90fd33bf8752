"""FSDP and tensor parallelism around attention, each against one process with all weights and data.

torchrun --nproc-per-node 2 examples/sharded_training.py
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from flashattn3 import flash_attn_func

WIDTH, HEAD_DIM, HEADS, HEADS_KV = 128, 32, 4, 2


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k = torch.nn.Linear(WIDTH, HEADS_KV * HEAD_DIM)
        self.v = torch.nn.Linear(WIDTH, HEADS_KV * HEAD_DIM)
        self.project = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x):  # (batch, seqlen, width)
        # The number of heads is that of this process: all, or its part.
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        return self.project(flash_attn_func(q, k, v, causal=True).flatten(-2))


def gradients(model, x):
    model(x).square().mean().backward()
    return {
        name: getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)()
        for name, p in model.named_parameters()
    }


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit(__doc__)
    gpu = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (size,))

    torch.manual_seed(0)  # every process makes the same weights and data
    dtype = torch.bfloat16 if gpu else torch.float32
    model = Attention().to(device, dtype)
    x = torch.randn(2 * size, 64, WIDTH, device=device, dtype=dtype)
    wanted = gradients(copy.deepcopy(model), x)

    # FSDP: each process has a part of the weights and of the batch; attention sees whole layers.
    sharded = fully_shard(copy.deepcopy(model), mesh=mesh)
    by_data = gradients(sharded, x.chunk(size)[rank])

    # Tensor parallel: each process has its heads of q, k and v, and the columns of the projection
    # that read them. Attention is an ordinary call with fewer heads.
    columns = {name: ColwiseParallel() for name in ("q", "k", "v")}
    plan = {**columns, "project": RowwiseParallel()}
    by_heads = gradients(parallelize_module(copy.deepcopy(model), mesh, plan), x)

    for way, found in (("FSDP", by_data), ("tensor parallel", by_heads)):
        for name, gradient in wanted.items():
            error = ((found[name] - gradient).float().norm() / gradient.float().norm()).item()
            # The exact gradient of the keys' bias is 0.
            assert name == "k.bias" or error < (2e-2 if gpu else 1e-5), (way, name, error)
        if rank == 0:
            print(f"{way}: the gradients of one process, on {size}")
    dist.barrier()  # a process whose peer has left aborts in gloo's threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # gloo's threads outlive the group, and one that drops a tensor while Python ends aborts.
    os._exit(0)
