"""DTensor inputs: flashattn3's operators run on each device's part of the batch or of the heads."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils import _pytree

from ..call import operands as checks
from ..errors import UnsupportedError
from ..masks import Mask

# The lists of a mask have the axes of batch and heads. A list numbers the bit tiles of all.
_LISTS = "mask_entries_q", "mask_work_q", "mask_entries_k", "mask_work_k"
_TILES = "mask_tiles_q", "mask_tiles_k"


def register() -> None:
    """Let ``flash_attn_func`` take DTensors q, k and v.

    They may be sharded along the batch (axis 0), along the heads (axis 2) where the mesh divides
    the KV heads evenly, and replicated; other placements are redistributed to one of these, but a
    sharded sequence raises UnsupportedError: torch's ``context_parallel`` with
    ``flashattn3.integrations.torch`` computes that. Calling again has no effect. For varlen calls
    use ``torch.distributed.tensor.experimental.local_map``. sinks, alibi_slopes and bias are
    DTensors too; each device reads their part of its batch or heads. Where devices share sinks or
    a bias their gradients are partial sums, and max_logit is then a partial maximum. A mask is
    passed as ``replicated`` gives it.
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
    if name in ("sinks", "alibi_slopes") or name.startswith("mask"):
        return
    if tensor.ndim != 4:
        raise UnsupportedError(
            f"{function}: {name} must be a local tensor, got a DTensor: sequences have no sharding "
            "rule; use torch.distributed.tensor.experimental.local_map"
        )
    if name != "bias" and any(placement.is_shard(1) for placement in tensor.placements):
        raise UnsupportedError(
            f"{function}: {name} must be sharded along batch or heads, got a sharded sequence: use "
            "torch.distributed.tensor.experimental.context_parallel with "
            "flashattn3.integrations.torch"
        )


# The axes of batch and of heads in what has them elsewhere than q, k, v and out.
_AXES = {
    **dict.fromkeys(("lse", "dlse", "bias", "dbias", *_LISTS), (0, 1)),
    **dict.fromkeys(("sinks", "dsinks", "max_logit"), (None, 0)),
    **dict.fromkeys(_TILES, (None, None)),
}
# How an output is joined that devices share.
_REDUCTIONS = {"dsinks": "sum", "dbias": "sum", "max_logit": "max"}


def _shardings(operator, outputs: tuple[str, ...], *arguments) -> list:
    """Placements on one axis of the mesh: replicated, by batch and by heads."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    asked = {
        "dsinks": given.get("sinks"),
        "dbias": given.get("with_dbias"),
        "max_logit": given.get("return_max_logit"),
    }

    def axis_of(name: str, by_heads: bool) -> int | None:
        """None: all devices have all of it."""
        if name == "alibi_slopes":  # (heads,) or (batch, heads)
            return len(given[name].shape) - 1 if by_heads else len(given[name].shape) - 2
        axis = _AXES.get(name, (0, 2))[by_heads]
        source = "bias" if name == "dbias" else name
        shared = source in ("bias", *_LISTS) and given[source].shape[axis] == 1
        return None if shared else axis

    def along(by_heads: bool | None) -> tuple[list, list]:
        def place(name: str):
            if by_heads is None or not asked.get(name, True):
                return Replicate()
            axis = axis_of(name, by_heads)
            if axis is not None and axis >= 0:
                return Shard(axis)
            return Partial(_REDUCTIONS[name]) if name in _REDUCTIONS else Replicate()

        inputs = [
            place(name) if hasattr(given[name], "placements") else None
            for name in names[: len(arguments)]
        ]
        return [place(name) for name in outputs], inputs

    k = given["k"]
    even = all(k.shape[2] % size == 0 for size in k.mesh.shape)
    return [along(None), along(False), *([along(True)] if even else [])]
