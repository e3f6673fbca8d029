"""Tests that wait for another process all the time: it runs beside the other tests, most of which keep one core busy.

- ``@pytest.mark.apart(program=...)``: ``program(folder)`` returns the command and the environment of a program, such
  as a pytest in another mode. The fixture `ended` is what it has said.
- ``@pytest.mark.apart(function=...)``: the function is called with the parameters of the test, and the fixture `made`
  is what it returns.

What the selected tests wait for runs from the beginning of the session, one after the other, and they come last.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Program = Callable[[Path], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Ended:
    """A program that has ended: exit code, what it has said, and its folder, which is there until the session ends."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path


class Apart:
    """What runs beside the tests of a session.

    Attributes
    ----------
    of : dict
        What a test waits for, by its node id.
    """

    def __init__(self, items: Iterable[pytest.Item]) -> None:
        self.of: dict[str, Future[Any]] = {}
        self._thread = ThreadPoolExecutor(1)
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._program: subprocess.Popen[str] | None = None
        self._cwd = Path.cwd()  # tests change it, and remove where they have been
        self._folder = tempfile.TemporaryDirectory(prefix="distmm-apart-", ignore_cleanup_errors=True)
        marked = [(item, mark) for item in items if (mark := item.get_closest_marker("apart")) is not None]
        if any("function" in mark.kwargs for _, mark in marked):
            self._process.submit(int)  # starts the process here and now, not in the folder of some test
        for item, mark in marked:
            if "program" in mark.kwargs:
                self.of[item.nodeid] = self._thread.submit(self._run, mark.kwargs["program"])
            else:
                parameters = item.callspec.params  # type: ignore[attr-defined]  # of tests with parameters
                self.of[item.nodeid] = self._thread.submit(self._call, mark.kwargs["function"], parameters)

    def _run(self, program: Program) -> Ended:
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        command, environment = program(folder)
        with subprocess.Popen(
            command,
            cwd=self._cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as self._program:
            out, err = self._program.communicate()
        return Ended(self._program.returncode, out, err, folder)

    def _call(self, function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
        return self._process.submit(function, **parameters).result()

    def end(self) -> None:
        """End what no test has waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._program is not None and self._program.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._program.pid, signal.SIGKILL)
        self._thread.shutdown()
        self._process.shutdown()
        self._folder.cleanup()
