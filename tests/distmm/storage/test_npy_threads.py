"""Threads that open `.npy` files at the same time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmm.storage import open_matrix


@pytest.fixture
def collecting() -> Any:
    """Have Python look for garbage at each new object, and call a function when it does."""
    before, added = gc.get_threshold(), []

    def begin(call: Callable[[str, dict[str, int]], None]) -> None:
        gc.callbacks.append(call)
        added.append(call)
        gc.set_threshold(1)

    yield begin
    gc.set_threshold(*before)
    for call in added:
        gc.callbacks.remove(call)


def test_a_header_is_not_parsed_while_another_thread_parses_one(
    tmp_path: Path, collecting: Callable[[Callable[[str, dict[str, int]], None]], None]
) -> None:
    """CPython before 3.11.8 has one depth of recursion for all threads: "AST constructor recursion depth mismatch".

    Dask's workers look for garbage with a callback in Python, so another thread may go on in the middle of a header.
    """
    np.save(tmp_path / "A.npy", np.eye(8))
    matrix = open_matrix(tmp_path / "A.npy")
    parsing, read, errors = threading.Event(), threading.Event(), []

    def interrupt(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe().f_back
        if threading.current_thread() is not reader or parsing.is_set():
            return
        if frame is None or frame.f_code.co_name != "parse":
            return
        parsing.set()
        read.wait(0.2)  # the other thread waits for this one, if all is well

    def read_in_thread() -> None:
        try:
            assert matrix[:4, :4].sum() == 4
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read_in_thread)
    collecting(interrupt)
    reader.start()
    assert parsing.wait(120)
    np.testing.assert_array_equal(matrix[4:, 4:], np.eye(4))
    read.set()
    reader.join()
    assert not errors
