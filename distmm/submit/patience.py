"""Requests to a batch system that may not answer for some minutes, for instance while its controller restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from distmm.errors import InputError

T = TypeVar("T")
Say = Callable[[str], None]

# A failover of Slurm's controller, or an upgrade of Kubernetes' API server, takes a few minutes.
PATIENCE_SECONDS = 600.0


class NoAnswerError(InputError):
    """A request without an answer; a repeated request may get one."""


def patiently(who: str, again: str, say: Say, pause: float, request: Callable[..., T], *words: str) -> T:
    """Repeat a request for up to ten minutes, while the system does not answer.

    Parameters
    ----------
    who : str
        Name of the system, for messages.
    again : str
        Command that follows the job again, for the message after ten minutes.
    say : callable
        Called with a line when the system stops answering, and when it answers again.
    pause : float
        Seconds between two requests.
    request : callable
        Takes the `words`. Raises `NoAnswerError` while the system does not answer.

    Returns
    -------
    Any
        The answer.

    Raises
    ------
    InputError
        After ten minutes without an answer. The job itself may still run.
    """
    since: float | None = None
    while True:
        try:
            answer = request(*words)
        except NoAnswerError as error:
            now = time.monotonic()
            if since is None:
                since = now
                say(f"{who} does not answer; asking again for {PATIENCE_SECONDS / 60:.0f} min: {error}")
            if now - since > PATIENCE_SECONDS:
                raise InputError(
                    f"{who} has not answered for {PATIENCE_SECONDS / 60:.0f} min: {error}; the job may still "
                    f"run, follow it again with: {again}"
                ) from error
            time.sleep(pause)
        else:
            if since is not None:
                say(f"{who} answers again")
            return answer
