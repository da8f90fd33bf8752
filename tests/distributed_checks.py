"""What each process of tests/test_integrations_distributed.py runs: gloo on a CPU.

torchrun --nproc-per-node 2 tests/distributed_checks.py dtensor fsdp ring
"""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional
from saved_tensors import AROUND, LENGTHS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flashattn3 import (
    UnsupportedError,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    masks,
    quantize_block_fp8,
    rotate_and_quantize,
)
from flashattn3.integrations import dtensor, torch_operators
from flashattn3.integrations import torch as provider


def inputs(heads=(4, 4, 4), rows=64, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, rows, h, 16) for h in heads]


def exact(q, k, v, causal):
    """Attention over (batch, heads, seqlen, head_dim) and its gradients, without flashattn3."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT / leaves[0].shape[-1] ** 0.5
    if causal:
        visible = torch.ones(scores.shape[-2:]).tril().bool()
        scores = scores.masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1) @ leaves[2]
    return out, torch.autograd.grad(out.square().sum(), leaves)


def check_ring(mesh) -> None:
    """torch's context_parallel over the provider, forward and backward.

    On a CPU scaled_dot_product_attention does not choose the operator that the ring attention
    replaces, so it is called here by name, as scaled_dot_product_attention does on a GPU.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import (
        _cp_options,
        context_parallel_unshard,
    )
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    calls = []
    for name in ("flash_attn_func", "backward_of"):
        function = getattr(torch_operators, name)
        spy = lambda *a, f=function, n=name, **k: (calls.append(n), f(*a, **k))[1]  # noqa: E731
        setattr(torch_operators, name, spy)
    operator = torch.ops.aten._scaled_dot_product_flash_attention

    def scaled_dot_product_attention(q, k, v, is_causal=False):
        return operator(q, k, v, 0.0, is_causal)[0]

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    activate_flash_attention_impl(provider.register(device="cpu"))
    for causal in (False, True):
        _cp_options.enable_load_balance = causal  # the other order of rows is for causal masks
        q, k, v = (x.transpose(1, 2).contiguous() for x in inputs())
        wanted, gradients = exact(q, k, v, causal)
        buffers = [q, k, v]
        calls.clear()
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            parts = [x.detach().requires_grad_() for x in buffers]
            out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal)
            found = torch.autograd.grad(out.square().sum(), parts)
        assert {"flash_attn_func", "backward_of"} <= set(calls), calls
        assert calls.count("flash_attn_func") == mesh.size(), calls
        whole = context_parallel_unshard(mesh, [out.detach(), *found], [2] * 4)
        torch.testing.assert_close(whole[0], wanted.detach(), rtol=1e-4, atol=1e-5)
        for x, y in zip(whole[1:], gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    restore_flash_attention_impl()


def check_dtensor(mesh) -> None:
    tensors = inputs((4, 2, 2), rows=24)
    leaves = [x.clone().requires_grad_() for x in tensors]
    wanted, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    gradients = torch.autograd.grad(wanted.square().sum() + lse.sum(), leaves)
    message = r"^flash_attn_func: q must be a local tensor \(torch\.distributed\..*local_map"
    with pytest.raises(TypeError, match=message):  # without sharding rules
        flash_attn_func(*(distribute_tensor(x, mesh, [Shard(0)]) for x in tensors))
    dtensor.register()
    dtensor.register()
    for axis in (0, 2, None):
        placement = Replicate() if axis is None else Shard(axis)
        parts = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in tensors]
        out, lse_of_parts = flash_attn_func(*parts, causal=True, return_lse=True)
        assert isinstance(out, DTensor) and out.placements == (placement,), out.placements
        if axis == 2:
            assert lse_of_parts.placements == (Shard(1),)
        loss = out.square().sum() + lse_of_parts.sum()
        found = torch.autograd.grad(loss, parts)
        torch.testing.assert_close(out.full_tensor(), wanted)
        torch.testing.assert_close(lse_of_parts.full_tensor(), lse)
        for x, y, part in zip(found, gradients, parts, strict=True):
            assert x.placements == part.placements
            torch.testing.assert_close(x.full_tensor(), y)
    check_masks(mesh, tensors)
    check_scores(mesh, tensors)
    one_head = [distribute_tensor(x, mesh, [Shard(2)]) for x in inputs((2, 1, 1), rows=24)]
    expected = flash_attn_func(*inputs((2, 1, 1), rows=24))
    torch.testing.assert_close(flash_attn_func(*one_head).full_tensor(), expected)
    with pytest.raises(UnsupportedError, match="context_parallel"):
        flash_attn_func(*(distribute_tensor(x, mesh, [Shard(1)]) for x in tensors))
    rows = [distribute_tensor(x[0], mesh, [Shard(1)]) for x in tensors]
    edges = distribute_tensor(torch.tensor([0, 24], dtype=torch.int32), mesh, [Replicate()])
    with pytest.raises(UnsupportedError, match="local_map"):
        flash_attn_varlen_func(*rows, edges, edges, 24, 24)
    parts = [distribute_tensor(x.half(), mesh, [Replicate()]) for x in tensors]
    sinks = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
    for name, call in {
        "flash_attn_with_kvcache: q": lambda: flash_attn_with_kvcache(*parts),
        "flash_attn_with_kvcache: sinks": lambda: flash_attn_with_kvcache(*tensors, sinks=sinks),
        "flash_attn_func: sinks": lambda: flash_attn_func(*tensors, sinks=sinks),
        "flash_attn_fp8_func: q": lambda: flash_attn_fp8_func(*parts),
        "quantize_block_fp8: x": lambda: quantize_block_fp8(parts[0]),
        "rotate_and_quantize: q": lambda: rotate_and_quantize(parts[0]),
    }.items():
        with pytest.raises(TypeError, match=f"^{name} must be a local tensor .*local_map"):
            call()


def check_masks(mesh, tensors) -> None:
    """Lists by batch and by query head, by one of them, and for all."""
    generator = torch.Generator().manual_seed(1)
    for batch, heads in ((2, 4), (2, 1), (1, 4), (1, 1)):
        seen = torch.rand(batch, heads, 24, 24, generator=generator) < 0.5
        mask = masks.from_bool(seen)
        leaves = [x.clone().requires_grad_() for x in tensors]
        wanted = flash_attn_func(*leaves, mask=mask)
        gradients = torch.autograd.grad(wanted.square().sum(), leaves)
        for placement in (Shard(0), Shard(2), Replicate()):
            parts = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in tensors]
            out = flash_attn_func(*parts, mask=dtensor.replicated(mask, mesh))
            assert out.placements == (placement,), out.placements
            torch.testing.assert_close(out.full_tensor(), wanted)
            found = torch.autograd.grad(out.square().sum(), parts)
            for x, y in zip(found, gradients, strict=True):
                assert x.placements == (placement,), x.placements
                torch.testing.assert_close(x.full_tensor(), y)


def check_scores(mesh, tensors) -> None:
    """Sinks, slopes and a bias, of all or of each sequence and head, and the largest score."""
    generator = torch.Generator().manual_seed(2)
    normal = partial(torch.randn, generator=generator)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    for given in (
        {"sinks": normal(4), "alibi_slopes": slopes, "bias": normal(2, 4, 24, 24)},
        {"alibi_slopes": slopes * torch.tensor([[1.0], [2.0]]), "bias": normal(1, 4, 24, 24)},
        {"sinks": normal(4), "bias": normal(2, 1, 24, 24)},
        {"bias": normal(1, 1, 24, 24)},
    ):
        learned = [name for name in given if name != "alibi_slopes"]

        def run(place, given=given, learned=learned):
            leaves = [place(x, 0).requires_grad_() for x in tensors]
            more = {
                name: place(x, name).requires_grad_(name in learned) for name, x in given.items()
            }
            out, highest = flash_attn_func(*leaves, **more, return_max_logit=True)
            wanted = [*leaves, *(more[name] for name in learned)]
            return [out, highest, *torch.autograd.grad(out.square().sum(), wanted)]

        expected = run(lambda x, _: x.clone())
        for placement in (Shard(0), Shard(2), Replicate()):

            def place(x, name, placement=placement):
                of = placement if name == 0 else Replicate()
                return distribute_tensor(x, mesh, [of])

            for x, y in zip(run(place), expected, strict=True):
                torch.testing.assert_close(x.full_tensor(), y)


class Block(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return x + self.out(flash_attn_func(q, k, v, causal=True).flatten(2))


def check_fsdp(mesh) -> None:
    """Checkpointed and offloaded blocks, batches of several lengths: the mean of the gradients of
    two processes is the gradient of one."""
    from torch.distributed.fsdp import fully_shard

    for around in AROUND.values():
        torch.manual_seed(0)
        blocks, alone = (torch.nn.ModuleList([Block(2), Block(4)]) for _ in range(2))
        alone.load_state_dict(blocks.state_dict())
        for block in blocks:
            fully_shard(block, mesh=mesh)
        for rows in LENGTHS:
            x = torch.randn(2, rows // 8, 32, generator=torch.Generator().manual_seed(rows))
            part = x[dist.get_rank()][None].requires_grad_()
            for block in blocks:
                part = around(block, part)
            part.square().mean().backward()
            alone[1](alone[0](x)).square().mean().backward()
            for a, b in zip(blocks.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6)
                a.grad = b.grad = None


CHECKS = {"ring": check_ring, "dtensor": check_dtensor, "fsdp": check_fsdp}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in sys.argv[1:]:
        CHECKS[name](mesh)
        print(name, "holds", flush=True)  # of several checks, the one that fails comes next
    dist.barrier()  # a process whose peer has left aborts in gloo's threads
    dist.destroy_process_group()
    sys.stdout.flush()
    # gloo's threads outlive the group, and one that drops a tensor while Python ends aborts.
    os._exit(0)
