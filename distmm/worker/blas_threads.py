"""Threads of BLAS for tasks that run side by side in one process.

By default each call of BLAS uses one thread per core, and Dask's threaded scheduler runs one task per core. On two
cores there are then four threads, which spend most of their time waiting for each other. Workers that Dask's nanny has
started have one BLAS thread from the environment, and nothing happens there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from dask.system import CPU_COUNT

_entering = threading.Lock()
_running = 0
_before: list[int] = []  # threads of each library when the first of the running tasks came


@contextmanager
def shared_by(tasks: int) -> Iterator[None]:
    """Give each of `tasks` tasks that run side by side its share of the cores, and no more threads than before.

    The number of threads belongs to the process. It is restored when none of these tasks runs any more.

    Parameters
    ----------
    tasks : int
        The planned number, not the present one: BLAS may give other bits with another number of threads. It is limited
        to the threads of the worker, or without a cluster to the cores.
    """
    global _running, _before
    share = max(1, CPU_COUNT // max(1, min(tasks, _task_threads())))
    with _entering:
        if not _running:
            _before = [library.num_threads for library in _libraries()]
        _running += 1
        _set(min(threads, share) for threads in _before)
    try:
        yield
    finally:
        with _entering:
            _running -= 1
            if not _running:
                _set(_before)


def _task_threads() -> int:
    """Tasks that this process runs at a time."""
    distributed = sys.modules.get("distributed")  # every worker has imported it
    try:
        return int(distributed.get_worker().state.nthreads if distributed else CPU_COUNT)
    except ValueError:  # this thread runs no task of a worker
        return int(CPU_COUNT)


def _set(threads: Iterable[int]) -> None:
    for library, number in zip(_libraries(), threads, strict=True):
        if library.num_threads == number:
            continue
        if library.internal_api == "openblas":
            # threadpoolctl lets one thread at a time set the number; here the threads of tasks take turns.
            library.clear_controlling_thread(force=True)
        library.set_num_threads(number)


@cache
def _libraries() -> list[Any]:
    """BLAS libraries whose number of threads belongs to the process. NumPy has loaded the one that multiplies.

    With OpenMP the number belongs to each thread: threads of other tasks would keep a number that was set here.
    """
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return [library for library in found if getattr(library, "threading_layer", None) != "openmp"]
