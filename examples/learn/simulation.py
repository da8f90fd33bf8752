"""Events on one SM: units that work at a rate, and programs that wait for conditions.

A task is a dict: unit ("gemm", "copy", "softmax" or "wait"), who, label, left (work), begin, end.
"""

from collections.abc import Callable, Generator

Program = Generator[Callable[[], bool], None, None]


class Machine:
    """softmax_rate: by busy tensor cores, elements per cycle of 1, 2, 3 softmaxes together."""

    def __init__(self, softmax_rate: dict[bool, tuple[float, ...]]) -> None:
        self.softmax_rate, self.time = softmax_rate, 0.0
        self.tasks: list[dict] = []
        self.active: list[dict] = []

    def start(self, unit: str, who: str, label: str, work: float, action=lambda: None) -> dict:
        """Queue a task, without waiting for it. Its action runs when its work is done."""
        task = {"unit": unit, "who": who, "label": label, "left": work, "action": action}
        task |= {"begin": None, "end": None}
        self.tasks.append(task)
        self.active.append(task)
        return task

    def rates(self) -> list[tuple[dict, float]]:
        """Tensor cores and copies serve the first of their queue; softmaxes share a unit."""
        of = {name: [t for t in self.active if t["unit"] == name] for name in ("gemm", "copy")}
        softmaxes = [t for t in self.active if t["unit"] == "softmax"]
        served = [(tasks[0], 1.0) for tasks in of.values() if tasks]
        served += [(t, 1.0) for t in self.active if t["unit"] == "wait"]
        if softmaxes:
            count = len(softmaxes)
            rate = self.softmax_rate[bool(of["gemm"])][count - 1] / count
            served += [(t, rate) for t in softmaxes]
        return served

    def run(self, programs: list[Program]) -> None:
        """Advance each program while its condition holds, then the time to the next event."""
        conditions = {program: (lambda: True) for program in programs}
        while conditions:
            ready = [program for program, condition in conditions.items() if condition()]
            for program in ready:
                conditions[program] = next(program, None)
                if conditions[program] is None:
                    del conditions[program]
            if not ready:
                self.advance()

    def advance(self) -> None:
        rates = self.rates()
        assert rates, "deadlock: every program waits and no unit works"
        step = min(task["left"] / rate for task, rate in rates)
        for task, rate in rates:
            task["begin"] = self.time if task["begin"] is None else task["begin"]
            task["left"] -= step * rate
            if task["left"] < 1e-6:
                task["end"] = self.time + step
                task["action"]()
                self.active.remove(task)
        self.time += step

    def busy(self) -> float:
        """Share of the time between the first GEMM and the last in which one runs."""
        spans = [(t["begin"], t["end"]) for t in self.tasks if t["unit"] == "gemm"]
        return sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0])


def done(task: dict) -> Callable[[], bool]:
    return lambda: task["end"] is not None
