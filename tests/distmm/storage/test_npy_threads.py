"""Threads that open `.npy` files at the same time."""

from __future__ import annotations

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmm.storage import open_matrix, reopen_output


def again(path: Path) -> Any:
    """Open a file as `distmm resume` opens the output of a job."""
    return reopen_output(str(path), str(path), False)


@pytest.mark.parametrize("second", [open_matrix, again])
def test_a_header_is_not_parsed_while_another_thread_parses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: Any
) -> None:
    """CPython before 3.11.8 has one depth of recursion for all threads: "AST constructor recursion depth mismatch".

    Threads change in the middle of a header where Python looks for garbage with a callback, as Dask's workers do.
    """
    np.save(tmp_path / "A.npy", np.eye(8))
    first, both, parsing = threading.Event(), threading.Event(), threading.Semaphore(1)
    parse = ast.literal_eval

    def parse_alone(text: Any) -> Any:
        if not parsing.acquire(blocking=False):
            both.set()
            return parse(text)
        first.set()
        both.wait(0.2)  # the other thread waits for this one, if all is well
        parsing.release()
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", parse_alone)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_matrix, tmp_path / "A.npy")
        assert first.wait(120)
        assert second(tmp_path / "A.npy").shape == (8, 8)
        np.testing.assert_array_equal(opened.result()[:4, :4], np.eye(4))
    assert not both.is_set()
