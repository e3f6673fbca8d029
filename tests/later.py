"""Parameters of which a few are enough for each run: the others run with the tests of minutes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def later(values: Iterable[Any], first: int = 1) -> list[Any]:
    """Return the parameters of a test, the first few as they are, and the others marked as tests of minutes."""
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=[pytest.mark.minutes] if n >= first else []) for n, value in enumerate(given)]
