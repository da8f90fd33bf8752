"""DTensor inputs: flashattn3's operators run on each device's part of the batch or of the heads."""

from __future__ import annotations

from functools import partial

import torch

from ..call import operands as checks
from ..errors import UnsupportedError


def register() -> None:
    """Let ``flash_attn_func`` take DTensors q, k and v.

    They may be sharded along the batch (axis 0), along the heads (axis 2) where the mesh divides
    the KV heads evenly, and replicated; other placements are redistributed to one of these, but a
    sharded sequence raises UnsupportedError: torch's ``context_parallel`` with
    ``flashattn3.integrations.torch`` computes that. Calling again has no effect. For varlen calls
    use ``torch.distributed.tensor.experimental.local_map``.
    """
    from torch.distributed.tensor.experimental import register_sharding

    if checks.check_dtensor is not None:
        return
    operators = torch.ops.flashattn3
    for forward in (operators.forward.default, operators.forward.scaled):
        register_sharding(forward)(partial(_shardings, forward, ("out", "lse")))
    backward = operators.backward.default
    register_sharding(backward)(partial(_shardings, backward, ("dq", "dk", "dv")))
    checks.check_dtensor = _check


def _check(function: str, name: str, tensor: torch.Tensor) -> None:
    """Raise for a DTensor that has no sharding rule. function: the one that was called."""
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

    def along(axis: int | None) -> tuple[list, list]:
        def place(name: str):
            if axis is None:
                return Replicate()
            return Shard(1 if name in ("lse", "dlse") and axis == 2 else axis)

        inputs = [place(name) if name in tensors else None for name in names[: len(arguments)]]
        return [place(name) for name in outputs], inputs

    k = given["k"]
    even = all(k.shape[2] % size == 0 for size in k.mesh.shape)
    return [along(None), along(0), *([along(2)] if even else [])]
