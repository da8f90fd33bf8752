"""Programs in processes of their own without importing torch again, which takes 2 s of a CPU: a
server that has imported torch and nothing else forks one for each."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import ModuleType


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


def run(program: Callable, *arguments, folder, variables: dict[str, str], log, timeout: float):
    """The exit status of ``program(*arguments)`` in ``folder`` with these environment variables
    alone; standard output goes to the file ``log``.out, errors to ``log``.err."""
    given = program, arguments, os.fspath(folder), variables, os.fspath(log)
    process = _context().Process(target=_begin, args=given)
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"no end after {timeout} s")
    return process.exitcode


def _begin(program, arguments, folder, variables, log) -> None:
    for stream, end in ((1, ".out"), (2, ".err")):
        file = os.open(log + end, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path.insert(0, "")
    status = 0
    try:
        program(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_code(code: str) -> None:
    """As ``python -c code``."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def run_file(path: str) -> None:
    """As ``python path``."""
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
