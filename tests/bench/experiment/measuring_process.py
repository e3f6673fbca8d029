"""The process that measures one group of cases: ``python -m experiment``, started by `experiment.run`.

It reads one line of JSON, a `Task`, and answers with lines of JSON: one when it is ready, and one for each case. If it
ends early, the last line is the reason. A separate process isolates GPU memory, a cluster, a crash or a hang.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from distmm.planning.precision import Precision
from experiment.cases import KERNEL, Case

__all__ = ["Assignment", "Say", "Task", "main", "serve"]

Say = Callable[[dict[str, Any]], None]

# The first product of each place, type and size warms up and is not counted. On GPUs it is the product of the case:
# libraries are loaded, peers connect, and kernels are compiled, which takes 3 s each. A smaller product may have
# another plan, and other kernels. On CPUs, and for programs with a `warm_edge`, it has four blocks along a dimension.
WARM_EDGE_ON_CPU = 64


class Assignment(Protocol):
    """The task of a measuring process."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """The device that it uses."""

    @property
    def workers(self) -> int:
        """GPUs that it sees, or CPU processes with one thread each."""

    def write(self) -> str:
        """Return the line of JSON that the process reads first."""


@dataclass(frozen=True)
class Task:
    """The task of a child process. The fields are those of `Program` and `Experiment`."""

    program: str
    module: str
    warm_edge: int | None
    device: Literal["cpu", "gpu"]
    workers: int
    cases: tuple[Case, ...]
    precision: Precision
    kernel: str | None
    repeat: int
    seed: int

    @classmethod
    def read(cls, line: str) -> Task:
        """Read what `write` wrote."""
        facts = json.loads(line)
        return cls(**facts | {"cases": tuple(Case(**case) for case in facts["cases"])})

    def write(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


def main() -> int:
    """Measure all cases; return the exit code."""
    return serve(_measure)


def serve(work: Callable[[str, Say], None]) -> int:
    """Read an assignment from standard input, do it, and answer on standard output; return the exit code.

    Parameters
    ----------
    work : callable
        Called with the line, and with a function that sends an answer. If it raises an error, the error is the last
        answer.
    """
    say = _answers()
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(line, say)
    except Exception as error:
        traceback.print_exc()
        say({"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
        return 1
    return 0


def _measure(line: str, say: Say) -> None:
    task = Task.read(line)
    seeds = iter(range(task.seed, sys.maxsize, 2))  # two matrices for each product, always new
    module = importlib.import_module(task.module)
    with module.program(task) as measure:
        say({"ready": True})
        warm: set[tuple[str, str, int]] = set()
        edge = task.warm_edge if task.device == "gpu" else WARM_EDGE_ON_CPU
        for case in task.cases:
            if case.program != KERNEL and (case.place, case.dtype, case.block) not in warm:
                measure(case if edge is None else smaller(case, edge), next(seeds))
                warm.add((case.place, case.dtype, case.block))
            runs = 1 if case.program == KERNEL else task.repeat
            say({"row": median([measure(case, next(seeds)) for _ in range(runs)])})


def smaller(case: Case, edge: int) -> Case:
    """Return the same case with four blocks along a dimension, of at most this edge."""
    edge = min(case.block, edge)
    return dataclasses.replace(case, n=min(case.n, 4 * edge), block=edge)


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the median seconds; of two in the middle, the slower one. It is ``ok`` if all rows are."""
    middle = sorted(rows, key=lambda row: row["seconds"])[len(rows) // 2]
    checks = {"ok": all(row["ok"] for row in rows)} if "ok" in middle else {}
    return middle | checks | {"all_seconds": [row["seconds"] for row in rows]}


def _answers() -> Say:
    """Reserve standard output for answers. The output of libraries and workers is redirected to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer, default=float) + "\n")
        out.flush()

    return say


def _end_with_parent() -> None:
    """End this process and its children when the parent ends. The parent's end closes standard input."""
    os.read(0, 1)  # not sys.stdin.read: Python takes its lock at exit
    os.killpg(0, signal.SIGKILL)
