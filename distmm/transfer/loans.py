"""How long an array of this process lives that tasks of clusters read: loans, counted by references and by tasks.

In the process of the array, everything that can still send it to a cluster refers to its `Loan`: lazy arrays and their
graphs. On a scheduler, the tasks that read it are counted (`distmm.transfer.loan_readers`).

When the last reference in the array's process has gone, nothing can send the array any more. If it was sent before,
that process then asks the schedulers of its clients to say when no task reads it, and keeps the array until they have
said so, or until the client is closed. A question takes the way of the client's graphs, and arrives after all of them.
So an answer is about all that was ever sent, and the answer to one question does not end another.

A pickled lazy array keeps nothing. What reads a lent array in another process therefore checks its mark afterwards: a
number in this process's memory that is erased before the array is freed.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from distributed import Client

# Clients ask by a subscription to a topic: this, the name of the loan, and a number.
TOPIC = "distmm-loan "

# Seconds after which a closed client is noticed, and a lost connection is tried again.
BEAT_SECONDS = 0.5

_loans: weakref.WeakValueDictionary[str, Loan] = weakref.WeakValueDictionary()
_arrays: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()  # by name, as long as they live
_numbers = itertools.count(1)
_free_marks: list[int] = []  # addresses that no array uses
_pages: list[np.ndarray] = []  # their memory, which is never freed


class Loan:
    """An array of this process, for everything in this process that may send it to a cluster.

    Parameters
    ----------
    name : str
        Its name in all processes; "" if the caller keeps the array alive until all have read it.
    array : numpy.ndarray
    """

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array
        self._end: weakref.finalize[..., Any] | None = None
        self.mark = (0, 0)  # an address, and the number that is there as long as the array lives
        if name:
            _loans[name], _arrays[name] = self, array
            self.mark = marked(array)

    def send(self) -> None:
        """Note that another process may receive it: its end is then not the end of all readers."""
        if self.name and self._end is None:
            self._end = weakref.finalize(self, _keep_while_read, self.name, self.array)
            self._end.atexit = False


def marked(array: np.ndarray) -> tuple[int, int]:
    """Write a new number to memory that outlives an array, until the array is freed."""
    try:
        address = _free_marks.pop()
    except IndexError:
        page = np.zeros(512, np.uint64)
        _pages.append(page)
        address, *others = range(page.ctypes.data, page.ctypes.data + page.nbytes, page.itemsize)
        _free_marks.extend(others)
    number = next(_numbers)
    ctypes.c_uint64.from_address(address).value = number
    weakref.finalize(array, _erase, address).atexit = False
    return address, number


def _erase(address: int) -> None:
    ctypes.c_uint64.from_address(address).value = 0
    _free_marks.append(address)


def received(name: str) -> Loan | None:
    """Return the loan of an array that comes back to its process; None for an array that has been freed."""
    loan = _loans.get(name)
    if loan is None and (array := _arrays.get(name)) is not None:
        loan = Loan(name, array)
        loan.send()
    return loan


def lent(name: str) -> np.ndarray | None:
    """Return an array of this process; None for one that has been freed."""
    return _arrays.get(name)


def _keep_while_read(name: str, array: np.ndarray) -> None:
    """Keep an array until no task of any cluster reads it. Called in any thread."""
    from distributed import Client

    for client in list(Client._instances):  # a lazy array may be computed by another client than it was made for
        if client.status in ("running", "connecting") and client.scheduler is not None:
            client.loop.add_callback(_ask, client, name, array)


async def _ask(client: Client, name: str, array: np.ndarray) -> None:
    """Ask the client's scheduler to say when no task reads an array, and keep the array until then."""
    from distmm.transfer import loan_readers

    topic, unread = f"{TOPIC}{name} {next(_numbers)}", asyncio.Event()
    asked: object = False  # the connection by which it was asked; after a lost one another scheduler may be there
    try:
        while client.status not in ("closing", "closed") and not unread.is_set():
            if client.scheduler_comm is not asked:
                connection = client.scheduler_comm
                with suppress(OSError):  # it is lost
                    await client.run_on_scheduler(loan_readers.install)
                    client.subscribe_topic(topic, lambda _: unread.set())
                    asked = connection
                    continue
            with suppress(TimeoutError):
                await asyncio.wait_for(unread.wait(), BEAT_SECONDS)
        if unread.is_set():  # otherwise the answer may still come, and Dask logs an error if nothing handles it
            del client._event_handlers[topic]
    except (ImportError, AttributeError):
        pass  # a scheduler without this version of distmm has no task that could read the array
    finally:
        del array
