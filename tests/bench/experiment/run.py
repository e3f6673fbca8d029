"""Starts a process for each group of cases, and ends cases that exceed their time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.diagnostics import nvml

from distmm.clusters import BLAS_THREADS
from experiment.cases import Case, Experiment, Group
from experiment.measuring_process import Assignment, Task
from experiment.results import Results, Row

__all__ = ["Child", "EndedError", "SilenceError", "run"]

OVER = "not measured: the time given by --deadline was over"

CLOSING_SECONDS = 20.0  # time for a child to close its cluster after its last answer


class SilenceError(Exception):
    """A child process did not answer in time."""


class EndedError(Exception):
    """A child process reported an error, or ended without an answer."""


def run(
    experiment: Experiment, patience: float, deadline: float | None, progress: Callable[[Results, Row], None]
) -> Results:
    """Measure all cases, the most important ones first.

    Parameters
    ----------
    experiment : Experiment
    patience : float
        Time limit in seconds for one case, including making its matrices and checking its result. The start of a
        process has the same limit.
    deadline : float, optional
        Seconds after which nothing more is measured.
    progress : callable
        Called after each case, with all results and the newest row.

    Returns
    -------
    Results
        A row for each case, also for failed ones.
    """
    results = Results(experiment, _where(experiment))
    ends = None if deadline is None else time.monotonic() + deadline

    def add(case: Case, **found: Any) -> None:
        row = Row(case, **found | {"all_seconds": tuple(found.get("all_seconds", ()))})
        results.rows.append(row)
        progress(results, row)

    for group in experiment.groups():
        waiting = deque(group.cases)
        while waiting:
            _measure(experiment, group, waiting, patience, ends, add)
    return results


def _where(experiment: Experiment) -> str:
    from distmm_kernels import device

    host = device.cpu()
    cpu = f"{host.name}, {host.multiprocessors} cores"
    if experiment.device == "cpu":
        return cpu
    name = nvml.one_time()["name"] if nvml.device_get_count() else "GPU"  # NVML makes no CUDA context on the GPUs
    return f"up to {max(experiment.counts)} x {name}; {cpu}"


def _measure(
    experiment: Experiment,
    group: Group,
    waiting: deque[Case],
    patience: float,
    ends: float | None,
    add: Callable[..., None],
) -> None:
    """Start a child for the waiting cases. Add a row for each finished case, and remove it from ``waiting``.

    At least one case is removed.
    """

    def left() -> float:
        return patience if ends is None else min(patience, ends - time.monotonic())

    if left() <= 0:
        while waiting:
            add(waiting.popleft(), failure=OVER)
        return
    started = False
    task = Task(
        group.program.name, group.program.module, group.program.warm_edge, experiment.device, group.workers,
        tuple(waiting), experiment.precision, experiment.kernel, experiment.repeat, experiment.seed,
    )  # fmt: skip
    with Child(task) as child:
        try:
            child.answer(left())
            started = True
            while waiting:
                row = child.answer(left())["row"]
                add(waiting.popleft(), **row)
            child.close()
        except EndedError as error:
            for _ in range(1 if started else len(waiting)):
                add(waiting.popleft(), failure=str(error))
        except SilenceError as error:
            slow = waiting.popleft()
            add(slow, failure=str(error))
            for case in [case for case in waiting if case.flops >= slow.flops or not started]:
                waiting.remove(case)
                add(case, failure=f"not measured: {slow} gave no result in time")


class Child:
    """A process that measures. It is a context manager; at its end, the process and its children are killed."""

    command = (sys.executable, "-m", "experiment")

    def __init__(self, task: Assignment) -> None:
        self.task = task
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def __enter__(self) -> Child:
        self.said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=environment(self.task),
            start_new_session=True,  # a new process group, which its workers belong to
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; `answer` raises the reason
            os.write(self.process.stdin.fileno(), self.task.write().encode())
        # Standard input stays open: the child ends when it is closed.
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next answer.

        Raises
        ------
        SilenceError
            If there is none in time.
        EndedError
            If the child has given up or ended.
        """
        try:
            answer = self.answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            over = seconds <= 0
            raise SilenceError(OVER if over else f"no result within {seconds:.0f} s (--patience, --deadline)") from None
        if answer is None:
            raise EndedError(f"its process ended with code {self.process.wait()}: {self._last_words()}")
        if "failure" in answer:
            raise EndedError(answer["failure"])
        return answer

    def close(self) -> None:
        """Wait until the process ends by itself after its last answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # `__exit__` kills it; all results have arrived
            self.process.wait(CLOSING_SECONDS)

    def _last_words(self) -> str:
        self.said.seek(0)
        lines = [line.strip() for line in self.said if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so have its children
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.said):
            assert stream is not None
            stream.close()


def environment(task: Assignment) -> dict[str, str]:
    """Return a child's environment: its GPUs or threads, and the folder of this package."""
    root = str(Path(__file__).parents[1])
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    if task.device == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(task.workers)))
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: task.workers])
    else:  # one thread a worker
        found |= dict.fromkeys(BLAS_THREADS, "1")
    return found
