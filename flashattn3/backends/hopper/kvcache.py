"""The Hopper backend of cached calls: it has no kernel yet, and says so."""

from __future__ import annotations

from ...dispatch.device import DeviceInfo
from .backend import BACKEND as FORWARD


class HopperCacheBackend:
    """Declines every cached call, so that Triton serves a Hopper GPU too."""

    name = "hopper"

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        return FORWARD.unavailable_reason(device)

    def decline_reason(self, problem: object, device: DeviceInfo) -> str | None:
        return "has no kernel for cached keys yet"


BACKEND = HopperCacheBackend()
