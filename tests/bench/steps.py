"""The steps of a measurement: each said as it begins and ends, kept in a file, and left out where time is over."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Steps"]

Result = TypeVar("Result")


class Steps:
    """Runs one step after the other. One that fails does not keep the next ones from running.

    Parameters
    ----------
    deadline : float, optional
        Seconds after which no step begins.
    path : str, optional
        File for `facts` and what became of the steps, as JSON; written anew after each of them.
    facts : dict
        What else is to be known: the size of the matrices. Steps add their figures.
    """

    def __init__(self, deadline: float | None = None, path: str | None = None, **facts: Any) -> None:
        self.facts = facts
        self.done: list[dict[str, Any]] = []
        self._began, self._deadline = time.monotonic(), deadline
        self._path = path

    @property
    def left(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return float("inf") if self._deadline is None else self._began + self._deadline - time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether a step did not come to its end; those left out have not failed."""
        return any("failure" in step for step in self.done)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)  # noqa: T201

    def run(self, name: str, work: Callable[[], Result]) -> Result | None:
        """Do a step; None where it fails, or time is over."""
        step: dict[str, Any] = {"step": name}
        self.done.append(step)
        result = None
        if self.left <= 0:
            step["left out"] = f"the time given by --deadline was over after {self._deadline:g} s"
            self.say(f"{name}: left out, {step['left out']}")
        else:
            self.say(f"{name} ...")
            start = time.monotonic()
            try:
                result = work()
            except Exception as error:
                traceback.print_exc()
                step["failure"] = f"{type(error).__name__}: {error}"
            step["seconds"] = time.monotonic() - start
            self.say(f"{name}: {step['seconds']:.1f} s{', failed' if 'failure' in step else ''}")
        self.write()
        return result

    def write(self) -> None:
        """Write the file; whoever reads meanwhile finds the one before, or this one.

        Without an fsync: after a step that wrote large files it would wait until these are on the disk too.
        """
        if self._path is not None:
            with open(f"{self._path}.draft", "w") as file:
                json.dump({**self.facts, "steps": self.done}, file, indent=1, default=float)
            os.replace(f"{self._path}.draft", self._path)
