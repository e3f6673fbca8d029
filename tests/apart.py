"""Tests that are programs of their own, such as a pytest in another mode, run beside the other tests.

Most tests keep one core busy. A test marked ``@pytest.mark.apart(program=program)`` only waits for a program, and looks at what
it has said. ``program(folder)`` returns its command and its environment. The programs of the tests that are selected
start with the session, one after the other, and the fixture `ended` waits for that of its test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

Program = Callable[[Path], tuple[list[str], dict[str, str]]]
Ended = subprocess.CompletedProcess[str]


class Programs:
    """The programs of a session."""

    def __init__(self, items: Iterable[pytest.Item]) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.running: subprocess.Popen[str] | None = None
        self.of: dict[str, Future[Ended]] = {}
        for item in items:
            if (mark := item.get_closest_marker("apart")) is not None:
                self.of[item.nodeid] = self.thread.submit(self._run, mark.kwargs["program"])

    def _run(self, program: Program) -> Ended:
        with tempfile.TemporaryDirectory(prefix="distmm-apart-", ignore_cleanup_errors=True) as folder:
            command, environment = program(Path(folder))
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            ) as self.running:  # fmt: skip
                out, err = self.running.communicate()
            return Ended(command, self.running.returncode, out, err)

    def end(self) -> None:
        """Kill what no test has waited for."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.running is not None and self.running.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
        self.thread.shutdown()
