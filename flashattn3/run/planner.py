"""From a problem and a device to a backend and its tiles. Pure: no tensor, no GPU, no launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..backends.base import Backend, Launch
from ..backends.device import DeviceInfo
from ..call.fields import HINTS
from ..call.problem import CallProblem
from ..call.selection import FROM_ENVIRONMENT
from ..errors import UnsupportedError, complaint, value_error


class Plan(NamedTuple):
    """The decision for one problem, and why the other backends did not get it."""

    problem: CallProblem
    device: DeviceInfo
    backend: Backend
    launch: Launch
    declined: tuple[tuple[str, str], ...] = ()

    @property
    def unused_hints(self) -> dict[str, str]:
        """Names of the call's hints that the backend ignores, each with the reason."""
        unused = self.backend.unused_hints(self.problem, self.device)
        asked = {field.name: field.is_asked(self._hint(field.name)) for field in HINTS}
        return {name: reason for name, reason in unused.items() if asked[name]}

    def _hint(self, name: str) -> object:
        """The problem of a cached call has fewer hints."""
        return getattr(self.problem, name, None)


def choose(problem: CallProblem, device: DeviceInfo, backends: Sequence[Backend]) -> Plan:
    """The first backend that does not decline; with ``problem.backend`` set, that one or none.

    Raises ValueError for a name that no backend has and UnsupportedError, with every reason, if
    no backend takes the problem. A named backend never falls back to another.
    """
    try:
        return _chosen(problem, device, backends)
    except ValueError as error:
        if problem.backend and problem.backend == FROM_ENVIRONMENT:
            told = f"{error}; FLASHATTN3_BACKEND={FROM_ENVIRONMENT} is set"
            raise type(error)(told) from None
        raise


def _chosen(problem: CallProblem, device: DeviceInfo, backends: Sequence[Backend]) -> Plan:
    names = tuple(backend.name for backend in backends)
    if problem.backend is not None and problem.backend not in names:
        raise value_error(problem.function, "backend", f"one of {names}", repr(problem.backend))
    declined = []
    for backend in backends:
        reason = decline_reason(backend, problem, device)
        if reason is None and problem.backend in (None, backend.name):
            launch = backend.prepare(problem, device)
            return Plan(problem, device, backend, launch, tuple(declined))
        declined.append((backend.name, reason or f"backend={problem.backend!r} was asked for"))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declined)
    if problem.backend is None:
        sentence = f"{problem.function}: no backend takes this problem"
    else:
        wanted = "one that takes this problem"
        sentence = complaint(problem.function, "backend", wanted, repr(problem.backend))
    raise UnsupportedError(f"{sentence} ({reasons})")


def decline_reason(backend: Backend, problem: CallProblem, device: DeviceInfo) -> str | None:
    return backend.unavailable_reason(device) or backend.decline_reason(problem, device)
