"""Copies between the memory of processes: their pieces, the threads that make them, and what a fork leaves of these."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.transfer import process_memory
from tests.tables import number_of


@given(
    rows=st.integers(1, 1100), width=st.integers(1, 20000), gap=st.integers(0, 3), piece=st.sampled_from([640, 4096])
)
@settings(max_examples=number_of(60))
def test_pieces_cover_every_byte_once(rows: int, width: int, gap: int, piece: int) -> None:
    old, process_memory.PIECE = process_memory.PIECE, piece
    try:
        pieces = list(process_memory._pieces((10**9 + np.arange(rows) * (width + gap), width), 500))
    finally:
        process_memory.PIECE = old
    expected = 500
    address = 10**9
    for here, there in pieces:
        assert int(here[0, 0]) == expected
        assert int(here[:, 1].sum()) == int(there[:, 1].sum())
        assert len(there) <= process_memory.IOV_MAX
        expected += int(here[:, 1].sum())
        for start, size in there.tolist():
            assert start == address
            address += size
            if (address - 10**9) % (width + gap) == width:
                address += gap
    assert expected == 500 + rows * width


def test_nothing_is_copied_any_more_when_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    second_began, raised, second_ended = threading.Event(), threading.Event(), threading.Event()
    calls = itertools.count()
    late: list[bool] = []

    def call(*about: Any) -> int:
        if next(calls) == 0:
            second_began.wait(10)
            return -1
        second_began.set()
        late.append(raised.wait(0.2))  # true if the error was raised during this call
        second_ended.set()
        return 8

    monkeypatch.setattr(process_memory, "_threads", cache(partial(ThreadPoolExecutor, 2)))
    monkeypatch.setattr(process_memory, "IOV_MAX", 1)
    with pytest.raises(OSError, match="out of reach"):
        process_memory._copy_pieces(call, 1, (np.arange(0, 160, 16), 8), 0)
    raised.set()
    assert second_ended.wait(10)
    assert not any(late)


def test_each_piece_is_handled_by_one_of_the_threads_which_have_buffers_of_their_own() -> None:
    for pieces in ([0], [0, 1, 2]):
        found: list[str] = []
        with ThreadPoolExecutor(2, thread_name_prefix="reader") as threads:
            process_memory.in_threads(threads, lambda _: found.append(threading.current_thread().name), pieces)  # noqa: B023
        assert len(found) == len(pieces)
        assert all(name.startswith("reader") for name in found)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_copies_in_threads_of_its_own() -> None:
    rows = np.ones((process_memory.THREADS, 8))
    process_memory.copy(np.empty_like(rows), rows)  # starts the threads, which the child does not have
    child = multiprocessing.get_context("fork").Process(target=process_memory.copy, args=(np.empty_like(rows), rows))
    child.start()
    child.join(timeout=30)
    child.kill()
    assert child.exitcode == 0
