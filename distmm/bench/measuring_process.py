"""The process that measures one group of cases: ``python -m distmm.bench``, started by `distmm.bench.run`.

It reads one line of JSON, a `Task`, and answers with lines of JSON: one when it is ready, one a case, and one with the
reason before it ends early. A program of its own keeps GPU memory, a cluster, a crash or a hang to itself.
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

from distmm.bench.cases import KERNEL, Case
from distmm.planning.precision import Precision

__all__ = ["Assignment", "Say", "Task", "main", "serve"]

Say = Callable[[dict[str, Any]], None]

# The first product of each place and type warms up and is not counted. It has three blocks along a dimension, as large
# as those of the case: so libraries load, peers connect, and the kernels of a chain's first, middle and last step are
# compiled, which takes 3 s each. On CPUs, and for programs that say so, it has at most four blocks of a smaller edge.
WARM_EDGE_ON_CPU = 64


class Assignment(Protocol):
    """What a measuring process is to do."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """The device that it uses."""

    @property
    def workers(self) -> int:
        """GPUs that it sees, or CPU processes with one thread each."""

    def write(self) -> str:
        """Return one line of JSON, which it reads first."""


@dataclass(frozen=True)
class Task:
    """What a child is to do; as in `Program` and `Experiment`."""

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
        Called with the line, and with what takes an answer. What it raises is the last answer.
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
    seeds = iter(range(task.seed, sys.maxsize, 2))  # two matrices a product, new ones each time
    module = importlib.import_module(task.module)
    with module.program(task) as measure:
        say({"ready": True})
        warm: set[tuple[str, str, int]] = set()  # blocks of another size may take another variant of the kernel
        edge = task.warm_edge if task.device == "gpu" else WARM_EDGE_ON_CPU
        for case in task.cases:
            if case.program != KERNEL and (case.place, case.dtype, case.block) not in warm:
                measure(smaller(case, edge), next(seeds))
                warm.add((case.place, case.dtype, case.block))
            runs = 1 if case.program == KERNEL else task.repeat
            say({"row": median([measure(case, next(seeds)) for _ in range(runs)])})


def smaller(case: Case, edge: int | None) -> Case:
    """Return the same case with three blocks along a dimension, or four of at most this edge."""
    if edge is None:
        return dataclasses.replace(case, n=min(case.n, 3 * case.block))
    edge = min(case.block, edge)
    return dataclasses.replace(case, n=min(case.n, 4 * edge), block=edge)


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the median seconds (of the two in the middle the slower one); it is right if all are."""
    middle = sorted(rows, key=lambda row: row["seconds"])[len(rows) // 2]
    checks = {"ok": all(row["ok"] for row in rows)} if "ok" in middle else {}
    return middle | checks | {"all_seconds": [row["seconds"] for row in rows]}


def _answers() -> Say:
    """Keep standard output for the answers; what libraries and workers print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer, default=float) + "\n")
        out.flush()

    return say


def _end_with_parent() -> None:
    """End this process and all that it started when the parent ends, which closes standard input."""
    os.read(0, 1)  # not sys.stdin.read: Python takes its lock at exit
    os.killpg(0, signal.SIGKILL)
