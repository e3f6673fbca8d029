"""Monitoring that fails never fails a product: what it raises is logged as a warning, once for each part of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["tolerated"]

logger = logging.getLogger(__name__)

_logged: set[str] = set()


@contextmanager
def tolerated(part: str) -> Iterator[None]:
    """Log what is raised here, and go on.

    Parameters
    ----------
    part : str
        What does not work then, for the warning: "the page of the dashboard".
    """
    try:
        yield
    except Exception:
        if part not in _logged:
            _logged.add(part)
            logger.warning("%s failed, and products go on without it", part, exc_info=True)
