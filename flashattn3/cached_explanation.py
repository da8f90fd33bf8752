"""How a cached call would run: ``explain_with_kvcache``."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .backends.device import describe_device
from .backends.registry import BACKENDS
from .call.cached import (
    AppendOptions,
    AppendTensors,
    DecodeTensors,
    Lengths,
    describe_append,
    describe_decode,
    query_sizes,
)
from .call.cached_checks import check_decode
from .call.cached_value_checks import capacity_of
from .call.metadata import Metadata, key_of, metadata_of, metadata_under
from .explanation import Explanation, explanation_of, place_of
from .kvcache_api import flash_attn_with_kvcache
from .run.cached_operators import unpacked_append, unpacked_decode, unpacked_prefix
from .run.planner import Plan, choose
from .run.shared_prefix import is_one_launch, prefix_call


class _Watched(TorchDispatchMode):
    """Keeps the arguments of the operators of a cached call, which do not run."""

    append = decode = prefix = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.flashattn3.decode.default:
            self.decode = unpacked_decode(args[2:])
        elif func is torch.ops.flashattn3.decode_after_prefix.default:
            self.prefix, *self.decode = unpacked_prefix(*args[2:])
        elif func is torch.ops.flashattn3.append.default:
            self.append = unpacked_append(args)
        else:
            return func(*args, **(kwargs or {}))


def explain_with_kvcache(
    *arguments: object, device: torch.device | str | None = None, **named: object
) -> Explanation:
    """Say how a ``flash_attn_with_kvcache`` with these arguments would run: backend, tile, grid,
    workspace, the kernel of an append, and why the other backends do not run it. Nothing is
    launched.

    Args:
        arguments, named: those of ``flash_attn_with_kvcache``. The tensors may lie on the meta
            device, where they take no memory.
        device: where the call of meta tensors would run; None stands for the current GPU, or the
            CPU where there is none.

    Raises: what the call would raise.
    """
    with _Watched() as watched:
        flash_attn_with_kvcache(*arguments, **named)
    tensors, lengths, options = watched.decode
    place = place_of("explain_with_kvcache", tensors.q, device)
    found = _on(place, tensors)
    check_decode(found, options, lengths)
    problem = describe_decode(found, options, lengths.max_seqlen_q)
    plan = choose(problem, describe_device(place), BACKENDS)
    in_one_launch = ()
    if watched.prefix is not None and is_one_launch(plan.launch, tensors):
        in_one_launch = (watched.prefix.page_table.shape[1],)
    described = _described(plan, tensors, lengths, *in_one_launch)
    if watched.prefix is not None and not in_one_launch:
        of_prefix = prefix_call(watched.prefix, *watched.decode)
        described |= {"prefix": _prefix_on(place, *of_prefix)}
    if watched.append is not None:
        described |= {"append": _append_on(place, *watched.append)}
    explained = explanation_of(plan, BACKENDS, described)
    unused = _unused(dict(zip(_NAMES, arguments, strict=False)) | named)
    return replace(explained, unused_hints=explained.unused_hints | unused)


_NAMES = tuple(signature(flash_attn_with_kvcache).parameters)


def _unused(given: dict[str, object]) -> dict[str, str]:
    """Arguments of a call that belong to others, which it lacks; what the backend does not do."""
    rotary = "rotates nothing without rotary_cos and rotary_sin"
    found = {"cu_seqlens_k_new": ("k", "writes nothing without k and v")}
    found |= {"rotary_seqlens": ("rotary_cos", rotary)}
    return {
        name: reason
        for name, (other, reason) in found.items()
        if given.get(name) is not None and given.get(other) is None
    }


def _append_on(place: torch.device, tensors: AppendTensors, _, options: AppendOptions) -> str:
    """The backend of an append, and which kernel it runs."""
    problem = describe_append(_on(place, tensors), options)
    plan = choose(problem, describe_device(place), BACKENDS)
    kernel = plan.launch.describe().get("kernel")
    return f"{plan.backend.name}: {kernel} kernel" if kernel else plan.backend.name


def _prefix_on(
    place: torch.device, tensors: DecodeTensors, lengths: Lengths, options: tuple
) -> str:
    """The backend of the call over a shared prefix, and its tile."""
    problem = describe_decode(_on(place, tensors), options, lengths.max_seqlen_q)
    plan = choose(problem, describe_device(place), BACKENDS)
    return f"{plan.backend.name}: {plan.launch.describe().get('tile', 'all rows')}"


def _on(place: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> tuple:
    """The metadata of tensors of which those on the meta device are on the place."""
    found = tuple(map(_metadata_of, tensors))
    return tuple(
        x and x._replace(device=place if x.device.type == "meta" else x.device) for x in found
    )


def _metadata_of(x: torch.Tensor | None) -> Metadata | None:
    """With the alignment of a tensor that has memory."""
    return metadata_under(key_of((x,)))[0] if type(x) is torch.Tensor else metadata_of(x)


def _described(
    plan: Plan, tensors: DecodeTensors, lengths: Lengths, *prefix_pages: int
) -> dict[str, object]:
    sizes = query_sizes(tensors, lengths.max_seqlen_q)
    _, capacity = capacity_of(tensors.k_cache, tensors.page_table)
    return plan.launch.describe() | plan.launch.describe_sizes(*sizes, capacity, *prefix_pages)
