"""Calls as replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Replay(Generic[Result]):
    """Replays a graph and returns the results that it writes.

    The graph reads the tensors of the call, which therefore lives as long.
    """

    graph: torch.cuda.CUDAGraph
    call: Callable[[], Result]
    results: Result

    def __call__(self) -> Result:
        self.graph.replay()
        return self.results


def captured(
    prepare: Callable[[], Callable[[], Result]], device: torch.device
) -> Callable[[], Result]:
    """A prepared call as the replay of a CUDA graph; on a CPU the call itself.

    It is prepared on the stream of the capture, because a backward pass runs on the stream of its
    forward pass.
    """
    if device.type != "cuda":
        return prepare()
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        call = prepare()
        call()  # compiles what is not compiled yet
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    return Replay(graph, call, results)
