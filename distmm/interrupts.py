"""Ctrl-C before any work has begun: while the command line is imported, and while a cluster starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

__all__ = ["sigint_blocked", "while_imported", "while_started"]

INTERRUPTED = 130  # exit code: 128 and the number of SIGINT, as in shells


def while_imported() -> None:
    """End the process at Ctrl-C, without a traceback, if it is the command ``distmm``; its imports take a second."""
    script = os.path.basename(sys.argv[0]).removesuffix(".exe") if sys.argv else ""
    if script == "distmm" or sys.orig_argv[1:3] == ["-m", "distmm"]:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def while_started() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, even if Dask's event loop has made another error of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    except Exception:
        if heard:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Deliver Ctrl-C at the end of the ``with`` block, and never to threads and processes that are started in it.

    A terminal sends SIGINT to all processes that were started from it. Each worker would end with a traceback; only the
    client is to decide what an interrupt means.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Otherwise it is started with the first process, and unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
