"""Waiting for what another process, or another thread, does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_SECONDS = 0.05


def until(true: Callable[[], T], otherwise: Callable[[], object] | str = "it never became true") -> T:
    """Return the first true value of `true`; fail after two minutes, for any process may be held up for long.

    `otherwise` is what is said then, or says it.
    """
    deadline = time.monotonic() + 120
    while not (value := true()):
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(PAUSE_SECONDS)
    return value
