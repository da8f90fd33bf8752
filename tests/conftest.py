"""Chooses, before torch and Triton are imported, how Triton runs in this session.

Without a CUDA device its kernels run in Triton's interpreter. With one, two options make the GPU
run the code and the tiles of another chip; both work in the environment, so pytest-xdist's workers
inherit them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("flashattn3")
    group.addoption(
        "--lowering",
        metavar="smXX",
        help="make Triton lower to another chip, sm80 for Ampere's mma.sync and cp.async, in a "
        "Triton cache of its own (under .pytest_cache); every kernel of the run is checked "
        "to be for it",
    )
    group.addoption(
        "--shared-memory-kib",
        type=int,
        metavar="KIB",
        help="take the tiles that fit this much shared memory: 163 for an A100, 99 for a 3090",
    )
    group.addoption("--sweep", action="store_true", help="run the tests marked sweep too")


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:  # the threads of several processes wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Triton's interpreter multiplies with numpy's OpenBLAS, whose kernels for newer chips give a
    # row other bits with other rows beside it (tests/test_invariance.py). torch imports numpy.
    if platform.machine() == "x86_64":
        os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")
    lowering, kib = config.getoption("lowering"), config.getoption("shared_memory_kib")
    if lowering is None and kib is None:
        _interpret_without_gpu()
        return
    if kib is not None and kib <= 0:
        raise pytest.UsageError(f"--shared-memory-kib must be positive, got {kib}")
    if lowering is not None and not re.fullmatch(r"sm\d\d\d?a?", lowering):
        raise pytest.UsageError(f"--lowering must be written like sm80, got {lowering!r}")
    if lowering is not None and not config.pluginmanager.hasplugin("cacheprovider"):
        raise pytest.UsageError(
            "--lowering keeps its kernels in pytest's cache: leave -p no:cacheprovider out"
        )
    if not _gpu_is_here():
        raise pytest.UsageError(
            "--lowering and --shared-memory-kib need a CUDA device; none is visible"
        )
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "--lowering must act before Triton is imported: start pytest by itself"
        )
    if kib is not None:
        os.environ["FLASHATTN3_SHARED_MEMORY_KIB"] = str(kib)
    if lowering is not None:
        os.environ["TRITON_OVERRIDE_ARCH"] = lowering
        os.environ["TRITON_CACHE_DIR"] = str(config.cache.mkdir(f"triton-{lowering}"))


def _gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def _interpret_without_gpu() -> None:
    # Triton reads this while it is imported, which no conftest or plugin has done yet.
    if "triton" not in sys.modules and not _gpu_is_here():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_make_parametrize_id(val):
    """The id of a value is its ``name``, if it has one; that of a dtype is what torch prints."""
    name = str(val) if type(val).__name__ == "dtype" else getattr(val, "name", None)
    return name if isinstance(name, str) else None


def pytest_report_header(config):
    names = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH", "FLASHATTN3_SHARED_MEMORY_KIB")
    found = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return [f"flashattn3: {' '.join(found) or 'native kernels'}"]


def pytest_terminal_summary(terminalreporter):
    """What is skipped, counted by reason: a line for each test would hide the result."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common(6):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if rest := reasons.most_common()[6:]:
        count = sum(count for _, count in rest)
        terminalreporter.write_line(f"skipped {count}: {len(rest)} other reasons, which -rs lists")


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(config, items):
    if not _gpu_is_here():
        reason = "needs a CUDA device; none is visible"
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
            interpreted = item.get_closest_marker("interpreted")
            for mark, applies in _tiers(interpreted.kwargs if interpreted else {}):
                if applies(**item.callspec.params):
                    item.add_marker(mark)
    if not config.getoption("sweep"):
        config.hook.pytest_deselected(items=[item for item in items if "sweep" in item.keywords])
        items[:] = [item for item in items if "sweep" not in item.keywords]


def _tiers(of_interpreter: dict):
    """Marks of a test on Triton's interpreter, with functions of its parameters: slow unless it is
    quick, and sweep."""
    if "quick" in of_interpreter:
        yield pytest.mark.slow, lambda **params: not of_interpreter["quick"](**params)
    if "sweep" in of_interpreter:
        yield pytest.mark.sweep, of_interpreter["sweep"]


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.make_quick()


@pytest.fixture(scope="session", autouse=True)
def lowering_is_real(request):
    """With --lowering: run one problem first, and read every kernel of the session at its end."""
    lowering = request.config.getoption("lowering")
    if lowering is None:
        yield
        return
    import ptx

    ptx.launch_one_problem()
    ptx.assert_cache_is_lowered_to(lowering)
    yield
    ptx.assert_cache_is_lowered_to(lowering)


def forget_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("TRITON_OVERRIDE_ARCH", None)


@pytest.fixture(scope="session")
def compilers():
    """Processes that compile Triton kernels, as this one may interpret them: two, or one if
    pytest-xdist already spreads the tests."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    num_processes = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, initializer=forget_interpreter) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def device():
    """The CUDA device if there is one, otherwise the CPU."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device()) if _gpu_is_here() else torch.device("cpu")
    )


@pytest.fixture
def fresh_dynamo():
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh tensors are NaN, so a value that a backend forgets to write shows. Calls are not
    deterministic by that."""
    import torch

    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all(), "torch does not fill fresh tensors"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: before[0])
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = filled
