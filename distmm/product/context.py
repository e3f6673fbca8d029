"""Which of Dask's schedulers computes here: a client's cluster, or threads or processes of this machine.

`computing` is the only function that answers this. Everything that depends on it calls this function: plans, lazy
products, `compute`, `out=`, checks and jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
import dask.multiprocessing
import dask.threaded
from dask.base import get_scheduler
from dask.local import get_sync

from distmm.errors import InputError
from distmm.worker.dask_internals import made_here

if TYPE_CHECKING:
    from distributed import Client

# What to do without an asynchronous client, for messages: they say "give" before it.
USABLE = (
    "client=distributed.Client(address) without asynchronous=True; inside an event loop call distmm in a thread, with "
    "asyncio.to_thread"
)


def computing(client: Any = None, now: bool = False) -> Client | None:
    """Return the client whose cluster computes: the caller's client, or else the one that Dask's `compute` would use.

    Dask's order is: the setting ``scheduler`` of its configuration; in a task, the scheduler of the worker; the current
    client; threads of this process.

    Parameters
    ----------
    client : distributed.Client, optional
        The caller's client.
    now : bool
        Whether the caller waits for results, which an asynchronous client does not allow. Lazy arrays are planned
        without an asynchronous client of Dask.

    Returns
    -------
    distributed.Client or None
        None: threads or processes of this machine compute.

    Raises
    ------
    InputError
        If `client` is not a client, or is closed or asynchronous. If Dask has no usable scheduler, and `now` is set. If
        the client was made before this process was forked.
    """
    if client is not None:
        return _checked(client)
    try:
        found = getattr(_scheduler(), "__self__", None)
        if getattr(found, "asynchronous", False):  # Dask refuses an asynchronous client, but not its method
            raise RuntimeError(f"the scheduler is a method of {found!r}")
    except (RuntimeError, ValueError) as error:  # asynchronous, or a setting that names no scheduler or no client
        if not now:
            return None
        setting = dask.config.get("scheduler", None)
        raise InputError(
            "Dask finds no scheduler that distmm can wait for, as there is none or the client is asynchronous (setting "
            f"scheduler={setting!r}: {error}): correct a wrong setting, or give {USABLE}"
        ) from error
    distributed = sys.modules.get("distributed")  # without it nothing is a client
    if not distributed or not isinstance(found, distributed.Client) or found.status != "running":
        return None
    return _checked_process(found)


def _scheduler() -> Callable[..., Any] | None:
    """Return what Dask's `get_scheduler` returns.

    Dask's function imports distributed, which takes a second. Without distributed there is no client.
    """
    if "distributed" not in sys.modules and not dask.config.get("scheduler", None):
        return None
    return get_scheduler()


def _checked(client: Any) -> Client:
    """Return the caller's client if distmm can use it."""
    from distributed import Client

    if not isinstance(client, Client):
        raise InputError(f"client is {client!r}: give a client of this cluster, distributed.Client({client!r})")
    if client.status != "running":
        raise InputError(f"client is {client.status}: give one that is connected, such as a new distributed.Client")
    if client.asynchronous:
        raise InputError(f"the client is asynchronous, and distmm waits for the cluster's answers: give {USABLE}")
    return _checked_process(client)


def _checked_process(client: Client) -> Client:
    """Return a client that this process has made. After a fork, calls of another one would wait without end."""
    if not made_here(client):
        raise InputError(
            "the client belongs to the process that this one was forked from, and gets no answers here: make one here, "
            f"distributed.Client({client.scheduler.address!r}), or compute without a cluster, with "
            "dask.config.set(scheduler='threads')"
        )
    return client


def tasks_share_memory() -> bool:
    """Whether tasks of Dask's local scheduler get this process's objects themselves, and not copies.

    Pools of the user, and schedulers of other packages, run one small task that tells.
    """
    if tasks_run_here():
        return True
    get: Callable[..., Any] = _scheduler() or dask.threaded.get
    if dask.config.get("pool", None) is None and get is dask.multiprocessing.get:  # it would start its processes
        return False
    mark = SimpleNamespace(is_set=False)  # the task gets this one, or a copy of it
    dask.delayed(setattr, pure=False)(mark, "is_set", True).compute(scheduler=get)
    return bool(mark.is_set)


def tasks_run_here() -> bool:
    """Whether Dask's own local scheduler runs tasks in threads of this process."""
    try:
        get = _scheduler() or dask.threaded.get
    except (RuntimeError, ValueError):  # as in `computing`
        return False
    return dask.config.get("pool", None) is None and get in (dask.threaded.get, get_sync)
