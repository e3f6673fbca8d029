"""Tasks that run side by side share the threads of BLAS, and leave their number as they found it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from distmm.worker import blas_threads
from distmm.worker.blas_threads import shared_by


class Library:
    """Stands for a BLAS."""

    internal_api = "mkl"

    def __init__(self, threads: int) -> None:
        self.num_threads = threads

    def set_num_threads(self, threads: int) -> None:
        self.num_threads = threads


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A BLAS of 12 threads on 8 cores."""
    library = Library(12)
    monkeypatch.setattr(blas_threads, "_libraries", lambda: [library])
    monkeypatch.setattr(blas_threads, "CPU_COUNT", 8)
    yield library
    assert library.num_threads == 12


@pytest.mark.parametrize(("tasks", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (1000, 1), (0, 8)])
def test_each_task_gets_its_share_of_the_cores(library: Library, tasks: int, threads: int) -> None:
    with shared_by(tasks):
        assert library.num_threads == threads


def test_the_number_is_as_before_when_the_last_of_them_ends(library: Library) -> None:
    first, second = shared_by(4), shared_by(4)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert library.num_threads == 2
    second.__exit__(None, None, None)
    assert library.num_threads == 12


def test_nobody_gets_more_threads_than_before(library: Library) -> None:
    library.num_threads = 1
    with shared_by(2):
        assert library.num_threads == 1
    assert library.num_threads == 1
    library.num_threads = 12


def test_it_ends_with_an_error(library: Library) -> None:
    with pytest.raises(KeyError), shared_by(8):
        raise KeyError


def test_a_worker_counts_the_tasks_that_it_runs(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_threads, "_task_threads", lambda: 2)
    with shared_by(1000):
        assert library.num_threads == 4


def test_the_threads_of_numpys_blas_change_whichever_thread_asks() -> None:
    """threadpoolctl would have one thread at a time set them: this fails first when its guard changes."""
    libraries = blas_threads._libraries()
    if not libraries:
        pytest.skip("this NumPy's BLAS has a number of threads for each thread (OpenMP), or none")
    before, seen = [library.num_threads for library in libraries], []

    def enter() -> None:
        with shared_by(10**6):
            seen.append([library.num_threads for library in libraries])

    for _ in range(2):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert [library.num_threads for library in libraries] == before
    assert seen == [[1] * len(before)] * 2
