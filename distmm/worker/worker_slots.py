"""Tasks that leave their worker's slot to the next one, while they only wait for a copy or for a disk.

A GPU worker has few slots (three), so that the next product is queued while one runs and no more blocks of C are there
than planned. Loads that held slots kept products from being queued: of a bfloat16 product of n = 65536 from host memory
the GPU stood still a fifth of the time (61 ms a panel, 49 of arithmetic), though its link was busy for a third.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from distributed import secede
from distributed.metrics import context_meter
from distributed.utils import thread_state

__all__ = ["beside_products"]

Kind = Literal["load", "store", "write"]

_running: Counter[Kind] = Counter()  # tasks of this process that are without a slot
_entering = threading.Lock()


@contextmanager
def beside_products(kind: Kind, most: float = math.inf) -> Iterator[None]:
    """Let the worker begin another task meanwhile, if this is a task of a worker.

    Parameters
    ----------
    kind : {"load", "store", "write"}
    most : int
        Of this kind and process at a time; those beyond keep their slot, so that products wait for them.
    """
    with _entering:
        leaves = getattr(thread_state, "key", None) is not None and _running[kind] < most
        _running[kind] += leaves
    try:
        if leaves:
            # The worker's event loop begins the next task in the context of the one that leaves, and adds to it what
            # measures that task: after 2,000 blocks each message and each measurement went to 2,962 callbacks, 21 ms
            # and 80 kB a block.
            with context_meter.clear_callbacks():
                secede()
        yield
    finally:
        if leaves:
            with _entering:
                _running[kind] -= 1
