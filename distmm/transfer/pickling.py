"""Pickles as Dask makes them when it sends a graph, to find out whether an object can be sent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_trial: list[Any] = []  # objects that are being pickled here: Dask would log each one that fails, with its traceback


def _is_wanted(_: logging.LogRecord) -> bool:
    return not _trial


logging.getLogger("distributed.protocol.pickle").addFilter(_is_wanted)


def pickled(x: Any, outside: Callable[[Any], object] | None = None) -> bytes:
    """Return the pickle of an object. Large buffers go to `outside`, without a copy. Errors of classes are raised."""
    from distributed.protocol.pickle import dumps

    _trial.append(x)
    try:
        return dumps(x, buffer_callback=outside)
    finally:
        _trial.pop()
