"""A plugin of pytest that runs Dask's tests with ``distmm.accelerate()`` on, for products of any size.

``python -m pytest -p tests.distmm.accelerate.turned_on --pyargs dask.array.tests.test_routines``
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import dask
import pytest

import distmm

FUNCTIONS = "matmul", "tensordot", "einsum", "tsqr"


class Counting(logging.Handler):
    """Counts what runs on distmm."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if "runs on distmm" in record.msg:
            self.ran[str(record.args[0])] += 1  # type: ignore[index]


counting = Counting()


def pytest_configure(config: pytest.Config) -> None:
    dask.config.set({"distmm.accelerate.min-flops": 0})
    log = logging.getLogger("distmm.accelerate")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(counting)
    distmm.accelerate()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"on distmm: {' '.join(f'{name}={counting.ran[name]}' for name in FUNCTIONS)}")
