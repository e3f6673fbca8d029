"""Requests to stop a job early: a deadline, SIGTERM or SIGINT. The exit code is 75, and finished blocks are kept.

A deadline and the first signal stop the job cleanly: it sends no new work, and writes the blocks of C that are already
computed. A second signal ends the job at once. Further signals are ignored.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distmm.errors import DistmmError, Stopped


class Stop:
    """A request to stop a job cleanly, with a reason.

    Parameters
    ----------
    seconds : float, optional
        Time from now after which the job stops.

    Attributes
    ----------
    seconds : float or None
        Time from the creation of this object to the deadline. None without a deadline.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._asked: str | None = None
        self._signals: list[str] = []
        self.seconds = seconds
        self._started = time.monotonic()

    @property
    def reason(self) -> str | None:
        """Reason to stop. None if the job should continue."""
        if self._asked is None and self.seconds is not None and time.monotonic() - self._started >= self.seconds:
            self._asked = f"the deadline of {self.seconds:g} s has passed"
        return self._asked

    def ask(self, reason: str) -> None:
        """Request a stop.

        Parameters
        ----------
        reason : str
            Reason for the message of `distmm.Stopped`. The reason of the first request is used.
        """
        self._asked = self._asked or reason

    @property
    def at_once(self) -> bool:
        """Whether a second signal was received. The job then does not wait for writes."""
        return len(self._signals) > 1

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Stop cleanly at the first SIGTERM or SIGINT, and at once at the second. For command lines.

        Batch systems send SIGTERM, possibly several times, and SIGKILL some seconds later. So the second signal
        interrupts every wait. Further signals are ignored, also while the program ends, so that its exit code says that
        the job can be resumed.

        Raises
        ------
        Stopped
            Instead of the `KeyboardInterrupt` of the second signal, or of an error that it causes: during a wait for a
            lock that is a RuntimeError ("release unlocked lock").
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number).name)
            self.ask(f"{self._signals[0]} was received")
            if len(self._signals) == 2:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except DistmmError:
            raise
        except BaseException:
            if not self.at_once:
                raise
            raise Stopped(f"{self.reason}, twice; the finished blocks of C are kept: call again to continue") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._signals else handler)
