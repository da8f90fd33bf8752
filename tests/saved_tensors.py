"""What calls with gradients save, and what may happen to it: checkpoints, offloading, hooks.

Shared by tests/test_saved_tensors.py and tests/host_saved_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flashattn3 import flash_attn_func, use_backend
from flashattn3.integrations.transformers import flash_attn_bhsd_func

LENGTHS = 64, 80, 96, 64, 128  # each is another call; one comes back
_kept = [torch.ops.flashattn3.forward.default]


def on_cpu(call: Callable, *arguments, pinned: bool = False):
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        return call(*arguments)


# Each runs call(*arguments).
AROUND = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _kept),
    ),
    "save_on_cpu": on_cpu,
}


def inputs(seqlen: int, device="cpu", dtype=torch.float16, heads=(4, 2), d=16, dv=None, batch=1):
    """q, k and v with gradients, heads behind tokens."""
    generator = torch.Generator().manual_seed(seqlen)
    shapes = (heads[0], d), (heads[1], d), (heads[1], dv or d)
    made = [torch.randn(batch, seqlen, *shape, generator=generator) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def attention_of(bhsd: bool, **options) -> Callable:
    """Attention of q, k and v with heads behind tokens, in either layout."""
    if not bhsd:
        return partial(flash_attn_func, causal=True, deterministic=True, **options)

    def call(q, k, v):
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_bhsd_func(*turned, causal=True, **options)

    return call


def on_backend(backend: str, attention: Callable) -> Callable:
    """A checkpoint calls it again, on a GPU in a thread of autograd's own that is in no block."""

    def call(*tensors):
        with use_backend(backend):
            return attention(*tensors)

    return call


def of_two_shapes(attention: Callable) -> Callable:
    """Layers with other heads one after the other, as a UNet or an encoder-decoder has them."""

    def model(q, k, v):
        out = attention(q, k, v)
        wide = [x.flatten(2)[:, :, None, : q.shape[-1]] for x in (out, k, v)]
        return out + attention(*wide) + attention(q * 0.5, k, v)

    return model


def gradients_of(run: Callable, tensors) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(x.grad for x in leaves)]


def under_compiled_autograd(attention: Callable, tensors, compiler: str) -> list[torch.Tensor]:
    """Gradients of an eager forward whose backward is compiled."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves)
    torch.compiler.reset()
    with compiled_autograd._enable(torch.compile(backend=compiler)):
        out.square().sum().backward()
    return [x.grad for x in leaves]


def saved_by(call: Callable) -> list[tuple]:
    """Shape and dtype of what hooks see, in order."""
    seen = []

    def pack(x):
        seen.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return seen


def saved_of(q, k, v, bhsd: bool = False) -> list[tuple]:
    """What a call of these tensors saves: k, q, v, lse and out, of which the last has tokens before
    heads."""
    (batch, seqlen, heads, _), columns = q.shape, v.shape[-1]
    shapes = [tuple((x.transpose(1, 2) if bhsd else x).shape) for x in (k, q, v)]
    rows = [(batch, heads, seqlen), (batch, seqlen, heads, columns)]
    dtypes = [q.dtype] * 3 + [torch.float32, q.dtype]
    return list(zip((*shapes, *rows), dtypes, strict=True))


def _shifted(x):
    """A copy whose memory begins 2 bytes (of a 16-bit tensor) off."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


# What hooks may return instead of a saved tensor of four axes.
RIGHT = {
    "shifted": _shifted,
    "strided": lambda x: x.mT.contiguous().mT,
    "sparse": lambda x: torch.stack((x, x), -1)[..., 0],
    "moved": lambda x: x.to("cpu", copy=True).to(x.device),
}
WRONG = {
    "dtype": lambda x: x.float() if x.dtype != torch.float32 else x.double(),
    "shape": lambda x: x[:, :-1],
    "device": lambda x: x.to("cpu" if x.is_cuda else "meta"),
}


def with_hook(call: Callable, unpack: Callable, chosen: int | None = None) -> Callable:
    """call, where hooks exchange its saved tensors of four axes, or the one of this index."""

    def run(*tensors):
        num_saved = 0

        def pack(x):
            nonlocal num_saved
            num_saved += 1
            return num_saved - 1, x

        def unpacked(packed):
            index, x = packed
            exchanged = x.ndim == 4 if chosen is None else index == chosen
            return unpack(x) if exchanged else x

        with torch.autograd.graph.saved_tensors_hooks(pack, unpacked):
            return call(*tensors)

    return run
