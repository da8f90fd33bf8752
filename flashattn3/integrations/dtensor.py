"""DTensor inputs: flashattn3's operators run on each device's part of the batch or of the heads."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils import _pytree

from ..call import operands as checks
from ..errors import UnsupportedError
from ..masks import Mask

# Of a mask: its lists have the axes of batch and heads. A list numbers the bit tiles of all.
_LISTS = "mask_entries_q", "mask_work_q", "mask_entries_k", "mask_work_k"
_TILES = "mask_tiles_q", "mask_tiles_k"


def register() -> None:
    """Let ``flash_attn_func`` take DTensors q, k and v.

    They may be sharded along the batch (axis 0), along the heads (axis 2) where the mesh divides
    the KV heads evenly, and replicated; other placements are redistributed to one of these, but a
    sharded sequence raises UnsupportedError: torch's ``context_parallel`` with
    ``flashattn3.integrations.torch`` computes that. Calling again has no effect. For varlen calls
    use ``torch.distributed.tensor.experimental.local_map``. A mask is passed as ``replicated``
    gives it; with return_max_logit all devices compute all of the call.
    """
    from torch.distributed.tensor.experimental import register_sharding

    if checks.check_dtensor is not None:
        return
    operators = torch.ops.flashattn3
    for forward in (operators.forward.default, operators.forward.scaled):
        register_sharding(forward)(partial(_shardings, forward, ("out", "lse")))
    of_masks = operators.forward.scores
    register_sharding(of_masks)(partial(_shardings, of_masks, ("out", "lse", "max_logit")))
    gradients = "dq", "dk", "dv"
    backward = operators.backward.default
    register_sharding(backward)(partial(_shardings, backward, gradients))
    of_masks, others = operators.backward.scores, ("dsinks", "dbias")
    register_sharding(of_masks)(partial(_shardings, of_masks, (*gradients, *others)))
    checks.check_dtensor = _check


def replicated(mask: Mask, mesh) -> Mask:
    """A mask for calls on DTensors: each device has all of it and reads its part of the lists."""
    from torch.distributed.tensor import DTensor, Replicate

    places = [Replicate()] * mesh.ndim
    return _pytree.tree_map(lambda x: DTensor.from_local(x, mesh, places, run_check=False), mask)


def _check(function: str, name: str, tensor: torch.Tensor) -> None:
    """Raise for a DTensor that has no sharding rule. function: the one that was called."""
    if name.startswith("mask"):
        return
    if name in ("sinks", "alibi_slopes", "bias"):
        raise UnsupportedError(
            f"{function}: {name} must be None beside DTensors, got one: it has no sharding rule; "
            "use torch.distributed.tensor.experimental.local_map"
        )
    if tensor.ndim != 4:
        raise UnsupportedError(
            f"{function}: {name} must be a local tensor, got a DTensor: sequences have no sharding "
            "rule; use torch.distributed.tensor.experimental.local_map"
        )
    if any(placement.is_shard(1) for placement in tensor.placements):
        raise UnsupportedError(
            f"{function}: {name} must be sharded along batch or heads, got a sharded sequence: use "
            "torch.distributed.tensor.experimental.context_parallel with "
            "flashattn3.integrations.torch"
        )


def _shardings(operator, outputs: tuple[str, ...], *arguments) -> list:
    """Placements on one axis of the mesh: replicated, by batch and by heads."""
    from torch.distributed.tensor import Replicate, Shard

    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    tensors = {name for name, value in given.items() if hasattr(value, "placements")}

    whole = (*_TILES, "max_logit", "dsinks", "dbias")  # alike on all devices

    def along(axis: int | None) -> tuple[list, list]:
        def place(name: str):
            if axis is None or name in whole:
                return Replicate()
            if name in _LISTS:
                own = {0: 0, 2: 1}[axis]
                return Replicate() if given[name].shape[own] == 1 else Shard(own)
            return Shard(1 if name in ("lse", "dlse") and axis == 2 else axis)

        inputs = [place(name) if name in tensors else None for name in names[: len(arguments)]]
        return [place(name) for name in outputs], inputs

    k = given["k"]
    even = all(k.shape[2] % size == 0 for size in k.mesh.shape)
    if given.get("return_max_logit"):
        return [along(None)]
    return [along(None), along(0), *([along(2)] if even else [])]
