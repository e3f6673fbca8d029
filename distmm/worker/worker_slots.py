"""Slots of a worker, released by tasks that wait for a copy or a disk, or that merge parts of a reduced product.

A GPU worker has few slots (`distmm.worker.gpu_worker_setup.THREADS`), so that the next product is queued while one runs
and there are no more blocks of C than planned. When loads kept their slots, they delayed products: in a bfloat16
product of n = 65536 from host memory a panel took 61 ms, 49 ms of them arithmetic, while the host link was busy a third
of it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from distmm.worker import dask_internals

Kind = Literal["load", "merge", "store", "write"]

_running: Counter[Kind] = Counter()  # tasks of this process that have released their slots
_entering = threading.Lock()


@contextmanager
def slot_released(kind: Kind, most: float = math.inf) -> Iterator[None]:
    """Release this task's slot, if it is a task of a worker, so that the worker can begin another task.

    Parameters
    ----------
    kind : {"load", "merge", "store", "write"}
    most : int
        Most tasks of this kind and process that go on without a slot. The others keep theirs, so that products wait for
        them.
    """
    with _entering:
        releases = dask_internals.in_task() and _running[kind] < most
        _running[kind] += releases
    try:
        if releases:
            from distributed import secede

            # The worker's event loop begins the next task in the context of the one that secedes, and adds to it what
            # measures that task: after 2,000 blocks each message and each measurement went to 2,962 callbacks, 21 ms
            # and 80 kB a block.
            with dask_internals.without_task_meters():
                secede()
        yield
    finally:
        with _entering:
            _running[kind] -= releases
