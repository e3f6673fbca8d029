"""Long tables of parameters: a few run each time and the others with the tests of minutes, or all run as one test."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def later(values: Iterable[Any], first: int = 1) -> list[Any]:
    """Return parameters of a test, the first few as they are, and the others marked as tests of minutes.

    A tuple has a value for each of several parameters.
    """
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=[pytest.mark.minutes] if n >= first else []) for n, value in enumerate(given)]


def number_of(examples: int) -> int:
    """Return how many drawn examples a test takes: all in `.ci/run`, and elsewhere the first quarter of them."""
    return examples if os.environ.get("DISTMM_CI") else max(1, examples // 4)


def for_each(*tables: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Check all combinations of these values in one test, if a check takes less than pytest's 10 ms for a test.

    A failure names the values.
    """

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def all_of_them() -> None:
            for values in itertools.product(*tables):
                try:
                    check(*values)
                except Exception as error:
                    error.add_note(f"with {', '.join(map(str, values))}")
                    raise

        functools.update_wrapper(all_of_them, check)
        del all_of_them.__wrapped__  # type: ignore[attr-defined]  # or pytest looks for fixtures of the check's parameters
        return all_of_them

    return decorate
