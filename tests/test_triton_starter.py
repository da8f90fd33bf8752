"""How a compiled Triton kernel is launched again, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.nvidia.driver import CudaLauncher

from flashattn3.backends.triton.kernels import launch


@pytest.mark.parametrize("hook", [None, "launch_enter_hook", "launch_exit_hook"])
def test_a_started_kernel_is_launched_as_triton_does(hook, monkeypatch):
    """With a hook of a profiler by Triton itself, which calls it."""
    calls = []

    class Compiled(SimpleNamespace):
        def __getitem__(self, grid):
            return lambda *arguments: calls.append(("by Triton", grid, arguments))

    compiled = Compiled(run=lambda *given: calls.append(given), function=7, packed_metadata=(8,))
    active = SimpleNamespace(get_current_stream=lambda i: 100 + i)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    start = launch.starter(compiled)
    if hook is not None:
        chain = getattr(triton.knobs.runtime, hook)
        monkeypatch.setattr(chain, "calls", [lambda _: None])
    start((2, 3, 4), 5, None)
    by_triton = "by Triton", (2, 3, 4), (5, None)
    alone = 2, 3, 4, 101, 7, (8,), None, None, None, 5, None
    assert calls == [alone if hook is None else by_triton]


class FlatLauncher:
    """As of Triton 3.5: the kernel's arguments follow the launcher's own."""

    global_scratch_size = 0

    def __call__(self, x, y, z, stream, function, *arguments):
        scratch = x * y * z * self.global_scratch_size if self.global_scratch_size > 0 else None
        self.launch(x, y, z, stream, function, False, scratch, *arguments)


class ScratchLauncher(FlatLauncher):
    global_scratch_size = 16


class InstalledLauncher(CudaLauncher):
    """Of a kernel without scratch memory and with no option that has a value."""

    def __init__(self):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


@pytest.mark.parametrize("launcher", [FlatLauncher, ScratchLauncher, InstalledLauncher])
def test_a_launch_is_one_call_of_the_function_in_c(launcher, monkeypatch):
    """What it gets is what Triton's launcher passes on, which no launch but the first asks."""
    run, found, asked = launcher(), [], []
    run.launch = lambda *passed: found.append(passed)
    call = launcher.__call__
    monkeypatch.setattr(launcher, "__call__", lambda *of: (asked.append(of), call(*of)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    active = SimpleNamespace(get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    compiled = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))
    for arguments in ((5, None, 2.0), (), (9,)):
        grid = 2, len(arguments), 1
        run(*grid, 73, 7, (4, 1, 0), None, None, None, *arguments)
        start = launch.starter(compiled)
        asked.clear()
        start(grid, *arguments)
        start(grid, *arguments)
        assert found[0] == found[1] == found[2] and found[0][:4] == (*grid, 73)
        assert len(asked) == (2 if launcher is ScratchLauncher else 0)
        found.clear()
