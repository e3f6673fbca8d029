"""Errors of monitoring never fail a product: each part of monitoring logs its first error as a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_logged: set[str] = set()


@contextmanager
def tolerated(part: str) -> Iterator[None]:
    """Suppress every exception of the ``with`` block; log the first one of each part.

    Parameters
    ----------
    part : str
        Name of the part for the warning, such as "the page of the dashboard".
    """
    try:
        yield
    except Exception:
        if part not in _logged:
            _logged.add(part)
            logger.warning("%s failed, and products run without it", part, exc_info=True)
