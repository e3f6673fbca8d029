"""Handling of Ctrl-C before any work: during the imports of the command line, and while a cluster starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit code: 128 + SIGINT, as in shells


def while_imported() -> None:
    """If this process is the command ``distmm``, let Ctrl-C end it without a traceback."""
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    if script == "distmm" or sys.orig_argv[1:3] == ["-m", "distmm"]:
        signal.signal(signal.SIGINT, end)


def end(number: int, frame: FrameType | None) -> NoReturn:
    """End this process at once, where nothing has to be cleaned up."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def while_started() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, even if Dask's event loop turns it into another error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    except Exception:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is handle:  # a job that was stopped ignores further signals
            signal.signal(signal.SIGINT, before)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT until the end of the ``with`` block; threads and processes started in it never receive it.

    A terminal sends SIGINT to all processes that were started from it. Without the block each worker would end with a
    traceback. Only the client should react to an interrupt.
    """
    from multiprocessing import resource_tracker

    # Start the resource tracker now: it would start with the first process, and unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
