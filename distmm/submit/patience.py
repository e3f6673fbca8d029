"""Questions to a batch system that may not answer for some minutes: while its controller restarts, for example."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from distmm.errors import InputError

__all__ = ["NoAnswerError", "Patience"]

T = TypeVar("T")

# A controller of Slurm that fails over, and an API server of Kubernetes that is upgraded, are back within minutes.
PATIENCE_SECONDS = 600.0


class NoAnswerError(InputError):
    """A question that got no answer, and may get one when it is asked again."""


class Patience:
    """Asks again, for ten minutes.

    Parameters
    ----------
    who : str
        Who is asked.
    again : str
        How to go on after the ten minutes.
    say : callable
        Takes a line when answers stay away, and when they are back.
    pause : float
        Seconds between two questions.
    """

    def __init__(self, who: str, again: str, say: Callable[[str], None], pause: float) -> None:
        self.who, self.again, self.say, self.pause = who, again, say, pause

    def ask(self, question: Callable[[], T]) -> T:
        """Return the answer.

        Raises
        ------
        InputError
            After ten minutes without one; the job that was asked about goes on.
        """
        since: float | None = None
        while True:
            try:
                answer = question()
            except NoAnswerError as error:
                now = time.monotonic()
                if since is None:
                    since = now
                    self.say(f"{self.who} does not answer; asking again for {PATIENCE_SECONDS / 60:.0f} min: {error}")
                if now - since > PATIENCE_SECONDS:
                    raise InputError(
                        f"{self.who} has not answered for {PATIENCE_SECONDS / 60:.0f} min: {error}; the job may go on, "
                        f"and is followed again with: {self.again}"
                    ) from error
                time.sleep(self.pause)
            else:
                if since is not None:
                    self.say(f"{self.who} answers again")
                return answer
