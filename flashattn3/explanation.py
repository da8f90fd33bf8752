"""How a call would run: ``explain``, and the backends of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backends.device import describe_device
from .backends.registry import BACKENDS
from .call.fields import Options
from .call.operands import Tensors, check_tensor_types, data_of, tensors_by_name, tensors_of_mask
from .errors import expect, shown, type_error, value_error
from .masks.block_lists import BlockLists, Grid, summary
from .run import operators
from .run.planner import Plan, decline_reason

if TYPE_CHECKING:
    from .backends.base import Backend
    from .call.problem import Problem


@dataclass(frozen=True)
class Explanation:
    """How a call would run. str() gives it as text.

    backend, device: names of the backend that runs the call and of the device.
    config: tile, stages and kernel config by name; the names depend on the backend.
    grid: of the launch; None where the backend launches no kernel of its own.
    shared_memory_bytes: of one block; None where it is not known.
    declined: every other backend's name and why it does not run the call.
    unused_hints: name of each hint, or other argument, given that has no effect, and why.
    """

    backend: str
    device: str
    config: dict[str, object]
    grid: tuple[int, ...] | None
    shared_memory_bytes: int | None
    declined: dict[str, str]
    unused_hints: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"backend: {self.backend} on {self.device}"]
        lines += [f"  {name}: {value}" for name, value in self.config.items()]
        for name, reason in self.unused_hints.items():
            lines.append(f"  {name} has no effect: {self.backend} {reason}")
        lines += [f"not {name}: {reason}" for name, reason in self.declined.items()]
        return "\n".join(lines)


def explained(options: Options, tensors: Tensors, varlen: bool, device: object) -> Explanation:
    """How the call runs on the device; of tensors that are not on meta None."""
    function = options.function
    check_tensor_types(function, tensors, varlen)
    place = place_of(function, data_of(tensors.q), device)
    _check_devices(function, tensors, place)
    plan = operators.plan_on(place, tensors, options)
    described = plan.launch.describe() | _scores_of(plan.problem)
    if plan.problem.mask is not None:
        grid = Grid(*plan.problem.mask, plan.problem.seqlen_q, plan.problem.seqlen_k)
        described = described | {"mask": summary(BlockLists(*tensors_of_mask(tensors)[:3]), grid)}
    return explanation_of(plan, BACKENDS, described)


def _scores_of(problem: Problem) -> dict[str, str]:
    """What changes the scores of a call, and what it costs."""
    costs = {
        "sinks": "one more term in each row sum",
        "alibi_slopes": "one multiply-add a score",
        "return_max_logit": "one more maximum of each tile of scores",
    }
    if problem.bias is not None:
        bias, size = problem.bias, problem.bias.dtype.itemsize
        sums = problem.batch // max(1, bias.batch) * (problem.num_heads_q // bias.heads)
        total = bias.batch * bias.heads * problem.seqlen_q * problem.seqlen_k * size
        shared = f", a sum over {sums} batch entries and heads" if sums > 1 else ""
        costs["bias"] = (
            f"{size} bytes a score are read in each pass; gradient: {total} bytes{shared}"
        )
    return {name: costs[name] for name in problem.score_options if name in costs}


def explanation_of(
    plan: Plan, backends: Sequence[Backend], described: dict[str, object]
) -> Explanation:
    """What a plan decides, with the reason of every backend that does not run the call."""
    declined = dict(plan.declined)
    for backend in backends:
        if backend.name != plan.backend.name and backend.name not in declined:
            reason = decline_reason(backend, plan.problem, plan.device)
            declined[backend.name] = reason or f"{plan.backend.name} comes first"
    return Explanation(
        backend=plan.backend.name,
        device=plan.device.name,
        config=described,
        grid=described.get("grid"),
        shared_memory_bytes=described.get("shared_memory_bytes"),
        declined=declined,
        unused_hints=plan.unused_hints,
    )


def place_of(function: str, q: Tensor, device: object) -> torch.device:
    """The device of a call; of meta tensors the one that is named, or this machine's first."""
    if not q.is_meta:
        expect(device is None, function, "device", "None unless q is on meta", shown(device))
        return q.device
    return _device(function, _here() if device is None else device)


def _check_devices(function: str, tensors: Tensors, place: torch.device) -> None:
    """Where q is on meta, raise for a tensor that is neither there nor on the call's device."""
    if not data_of(tensors.q).is_meta:
        return  # the plan compares the devices
    for name, tensor in tensors_by_name(tensors).items():
        if tensor is not None and not (tensor.is_meta or tensor.device == place):
            wanted = f"meta as q's, or {place}, where the call would run"
            raise value_error(function, f"{name}.device", wanted, tensor.device)


def _here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def available_backends(device: torch.device | str | None = None) -> list[str]:
    """Names of the backends that can run on a device, in the order in which dispatch asks them.

    device: None stands for the current GPU, or the CPU where there is none.
    """
    if device is None:
        device = _here()
    info = describe_device(_device("available_backends", device))
    return [backend.name for backend in BACKENDS if backend.unavailable_reason(info) is None]


def _device(function: str, device: object) -> torch.device:
    """A device of this machine; of GPUs the current one where no index is given."""
    wanted = "a torch.device or its name"
    if not isinstance(device, (str, torch.device)):
        raise type_error(function, "device", wanted, shown(device))
    try:
        found = torch.device(device)
    except RuntimeError:
        raise value_error(function, "device", wanted, shown(device)) from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = 0 <= (found.index or 0) < count  # torch reads "cuda:1000" as index -24
    expect(here, function, "device", f"one of this machine's {count} GPUs or a CPU", shown(device))
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
